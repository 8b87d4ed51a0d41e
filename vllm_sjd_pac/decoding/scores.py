"""Scores of the next window's positions under the `race` rule: their noise plus what is known of their rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vllm_sjd_pac.decoding.acceptance import Legal, Verdict
from vllm_sjd_pac.decoding.drafting import WindowPlan, entering_scores
from vllm_sjd_pac.decoding.randomness import first_argmax
from vllm_sjd_pac.decoding.state import WindowState

if TYPE_CHECKING:
    from vllm_sjd_pac.decoding.race import RaceRule


class WindowScores:
    """Scores of the next window's positions, noise plus estimate, computed where they are asked for.

    The rows of a verdict have raced already: their winners are the drafts of the positions that continue, and their
    scores are needed for siblings alone. Only with smoothing, or where the walk has left the main chain for a branch
    that goes on, are all computed.
    """

    def __init__(
        self, rule: RaceRule, plan: WindowPlan, state: WindowState, verdict: Verdict | None, legal: Legal | None
    ) -> None:
        self._rule, self._plan, self._state, self._verdict = rule, plan, state, verdict
        self._entering: Tensor | None = None
        if plan.total > plan.known and (legal or rule.proposal or rule.keeps_estimates):
            self._entering = entering_scores(plan, state, legal, rule.proposal)
        self._all: Tensor | None = None
        if rule.keeps_estimates or (verdict is not None and verdict.winners is None):
            self._all = self._scores_of_all()

    def winners(self) -> Tensor:
        """Best token of each position, long [T]; anything where a position has neither a row nor weights."""
        plan, verdict = self._plan, self._verdict
        if self._all is not None:
            return first_argmax(self._all)
        drafts = torch.zeros_like(plan.ring)
        if verdict is not None and plan.continued:
            assert verdict.winners is not None
            if self._state.single is not None:
                drafts[: plan.continued] = verdict.winners[0].index_select(0, plan.source)
            else:
                rows = plan.rows[: plan.continued]
                drafts[: plan.continued] = verdict.winners[rows, verdict.counts[rows] + plan.offsets[: plan.continued]]
        if plan.total > plan.known:
            entering = slice(plan.known, plan.total)
            scores = self._noise(plan.ring[entering], plan.rows[entering], plan.offsets[entering])
            drafts[entering] = first_argmax(scores if self._entering is None else scores.add_(self._entering))
        return drafts

    def scores(self, place: Tensor) -> Tensor:
        """Float32 [n, V], fresh, of the positions at ``place`` long [n] of the plan."""
        if self._all is not None:
            return self._all.index_select(0, place)
        plan = self._plan
        scores = self._noise(plan.ring[place], plan.rows[place], plan.offsets[place])
        if self._verdict is not None and plan.continued:
            source = plan.source[place.clamp(max=plan.continued - 1)]
            fresh = self._verdict.rows.flatten(0, 1).index_select(0, source)
            scores += torch.where((place < plan.continued).unsqueeze(1), fresh, 0.0)
        if self._entering is not None:
            weights = self._entering.index_select(0, (place - plan.known).clamp_(min=0))
            scores += torch.where((place >= plan.known).unsqueeze(1), weights, 0.0)
        return scores

    def scores_of_one(self, offset: int) -> np.ndarray:
        """Float32 [V], fresh: `scores` of one position of a single request on the CPU."""
        if self._all is not None:
            return self._all[offset].numpy().copy()
        plan = self._plan
        at = slice(offset, offset + 1)
        scores: np.ndarray = self._noise(plan.ring[at], plan.rows[at], plan.offsets[at])[0].numpy()
        if offset < plan.continued:
            assert self._verdict is not None
            scores += self._verdict.rows.numpy()[0, int(plan.source[offset])]
        elif offset >= plan.known and self._entering is not None:
            scores += self._entering.numpy()[offset - plan.known]
        return scores

    def _scores_of_all(self) -> Tensor:
        plan, state, rule = self._plan, self._state, self._rule
        scores = self._noise(plan.ring, plan.rows, plan.offsets)
        if self._verdict is not None and plan.continued:
            if rule.keeps_estimates:
                scores[: plan.continued] += self._estimate(self._verdict)
            else:
                scores[: plan.continued] += self._verdict.rows.flatten(0, 1).index_select(0, plan.source)
        if plan.known > plan.continued and rule.keeps_estimates:
            held = plan.ring[plan.continued : plan.known]
            scores[plan.continued : plan.known] += state.flat("estimates").index_select(0, held)
        if self._entering is not None:
            scores[plan.known :] += self._entering
            if rule.keeps_estimates:
                state.flat("estimates").index_copy_(0, plan.ring[plan.known :], self._entering)
        return scores

    def _estimate(self, verdict: Verdict) -> Tensor:
        """Estimates float32 [continued, V], est_j: fresh rows, smoothed with the previous estimates where there are
        any; and they are kept."""
        plan, smoothing = self._plan, self._rule.smoothing
        fresh = verdict.rows.flatten(0, 1).index_select(0, plan.source)
        estimates = self._state.flat("estimates")
        refined, previous = fresh[: plan.refined], estimates.index_select(0, plan.ring[: plan.refined])
        # A token that was cut off (top-k) and is allowed again counts with its fresh value; else -inf would stay.
        previous = torch.where(previous == float("-inf"), refined, previous)
        refined.mul_(1 - smoothing).add_(previous, alpha=smoothing)
        estimates.index_copy_(0, plan.ring[: plan.continued], fresh)
        return fresh

    def _noise(self, ring: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
        return self._state.noise_rows(self._rule.noise, ring, rows, offsets)
