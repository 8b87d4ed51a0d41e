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
    window_rows,
)
from vllm_sjd_pac.decoding.randomness import NoiseSource, first_argmax
from vllm_sjd_pac.decoding.state import WindowState
from vllm_sjd_pac.decoding.tree import TreeBatch

DEFAULT_MEMORY = 7
_MATCHED = 16
"""Window offsets whose draft is looked up by context: later ones will have a fresher row before their turn comes."""
_NONE, _ENTERED = -2, -1
"""Contexts of an empty place, and of a draft that entered the window without a row."""
_PREFERENCE = 1e6
"""Above every score: remembered drafts come before runners-up."""


class RaceRule(AcceptanceRule):
    """Exact for one seed: the same tokens with speculation on, off, or changed halfway.

    ``smoothing``: λ in [0, 1): estimates are (1 - λ)·row + λ·previous estimate, of logits; 0 keeps no estimate rows.
    ``memory``: how many earlier drafts of a position are remembered, each with the token that stood before it (0 =
    none). They come back as siblings, and as main drafts where that token has come back.
    ``keep_noise``: hold the window's noise rows in the pool; else the source is asked again in every step.
    Modes: adaptive continuation is inherent, so ``sjd`` = ``ac`` (chains) and ``pd`` = ``pac`` (trees).
    """

    name = "race"

    def __init__(
        self,
        noise: NoiseSource,
        mode: str = "pac",
        *,
        smoothing: float = 0.0,
        memory: int = DEFAULT_MEMORY,
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

    # -- verify ---------------------------------------------------------------------------------------------

    def verify(self, trees: TreeBatch, tokens: Tensor, rows: Tensor, state: WindowState) -> Verdict:
        check_rows(trees, tokens, rows, state, values=False)
        batch, depth, vocab = trees.batch_size, trees.max_main, rows.shape[2]
        state.prepare_noise(self.noise, trees)
        steps = torch.arange(depth + 1, device=tokens.device)
        noise = state.noise_rows(self.noise, state.ring_grid(depth + 1).flatten(), None, steps)
        noise = noise.view(batch, depth + 1, vocab)
        winners = first_argmax(noise + rows[:, : depth + 1])

        # Along the main chain: how many drafts won their race?
        won = (tokens[:, 1 : depth + 1] == winners[:, :-1]) & trees.on_main
        kept = won.cumprod(1).sum(1)
        walked = steps <= kept.unsqueeze(1)
        committed = winners.masked_fill(~walked, -1)
        path = steps[1:].expand(batch, depth).masked_fill(~walked[:, 1:], -1)
        node = kept

        # Off it: does a sibling carry the winner? Then go on from there.
        if trees.branch_height:
            each = torch.arange(batch, device=tokens.device)
            token = winners[each, kept]
            path = path.clone()
        for _ in range(trees.branch_height):
            child = (trees.parents == node.unsqueeze(1)) & (tokens == token.unsqueeze(1))
            found = child.any(1)
            if not found.any():
                break
            node = torch.where(found, child.long().argmax(1), node)
            at = trees.depths[each, node]
            token = torch.where(found, (rows[each, node] + noise[each, at]).argmax(-1), token)
            committed[each, at] = token
            path[each, at - 1] = torch.where(found, node, path[each, at - 1])
        counts = trees.depths.gather(1, node.unsqueeze(1)).squeeze(1) + 1
        state.commit(counts)
        return Verdict(committed, counts, kept, path, rows, freshest_line(trees, node), tokens)

    # -- draft ----------------------------------------------------------------------------------------------

    def draft(
        self, trees: TreeBatch, state: WindowState, verdict: Verdict | None, legal: Legal | None = None
    ) -> Tensor:
        root = verdict.last if verdict is not None else torch.full_like(state.slots, -1)
        state.prepare_noise(self.noise, trees)
        plan = plan_window(trees, state, verdict)
        if not plan.total:
            return node_tokens(trees, root, plan, plan.offsets, None)
        scores = state.noise_rows(self.noise, plan.ring, plan.rows, plan.offsets)
        if verdict is not None and plan.continued:
            scores[: plan.continued] += self._estimate(plan, state, verdict)
        if plan.known > plan.continued and self.keeps_estimates:
            held = plan.ring[plan.continued : plan.known]
            scores[plan.continued : plan.known] += state.flat("estimates").index_select(0, held)
        if plan.total > plan.known:
            weights = entering_weights(plan, state, legal, self.proposal)
            scores[plan.known :] += weights.log_()
            if self.keeps_estimates:
                state.flat("estimates").index_copy_(0, plan.ring[plan.known :], weights)
        drafts = first_argmax(scores)
        if plan.known > plan.continued and not self.keeps_estimates:
            drafts[plan.continued : plan.known] = state.flat("drafts")[plan.ring[plan.continued : plan.known], 0]
        if self.memory:
            history, contexts = self._remember(plan, state, verdict, drafts)
            drafts = self._match(trees, plan, root, history, contexts)
        else:
            history = drafts.unsqueeze(1)
            state.flat("drafts").index_copy_(0, plan.ring, history)
        siblings = self._siblings(trees, plan, scores, drafts, history)
        state.note_window(trees.main_length, plan.fresh_length)
        return node_tokens(trees, root, plan, drafts, siblings)

    def _estimate(self, plan: WindowPlan, state: WindowState, verdict: Verdict) -> Tensor:
        """Fresh rows [continued, V], smoothed with the previous estimates where there are any: est_j."""
        fresh = verdict.rows.flatten(0, 1).index_select(0, plan.source)
        if not self.keeps_estimates:
            return fresh
        estimates = state.flat("estimates")
        refined, previous = fresh[: plan.refined], estimates.index_select(0, plan.ring[: plan.refined])
        # A token that was cut off (top-k) and is allowed again counts with its fresh value; else -inf would stay.
        previous = torch.where(previous == float("-inf"), refined, previous)
        refined.mul_(1 - self.smoothing).add_(previous, alpha=self.smoothing)
        estimates.index_copy_(0, plan.ring[: plan.continued], fresh)
        return fresh

    def _remember(
        self, plan: WindowPlan, state: WindowState, verdict: Verdict | None, drafts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Drafts and contexts long [T, 1+H] of each position, newest first, brought up to date.

        A context, the token before the position in the pass that gave the row, is there once, with its newest draft.
        """
        stored, stored_contexts = state.flat("drafts"), state.flat("contexts")
        history = stored.index_select(0, plan.ring)
        contexts = stored_contexts.index_select(0, plan.ring)
        # The row after the old window's end is the first thing known of its position.
        new = (plan.offsets >= state.length[plan.rows]).unsqueeze(1)
        history, contexts = history.masked_fill(new, -1), contexts.masked_fill(new, _NONE)
        if verdict is not None and plan.continued:
            fresh = slice(0, plan.continued)
            context = verdict.nodes.flatten().index_select(0, plan.source).unsqueeze(1)
            past, past_contexts = history[fresh], contexts[fresh]
            # The older entry of this context gives way; without one, the oldest of all.
            known = (past_contexts == context) | (past_contexts == _ENTERED)
            gone = torch.where(known.any(1), known.byte().argmax(1), self.memory).unsqueeze(1)
            place = torch.arange(self.memory, device=history.device)
            keep = place + (place >= gone)
            history[fresh] = torch.cat([drafts[fresh].unsqueeze(1), past.gather(1, keep)], 1)
            contexts[fresh] = torch.cat([context, past_contexts.gather(1, keep)], 1)
        if plan.total > plan.known:
            history[plan.known :, 0], contexts[plan.known :, 0] = drafts[plan.known :], _ENTERED
        stored.index_copy_(0, plan.ring, history)
        stored_contexts.index_copy_(0, plan.ring, contexts)
        return history, contexts

    def _match(self, trees: TreeBatch, plan: WindowPlan, root: Tensor, history: Tensor, contexts: Tensor) -> Tensor:
        """Main drafts long [T]: where the token before a position is not the one that its newest row saw, the draft of
        the newest row that did see it, if one is remembered."""
        width = min(_MATCHED, trees.max_main)
        place = window_rows(trees, plan, width)
        inside = torch.arange(width, device=root.device) < trees.main_length.unsqueeze(1)
        drafts, before = history[place], contexts[place]
        previous, chosen = root, []
        for offset in range(width):
            # No match: argmax gives 0, the newest.
            match = (before[:, offset] == previous.unsqueeze(1)).byte().argmax(1, keepdim=True)
            previous = drafts[:, offset].gather(1, match).squeeze(1)
            chosen.append(previous)
        # Offsets outside a window write to a place beyond the end: a mask as index would wait for the GPU.
        end = history.shape[0]
        main = torch.cat([history[:, 0], history.new_zeros(1)])
        main.index_copy_(0, torch.where(inside, place, end).flatten(), torch.stack(chosen, 1).flatten())
        return main[:end]

    def _siblings(
        self, trees: TreeBatch, plan: WindowPlan, scores: Tensor, drafts: Tensor, history: Tensor
    ) -> Tensor | None:
        """Tokens long [B, S, K-1]: remembered drafts of each position, newest first, then runners-up of its race."""
        if trees.width == 1:
            return None
        place = sibling_rows(trees, plan)
        ranking, history = scores.index_select(0, place), history.index_select(0, place)
        own = drafts[place].unsqueeze(1)
        if self.memory:
            known = torch.where(history >= 0, history, own)
            bonus = (_PREFERENCE - torch.arange(history.shape[1], device=own.device)).expand_as(known)
            ranking.scatter_reduce_(1, known, bonus.to(ranking.dtype), "amax")
        ranking.scatter_(1, own, float("-inf"))
        best, siblings = ranking.topk(min(trees.width - 1, ranking.shape[1]), dim=1)
        siblings = torch.where(best > float("-inf"), siblings, own)
        if siblings.shape[1] < trees.width - 1:
            siblings = torch.cat([siblings, own.expand(-1, trees.width - 1 - siblings.shape[1])], 1)
        return siblings.view(trees.batch_size, trees.sibling_depth, trees.width - 1)
