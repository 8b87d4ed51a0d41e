"""Known mistakes, injected one at a time, must fail the test of the law (otherwise that test shows nothing)."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from toys import SEQUENCES, Toy, p_value, toys

from vllm_sjd_pac.decoding import DraftTree, GeneratorRandomness, RejectionRule, simulate
from vllm_sjd_pac.decoding.randomness import draw
from vllm_sjd_pac.decoding.rejection import residual, without

ZEROS, FORCED, SHARP, FLAT = toys()
CERTAINLY_WRONG = 1e-9


def decode(rule: RejectionRule, toy: Toy, tree: DraftTree, seed: int = 0) -> float:
    rule.randomness = GeneratorRandomness(torch.Generator().manual_seed(seed))
    result = simulate(toy.batch, SEQUENCES, toy.length, rule, tree, vocab_size=toy.vocab)
    return p_value(toy.code(result.tokens), toy.joint())


class LongestRun(RejectionRule):
    """(a) Every path is tested on its own and the longest accepted run wins, instead of walking."""

    def verify(self, trees, tokens, rows, state):
        verdict = super().verify(trees, tokens, rows, self.copy(state))
        batch, nodes = tokens.shape
        each, here = torch.arange(batch), torch.arange(nodes).expand(batch, nodes)
        p = rows.softmax(-1)
        q = state.flat("estimates")[state.ring_grid(trees.max_main + 1)]
        at = (trees.depths - 1).clamp(min=0)
        column = tokens.clamp(min=0).unsqueeze(2)
        p_x = p[each.unsqueeze(1), trees.parents.clamp(min=0)].gather(2, column).squeeze(2)
        q_x = q[each.unsqueeze(1), at].gather(2, column).squeeze(2)
        u = self.randomness.uniform(state.keys, state.position, 0, nodes)
        passed = ((u * q_x < p_x) & trees.valid) | (here == 0)
        whole = (passed.unsqueeze(1) | ~trees.ancestors).all(2) & trees.valid
        node = torch.where(whole, trees.depths, -1).argmax(1)
        depth = trees.depths[each, node]
        tested = trees.first_children[each, node] >= 0
        final = torch.where(tested.unsqueeze(1), residual(p[each, node], q[each, depth]), p[each, node])
        token = draw(final, self.randomness.uniform(state.keys, state.position, 0, 1)[:, 0])
        target = torch.where(trees.ancestors[each, node] & (trees.depths > 0), trees.depths, 0)
        committed = torch.full((batch, trees.max_main + 2), -1).scatter(1, target, tokens)[:, 1:]
        committed[each, depth] = token
        state.commit(depth + 1)
        return dataclasses.replace(verdict, tokens=committed, counts=depth + 1, kept=depth, line=trees.main_line)

    @staticmethod
    def copy(state):
        class Scratch(type(state)):
            def save(self):
                pass

        return Scratch(state.pool, state.slots, state.numbers.clone())


class ResidualSiblings(RejectionRule):
    """(b) Siblings of a draft are drawn from the residual (p - q)+ but verified as draws from q."""

    def _continue(self, plan, state, verdict, drafts, uniforms):
        old = state.flat("estimates")[plan.ring]
        super()._continue(plan, state, verdict, drafts, uniforms)
        self.wrong = state.flat("estimates")[plan.ring].clone()
        self.wrong[: plan.refined] = residual(self.wrong[: plan.refined], old[: plan.refined])

    def _sibling_laws(self, plan, state, place):
        right = super()._sibling_laws(plan, state, place)
        if not plan.refined:
            return right
        return torch.where((place < plan.refined).unsqueeze(1), self.wrong[place], right)


class ResidualOfTheLastSibling(RejectionRule):
    """(c) Only the first sibling is tested, but the last token is drawn from the residual of all of them."""

    tried = 2

    def _choose(self, step, node, width):
        trees = step.trees
        few = dataclasses.replace(trees, ranks=torch.where(trees.ranks < self.tried, trees.ranks, trees.width))
        chosen, _ = super()._choose(dataclasses.replace(step, trees=few), node, min(width, self.tried))
        all_rejected = step.uniforms.clone()
        all_rejected[:, 2:] = 2.0  # no sibling passes
        _, drawn = super()._choose(dataclasses.replace(step, uniforms=all_rejected), node, width)
        return chosen, drawn


class RepeatingSiblings(RejectionRule):
    """(d) Siblings may repeat (uniform, as in the first step), but are tested as if drawn without replacement."""

    def _branch(self, trees, plan, state, drafts):
        right = super()._branch(trees, plan, state, drafts)
        return None if right is None else torch.randint(state.pool.vocab_size, right.shape)

    def _choose(self, step, node, width):
        trees, tokens, valid = step.trees, step.tokens, step.valid
        each = torch.arange(node.shape[0])
        depth = trees.depths[each, node]
        p, chosen = step.laws[each, node], torch.full_like(node, -1)
        q, u = step.q_rows[step.ring[each, depth]], step.uniforms[each, :, depth]
        for k in range(width):
            mine = (trees.parents == node.unsqueeze(1)) & valid & (trees.ranks == k)
            child, exists = mine.long().argmax(1), mine.any(1) & (chosen < 0)
            candidate = tokens[each, child].clamp(min=0).unsqueeze(1)
            passed = exists & (u[:, k + 1] * q.gather(1, candidate)[:, 0] < p.gather(1, candidate)[:, 0]) & (k > 0)
            chosen = torch.where(passed, child, chosen)
            rejected = (exists & ~passed).unsqueeze(1)
            p, q = torch.where(rejected, residual(p, q), p), torch.where(rejected, without(q, candidate), q)
        return chosen, draw(p, u[:, 0])


class LastRowIgnored(RejectionRule):
    """(d) After a fully accepted window the next token is proposed afresh, not sampled from the last row."""

    def verify(self, trees, tokens, rows, state):
        verdict = super().verify(trees, tokens, rows, state)
        whole = (verdict.kept == trees.main_length) & (trees.main_length > 0)
        last = torch.where(whole, torch.randint(state.pool.vocab_size, whole.shape), verdict.last)
        return dataclasses.replace(
            verdict, tokens=verdict.tokens.scatter(1, verdict.counts.unsqueeze(1) - 1, last.unsqueeze(1))
        )


@pytest.mark.parametrize(
    ("mistake", "toy", "tree"),
    [
        (LongestRun, FLAT, DraftTree.comb(8, (2,))),
        (LongestRun, FORCED, DraftTree.full(8, 2, 2)),
        (ResidualSiblings, ZEROS, DraftTree.comb(8, (1,))),
        (ResidualSiblings, SHARP, DraftTree.full(13, 2, 3)),
        (ResidualOfTheLastSibling, ZEROS, DraftTree.comb(9, (3,))),
        (ResidualOfTheLastSibling, ZEROS, DraftTree.full(11, 4, 2)),
        (RepeatingSiblings, FORCED, DraftTree.comb(9, (3,))),
        (LastRowIgnored, FLAT, DraftTree.chain(3)),
    ],
    ids=lambda value: getattr(value, "__name__", None) or repr(value),
)
def test_known_mistakes_are_caught(mistake, toy, tree):
    torch.manual_seed(0)
    assert decode(mistake("pac"), toy, tree) < CERTAINLY_WRONG


def test_smallest_failing_case():
    """Vocabulary 3, two tokens, one sibling, one draft: the longest run is caught, the walk is not."""
    toy = Toy("smallest", 3, 2, 1.5, seed=6)
    tree = DraftTree.full(3, width=2, depth=2)
    assert decode(LongestRun("pac"), toy, tree) < CERTAINLY_WRONG
    assert decode(RejectionRule("pac"), toy, tree) > 1e-3
