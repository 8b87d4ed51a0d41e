"""The adaptive window: how many nodes to draft under the present load, from measured step times and acceptance.

Drafting pays while the machine has arithmetic to spare. Two things are learnt from the steps that run anyway:

* E(n), tokens that a request commits in a step with n drafted nodes. Acceptance depends on the window itself (in a
  longer one drafts are refined for more passes before their turn comes), so every window size has its own mean. One
  request's steps scatter widely, so the sizes share what they know: log E is Gaussian around a power law (n + 1)^γ.
* the seconds of a step over T tokens and R sequences: ``a + b·T + c·R`` fitted to everything seen, corrected by what
  steps of nearly this shape really took (a Gaussian process over log T and log R).

The window is the n with most tokens per second, where what is not known well is given the benefit of the doubt (an
upper confidence bound): so it is tried where it may be best, and then known. No table of machines or models is known,
and under `race` the choice never changes what is generated.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

_DECIDE_EVERY = 8
_TRIAL = 8
"""Steps for which the shortest window is tried: enough for its cost."""
_LULL = 16
"""Steps that a lower load must last: a longer window takes steps to fill, so it does not pay in a lull."""
_ADVANTAGE = 0.03
"""A change of window must promise this much (of log tokens per second), so that noise does not make it flutter."""
_HALF_LIFE = 3000
"""Steps after which what was learnt counts half: models and prompts change, and so may the machine."""
_GAMMA, _GAMMA_SPREAD = 0.4, 0.1
"""E(n) = (n + 1)^γ a priori; image-token models measured γ = 0.3 to 0.45."""
_OWN_SPREAD, _NEIGHBOURS = 0.3, 0.8
"""Standard deviation of log E of a window around that law, and its correlation with the next window's."""
_SCATTER = 1.5
"""Relative variance of one request's gain in a step, as a factor of the geometric law's; steps of one picture are
alike, which raises it."""
_COST_SPREAD, _COST_NOISE = 0.2, 0.15
"""Standard deviation of log seconds around the fit for shapes of steps that were never seen; and of single steps."""
_APART = np.log([3.0, 6.0])
"""Shapes whose sequences or tokens differ by this factor have hardly anything in common."""
_CELLS = 32
"""Shapes that a prediction is made from, at most."""
_FULL = 4.0
"""Steps of one shape after which more of them say nothing new about others."""
_OPTIMISM, _COST_OPTIMISM = 1.0, 0.5
"""Standard deviations of log E and of log seconds by which a window is judged better than its mean."""
_DARE_EVERY, _DARING = 400, 2.5
"""Now and then the benefit of the doubt about E is larger, so that a wrong belief does not last for ever."""
_MOST_CELLS = 400
"""Shapes of steps that are remembered."""


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
        self._windows = self.ladder[1:]
        self._gains = {drafts: _Average() for drafts in self._windows}
        self._sizes = {drafts: _Average(drafts + 1.0, 1.0) for drafts in self.ladder}
        self._times: dict[tuple[int, int], _Average] = {}
        self._steps = 0
        self._since_change = 0
        self._to_settle = 0.0
        self._current = max_drafts
        self._decided_for = 1
        self._dare_at = _DARE_EVERY
        self._loads: deque[int] = deque(maxlen=_LULL)
        self._tried: dict[int, int] = {}
        self._trial_left = 0
        logs = np.log1p(self._windows)
        places = np.arange(len(logs))
        alike = _NEIGHBOURS ** np.abs(places[:, None] - places)
        self._prior = _GAMMA * logs
        self._precision = np.linalg.inv(_GAMMA_SPREAD**2 * np.outer(logs, logs) + _OWN_SPREAD**2 * alike)
        self._learn()

    # ---- learning -------------------------------------------------------------------------------------------------

    def observe(self, tokens: int, sequences: int, seconds: float, accepted: Iterable[int]) -> None:
        """Learn from one step.

        Args:
            tokens: scheduled tokens of the step; sequences: scheduled sequences, twins included.
            seconds: from this step's scheduling to the next one's.
            accepted: drafts accepted, per request that had any.
        """
        self._steps += 1
        self._since_change += 1
        cell = self._times.setdefault((_rounded(sequences), _rounded(tokens)), _Average())
        # A hiccup, or kernels compiled for a new shape, are no property of the step; a slower machine is soon seen.
        if cell.weight >= _FULL:
            seconds = min(seconds, 1.25 * cell.value)
        elif cell.weight:
            seconds = cell.value = min(seconds, cell.value)
        cell.add(seconds, 1.0, self._steps, most=20.0)
        if len(self._times) > _MOST_CELLS:
            del self._times[min(self._times, key=lambda key: self._times[key].weight_at(self._steps))]
        counts = list(accepted)
        if not self._current:
            self._to_settle -= 1
        elif counts:
            gained = 1 + sum(counts) / len(counts)
            self._to_settle -= gained
            if self._since_change > 1 and self._to_settle <= 0:
                self._gains[self._current].add(gained, len(counts), self._steps)
                self._sizes[self._current].add(tokens / sequences, 1.0, self._steps, most=20.0)

    @property
    def cost(self) -> tuple[float, float, float]:
        """Fitted seconds per step, per token and per sequence; none is negative."""
        if not self._times:
            return 0.0, 0.0, 0.0
        shapes = np.array([(1.0, tokens, sequences) for sequences, tokens in self._times])
        seconds = np.array([max(cell.value, 1e-6) for cell in self._times.values()])
        # Relative errors count: a long prefill must not outweigh the small steps.
        weight = np.sqrt([min(cell.weight_at(self._steps), _FULL) for cell in self._times.values()])
        rows = shapes * (weight / seconds)[:, None]
        scale = np.maximum(rows.max(0), 1e-30)
        active = [0, 1, 2]
        while True:
            solution = np.linalg.lstsq(rows[:, active] / scale[active], weight, rcond=1e-6)[0]
            if (solution >= 0).all() or len(active) == 1:
                break
            active.pop(int(np.argmin(solution)))
        fit = np.zeros(3)
        fit[active] = np.maximum(solution, 0) / scale[active]
        return float(fit[0]), float(fit[1]), float(fit[2])

    def _learn(self) -> None:
        """Bring what decisions are made from up to date: posterior of log E by window, the fit, and its errors."""
        gains = np.array([max(1.0, self._gains[drafts].value) for drafts in self._windows])
        weight = np.array([self._gains[drafts].weight_at(self._steps) for drafts in self._windows])
        weight /= _SCATTER * np.maximum(1 - 1 / gains, 0.1)
        seen = np.log(gains)
        covariance = np.linalg.inv(self._precision + np.diag(weight))
        mean = covariance @ (self._precision @ self._prior + weight * seen)
        self._log_gain = np.concatenate([[0.0], np.maximum(mean, 0.0)])
        self._gain_variance = np.concatenate([[0.0], np.diag(covariance)])
        self._cost = self.cost

    def _fitted(self, sequences: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Seconds [n] of steps with these sequences and tokens [n], by the fit alone."""
        return np.maximum(self._cost[0] + self._cost[1] * tokens + self._cost[2] * sequences, 1e-9)

    # ---- choosing -------------------------------------------------------------------------------------------------

    def choose(self, sequences: int) -> int:
        """Drafted nodes per sequence for the next step of `sequences` sequences (twins included)."""
        self._loads.append(max(1, sequences))
        current = self._next(max(self._loads))
        if current != self._current:
            # Until as many tokens are committed, drafts of the old window are still there, or of the new one not yet.
            self._to_settle = float(max(current, self._current)) if current else float(_DECIDE_EVERY)
            self._current, self._since_change = current, 0
        return current

    def _next(self, sequences: int) -> int:
        # Long windows alone would not tell what tokens cost from what sequences cost. So at every load, in powers of
        # two, the shortest window is tried, and again when that is forgotten.
        load = round(math.log2(sequences))
        if self._steps >= self._tried.get(load, 0) and self._steps >= _TRIAL:
            self._tried[load], self._trial_left = self._steps + 2 * _HALF_LIFE, _TRIAL
        if self._trial_left:
            self._trial_left -= 1
            return self.ladder[1]
        # A window that was left before it could show its E was tried for nothing; another load is another question.
        settled = self._to_settle <= 0 and self._steps % _DECIDE_EVERY == 0
        if settled or not 0.8 < sequences / self._decided_for < 1.25:
            self._decide(sequences)
        return self.drafts

    def _decide(self, sequences: int) -> None:
        self._decided_for = sequences
        self._learn()
        daring = self._steps >= self._dare_at
        if daring:
            self._dare_at = self._steps + _DARE_EVERY
        scores = self._scores(sequences, _DARING if daring else _OPTIMISM)
        best = int(np.argmax(scores))
        if scores[best] > scores[self.ladder.index(self.drafts)] + _ADVANTAGE:
            self.drafts = self.ladder[best]

    def _scores(self, sequences: int, optimism: float) -> np.ndarray:
        """Log tokens per second and sequence of each window of the ladder, raised by `optimism` deviations of log E."""
        tokens = sequences * np.array([self._sizes[drafts].value for drafts in self.ladder])
        seconds, doubt = self._seconds(np.full(len(tokens), float(sequences)), tokens)
        return self._log_gain - seconds + optimism * np.sqrt(self._gain_variance) + _COST_OPTIMISM * np.sqrt(doubt)

    def _seconds(self, sequences: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean [n] and variance [n] of the log seconds of steps with these sequences and tokens [n]: a Gaussian process
        around the fit."""
        here = np.log(np.stack([sequences, tokens], 1))
        fitted = np.log(self._fitted(sequences, tokens))
        if not self._times:
            return fitted, np.full(len(tokens), _COST_SPREAD**2)
        keys = list(self._times)
        shapes = np.array(keys, dtype=float)
        seen = np.log(shapes)
        # The cells that say most: near the present number of sequences, and in most steps.
        weight = np.maximum([self._times[key].weight_at(self._steps) for key in keys], 1e-3)
        order = np.argsort(np.abs(seen[:, 0] - here[0, 0]) - 0.1 * np.log(weight))[:_CELLS]
        seen, weight, shapes = seen[order], weight[order], shapes[order]
        errors = np.log([max(self._times[keys[i]].value, 1e-9) for i in order]) - np.log(
            self._fitted(shapes[:, 0], shapes[:, 1])
        )

        def alike(left: np.ndarray, right: np.ndarray) -> np.ndarray:
            return _COST_SPREAD**2 * np.exp(-np.abs((left[:, None] - right[None]) / _APART).sum(2))

        own = alike(seen, seen) + np.diag(_COST_NOISE**2 / weight + 1e-4)
        between = alike(here, seen)
        solved = np.linalg.solve(own, between.T)
        return fitted + errors @ solved, np.maximum(_COST_SPREAD**2 - (between.T * solved).sum(0), 0.0)


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
