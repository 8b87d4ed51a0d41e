"""The noise that vLLM's own sampler would draw, one fixed vector per request and output position.

With it the `race` rule returns the tokens of plain vLLM for the same seed. On the CPU the stock sampler draws one
integer per token from the request's generator and hashes it with the token id; elsewhere it draws one row of
exponentials. Requests without a seed get one derived from the engine's seed and the request's id, equal on all ranks.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

_GOLDEN, _MUL_1, _MUL_2 = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_CHUNK = 64


def derived_seed(engine_seed: int, request_id: str) -> int:
    """A 63-bit seed for a request that gave none."""
    digest = hashlib.blake2b(f"{engine_seed}:{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class SeedStreams:
    """Per-request streams of random integers: draw p of the stream belongs to output position p.

    A stream is recomputable from its seed, so it survives preemption by construction.
    """

    def __init__(self) -> None:
        self._generators: dict[int, torch.Generator] = {}
        self._table = torch.zeros((0, _CHUNK), dtype=torch.long)
        self._drawn: list[int] = []
        self._free: list[int] = []
        self.greedy = torch.zeros(0, dtype=torch.bool)
        self.num_greedy = 0

    def open(self, seed: int, greedy: bool) -> int:
        """Start a stream; returns its key."""
        if self._free:
            key = self._free.pop()
        else:
            key = len(self._drawn)
            self._drawn.append(0)
            if key >= self._table.shape[0]:
                more = max(4, key)
                self._table = torch.cat([self._table, self._table.new_zeros(more, self._table.shape[1])])
                self.greedy = torch.cat([self.greedy, self.greedy.new_zeros(more)])
        self._drawn[key] = 0
        self._generators[key] = torch.Generator().manual_seed(seed)
        self.greedy[key] = greedy
        self.num_greedy += greedy
        return key

    def close(self, key: int) -> None:
        del self._generators[key]
        self.num_greedy -= int(self.greedy[key])
        self.greedy[key] = False
        self._free.append(key)

    def integers(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Draws as LongTensor of the common shape of `keys` and `positions` (long)."""
        if positions.numel():
            furthest = int(positions.max()) + 1
            if keys.numel() == 1:
                key = int(keys)
                self._draw(key, furthest)
                return self._table[key][positions]
            for key in set(keys.flatten().tolist()):
                self._draw(key, furthest)
        return self._table[keys, positions]

    def _draw(self, key: int, count: int) -> None:
        drawn = self._drawn[key]
        if drawn >= count:
            return
        target = -(-count // _CHUNK) * _CHUNK
        if target > self._table.shape[1]:
            wider = max(target, 2 * self._table.shape[1]) - self._table.shape[1]
            self._table = torch.cat([self._table, self._table.new_zeros(self._table.shape[0], wider)], dim=1)
        # As the stock sampler: torch.randint(0, 2**31, (1,), generator=g) per token.
        self._table[key, drawn:target] = torch.randint(0, 2**31, (target - drawn,), generator=self._generators[key])
        self._drawn[key] = target


def cpu_gumbel(seeds: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The stock CPU sampler's Gumbel noise: hash of (seed, token id), SplitMix64 (Steele et al. 2014).

    Args:
        seeds: LongTensor [...]; tokens: LongTensor [C].

    Returns:
        float64 [..., C].
    """
    return _gumbel(seeds, _token_steps(tokens))


def _token_steps(tokens: torch.Tensor) -> np.ndarray:
    """uint64 [C]: what each token id adds to a hashed seed."""
    return (tokens.numpy().astype(np.uint64) + np.uint64(1)) * _GOLDEN


def _gumbel(seeds: torch.Tensor, steps: np.ndarray, dtype: type = np.float64) -> torch.Tensor:
    """`dtype` [..., C] for seeds long [...] and steps uint64 [C], rounded from float64."""
    # In NumPy: torch's integer products and float64 logarithms take more than twice as long on one core. In place,
    # as what these operations cost is mostly that their memory is in no cache.
    bits = _mix(_mix(seeds.numpy().astype(np.uint64))[..., None] + steps)
    bits >>= np.uint64(11)
    noise = np.multiply(bits, 2.0**-53, out=bits.view(np.float64))
    noise += 2.0**-54  # (bits + 1/2) / 2^53: scaling by a power of two commutes with rounding
    np.log(noise, out=noise)
    np.negative(noise, out=noise)
    np.log(noise, out=noise)
    return torch.from_numpy(np.negative(noise, out=np.empty(noise.shape, dtype), casting="same_kind"))


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser on uint64, in place."""
    shifted = np.empty_like(x)
    for shift, factor in ((30, _MUL_1), (27, _MUL_2), (31, None)):
        x ^= np.right_shift(x, np.uint64(shift), out=shifted)
        if factor is not None:
            x *= factor
    return x


class CPUStockNoise:
    """`NoiseSource` of `decoding` that reproduces vLLM's CPU sampler (``fused_gumbel_argmax``).

    Args:
        tokens: LongTensor [C], the token id of each column.
    """

    def __init__(self, streams: SeedStreams, tokens: torch.Tensor) -> None:
        self.streams, self.tokens, self._steps = streams, tokens, _token_steps(tokens)

    def gumbel(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """float32 [B, W, C] for keys long [B] and positions long [B, W]; zeros for greedy requests."""
        noise = _gumbel(self.streams.integers(keys.unsqueeze(-1), positions), self._steps, np.float32)
        if not self.streams.num_greedy:
            return noise
        return noise.masked_fill_(self.streams.greedy[keys].view(-1, 1, 1), 0.0)

    def self_check(self) -> None:
        """Compare with the stock sampler's operator.

        Raises:
            RuntimeError: they differ; this vLLM draws its noise in another way.
        """
        generator = torch.Generator().manual_seed(0)
        seeds = torch.randint(0, 2**31, (64,), generator=generator)
        rows = torch.randn(64, len(self.tokens), generator=generator)
        full = torch.full((64, int(self.tokens.max()) + 1), float("-inf"))
        full[:, self.tokens] = rows
        winners = torch.ops._C.fused_gumbel_argmax(full, seeds)
        ours = self.tokens[(rows + cpu_gumbel(seeds, self.tokens)).argmax(-1)]
        if not torch.equal(winners, ours):
            raise RuntimeError(
                "sjd_pac: this vLLM's CPU sampler draws its noise in another way; equal seeds would differ"
            )


class ExponentialStockNoise:
    """`NoiseSource` that reproduces the stock sampler elsewhere: one exponential row per token from a generator.

    Never run on a GPU so far; its arithmetic is tested on the CPU. Rows must be drawn in order, so a position that lies
    behind the generator (after a preemption) restarts the stream from its seed.

    Args:
        vocab_size: length of the rows that the stock sampler draws; tokens: LongTensor [C]; device: of the generators.
    """

    def __init__(self, streams: SeedStreams, tokens: torch.Tensor, vocab_size: int, device: torch.device) -> None:
        self.streams, self.tokens, self.vocab_size, self.device = streams, tokens.to(device), vocab_size, device
        self._generators: dict[int, tuple[torch.Generator, int]] = {}
        self._seeds: dict[int, int] = {}

    def open(self, key: int, seed: int) -> None:
        self._seeds[key] = seed
        self._generators[key] = (torch.Generator(self.device).manual_seed(seed), 0)

    def gumbel(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """float32 [B, W, C] for keys long [B] and positions long [B, W]; zeros for greedy requests."""
        out = torch.zeros(*positions.shape, len(self.tokens), device=self.device)
        for row, (key, wanted) in enumerate(zip(keys.tolist(), positions.tolist(), strict=True)):
            if self.streams.greedy[key]:
                continue
            for column, position in enumerate(wanted):
                out[row, column] = -self._row(key, position)[self.tokens].log_()
        return out

    def _row(self, key: int, position: int) -> torch.Tensor:
        generator, following = self._generators[key]
        if following > position:
            self.open(key, self._seeds[key])
            generator, following = self._generators[key]
        row = torch.empty(self.vocab_size, device=self.device)
        for _ in range(position - following + 1):
            row.exponential_(generator=generator)
        self._generators[key] = (generator, position + 1)
        return row
