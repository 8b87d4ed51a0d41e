"""Slots of the window pool: reuse, growth, cut windows, legal tokens, memory."""

from __future__ import annotations

import pytest
import torch

from vllm_sjd_pac.decoding import CounterNoise, DraftTree, RaceRule, RejectionRule, TreeBatch, WindowPool, default_tree

VOCAB = 32


def rules():
    return [RejectionRule(), RaceRule(CounterNoise(VOCAB), smoothing=0.25), RaceRule(CounterNoise(VOCAB))]


def rows(step: int, nodes: int) -> torch.Tensor:
    return 2 * torch.randn(1, nodes, VOCAB, generator=torch.Generator().manual_seed(step))


def run(rule, pool, slot, sizes, legal=None):
    """Decode with windows of the given sizes, gathering the state anew in each half step."""
    seen, verdict = [], None
    tree = DraftTree.chain(1)
    tokens = torch.ones(1, 1, dtype=torch.long)
    for step, size in enumerate(sizes):
        batch = TreeBatch.stack([tree])
        slots = torch.tensor([slot])
        verdict = rule.verify(batch, tokens, rows(step, batch.nodes), pool.gather(slots))
        seen += verdict.tokens[0, : int(verdict.counts)].tolist()
        tree = default_tree(size)
        tokens = rule.draft(TreeBatch.stack([tree]), pool.gather(slots), verdict, legal)
        assert tokens[0, 0] == seen[-1]
        assert ((tokens >= 0) & (tokens < VOCAB)).all()
    return seen


@pytest.mark.parametrize("rule", rules(), ids=["rejection", "race", "race without smoothing"])
def test_a_freed_slot_starts_afresh(rule):
    sizes = [20, 20, 1, 8, 20, 30, 1, 1, 20]
    pool = WindowPool(rule, VOCAB, 30)
    first = run(rule, pool, pool.allocate(5), sizes)
    other = pool.allocate(6)
    run(rule, pool, other, sizes)
    pool.free(other)
    again = pool.allocate(5)
    assert again == other
    assert run(rule, pool, again, sizes) == first


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("rule", rules(), ids=["rejection", "race", "race without smoothing"])
def test_drafts_do_not_depend_on_what_a_slot_held_before(rule, batch):
    """Tensor-parallel ranks may give a request different slots; they must draft the same nodes all the same."""

    def drafts(junk):
        pool = WindowPool(rule, VOCAB, 30)
        slots = torch.tensor([pool.allocate(key) for key in range(batch)])
        generator = torch.Generator().manual_seed(junk)
        for name in ("drafts", "memory"):
            if name in pool:
                pool[name].random_(0, VOCAB, generator=generator)
        for name in ("estimates", "noise"):
            if name in pool:
                pool[name].uniform_(generator=generator)
        trees = TreeBatch.stack([DraftTree.chain(1)] * batch)
        tokens, seen = torch.ones(batch, 1, dtype=torch.long), []
        for step, size in enumerate([20] * 30 + [30, 8, 30, 1] + [20] * 20):
            # Steady laws, so that drafts stay what they are, except for the next token: few are accepted.
            logits = rows(99, 1).repeat(batch, trees.nodes, 1)
            logits[:, :1] = rows(step, 1)
            verdict = rule.verify(trees, tokens, logits, pool.gather(slots))
            trees = TreeBatch.stack([default_tree(size)] * batch)
            tokens = rule.draft(trees, pool.gather(slots), verdict)
            seen.append(tokens.tolist())
        return seen

    assert drafts(junk=1) == drafts(junk=2)


def test_the_pool_grows_and_keeps_what_it_holds():
    rule = RaceRule(CounterNoise(VOCAB))
    pool = WindowPool(rule, VOCAB, 8)
    slots = [pool.allocate(key, position=100 + key) for key in range(20)]
    assert len(set(slots)) == len(pool) == 20
    state = pool.gather(torch.tensor(slots))
    assert torch.equal(state.position, torch.arange(100, 120))
    assert torch.equal(state.keys, torch.arange(20))
    for slot in slots:
        pool.free(slot)
    assert len(pool) == 0
    with pytest.raises(ValueError, match="slot: 3 is not in use"):
        pool.free(3)


def test_bytes_per_request_count_the_rows():
    rows_of = 46 * 8192 * 4
    smooth = RaceRule(CounterNoise(8192), smoothing=0.25)
    assert WindowPool(RejectionRule(), 8192, 45).bytes_per_request == pytest.approx(rows_of, rel=0.01)
    assert WindowPool(smooth, 8192, 45).bytes_per_request == pytest.approx(2 * rows_of, rel=0.01)
    bare = RaceRule(CounterNoise(8192), smoothing=0.0, keep_noise=False)
    assert WindowPool(bare, 8192, 45).bytes_per_request < 7000


@pytest.mark.parametrize("rule", rules(), ids=["rejection", "race", "race without smoothing"])
def test_entering_drafts_are_legal_at_their_absolute_position(rule):
    asked = []

    def legal(positions):
        asked.append(positions)
        allowed = torch.zeros(*positions.shape, VOCAB, dtype=torch.bool)
        return allowed.scatter_(2, (positions % VOCAB).unsqueeze(2), True)  # exactly one token: forced

    pool = WindowPool(rule, VOCAB, 12)
    state = pool.gather(torch.tensor([pool.allocate(1, 7), pool.allocate(2, 20)]))
    trees = TreeBatch.stack([DraftTree.chain(9), DraftTree.comb(13, (2,))])
    tokens = rule.draft(trees, state, None, legal)
    for row, start in ((0, 7), (1, 20)):
        length = int(trees.main_length[row])
        assert tokens[row, 1 : length + 1].tolist() == [(start + i) % VOCAB for i in range(length)]
    # Where one token is legal there is no other candidate: siblings repeat it rather than propose what cannot be.
    assert tokens[1, 11:].tolist() == [20, 20]


def test_wider_then_narrower_windows_keep_the_held_drafts():
    rule = RejectionRule()
    pool = WindowPool(rule, VOCAB, 20)
    state = pool.gather(torch.tensor([pool.allocate(3)]))
    wide, narrow = TreeBatch.stack([DraftTree.chain(21)]), TreeBatch.stack([DraftTree.chain(4)])
    tokens = rule.draft(wide, state, None)
    tokens[:, 0] = 0
    verdict = rule.verify(narrow, tokens[:, :4], rows(0, 4), state)
    count = int(verdict.counts)
    after = rule.draft(wide, state, verdict)
    # Positions 1..4 after the old root have rows; later drafts of the wide window are held.
    assert after[0, 5 - count : 21 - count].tolist() == tokens[0, 5:].tolist()
