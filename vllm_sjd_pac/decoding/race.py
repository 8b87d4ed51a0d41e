"""The `race` rule: one fixed noise vector per position (Gumbel race), as plain sampling uses it.

The token after node u is argmax(row_u + noise of its position): the very token that plain sampling with the same
noise would produce there. Candidates are guesses of it and can come from anywhere, so the output is that of plain
sampling whatever the drafts, the tree or the window are. Coupling by shared noise: So et al., MC-SJD, 2510.24211.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_sjd_pac.decoding.acceptance import AcceptanceRule, Legal, Verdict, check_rows, freshest_line
from vllm_sjd_pac.decoding.drafting import (
    Proposal,
    WindowPlan,
    entering_weights,
    node_tokens,
    plan_window,
    sibling_rows,
)
from vllm_sjd_pac.decoding.randomness import NoiseSource
from vllm_sjd_pac.decoding.state import WindowState
from vllm_sjd_pac.decoding.tree import TreeBatch


class RaceRule(AcceptanceRule):
    """Exact for one seed: the same tokens with speculation on, off, or changed halfway.

    ``smoothing``: λ in [0, 1): estimates are (1 - λ)·row + λ·previous estimate; 0 keeps no estimate rows.
    ``memory``: how many earlier main drafts of a position stand as siblings (0 = none).
    ``keep_noise``: hold the window's noise rows in the pool; else the source is asked again in every step.
    Modes: adaptive continuation is inherent, so ``sjd`` = ``ac`` (chains) and ``pd`` = ``pac`` (trees).
    """

    name = "race"

    def __init__(
        self,
        noise: NoiseSource,
        mode: str = "pac",
        *,
        smoothing: float = 0.25,
        memory: int = 4,
        keep_noise: bool = True,
        proposal: Proposal | None = None,
    ) -> None:
        if not 0 <= smoothing < 1:
            raise ValueError(f"smoothing: expected a number in [0, 1), got {smoothing!r}")
        if memory < 0:
            raise ValueError(f"memory: expected a number of tokens, at least 0, got {memory!r}")
        self.mode = self.check_mode(mode)
        self.noise, self.smoothing, self.memory, self.proposal = noise, smoothing, int(memory), proposal
        self.keeps_estimates, self.keeps_noise = smoothing > 0, keep_noise
        self.memory_bonus = 4.0
        self.mixing = "logits"

    # -- verify ---------------------------------------------------------------------------------------------

    def verify(self, trees: TreeBatch, tokens: Tensor, rows: Tensor, state: WindowState) -> Verdict:
        check_rows(trees, tokens, rows, state, values=False)
        batch, depth, vocab = trees.batch_size, trees.max_main, rows.shape[2]
        state.prepare_noise(self.noise, trees.main_length + 1)
        steps = torch.arange(depth + 1, device=tokens.device)
        each = torch.arange(batch, device=tokens.device)
        noise = state.noise_rows(self.noise, each.repeat_interleave(depth + 1), steps.repeat(batch))
        noise = noise.view(batch, depth + 1, vocab)
        winners = (noise + rows[:, : depth + 1]).argmax(-1)

        # Along the main chain: how many drafts won their race?
        won = (tokens[:, 1 : depth + 1] == winners[:, :-1]) & (steps[1:] <= trees.main_length.unsqueeze(1))
        kept = won.long().cumprod(1).sum(1)
        node, token = kept, winners.gather(1, kept.unsqueeze(1)).squeeze(1)
        committed = torch.where(steps <= kept.unsqueeze(1), winners, -1)
        path = torch.where(steps[1:] <= kept.unsqueeze(1), steps[1:], -1)

        # Off it: does a sibling carry the winner? Then go on from there.
        for _ in range(trees.branch_height):
            child = (trees.parents == node.unsqueeze(1)) & (tokens == token.unsqueeze(1)) & trees.valid
            found = child.any(1)
            if not found.any():
                break
            node = torch.where(found, child.long().argmax(1), node)
            at = trees.depths[each, node]
            token = torch.where(found, (rows[each, node] + noise[each, at]).argmax(-1), token)
            committed[each, at] = token
            path[each, at - 1] = torch.where(found, node, path[each, at - 1])
        counts = trees.depths[each, node] + 1
        state.advance(counts)
        return Verdict(committed, counts, kept, path, rows, freshest_line(trees, node))

    # -- draft ----------------------------------------------------------------------------------------------

    def draft(
        self, trees: TreeBatch, state: WindowState, verdict: Verdict | None, legal: Legal | None = None
    ) -> Tensor:
        root = verdict.last if verdict is not None else torch.full_like(state.position, -1)
        plan = plan_window(trees, state, verdict)
        state.prepare_noise(self.noise, trees.main_length + 1)
        ring = state.ring_index(plan.rows, plan.offsets)
        scores = state.noise_rows(self.noise, plan.rows, plan.offsets)
        end = plan.continued + plan.held
        if verdict is not None and plan.continued:
            scores[: plan.continued] += self._estimate(plan, state, verdict, ring)
        if plan.held and self.keeps_estimates:
            scores[plan.continued : end] += state.flat("estimates").index_select(0, ring[plan.continued : end])
        if plan.total > end:
            scores[end:] += entering_weights(plan, state, legal, self.proposal).log_()
        drafts = scores.argmax(-1)
        if plan.held and not self.keeps_estimates:
            drafts[plan.continued : end] = state.flat("tokens")[ring[plan.continued : end]]
        earlier = self._remember(plan, state, ring, drafts)
        siblings = self._siblings(trees, plan, scores, drafts, earlier)
        state.flat("tokens")[ring] = drafts
        state.length = torch.maximum(state.length, trees.main_length)
        state.pool.scatter(state)
        return node_tokens(trees, root, plan, drafts, siblings)

    def _estimate(self, plan: WindowPlan, state: WindowState, verdict: Verdict, ring: Tensor) -> Tensor:
        """Fresh rows [continued, V], smoothed with the previous estimates where there are any: est_j."""
        fresh = verdict.rows.flatten(0, 1).index_select(0, plan.source)
        if not self.keeps_estimates:
            return fresh
        index, estimates = ring[: plan.continued], state.flat("estimates")
        rows, offsets = plan.rows[: plan.continued], plan.offsets[: plan.continued]
        end = state.pool["estimate_end"]
        position = state.position[rows] + offsets
        if self.mixing == "laws":
            fresh = fresh.softmax(-1)
        new = (position >= end[state.slots[rows]]).nonzero(as_tuple=True)[0]
        estimates.index_copy_(0, index[new], fresh[new])  # mixing a row with itself changes nothing
        fresh.mul_(1 - self.smoothing).add_(estimates.index_select(0, index), alpha=self.smoothing)
        estimates.index_copy_(0, index, fresh)
        end.scatter_reduce_(0, state.slots[rows], position + 1, "amax")
        return fresh.log() if self.mixing == "laws" else fresh

    def _remember(self, plan: WindowPlan, state: WindowState, ring: Tensor, drafts: Tensor) -> Tensor | None:
        """Earlier main drafts long [T, H] of each position, newest first, -1 = none; brought up to date."""
        if not self.memory:
            return None
        tokens, memory = state.flat("tokens"), state.flat("memory")
        end = plan.continued + plan.held
        before, history = tokens[ring], memory[ring]
        before_known = plan.offsets < state.length[plan.rows]
        before = torch.where(before_known, before, -1)
        history[end:] = -1
        shifted = torch.cat([before.unsqueeze(1), history[:, :-1]], 1)
        changed = ((before != drafts) & (before >= 0)).unsqueeze(1)
        history = torch.where(changed, shifted, torch.where(before_known.unsqueeze(1), history, -1))
        memory[ring] = history
        return history

    def _siblings(
        self, trees: TreeBatch, plan: WindowPlan, scores: Tensor, drafts: Tensor, earlier: Tensor | None
    ) -> Tensor | None:
        """Tokens long [B, S, K-1]: runners-up of each race, earlier main drafts of the position preferred."""
        if trees.width == 1:
            return None
        place = sibling_rows(trees, plan)
        flat = place.flatten()
        own = drafts[flat].unsqueeze(1)
        ranking = scores.index_select(0, flat)
        if earlier is not None:
            old = earlier[flat]
            known = old.clamp(min=0)
            bonus = torch.where(old >= 0, self.memory_bonus, 0.0)
            ranking.scatter_(1, known, ranking.gather(1, known) + bonus)
        ranking.scatter_(1, own, float("-inf"))
        best, siblings = ranking.topk(min(trees.width - 1, ranking.shape[1]), dim=1)
        siblings = torch.where(best > float("-inf"), siblings, own)
        siblings = torch.cat([siblings, own.expand(-1, trees.width - 1 - siblings.shape[1])], 1)
        return siblings.view(*place.shape, trees.width - 1)
