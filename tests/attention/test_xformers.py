"""The xformers path: biases and groups against the reference; the call itself with substitutes for CUDA operators."""

from __future__ import annotations

import math
import random

import pytest
import torch
from scenes import Request, Scene, random_tree, scene
from xformers_substitutes import dense, substitute_operators

from vllm_sjd_pac.decoding import DraftTree
from vllm_sjd_pac.engine.attention import xformers as path
from vllm_sjd_pac.engine.attention.interface import RequestTree, TreeStep
from vllm_sjd_pac.engine.attention.reference import merge_states_reference, visible_in_window

COMB = DraftTree.comb(17, (2, 2, 1), 1)
CPU = torch.device("cpu")
STEP_REQUESTS = [
    Request(70, 1, COMB.parents),
    Request(5, 9, None),
    Request(33, 1, COMB.parents),
    Request(16, 0, COMB.truncate(12).parents),
]


def tree_step(step: Scene) -> TreeStep:
    trees = (
        RequestTree(index, request.before, request.prefix + request.before, COMB.truncate(len(request.tree)))
        for index, request in enumerate(step.requests)
        if request.tree
    )
    return TreeStep(tuple(trees))


def starts_of(step: Scene) -> list[int]:
    return [0, *torch.tensor(step.query_lens).cumsum(0).tolist()]


def groups_of(step: Scene) -> list[path.TreeGroup]:
    return path.group_trees(tree_step(step), starts_of(step), torch.float32, CPU)


@pytest.mark.parametrize("seed", range(20))
def test_bias_is_the_references_mask(seed):
    rng = random.Random(seed)
    root, tree = rng.randrange(5), random_tree(rng.randrange(1, 130), rng)
    bias = path.window_bias(root, tree, torch.float32, CPU)
    visible = visible_in_window(root + len(tree), root, tree)
    assert torch.equal(bias == 0, visible)
    assert bool(torch.isinf(bias[~visible]).all())
    assert bias.stride(0) % 8 == 0


def test_groups_cover_the_trees_and_nothing_else():
    step = scene(STEP_REQUESTS)
    groups = groups_of(step)
    assert [group.requests for group in groups] == [(0, 2), (3,)]
    assert [group.prefix_lens for group in groups] == [(70, 33), (16,)]
    starts = starts_of(step)
    covered = torch.cat([group.tokens.flatten() for group in groups]).sort().values
    assert covered.tolist() == [*range(starts[1]), *range(starts[2], starts[4])]


def test_prefix_and_bias_give_the_references_attention():
    """Without xformers: its two parts computed densely from our groups, and merged."""
    step = scene(STEP_REQUESTS, 4, 2, 64)
    expected, _ = step.expected()
    for group in groups_of(step):
        for request, prefix, rows in zip(group.requests, group.prefix_lens, group.tokens, strict=True):
            places = torch.arange(prefix)
            blocks = step.block_table[request].long()[places // 16]
            query = step.query[rows].view(1, len(rows), 2, 2, 64)
            keys, values = (
                cache[blocks, places % 16].view(1, prefix, 2, 1, 64).expand(-1, -1, 2, 2, 64)
                for cache in (step.key_cache, step.value_cache)
            )
            own_keys, own_values = (
                tensor[rows].view(1, len(rows), 2, 1, 64).expand(-1, -1, 2, 2, 64) for tensor in (step.key, step.value)
            )
            prefix_part = dense(query, keys, values, 0.0, step.scale)
            window_part = dense(query, own_keys, own_values, group.bias, step.scale)
            flat = [
                item for out, lse in (prefix_part, window_part) for item in (out.reshape(-1, 4, 64), lse.reshape(4, -1))
            ]
            merged, _ = merge_states_reference(*flat)
            assert float((merged - expected[rows]).abs().max()) <= 1e-4


def test_a_tree_that_does_not_fill_its_window_is_refused():
    step = scene(STEP_REQUESTS)
    starts = starts_of(step)
    starts[1] += 1
    with pytest.raises(ValueError, match="does not fill"):
        path.group_trees(tree_step(step), starts, torch.float32, CPU)


# -- with xformers installed ------------------------------------------------------------------------------------------


def test_bias_equals_xformers_own():
    """xformers orders nodes by depth, we put the main chain first: equal up to that permutation."""
    upstream = pytest.importorskip("xformers.ops.tree_attention")
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, COMB.num_nodes):
        paths.append((*paths[COMB.parents[node]], COMB.ranks[node]))
    theirs = upstream.TreeAttnMetadata.from_tree_choices(paths[1:], torch.float32, CPU).attention_bias
    order = sorted(range(COMB.num_nodes), key=lambda node: (len(paths[node]), paths[node]))
    ours = path.window_bias(0, COMB.parents, torch.float32, CPU)
    assert torch.equal(ours[order][:, order], theirs)


def test_the_call_gives_the_references_attention(monkeypatch):
    """xformers' own `tree_attention`, with dense PyTorch in the place of its three CUDA operators."""
    pytest.importorskip("xformers.ops.tree_attention")
    substitute_operators(monkeypatch)
    step = scene(STEP_REQUESTS, 4, 2, 64, block_size=64)
    step.scale = 0.2  # not xformers' own
    expected, _ = step.expected()
    # The layout that the back end asks for: slots of a block one after the other, heads inside them.
    cache = torch.cat([step.key_cache, step.value_cache], -1).contiguous()
    caches = cache.split(64, dim=-1)
    for group in groups_of(step):
        prefixes = path.prefix_bias(group, step.block_table, 64)
        got = path.attend_group(step.query, step.key, step.value, *caches, group, prefixes, step.scale)
        assert float((got - expected[group.tokens.flatten()]).abs().max()) <= 1e-4
        wrong = path.TreeGroup(group.requests, group.prefix_lens, group.tokens, torch.zeros_like(group.bias))
        got = path.attend_group(step.query, step.key, step.value, *caches, wrong, prefixes, step.scale)
        assert float((got - expected[group.tokens.flatten()]).abs().max()) > 1e-2
    assert math.isfinite(float(expected.sum()))
