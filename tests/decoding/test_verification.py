"""One verification at a time: many draws from q go in, the first committed token must follow p."""

from __future__ import annotations

import math

import pytest
import torch
from test_negative_controls import RepeatingSiblings, ResidualOfTheLastSibling
from toys import p_value

from vllm_sjd_pac.decoding import DraftTree, GeneratorRandomness, RejectionRule, TreeBatch, WindowPool

CALLS = 200_000
LAWS = {
    "ordinary": ([2.0, 1.0, 4.0, 0.5, 1.5, 1.0], [1.0, 3.0, 0.3, 2.0, 1.0, 2.0]),
    "disjoint supports": ([1.0, 2.0, 1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0, 1.0, 3.0]),
    "fewer tokens than siblings": ([3.0, 1.0, 0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
    "one-hot q": ([0.0, 0.0, 1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0, 1.0, 1.0]),
    "forced token": ([1.0, 1.0, 1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]),
    "equal": ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
    "nearly one-hot q": ([1e9, 1.0, 1.0, 2.0, 1.0, 3.0], [1.0, 2.0, 1.0, 1.0, 1.0, 1.0]),
}


def first_tokens(rule: RejectionRule, q: list[float], p: list[float], tree: DraftTree) -> torch.Tensor:
    rule.randomness = GeneratorRandomness(torch.Generator().manual_seed(1))
    rule.proposal = lambda positions: torch.tensor(q)
    pool = WindowPool(rule, len(q), tree.main_length, capacity=CALLS)
    state = pool.gather(pool.allocate_many(torch.arange(CALLS)))
    trees = TreeBatch.gather([tree], torch.zeros(CALLS, dtype=torch.long))
    tokens = rule.draft(trees, state, None)
    tokens[:, 0] = 0
    rows = torch.tensor(p).log().expand(CALLS, trees.nodes, len(p))
    return rule.verify(trees, tokens, rows, state).tokens[:, 0]


@pytest.mark.parametrize("candidates", ["recursive", "residual"])
@pytest.mark.parametrize(("q", "p"), LAWS.values(), ids=LAWS.keys())
def test_committed_token_follows_p(q, p, candidates):
    tokens = first_tokens(RejectionRule(candidates=candidates), q, p, DraftTree.comb(6, (4,)))
    law = torch.tensor(p, dtype=torch.float64)
    assert p_value(tokens, law / law.sum()) > 1e-3


@pytest.mark.parametrize("mistake", [ResidualOfTheLastSibling, RepeatingSiblings])
def test_mistakes_show_in_a_single_call(mistake):
    torch.manual_seed(0)
    q, p = LAWS["ordinary"]
    law = torch.tensor(p, dtype=torch.float64)
    assert p_value(first_tokens(mistake(), q, p, DraftTree.comb(6, (4,))), law / law.sum()) < 1e-9


def test_siblings_are_drawn_without_replacement():
    """Draft and siblings are distinct; their joint law is that of successive draws without replacement."""
    q = [4.0, 2.0, 1.0, 1.0]
    rule = RejectionRule(randomness=GeneratorRandomness(torch.Generator().manual_seed(3)))
    rule.proposal = lambda positions: torch.tensor(q)
    tree = DraftTree.comb(4, (2,))
    pool = WindowPool(rule, 4, 1, capacity=CALLS)
    state = pool.gather(pool.allocate_many(torch.arange(CALLS)))
    tokens = rule.draft(TreeBatch.gather([tree], torch.zeros(CALLS, dtype=torch.long)), state, None)[:, 1:]
    law = torch.zeros(4, 4, 4, dtype=torch.float64)
    weights = [value / 8 for value in q]
    for a in range(4):
        for b in range(4):
            for c in range(4):
                if len({a, b, c}) == 3:
                    rest = 1 - weights[a]
                    law[a, b, c] = weights[a] * weights[b] / rest * weights[c] / (rest - weights[b])
    assert p_value(tokens[:, 0] * 16 + tokens[:, 1] * 4 + tokens[:, 2], law.flatten()) > 1e-3


def test_padded_rows_never_leak():
    """A batch of different trees: rows of padded nodes are NaN, and results equal those of each tree alone."""
    trees = [DraftTree.comb(12, (3, 2)), DraftTree.chain(3), DraftTree.chain(1), DraftTree.full(9, 3, 2)]
    vocab, keys = 40, torch.tensor([11, 12, 13, 14])

    def run(rule, members):
        pool = WindowPool(rule, vocab, 8, capacity=4)
        state = pool.gather(pool.allocate_many(keys[members]))
        batch = TreeBatch.stack([trees[m] for m in members])
        tokens, seen = rule.draft(batch, state, None), []
        for step in range(6):
            tokens[:, 0] = 1
            table = torch.randn(4, 12, vocab, generator=torch.Generator().manual_seed(step))
            rows = (3 * table[members][:, : batch.nodes]).masked_fill(~batch.valid.unsqueeze(2), math.nan)
            verdict, tokens = rule.step(batch, tokens, rows, state)
            seen.append((verdict.tokens, verdict.counts, verdict.kept, tokens))
        return seen

    from vllm_sjd_pac.decoding import CounterNoise, RaceRule

    for make in (RejectionRule, lambda: RaceRule(CounterNoise(vocab))):
        together = run(make(), [0, 1, 2, 3])
        for member in range(4):
            for both, single in zip(together, run(make(), [member]), strict=True):
                for left, right in zip(both, single, strict=True):
                    width = right.shape[1] if right.dim() > 1 else None
                    assert torch.equal(left[member : member + 1, :width] if width else left[[member]], right)
