"""The decoded sequences follow the target's joint law exactly, whatever the rule, mode, tree and proposal."""

from __future__ import annotations

import itertools
import os
from collections import Counter

import pytest
import torch
from toys import SEQUENCES, Toy, p_value, toys

from vllm_sjd_pac.decoding import DraftTree, GeneratorRandomness, RejectionRule, Verdict, simulate

TOYS = toys()
CHAIN = DraftTree.chain(5)
TREES = [
    DraftTree.full(13, width=2, depth=3),
    DraftTree.full(15, width=3, depth=3),
    DraftTree.full(11, width=4, depth=2),
    DraftTree.comb(12, siblings=(3, 2, 1)),
    DraftTree.comb(14, siblings=(2, 1), tail=2),
]
LEAST_P = 1e-3  # of about 120 tests with fixed seeds


def skewed(positions: torch.Tensor) -> torch.Tensor:
    """A proposal that knows the position; the vocabulary is cut to fit."""
    return torch.tensor([1.0, 3.0, 0.5, 2.0, 0.1, 1.0]) + positions.unsqueeze(1) % 3


class CountingRule(RejectionRule):
    """Counts what the algorithm did, to be sure that a test exercised it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.events = Counter()

    def verify(self, trees, tokens, rows, state):
        verdict: Verdict = super().verify(trees, tokens, rows, state)
        ranks = torch.where(verdict.path >= 0, trees.ranks.gather(1, verdict.path.clamp(min=0)), -1)
        for rank in range(1, trees.width):
            self.events[f"sibling {rank} accepted"] += int((ranks == rank).sum())
        left = verdict.kept < (verdict.path >= 0).sum(1)
        self.events["went on behind a sibling"] += int((left & (verdict.counts - 1 - verdict.kept > 1)).sum())
        self.events["whole main chain accepted"] += int(
            ((verdict.kept == trees.main_length) & (trees.main_length > 0)).sum()
        )
        self.events["stopped at the root"] += int(((verdict.counts == 1) & (trees.main_length > 0)).sum())
        self.events["row of the accepted branch"] += int(((verdict.line > trees.main_length.unsqueeze(1)).any(1)).sum())
        return verdict

    def _continue(self, plan, state, verdict, drafts, uniforms):
        before = drafts[: plan.refined].clone()
        super()._continue(plan, state, verdict, drafts, uniforms)
        self.events["draft kept"] += int((before == drafts[: plan.refined]).sum())
        self.events["draft redrawn"] += int((before != drafts[: plan.refined]).sum())


def decode(toy: Toy, tree: DraftTree, *, proposal=None, seed=0, sequences=SEQUENCES, **options):
    randomness = GeneratorRandomness(torch.Generator().manual_seed(seed))
    law = None if proposal is None else lambda positions: proposal(positions)[:, : toy.vocab]
    rule = CountingRule(randomness=randomness, proposal=law, **options)
    result = simulate(toy.batch, sequences, toy.length, rule, tree, vocab_size=toy.vocab)
    return p_value(toy.code(result.tokens), toy.joint()), rule.events, result


def spread(trees):
    """Every (mode, tree, proposal) on two of the toys; on all of them if SJD_PAC_EVERY_COMBINATION is set."""
    everything = bool(os.environ.get("SJD_PAC_EVERY_COMBINATION"))
    for number, (tree, toy) in enumerate(itertools.product(range(len(trees)), range(len(TOYS)))):
        for proposal, name in ((None, "uniform"), (skewed, "skewed")):
            if everything or (number + tree) % 2 == (proposal is None):
                yield pytest.param(trees[tree], TOYS[toy], proposal, id=f"{trees[tree].family}-{TOYS[toy]}-{name}")


@pytest.mark.parametrize(("tree", "toy", "proposal"), spread([CHAIN]))
@pytest.mark.parametrize("mode", ["sjd", "ac"])
def test_rejection_chain_follows_the_law(mode, tree, toy, proposal):
    p, events, _ = decode(toy, tree, mode=mode, proposal=proposal)
    assert p > LEAST_P
    assert events["draft redrawn"] > 1000
    assert events["draft kept"] > 1000
    assert events["stopped at the root"] > 1000


@pytest.mark.parametrize(("tree", "toy", "proposal"), spread(TREES))
@pytest.mark.parametrize("mode", ["pd", "pac"])
def test_rejection_trees_follow_the_law(mode, tree, toy, proposal):
    p, events, _ = decode(toy, tree, mode=mode, proposal=proposal)
    assert p > LEAST_P
    for rank in range(1, min(tree.width, toy.vocab)):
        assert events[f"sibling {rank} accepted"] > 100
    if tree.branch_height > 1:
        assert events["went on behind a sibling"] > 100
        # Where the siblings are all the other tokens, one of them is always accepted and no row is left over.
        assert events["row of the accepted branch"] > 100 or tree.width >= toy.vocab
    assert events["draft redrawn"] > 1000
    assert events["draft kept"] > 1000


@pytest.mark.parametrize("toy", TOYS[1:3], ids=repr)
@pytest.mark.parametrize("tree", [TREES[0], TREES[4]], ids=lambda tree: tree.family)
@pytest.mark.parametrize(
    "options",
    [{"candidates": "residual"}, {"smoothing": 0.3}, {"keep_at_leaf": False}],
    ids=["residual", "smoothed", "published leaf"],
)
def test_rejection_variants_follow_the_law(options, tree, toy):
    p, events, _ = decode(toy, tree, mode="pac", **options)
    assert p > LEAST_P
    assert events["sibling 1 accepted"] > 1000


@pytest.mark.parametrize("toy", TOYS[:2], ids=repr)
def test_rejection_law_survives_changing_trees_and_cut_trees(toy):
    """The tree changes in every step, and the window shrinks and grows: held drafts keep their laws."""
    trees = [DraftTree.chain(5), TREES[1], DraftTree.chain(1), TREES[3], DraftTree.chain(2), TREES[4]]
    randomness = GeneratorRandomness(torch.Generator().manual_seed(5))
    rule = CountingRule("pac", randomness=randomness)
    result = simulate(
        toy.batch,
        SEQUENCES,
        toy.length,
        rule,
        lambda step: trees[step % len(trees)],
        vocab_size=toy.vocab,
        max_window=9,
    )
    assert p_value(toy.code(result.tokens), toy.joint()) > LEAST_P
