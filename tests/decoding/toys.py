"""Enumerable toy targets (every prefix has its own law) and the chi-square test of decoded sequences."""

from __future__ import annotations

import math

import torch
from scipy.stats import chi2
from torch import Tensor

from vllm_sjd_pac.decoding import TreeBatch

SEQUENCES = 200_000


class Toy:
    """A target whose law after each prefix is a row of a table; works for `jacobi_decode` and `simulate`.

    The prompt is one token and does not matter.
    """

    def __init__(self, name: str, vocab: int, length: int, scale: float, seed: int = 0) -> None:
        self.name, self.vocab, self.length = name, vocab, length
        generator = torch.Generator().manual_seed(seed)
        starts = [sum(vocab**k for k in range(n)) for n in range(length + 2)]
        self.starts = torch.tensor(starts)
        self.table = scale * torch.randn(starts[length], vocab, generator=generator)
        self.generator = generator

    def __repr__(self) -> str:
        return self.name

    def level(self, position: int) -> Tensor:
        """Rows of all prefixes of length ``position``; a view."""
        return self.table[self.starts[position] : self.starts[position + 1]]

    def joint(self) -> Tensor:
        """Exact probability of every sequence, float64 [V ** L]."""
        joint = torch.ones(1, dtype=torch.float64)
        for position in range(self.length):
            joint = (joint[:, None] * self.level(position).double().softmax(-1)).flatten()
        return joint

    def code(self, tokens: Tensor) -> Tensor:
        """Number of each sequence of ``tokens`` long [B, L]."""
        code = torch.zeros(tokens.shape[0], dtype=torch.long)
        for column in tokens.unbind(1):
            code = code * self.vocab + column
        return code

    def batch(self, committed: Tensor, position: Tensor, trees: TreeBatch, tokens: Tensor, sequences: Tensor) -> Tensor:
        """Target of `simulate`. Padded nodes get NaN rows: they must never leak."""
        codes = torch.zeros_like(tokens)
        for column in range(self.length):
            before = column < position
            codes[:, 0] = torch.where(before, codes[:, 0] * self.vocab + committed[:, column], codes[:, 0])
        for node in range(1, tokens.shape[1]):
            parent = trees.parents[:, node : node + 1].clamp(min=0)
            codes[:, node] = codes.gather(1, parent).squeeze(1) * self.vocab + tokens[:, node].clamp(min=0)
        lengths = (position.unsqueeze(1) + trees.depths).clamp(max=self.length - 1)
        rows = self.table[(self.starts[lengths] + codes).clamp(max=len(self.table) - 1)]
        return rows.masked_fill_(~trees.valid.unsqueeze(2), math.nan)

    def single(self, prefix: Tensor, tokens: Tensor, parents: Tensor) -> Tensor:
        """Target of `jacobi_decode` and of the reference, for a prompt of one token."""
        done = torch.cat([prefix, tokens[:1]])[1:]
        codes = [(int(self.code(done.unsqueeze(0))), len(done))]
        for node in range(1, len(tokens)):
            code, length = codes[int(parents[node])]
            codes.append((code * self.vocab + int(tokens[node]), length + 1))
        return torch.stack([self.table[self.starts[length] + code] for code, length in codes])


def toys() -> list[Toy]:
    """Zero-probability tokens, forced tokens in the middle, nearly deterministic, flat."""
    zeros = Toy("zeros", 5, 4, 1.5, seed=1)
    zeros.table[torch.rand(zeros.table.shape, generator=zeros.generator) < 0.4] = -math.inf
    dead = (zeros.table == -math.inf).all(1)
    zeros.table[dead, 0] = 0.0
    forced = Toy("forced", 4, 5, 1.5, seed=2)
    forced.level(2).fill_(-math.inf)[:, 1] = 0.0
    alive = torch.randint(4, (len(forced.level(3)),), generator=forced.generator)
    some = torch.rand(len(alive), generator=forced.generator) < 0.5
    forced.level(3)[some] = -math.inf
    forced.level(3)[some, alive[some]] = 0.3
    sharp = Toy("sharp", 3, 6, 4.0, seed=3)
    flat = Toy("flat", 6, 4, 0.3, seed=4)
    return [zeros, forced, sharp, flat]


def p_value(codes: Tensor, law: Tensor) -> float:
    """Chi-square test of sequence numbers against their exact law. Impossible sequences give 0; cells that expect
    fewer than 5 are pooled."""
    observed = torch.bincount(codes, minlength=len(law)).double()
    if observed[law == 0].sum() > 0:
        return 0.0
    expected = law * len(codes)
    big = expected >= 5
    pairs = [(observed[big], expected[big])]
    if expected[~big].sum() >= 1:
        pairs.append((observed[~big].sum().view(1), expected[~big].sum().view(1)))
    statistic = sum(float(((o - e) ** 2 / e).sum()) for o, e in pairs)
    cells = sum(len(o) for o, _ in pairs)
    return float(chi2.sf(statistic, max(1, cells - 1)))
