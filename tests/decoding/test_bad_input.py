"""Bad input is refused with a ValueError that names the argument and what is allowed."""

from __future__ import annotations

import math

import pytest
import torch

from vllm_sjd_pac.decoding import (
    CounterNoise,
    DraftTree,
    RaceRule,
    RejectionRule,
    TreeBatch,
    WindowPool,
    default_tree,
    jacobi_decode,
)


def uniform(prefix, tokens, parents):
    return torch.zeros(len(tokens), 5)


def decode(target=uniform, prompt=(0,), num_tokens=4, **options):
    return jacobi_decode(target, prompt, num_tokens, **{"vocab_size": 5, "tree": DraftTree.comb(6, (2,)), **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "greedy"}, "rule: expected one of race, rejection, got 'greedy'"),
        ({"mode": "fast"}, "mode: expected one of sjd, ac, pd, pac, ar, got 'fast'"),
        ({"prompt": ()}, "prompt: expected at least one token"),
        ({"num_tokens": 0}, "num_tokens: expected an integer of at least 1"),
        ({"vocab_size": 0}, "vocab_size: expected an integer of at least 1"),
        ({"tree": 64}, "tree: expected a DraftTree, got int"),
        ({"smoothing": 1.0}, r"smoothing: expected a number in \[0, 1\)"),
        ({"proposal": "row above"}, "proposal: expected 'uniform' or a callable"),
        ({"proposal": lambda positions: torch.ones(3)}, "proposal: expected weights of shape"),
        ({"proposal": lambda positions: torch.zeros(5)}, "proposal: weights must be non-negative"),
    ],
)
@pytest.mark.parametrize("rule", ["race", "rejection"])
def test_arguments_are_checked(options, message, rule):
    with pytest.raises(ValueError, match=message):
        decode(**{"rule": rule, **options})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.full((6, 5), math.nan), "rows: .*NaN"),
        (torch.full((6, 5), -math.inf), "rows: .*sums to 0"),
        (torch.full((6, 5), math.inf), r"rows: .*\+inf"),
        (torch.zeros(6, 4), r"target: expected floating-point logits of shape \(\d, 5\), got"),
        (torch.zeros(6, 5, dtype=torch.long), "target: expected floating-point logits"),
        (None, "target: expected floating-point logits"),
    ],
)
@pytest.mark.parametrize("rule", ["race", "rejection"])
def test_what_the_target_returns_is_checked(value, message, rule):
    with pytest.raises(ValueError, match=message):
        decode(lambda prefix, tokens, parents: value if value is None else value[: len(tokens)], rule=rule)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DraftTree.chain(0), "nodes: expected an integer of at least 1, got 0"),
        (lambda: DraftTree.full(64, width=0), "width: expected an integer of at least 1"),
        (lambda: DraftTree.full(64, depth=0), "depth: expected an integer of at least 1"),
        (lambda: DraftTree.full(10, width=3, depth=3), "nodes: .* needs at least 13 nodes, got 10"),
        (lambda: DraftTree.comb(64, siblings=()), "siblings: give at least one"),
        (lambda: DraftTree.comb(64, siblings=(4, 0)), "siblings: expected an integer of at least 1"),
        (lambda: DraftTree.comb(64, tail=-1), "tail: expected an integer of at least 0"),
        (lambda: DraftTree.comb(8, siblings=(8,)), "nodes: .* needs at least 10 nodes, got 8"),
        (lambda: DraftTree((0,), 0), "parents: node 0 must be the root"),
        (lambda: DraftTree((-1, 0, 2), 1), "parents: node 2 has parent 2"),
        (lambda: DraftTree((-1, 0, 0), 2), "parents: nodes 1..2 must be the main chain"),
        (lambda: DraftTree((-1, 0, 0, 2), 1), "parents: a branch reaches depth 2"),
        (lambda: default_tree(64, "greedy"), "rule: expected one of race, rejection"),
        (lambda: TreeBatch.stack([]), "trees: give at least one"),
        (lambda: RejectionRule("fast"), "mode: expected one of"),
        (lambda: RejectionRule(candidates="best"), "candidates: expected 'recursive' or 'residual'"),
        (lambda: RejectionRule(smoothing=-0.1), "smoothing: expected a number"),
        (lambda: RaceRule(CounterNoise(5), memory=-1), "memory: expected a number of tokens"),
        (lambda: WindowPool(RejectionRule(), 0, 4), "vocab_size: expected at least 1"),
        (lambda: WindowPool(RejectionRule(), 5, -1), "max_window: expected at least 0"),
    ],
)
def test_constructors_check(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("rule", [RejectionRule(), RaceRule(CounterNoise(5))], ids=["rejection", "race"])
def test_rules_check_shapes(rule):
    pool = WindowPool(rule, 5, 3)
    state = pool.gather(torch.tensor([pool.allocate(1)]))
    trees = TreeBatch.stack([DraftTree.chain(4)])
    tokens = rule.draft(trees, state, None)
    for rows, message in (
        (torch.zeros(1, 3, 5), r"rows: expected shape \(1, 4, 5\)"),
        (torch.zeros(1, 4, 6), r"rows: expected shape \(1, 4, 5\)"),
        (torch.zeros(1, 4, 5, dtype=torch.long), "rows: expected floating-point"),
    ):
        with pytest.raises(ValueError, match=message):
            rule.verify(trees, tokens, rows, state)
    with pytest.raises(ValueError, match=r"tokens: expected shape \(1, 4\)"):
        rule.verify(trees, tokens[:, :2], torch.zeros(1, 4, 5), state)
    with pytest.raises(ValueError, match="trees: a main chain of 4 nodes exceeds the window"):
        rule.draft(TreeBatch.stack([DraftTree.chain(5)]), state, None)
    with pytest.raises(ValueError, match="trees: 2 trees for a state of 1 requests"):
        rule.draft(TreeBatch.stack([DraftTree.chain(4)] * 2), state, None)


def test_noise_of_a_wrong_shape_is_named():
    rule = RaceRule(CounterNoise(7))
    pool = WindowPool(rule, 5, 3)
    state = pool.gather(torch.tensor([pool.allocate(1)]))
    with pytest.raises(ValueError, match="noise: expected shape"):
        rule.draft(TreeBatch.stack([DraftTree.chain(4)]), state, None)
