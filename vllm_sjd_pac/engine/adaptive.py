"""The adaptive window: how many nodes to draft under the present load, from measured step times and acceptance.

Drafting pays while the machine has arithmetic to spare: a step over T tokens and R sequences takes about
``a + b·T + c·R`` seconds, and a window of n nodes commits E(n) tokens per sequence. The controller fits a, b, c to the
steps it sees and E to the accepted drafts it sees, both with exponential forgetting, and takes the n that commits most
tokens per second. It knows no table of machines or models. Under `race` its choice never changes what is generated.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

_SHRINK = 2
_FORGET = 0.98
_DECIDE_EVERY = 4
_PROBE_EVERY = 48
_WARM_UP = 12
_ADVANTAGE = 1.03
"""A change of window must promise this factor, so that noise does not make it flutter."""


class WindowController:
    """Chooses the number of drafted nodes for the next steps.

    Args:
        max_drafts: drafted nodes of the full window (the root not counted).
    """

    def __init__(self, max_drafts: int) -> None:
        self.ladder = _ladder(max_drafts)
        self.drafts = max_drafts
        self._normal = np.zeros((3, 3))
        self._moment = np.zeros(3)
        self._scale = np.array([1.0, 0.01, 0.1])  # tokens come in hundreds, sequences in tens
        self._reached = np.zeros(max_drafts + 2)
        self._possible = np.zeros(max_drafts + 2)
        self._steps = 0

    def observe(self, tokens: int, sequences: int, seconds: float, accepted: Iterable[tuple[int, int]]) -> None:
        """Learn from one step.

        Args:
            tokens: scheduled tokens of the step; sequences: scheduled sequences, twins included.
            seconds: from scheduling to the step's output.
            accepted: per request with drafts: depth that its tree reached, drafts accepted.
        """
        x = np.array([1.0, tokens, sequences]) * self._scale
        # Relative errors count: a long prefill must not outweigh a hundred small steps.
        weight = 1.0 / max(seconds, 1e-6) ** 2
        self._normal = _FORGET * self._normal + weight * np.outer(x, x)
        self._moment = _FORGET * self._moment + weight * seconds * x
        seen = False
        for depth, count in accepted:
            if not seen:
                self._reached *= _FORGET
                self._possible *= _FORGET
                seen = True
            depth = min(depth, len(self._possible) - 1)
            self._possible[1 : depth + 1] += 1
            self._reached[1 : min(count, depth) + 1] += 1
        self._steps += 1

    def choose(self, sequences: int) -> int:
        """Drafted nodes per sequence for the next step of `sequences` sequences (twins included)."""
        if self._steps < _WARM_UP:
            # The first steps try different windows, so that the cost of a token can be told from that of a step.
            return self.ladder[-1 - (self._steps // 3) % min(3, len(self.ladder))]
        if self._steps % _PROBE_EVERY == 0:
            return self.ladder[max(1, self.ladder.index(self.drafts) - 1)] if self.drafts else self.ladder[1]
        if self._steps % _DECIDE_EVERY == 0:
            rates = [self._rate(drafts, max(1, sequences)) for drafts in self.ladder]
            best = int(np.argmax(rates))
            if rates[best] > _ADVANTAGE * rates[self.ladder.index(self.drafts)]:
                self.drafts = self.ladder[best]
        return self.drafts

    def _rate(self, drafts: int, sequences: int) -> float:
        fixed, per_token, per_sequence = self.cost
        seconds = fixed + per_sequence * sequences + per_token * sequences * (drafts + 1)
        return sequences * self.expected_tokens(drafts) / max(seconds, 1e-9)

    @property
    def cost(self) -> tuple[float, float, float]:
        """Fitted seconds per step, per token and per sequence; none is negative."""
        active = [0, 1, 2]
        while True:
            part = np.ix_(active, active)
            ridge = 1e-9 * np.trace(self._normal[part]) * np.eye(len(active)) + 1e-12 * np.eye(len(active))
            solution = np.linalg.solve(self._normal[part] + ridge, self._moment[active])
            if (solution >= 0).all() or len(active) == 1:
                break
            active.pop(int(np.argmin(solution)))
        full = np.zeros(3)
        full[active] = np.maximum(solution, 0)
        fixed, per_token, per_sequence = full * self._scale
        return float(fixed), float(per_token), float(per_sequence)

    def expected_tokens(self, drafts: int) -> float:
        """E(n): tokens that a step with a window of `drafts` nodes commits, from the accepted drafts seen so far."""
        expected, survival = 1.0, 1.0
        for depth in range(1, drafts + 1):
            possible = self._possible[depth] if depth < len(self._possible) else 0.0
            if possible >= 4:
                survival = self._reached[depth] / possible
            else:
                survival *= 0.7  # not seen: drafts get rarer with depth
            expected += survival
            if survival < 1e-3:
                break
        return expected


def _ladder(max_drafts: int) -> list[int]:
    """0, …, max_drafts/4, max_drafts/2, max_drafts."""
    rungs = [max_drafts]
    while rungs[0] > 3:
        rungs.insert(0, (rungs[0] + 1) // _SHRINK - 1)
    return [0, *[rung for rung in rungs if rung > 0]]
