"""The batched rules and the one-page reference agree: in tokens (`race`) and in law (`rejection`)."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chi2_contingency
from toys import p_value, toys

from vllm_sjd_pac.decoding import DraftTree, GeneratorRandomness, RaceRule, RejectionRule, TableNoise, simulate
from vllm_sjd_pac.decoding.reference import reference_decode

ZEROS, FORCED, SHARP, FLAT = toys()
TREES = [DraftTree.chain(4), DraftTree.full(9, width=3, depth=2), DraftTree.comb(10, siblings=(2, 1), tail=1)]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.family)
@pytest.mark.parametrize("toy", [ZEROS, FORCED], ids=repr)
def test_race_tokens_equal_the_reference(tree, toy):
    clocks = torch.empty(60, toy.length, toy.vocab).exponential_(generator=torch.Generator().manual_seed(1))
    noise = TableNoise(-clocks.log())
    batched = simulate(toy.batch, 60, toy.length, RaceRule(noise), tree, vocab_size=toy.vocab)
    for row in range(60):
        single = reference_decode(
            toy.single, [0], toy.length, vocab_size=toy.vocab, tree=tree, noise=noise.table[row].double().__getitem__
        )
        assert single.tokens == batched.tokens[row].tolist()


@pytest.mark.parametrize(
    ("tree", "toy", "mode"),
    [(TREES[0], FORCED, "sjd"), (TREES[0], ZEROS, "ac"), (TREES[1], FORCED, "pac"), (TREES[2], ZEROS, "pac")],
    ids=lambda value: getattr(value, "family", None) or str(value),
)
def test_rejection_equals_the_reference_in_law_and_in_steps(tree, toy, mode):
    generator = torch.Generator().manual_seed(2)
    tokens, steps = [], []
    for _ in range(2500):
        single = reference_decode(
            toy.single, [0], toy.length, vocab_size=toy.vocab, tree=tree, mode=mode, generator=generator
        )
        tokens.append(single.tokens)
        steps.append(single.forwards)
    assert p_value(toy.code(torch.tensor(tokens)), toy.joint()) > 1e-3

    rule = RejectionRule(mode, randomness=GeneratorRandomness(generator))
    batched = simulate(toy.batch, 40_000, toy.length, rule, tree, vocab_size=toy.vocab)
    table = torch.stack(
        [torch.bincount(x, minlength=toy.length + 1) for x in (torch.tensor(steps), batched.forwards)]
    ).double()
    table = table[:, table.sum(0) > 40]
    assert chi2_contingency(table.numpy()).pvalue > 1e-3
