"""Remembered drafts: an earlier row knows better where it saw the token that was committed in the end."""

import pytest
import torch

from vllm_sjd_pac.decoding import DraftTree, RaceRule, TreeBatch, WindowPool

VOCAB = 6


class NoNoise:
    """The winner of every race is the row's largest logit; smaller tokens win ties."""

    def gumbel(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return (-1e-3 * torch.arange(VOCAB)).expand(*positions.shape, VOCAB)


def step(rule, trees, tokens, state, winners):
    """Verify with rows whose largest logits are `winners`, then draft for the same trees."""
    rows = torch.nn.functional.one_hot(torch.tensor([winners] * trees.batch_size), VOCAB).float()
    verdict = rule.verify(trees, tokens, rows, state)
    return verdict, rule.draft(trees, state, verdict)


@pytest.mark.parametrize(("memory", "drafted"), [(0, 4), (7, 3)])
@pytest.mark.parametrize("batch", [1, 2])
def test_the_row_that_saw_the_committed_token_drafts(memory: int, drafted: int, batch: int) -> None:
    rule = RaceRule(NoNoise(), memory=memory)
    pool = WindowPool(rule, VOCAB, 2)
    state = pool.gather(torch.tensor([pool.allocate(key) for key in range(batch)]))
    trees = TreeBatch.stack([DraftTree.chain(3)] * batch)
    tokens = rule.draft(trees, state, None)
    assert tokens[:, 1:].tolist() == [[0, 0]] * batch  # uniform proposals, no noise
    # 2 is committed, not 0. Behind the rejected 0 the rows say 1; behind the second 0 they say 3.
    _, tokens = step(rule, trees, tokens, state, [2, 1, 3])
    assert tokens.tolist() == [[2, 1, 3]] * batch
    # 0 is committed, not 1. The newest row for the token after it stood behind 1 and says 4; an older one behind 0: 3.
    verdict, tokens = step(rule, trees, tokens, state, [0, 4, 5])
    assert verdict.last.tolist() == [0] * batch
    assert tokens[:, 1].tolist() == [drafted] * batch


def test_remembered_drafts_are_the_first_siblings() -> None:
    rule = RaceRule(NoNoise())
    pool = WindowPool(rule, VOCAB, 3)
    state = pool.gather(torch.tensor([pool.allocate(0)]))
    trees = TreeBatch.stack([DraftTree.comb(6, (2,))])
    tokens = rule.draft(trees, state, None)
    _, tokens = step(rule, trees, tokens, state, [4, 1, 3, 5, 0, 0])
    _, tokens = step(rule, trees, tokens, state, [5, 4, 5, 5, 0, 0])
    # Main draft 4; then what earlier passes drafted, newest first: 3. Then the runner-up.
    assert tokens[0, 1] == 4
    assert tokens[0, trees.num_nodes.item() - 2 :].tolist() == [3, 0]
