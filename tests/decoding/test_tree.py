"""Topology of draft trees."""

from __future__ import annotations

import pytest
import torch

from vllm_sjd_pac.decoding import DraftTree, TreeBatch, default_tree

TREES = [
    DraftTree.chain(1),
    DraftTree.chain(6),
    DraftTree.full(64, 3, 3),
    DraftTree.full(64, 4, 3),
    DraftTree.comb(64, (8, 4, 4, 2)),
    DraftTree.comb(40, (4, 2), tail=3),
]


@pytest.mark.parametrize("tree", TREES, ids=repr)
def test_every_prefix_and_every_depth_is_a_valid_tree(tree):
    for nodes in range(1, tree.num_nodes + 1):
        cut = tree.truncate(nodes)
        assert cut.parents == tree.parents[:nodes]
        assert cut.main_length == min(tree.main_length, nodes - 1)
    for depth in range(tree.max_depth + 2):
        cut = tree.limit_depth(depth)
        assert cut.max_depth == min(depth, tree.max_depth)
        assert cut.num_nodes == sum(d <= depth for d in tree.depths)


def test_the_paper_tree_has_its_levels():
    tree = DraftTree.full(64, width=3, depth=3)
    assert tree.num_nodes == 64
    assert [tree.depths.count(d) for d in range(5)] == [1, 3, 9, 1, 1]
    assert tree.main_length == 64 - 1 - 2 - 8
    assert tree.width == 3
    assert tree.branch_levels == 2


def test_the_comb_hangs_off_the_main_chain():
    tree = DraftTree.comb(64, siblings=(8, 4, 4, 2))
    assert tree.main_length == 45
    assert [tree.depths.count(d) - 1 for d in range(1, 6)] == [8, 4, 4, 2, 0]
    assert all(tree.parents[node] <= 3 for node in range(46, 64))
    assert tree.branch_height == 1
    tailed = DraftTree.comb(20, siblings=(2,), tail=3)
    assert tailed.branch_height == 4
    assert tailed.branch_levels == 1
    assert tailed.ranks[12:] == (1, 0, 0, 0, 2, 0, 0, 0)


@pytest.mark.parametrize("tree", TREES, ids=repr)
def test_ancestor_mask_follows_the_parents(tree):
    mask = tree.ancestor_mask
    assert torch.equal(mask.sum(1), torch.tensor(tree.depths) + 1)
    for node in range(1, tree.num_nodes):
        assert mask[node, tree.parents[node]]
    assert not mask.triu(1).any()


def test_trees_are_hashable_and_equal_by_content():
    assert DraftTree.chain(5) is DraftTree.chain(5)
    assert DraftTree((-1, 0, 1), 2) == DraftTree.chain(3)
    assert len({DraftTree((-1, 0, 1), 2), DraftTree.chain(3), DraftTree.full(3, 1, 2)}) == 1


def test_batches_pad_and_are_cached():
    batch = TreeBatch.stack(TREES)
    assert batch is TreeBatch.stack(list(TREES))
    for row, tree in enumerate(TREES):
        size = tree.num_nodes
        assert tuple(batch.parents[row, :size].tolist()) == tree.parents
        assert (batch.parents[row, size:] == -1).all()
        assert batch.valid[row].sum() == size == batch.num_nodes[row]
        assert torch.equal(batch.ancestors[row, :size, :size], tree.ancestor_mask)
        assert not batch.ancestors[row, size:].any()


def test_default_trees_have_as_many_nodes_as_asked():
    for nodes in range(1, 130):
        assert default_tree(nodes).num_nodes == nodes
