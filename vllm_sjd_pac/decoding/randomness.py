"""Where random numbers come from.

Both rules ask for numbers by (key of the request, absolute position), so that they do not depend on the batch,
on the window or on which rank asks: `NoiseSource` gives `race` its fixed noise per position, `Randomness` gives
`rejection` its uniforms. The defaults are counter-based: a 64-bit mixing function (Steele et al. 2014,
SplitMix64) of key, position and index.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MUL_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MUL_2 = 0x94D049BB133111EB - (1 << 64)
_STEP = 0xD1342543DE82EF95 - (1 << 64)
_NOISE = 7  # stream number of CounterNoise; RejectionRule uses 0..2


class NoiseSource(Protocol):
    """Noise of the `race` rule, fixed once per (request, position)."""

    def gumbel(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Additive noise float32 [B, W, V] for keys long [B] and absolute positions long [B, W].

        The token that plain sampling produces at a position is argmax(logits + noise). Greedy requests get zeros.
        Asked twice for the same (key, position), it must answer the same.
        """
        ...


class Randomness(Protocol):
    """Uniform numbers of the `rejection` rule."""

    def uniform(self, keys: Tensor, positions: Tensor, stream: int, count: int) -> Tensor:
        """float64 [B, count] in [0, 1) for keys long [B], positions long [B] (one a step) and a stream number.

        Numbers of different (key, position, stream) must be independent; a request never asks twice for the
        same triple, except when a step is thrown away and done again. The first numbers do not depend on ``count``.
        """
        ...


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on an int64 tensor (a bijection; wraps around)."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MUL_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MUL_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _wrap(number: int) -> int:
    """``number`` as a signed 64-bit integer."""
    return ((number + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)


@lru_cache(maxsize=64)
def _multiples(count: int, device: str) -> Tensor:
    return torch.arange(1, count + 1, device=device) * _GOLDEN


def counter_bits(keys: Tensor, positions: Tensor, stream: int, count: int) -> Tensor:
    """48 random bits as int64 [..., count] for keys and positions of equal shape [...]."""
    base = mix(keys * _MUL_2 + positions * _STEP + _wrap(stream * _MUL_1)).unsqueeze(-1)
    x = base + _multiples(count, str(keys.device))
    x.bitwise_xor_((x >> 30).bitwise_and_(0x3FFFFFFFF)).mul_(_MUL_1)
    x.bitwise_xor_((x >> 27).bitwise_and_(0x1FFFFFFFFF)).mul_(_MUL_2)
    return x.bitwise_right_shift_(16).bitwise_and_(0xFFFFFFFFFFFF)  # the upper bits need no last mixing


class CounterNoise:
    """Counter-based Gumbel noise over ``vocab_size`` tokens; the key is the request's seed."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def gumbel(self, keys: Tensor, positions: Tensor) -> Tensor:
        bits = counter_bits(keys.unsqueeze(-1), positions, _NOISE, self.vocab_size)
        # -log1p(-u) resolves small exponentials, the winners, to 2^-48; u must stay below 1 in float32.
        negative_u = bits.to(torch.float32).mul_(-(2.0**-48)).sub_(2.0**-49).clamp_(min=2.0**-24 - 1)
        return negative_u.log1p_().neg_().log_().neg_()


class TableNoise:
    """Noise given as a table float32 [B, P, V]; the key is the row. For tests and simulations."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def gumbel(self, keys: Tensor, positions: Tensor) -> Tensor:
        return self.table[keys.unsqueeze(-1), positions.clamp(max=self.table.shape[1] - 1)]


class CounterRandomness:
    """Counter-based uniforms; the key is the request's seed."""

    def uniform(self, keys: Tensor, positions: Tensor, stream: int, count: int) -> Tensor:
        return counter_bits(keys, positions, stream, count).to(torch.float64) * 2.0**-48


class GeneratorRandomness:
    """Uniforms from one torch generator, whatever the keys: fast, for simulations of many sequences."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def uniform(self, keys: Tensor, positions: Tensor, stream: int, count: int) -> Tensor:
        shape = (keys.shape[0], count)
        return torch.rand(shape, generator=self.generator, dtype=torch.float64, device=keys.device)


def first_argmax(scores: Tensor) -> Tensor:
    """``scores.argmax(-1)``, the first of equals; [..., V] -> long [...]. On CPUs NumPy's is many times as fast."""
    if scores.device.type != "cpu" or scores.dtype not in (torch.float32, torch.float64):
        return scores.argmax(-1)
    return torch.from_numpy(np.asarray(scores.numpy().argmax(-1)))


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """One index per row of ``weights`` [n, V] (non-negative, not all 0) by inversion, given uniforms float64 [n].

    Sums in float64: exact to about 1e-15, and an entry of weight 0 is never drawn. Returns long [n].
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    threshold = uniform * cumulative[:, -1]
    return (
        torch.searchsorted(cumulative, threshold.unsqueeze(-1), right=True).squeeze(-1).clamp_(max=weights.shape[1] - 1)
    )
