"""Layouts and bit masks, without any kernel."""

from __future__ import annotations

import random

import pytest
import torch
from scenes import random_tree

from vllm_sjd_pac.decoding import DraftTree
from vllm_sjd_pac.engine.attention.reference import visible_in_window
from vllm_sjd_pac.engine.attention.window import ancestor_words, rows_per_tile, window_layout


def unpack(words: torch.Tensor, nodes: int) -> torch.Tensor:
    return torch.stack([(words[:, node // 64] >> (node % 64)) & 1 for node in range(nodes)], 1).bool()


@pytest.mark.parametrize("nodes", [1, 2, 63, 64, 65, 128, 200, 513])
def test_bits_are_the_ancestors(nodes):
    tree = random_tree(nodes, random.Random(nodes))
    words = torch.from_numpy(ancestor_words(tree).copy())
    assert words.shape == (nodes, -(-nodes // 64))
    assert torch.equal(unpack(words, nodes), visible_in_window(nodes, 0, tree))


def test_bits_equal_the_decoders_ancestor_mask():
    tree = DraftTree.comb(64, (8, 4, 4, 2))
    assert torch.equal(unpack(torch.from_numpy(ancestor_words(tree.parents).copy()), 64), tree.ancestor_mask)


@pytest.mark.parametrize("parents", [(), (0,), (-1, 1), (-1, 2, 0), (-1, -1), (-1,) + (0,) * 513])
def test_what_is_no_tree_is_refused(parents):
    with pytest.raises(ValueError, match="draft tree"):
        ancestor_words(parents)


def test_layout_of_a_mixed_batch():
    tree = (-1, 0, 1, 0)
    layout = window_layout([6, 40, 1, 4], [2, None, None, 0], [tree, None, None, tree], group_size=4)
    assert layout.query_start.tolist() == [0, 6, 46, 47, 51]
    assert layout.root.tolist() == [2, 40, 1, 0]
    assert layout.node_start.tolist() == [0, 4, 4, 4]
    assert layout.ancestors.shape == (8, 1)
    assert layout.tile_rows == 16
    assert layout.tiles.tolist() == [[0, 0], [1, 0], [1, 16], [1, 32], [2, 0], [3, 0]]
    only = window_layout([6, 40, 1, 4], [2, None, None, 0], [tree, None, None, tree], group_size=4, only=[0, 3])
    assert only.tiles.tolist() == [[0, 0], [3, 0]]


def test_trees_must_fill_their_windows():
    with pytest.raises(ValueError, match="does not fill"):
        window_layout([6], [1], [(-1, 0, 1, 0)], group_size=1)


TILES = [(1, 1, 16), (1, 500, 64), (4, 1, 4), (7, 65, 9), (8, 3, 4), (48, 5, 1)]


@pytest.mark.parametrize(("group", "longest", "rows"), TILES)
def test_rows_per_tile(group, longest, rows):
    assert rows_per_tile(group, longest) == rows
