"""The adaptive window: how many nodes to draft under the present load, from measured step times and acceptance.

Drafting pays while the machine has arithmetic to spare. Two things are learnt from the steps that run anyway:

* E(n), tokens that a request commits in a step with n drafted nodes. It is kept per window size, because acceptance
  depends on the window itself: in a longer one drafts are refined for more passes before their turn comes. A size that
  was not tried is given the benefit of the doubt: a shorter window what the first depths of a longer one commit, a
  longer one a generous power law. So it is tried where it may be best, and then known.
* the seconds of a step over T tokens and R sequences: averages by (R, T), and ``a + b·T + c·R`` fitted to all of them
  for what has not been seen.

The window is the n with most tokens per second. No table of machines or models is known, and under `race` the choice
never changes what is generated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

_DECIDE_EVERY = 4
_TRIAL = 12
"""Steps that a window is tried for; the first `_SETTLE` of them say nothing about E: a new window has to fill."""
_SETTLE = 4
_PROBE_EVERY = 256
_ADVANTAGE = 1.04
"""A change of window must promise this factor, so that noise does not make it flutter."""
_HALF_LIFE = 3000
"""Steps after which what was learnt counts half: models and prompts change, and so may the machine."""
_GENEROUS = 0.5
"""E(n) grows at most like (n + 1)^this; image-token models measured 0.3 to 0.45."""
_DOUBT = 8.0
"""Request-steps that the guess at an untried window weighs as much as."""
_MOST_REQUESTS = 2000.0
_MOST_CELLS = 400


@dataclass
class _Average:
    """A mean with forgetting."""

    value: float = 0.0
    weight: float = 0.0
    step: int = 0

    def add(self, value: float, weight: float, step: int, most: float = math.inf) -> None:
        """Include ``value``; ``most`` bounds the weight of the past, so that the mean follows drifts."""
        past = min(self.weight_at(step), most)
        self.value = (self.value * past + value * weight) / (past + weight)
        self.weight, self.step = past + weight, step

    def weight_at(self, step: int) -> float:
        return self.weight * 0.5 ** ((step - self.step) / _HALF_LIFE)


class WindowController:
    """Chooses the number of drafted nodes for the next steps.

    Args:
        max_drafts: drafted nodes of the full window (the root not counted).
    """

    def __init__(self, max_drafts: int) -> None:
        self.ladder = _ladder(max_drafts)
        self.drafts = max_drafts
        self._gains = {drafts: _Average() for drafts in self.ladder}
        self._reached = {drafts: np.zeros(drafts + 1) for drafts in self.ladder}
        self._times: dict[tuple[int, int], _Average] = {}
        self._cost = (0.0, 0.0, 0.0)
        self._steps = 0
        self._since_change = 0
        self._current = max_drafts
        self._trials = [rung for rung in (max_drafts, self.ladder[len(self.ladder) // 2]) if rung]
        self._trial_left = _TRIAL

    # ---- learning -------------------------------------------------------------------------------------------------

    def observe(self, tokens: int, sequences: int, seconds: float, accepted: Iterable[int]) -> None:
        """Learn from one step.

        Args:
            tokens: scheduled tokens of the step; sequences: scheduled sequences, twins included.
            seconds: from scheduling to the step's output.
            accepted: drafts accepted, per request that had any.
        """
        self._steps += 1
        self._since_change += 1
        cell = self._times.setdefault((sequences, _rounded(tokens)), _Average())
        if cell.weight >= 3:
            seconds = min(seconds, 3 * cell.value)  # a hiccup of the machine is no property of the step
        cell.add(seconds, 1.0, self._steps, most=20.0)
        if len(self._times) > _MOST_CELLS:
            del self._times[min(self._times, key=lambda key: self._times[key].weight_at(self._steps))]
        counts = list(accepted)
        if counts and self._current and self._since_change > _SETTLE:
            gained = 1 + sum(counts) / len(counts)
            gain, reached = self._gains[self._current], self._reached[self._current]
            share = len(counts) / (len(counts) + min(gain.weight_at(self._steps), _MOST_REQUESTS))
            gain.add(gained, len(counts), self._steps, most=_MOST_REQUESTS)
            depths = np.arange(len(reached))
            reached += share * ((np.array(counts)[:, None] >= depths).mean(0) - reached)

    @property
    def cost(self) -> tuple[float, float, float]:
        """Fitted seconds per step, per token and per sequence; none is negative."""
        if not self._times:
            return 0.0, 0.0, 0.0
        keys = np.array([(1.0, tokens, sequences) for sequences, tokens in self._times])
        seconds = np.array([max(cell.value, 1e-6) for cell in self._times.values()])
        weight = np.sqrt([cell.weight_at(self._steps) for cell in self._times.values()])
        # Relative errors count: a long prefill must not outweigh the small steps.
        rows, right = keys * (weight / seconds)[:, None], weight
        scale = np.maximum(np.abs(rows).max(0), 1e-30)
        active = [0, 1, 2]
        while True:
            solution = np.linalg.lstsq(rows[:, active] / scale[active], right, rcond=1e-6)[0]
            if (solution >= 0).all() or len(active) == 1:
                break
            active.pop(int(np.argmin(solution)))
        full = np.zeros(3)
        full[active] = np.maximum(solution, 0) / scale[active]
        return float(full[0]), float(full[1]), float(full[2])

    def expected_tokens(self, drafts: int) -> float:
        """E(n): tokens that a request commits in a step with a window of `drafts` nodes."""
        if not drafts:
            return 1.0
        gain = self._gains.get(drafts)
        weight = gain.weight_at(self._steps) if gain is not None else 0.0
        guess = self._guess(drafts)
        return ((gain.value if gain is not None else 0.0) * weight + guess * _DOUBT) / (weight + _DOUBT)

    def _guess(self, drafts: int) -> float:
        """A generous E(n) from the other windows seen, the nearest larger one or else the nearest smaller one."""
        seen = [rung for rung in self.ladder if rung and rung != drafts and self._gains[rung].weight]
        larger = [rung for rung in seen if rung > drafts]
        if larger:
            return float(self._reached[min(larger)][: drafts + 1].sum())
        nearest = max(seen, default=0)
        return max(1.0, self._gains[nearest].value) * ((drafts + 1) / (nearest + 1)) ** _GENEROUS

    # ---- choosing -------------------------------------------------------------------------------------------------

    def choose(self, sequences: int) -> int:
        """Drafted nodes per sequence for the next step of `sequences` sequences (twins included)."""
        current = self._next(max(1, sequences))
        if current != self._current:
            self._current, self._since_change = current, 0
        return current

    def _next(self, sequences: int) -> int:
        if self._trials:
            # At first, and now and then, other windows are tried: what is never run is never learnt.
            self._trial_left -= 1
            if self._trial_left >= 0:
                return self._trials[0]
            self._trials.pop(0)
            self._trial_left = _TRIAL
            if self._trials:
                return self._trials[0]
            self._decide(sequences)
        elif self._steps % _PROBE_EVERY == 0 and self._steps:
            self._probe(sequences)
        elif self._steps % _DECIDE_EVERY == 0:
            self._decide(sequences)
        return self._trials[0] if self._trials else self.drafts

    def _decide(self, sequences: int) -> None:
        self._cost = self.cost
        rates = {drafts: self._rate(drafts, sequences) for drafts in self.ladder}
        best = max(rates, key=lambda drafts: rates[drafts])
        if rates[best] > _ADVANTAGE * rates[self.drafts]:
            self.drafts = best

    def _probe(self, sequences: int) -> None:
        """Try the neighbour about which least is known, if it may be as good as the present window."""
        place = self.ladder.index(self.drafts)
        around = [self.ladder[i] for i in (place - 1, place + 1) if 0 <= i < len(self.ladder) and self.ladder[i]]
        if not around:
            return
        rung = min(around, key=lambda drafts: self._gains[drafts].weight_at(self._steps))
        if self._rate(rung, sequences) > 0.8 * self._rate(self.drafts, sequences):
            self._trials, self._trial_left = [rung], _TRIAL

    def _rate(self, drafts: int, sequences: int) -> float:
        return sequences * self.expected_tokens(drafts) / self._seconds(drafts, sequences)

    def _seconds(self, drafts: int, sequences: int) -> float:
        """Of a step: what was measured for nearly this step, as far as it was, else the fit."""
        fixed, per_token, per_sequence = self._cost
        tokens = sequences * (drafts + 1)
        fitted = fixed + per_token * tokens + per_sequence * sequences
        cell = self._times.get((sequences, _rounded(tokens)))
        if cell is None:
            return max(fitted, 1e-9)
        weight = cell.weight_at(self._steps)
        return max((cell.value * weight + 2 * fitted) / (weight + 2), 1e-9)


def _rounded(tokens: int) -> int:
    """To steps of about 9 %, so that a few catch-up tokens do not make another case."""
    if tokens < 12:
        return tokens
    step = 2 ** max(0, tokens.bit_length() - 4)
    return round(tokens / step) * step


def _ladder(max_drafts: int) -> list[int]:
    """0, …, max_drafts/4, max_drafts/2, max_drafts."""
    rungs = [max_drafts]
    while rungs[0] > 3:
        rungs.insert(0, (rungs[0] + 1) // 2 - 1)
    return [0, *[rung for rung in rungs if rung > 0]]
