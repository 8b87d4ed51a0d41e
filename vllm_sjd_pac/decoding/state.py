"""What a request remembers between steps, for all requests of an engine.

The rows of a window (laws or estimates, and noise) live in rings addressed by absolute position, so that
committing tokens moves no memory: the row of position p is row ``p % ring`` of the request's slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm_sjd_pac.decoding.acceptance import AcceptanceRule
    from vllm_sjd_pac.decoding.randomness import NoiseSource


class WindowPool:
    """Window state of many requests; a slot per request, grown on demand.

    Per slot, with R = ``max_window`` + 1 ring rows: ``position`` (absolute position of the token after the root),
    ``length`` (window positions that hold a draft), ``estimate_end`` and ``noise_end`` (positions below them have an
    estimate row from the model, a noise row), ``key`` (seed for the random numbers), ``tokens``
    long [R] (main drafts), ``memory`` long [R, H] (earlier main drafts, newest first, -1 = none),
    ``estimates`` float32 [R, V] (`rejection`: the laws the drafts were drawn from; `race`: smoothed rows),
    ``noise`` float32 [R, V].
    """

    def __init__(
        self,
        rule: AcceptanceRule,
        vocab_size: int,
        max_window: int,
        device: torch.device | str = "cpu",
        capacity: int = 1,
    ) -> None:
        if vocab_size < 1:
            raise ValueError(f"vocab_size: expected at least 1, got {vocab_size}")
        if max_window < 0:
            raise ValueError(f"max_window: expected at least 0 (length of the main chain), got {max_window}")
        self.vocab_size, self.max_window, self.device = vocab_size, max_window, torch.device(device)
        self.ring = max_window + 1
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "position": ((), torch.long),
            "length": ((), torch.long),
            "estimate_end": ((), torch.long),
            "noise_end": ((), torch.long),
            "key": ((), torch.long),
            "tokens": ((self.ring,), torch.long),
        }
        if rule.memory:
            shapes["memory"] = ((self.ring, rule.memory), torch.long)
        if rule.keeps_estimates:
            shapes["estimates"] = ((self.ring, vocab_size), torch.float32)
        if rule.keeps_noise:
            shapes["noise"] = ((self.ring, vocab_size), torch.float32)
        self._shapes = shapes
        self._data = {
            name: torch.empty((0, *shape), dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()
        }
        self._free: list[int] = []
        self._capacity = 0
        self._used: set[int] = set()
        self._grow(max(1, capacity))

    def __getitem__(self, name: str) -> Tensor:
        return self._data[name]

    def __contains__(self, name: str) -> bool:
        return name in self._data

    def __len__(self) -> int:
        return len(self._used)

    @property
    def bytes_per_request(self) -> int:
        """Memory of one slot."""
        return sum(data[0].numel() * data.element_size() for data in self._data.values())

    def allocate(self, key: int = 0, position: int = 0) -> int:
        """A slot with an empty window. ``key`` seeds the request's random numbers (unused by noise sources that
        keep their own streams); ``position``: absolute position of the token after the root."""
        if not self._free:
            self._grow(max(4, self._capacity // 2))
        slot = self._free.pop()
        self._used.add(slot)
        self._data["key"][slot] = key
        self.reset(slot, position)
        return slot

    def allocate_many(self, keys: Tensor) -> Tensor:
        """Slots long [n] for n requests at position 0, with seeds ``keys`` long [n]."""
        if len(self._free) < keys.shape[0]:
            self._grow(keys.shape[0] - len(self._free))
        chosen = [self._free.pop() for _ in range(keys.shape[0])]
        self._used.update(chosen)
        slots = torch.tensor(chosen, device=self.device)
        self._data["key"][slots] = keys
        for name in ("position", "length", "estimate_end", "noise_end"):
            self._data[name][slots] = 0
        return slots

    def reset(self, slot: int, position: int) -> None:
        """Forget the window of ``slot`` and go to ``position`` (O(1): no row is cleared)."""
        for name, value in (("position", position), ("length", 0), ("estimate_end", position), ("noise_end", position)):
            self._data[name][slot] = value

    def free(self, slot: int) -> None:
        """Give ``slot`` back."""
        if slot not in self._used:
            raise ValueError(f"slot: {slot} is not in use")
        self._used.remove(slot)
        self._free.append(slot)

    def gather(self, slots: Tensor) -> WindowState:
        """The state of a batch of requests; ``slots`` long [B] without repetition."""
        if self.device.type != slots.device.type:
            slots = slots.to(self.device)
        return WindowState(self, slots, *(self._data[name][slots] for name in ("key", "position", "length")))

    def scatter(self, state: WindowState) -> None:
        """Write the per-request numbers back (rules do it themselves; large rows are written in place anyway)."""
        self._data["position"][state.slots] = state.position
        self._data["length"][state.slots] = state.length

    def _grow(self, more: int) -> None:
        for name, (shape, dtype) in self._shapes.items():
            fresh = torch.zeros((more, *shape), dtype=dtype, device=self.device)
            self._data[name] = torch.cat([self._data[name], fresh])
        self._free.extend(range(self._capacity + more - 1, self._capacity - 1, -1))
        self._capacity += more


@dataclass
class WindowState:
    """Handle on the windows of B requests. ``slots``, ``keys``, ``position``, ``length``: long [B] (see `WindowPool`).

    Rules advance it in place and write through to the pool; it stays usable from step to step while the batch
    stays the same, or is gathered anew.
    """

    pool: WindowPool
    slots: Tensor
    keys: Tensor
    position: Tensor
    length: Tensor

    def ring_index(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """Flat index into a ring field viewed as [slots * ring, ...], for batch rows and window offsets (0 = the
        token after the root); both long, of equal shape."""
        ring = self.pool.ring
        return self.slots[rows] * ring + (self.position[rows] + offsets) % ring

    def ring_grid(self, width: int) -> Tensor:
        """`ring_index` of offsets 0..width-1 of every request: long [B, width]."""
        ring = self.pool.ring
        offsets = torch.arange(width, device=self.slots.device)
        return (self.slots * ring).unsqueeze(1) + (self.position.unsqueeze(1) + offsets) % ring

    def flat(self, name: str) -> Tensor:
        """Ring field ``name`` viewed as [slots * ring, ...]."""
        return self.pool[name].flatten(0, 1)

    def advance(self, counts: Tensor) -> None:
        """Move the roots ``counts`` long [B] positions on."""
        self.position = self.position + counts
        self.length = (self.length - counts).clamp_(min=0)
        self.pool.scatter(self)

    def noise_rows(self, source: NoiseSource, rows: Tensor, offsets: Tensor) -> Tensor:
        """Noise float32 [n, V] for batch rows and window offsets (long [n]); a fresh tensor."""
        if "noise" in self.pool:
            return self.flat("noise").index_select(0, self.ring_index(rows, offsets))
        positions = self.position[rows] + offsets
        return source.gumbel(self.keys[rows], positions.unsqueeze(1)).squeeze(1)

    def prepare_noise(self, source: NoiseSource, width: Tensor) -> None:
        """Compute the noise rows that offsets 0..width-1 (``width`` long [B]) of each request still lack."""
        if "noise" not in self.pool:
            return
        end = self.pool["noise_end"][self.slots]
        start, need = torch.maximum(end, self.position), self.position + width
        missing = int((need - start).max())
        if missing <= 0:
            return
        grid = start.unsqueeze(1) + torch.arange(missing, device=start.device)
        rows, columns = (grid < need.unsqueeze(1)).nonzero(as_tuple=True)
        positions = grid[rows, columns]
        noise = source.gumbel(self.keys[rows], positions.unsqueeze(1)).squeeze(1)
        if noise.shape != (rows.shape[0], self.pool.vocab_size):
            expected = (rows.shape[0], 1, self.pool.vocab_size)
            raise ValueError(f"noise: expected shape {expected} from gumbel(), got {tuple(noise.unsqueeze(1).shape)}")
        ring = self.slots[rows] * self.pool.ring + positions % self.pool.ring
        self.flat("noise").index_copy_(0, ring, noise)
        self.pool["noise_end"][self.slots] = torch.maximum(start, need)
