"""What a request remembers between steps, for all requests of an engine.

The rows of a window (laws or estimates, and noise) live in rings addressed by absolute position, so that
committing tokens moves no memory: the row of position p is row ``p % ring`` of the request's slot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm_sjd_pac.decoding.acceptance import AcceptanceRule
    from vllm_sjd_pac.decoding.randomness import NoiseSource
    from vllm_sjd_pac.decoding.tree import TreeBatch

_NUMBERS = ("key", "position", "draft_end", "estimate_end", "noise_end")


class WindowPool:
    """Window state of many requests; a slot per request, grown on demand.

    Per slot, with R = ``max_window`` + 1 ring rows:

    * ``numbers`` long [5]: ``key`` (seed of the random numbers), ``position`` (absolute position of the token after
      the root), and the positions below which the window has drafts, estimate rows and noise rows;
    * ``drafts`` long [R, 1], or, where the rule has a memory, ``memory`` long [R, 2, 1 + H]: the draft of the newest
      row, then those of earlier rows, newest first, negative = none; and the token before the position when each of
      these rows was computed;
    * ``estimates`` float32 [R, V]: `rejection`: the law each draft was drawn from; `race`: smoothed rows;
    * ``noise`` float32 [R, V]: `race` only.
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
        self.wheel = torch.arange(2 * self.ring, device=device) % self.ring
        self._shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "numbers": ((len(_NUMBERS),), torch.long),
        }
        if rule.memory:
            self._shapes["memory"] = ((self.ring, 2, 1 + rule.memory), torch.long)
        else:
            self._shapes["drafts"] = ((self.ring, 1), torch.long)
        if rule.keeps_estimates:
            self._shapes["estimates"] = ((self.ring, vocab_size), torch.float32)
        if rule.keeps_noise:
            self._shapes["noise"] = ((self.ring, vocab_size), torch.float32)
        self._data = {
            name: torch.empty((0, *shape), dtype=dtype, device=device) for name, (shape, dtype) in self._shapes.items()
        }
        self._free: list[int] = []
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
        """A slot with an empty window. ``key`` seeds the request's random numbers (or is whatever the engine's own
        noise source goes by); ``position``: absolute position of the token after the root."""
        if not self._free:
            self._grow(max(4, len(self._used) // 2))
        slot = self._free.pop()
        self._used.add(slot)
        self._data["numbers"][slot] = torch.tensor([key, *[position] * 4], device=self.device)
        return slot

    def allocate_many(self, keys: Tensor) -> Tensor:
        """Slots long [n] for n requests at position 0, with seeds ``keys`` long [n]."""
        if len(self._free) < keys.shape[0]:
            self._grow(keys.shape[0] - len(self._free))
        chosen = [self._free.pop() for _ in range(keys.shape[0])]
        self._used.update(chosen)
        slots = torch.tensor(chosen, device=self.device)
        self._data["numbers"][slots] = torch.nn.functional.pad(keys.unsqueeze(1), (0, 4))
        return slots

    def reset(self, slot: int, position: int) -> None:
        """Forget the window of ``slot`` and go to ``position`` (O(1): no row is cleared)."""
        self._data["numbers"][slot, 1:] = position

    def free(self, slot: int) -> None:
        """Give ``slot`` back."""
        if slot not in self._used:
            raise ValueError(f"slot: {slot} is not in use")
        self._used.remove(slot)
        self._free.append(slot)

    def gather(self, slots: Tensor) -> WindowState:
        """The state of a batch of requests; ``slots`` long [B] without repetition."""
        return WindowState(self, slots, self._data["numbers"].index_select(0, slots))

    def _grow(self, more: int) -> None:
        capacity = self._data["numbers"].shape[0]
        for name, (shape, dtype) in self._shapes.items():
            fresh = torch.zeros((more, *shape), dtype=dtype, device=self.device)
            self._data[name] = torch.cat([self._data[name], fresh])
        self._free.extend(range(capacity + more - 1, capacity - 1, -1))


class WindowState:
    """Handle on the windows of B requests: their ``slots`` long [B] and ``numbers`` long [B, 5] (see `WindowPool`).

    Rules advance it and write through to the pool, so it may be kept from step to step while the batch stays the
    same, or gathered anew in every step. A single request on the CPU (one image, the latency case) keeps its numbers
    as plain integers in ``single``: they cost nothing to read, where every tiny tensor operation costs microseconds.
    """

    def __init__(self, pool: WindowPool, slots: Tensor, numbers: Tensor) -> None:
        self.pool, self.slots, self._numbers = pool, slots, numbers
        self.single: list[int] | None = None
        if slots.shape[0] == 1 and slots.device.type == "cpu":
            self.single = numbers[0].tolist()
            self._slot = int(slots)
            self._start = self._slot * pool.ring
            self._keys = numbers[:, 0]

    @property
    def numbers(self) -> Tensor:
        """``key``, ``position``, ends of drafts, estimates and noise: long [B, 5]."""
        return self._numbers if self.single is None else torch.tensor([self.single])

    @property
    def keys(self) -> Tensor:
        """Seeds, long [B]."""
        return self._numbers[:, 0] if self.single is None else self._keys

    @property
    def position(self) -> Tensor:
        """Absolute position of the token after the root, long [B]."""
        return self._numbers[:, 1] if self.single is None else torch.tensor(self.single[1:2])

    @property
    def length(self) -> Tensor:
        """How many window positions hold a draft (0 or less: none), long [B]."""
        numbers = self.numbers
        return numbers[:, 2] - numbers[:, 1]

    @property
    def estimated(self) -> Tensor:
        """How many window positions have an estimate row (0 or less: none), long [B]."""
        numbers = self.numbers
        return numbers[:, 3] - numbers[:, 1]

    def is_new(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """Bool [n]: whether the window has no draft yet at ``offsets`` long [n] of batch ``rows`` long [n]."""
        return offsets >= self.length[rows]

    def commit(self, counts: Tensor) -> None:
        """Move the roots ``counts`` long [B] positions on."""
        if self.single is None:
            self._numbers[:, 1] += counts
        else:
            self.single[1] += int(counts)
        self.save()

    def note_window(self, drafted: Tensor, estimated: Tensor) -> None:
        """Record that the first ``drafted`` positions hold drafts and the first ``estimated`` an estimate; long [B]."""
        if self.single is None:
            ends = torch.stack([drafted, estimated], 1) + self._numbers[:, 1:2]
            self._numbers[:, 2:4] = torch.maximum(self._numbers[:, 2:4], ends)
        else:
            position = self.single[1]
            self.single[2] = max(self.single[2], position + int(drafted))
            self.single[3] = max(self.single[3], position + int(estimated))
        self.save()

    def save(self) -> None:
        """Write the numbers back to the pool."""
        if self.single is None:
            self.pool["numbers"].index_copy_(0, self.slots, self._numbers)
        else:
            self.pool["numbers"].numpy()[self._slot] = self.single

    def ring_grid(self, width: int) -> Tensor:
        """Flat index long [B, width] of window offsets 0..width-1 (0 = the token after the root) into a ring field
        viewed as [slots * R, ...]."""
        ring = self.pool.ring
        if self.single is not None:
            first = self.single[1] % ring
            return (self.pool.wheel[first : first + width] + self._start).unsqueeze(0)
        offsets = torch.arange(width, device=self.slots.device)
        return (self.position.unsqueeze(1) + offsets).remainder_(ring).add_((self.slots * ring).unsqueeze(1))

    def flat(self, name: str) -> Tensor:
        """Ring field ``name`` viewed as [slots * R, ...]."""
        return self.pool[name].flatten(0, 1)

    def noise_rows(self, source: NoiseSource, ring: Tensor, rows: Tensor | None, offsets: Tensor) -> Tensor:
        """Noise float32 [n, V] for flat ring indices long [n]; a fresh tensor. Where the pool keeps no noise, the
        source is asked for batch ``rows`` (None: all, ``offsets`` each) and window ``offsets``."""
        if "noise" in self.pool:
            return self.flat("noise").index_select(0, ring)
        if rows is None:
            positions = self.position.unsqueeze(1) + offsets
            return source.gumbel(self.keys, positions).flatten(0, 1)
        positions = self.position[rows] + offsets
        return source.gumbel(self.keys[rows], positions.unsqueeze(1)).squeeze(1)

    def prepare_noise(self, source: NoiseSource, trees: TreeBatch) -> None:
        """Compute the noise rows that the windows of ``trees`` (and the token after each) still lack."""
        if "noise" not in self.pool:
            return
        ring = self.pool.ring
        if self.single is not None:
            need = self.single[1] + trees.max_main + 1
            first = max(self.single[4], self.single[1])
            if need <= first:
                return
            positions = torch.arange(first, need)
            noise = source.gumbel(self.keys, positions.unsqueeze(0))
            _check_noise(noise, (1, need - first, self.pool.vocab_size))
            index = self.pool.wheel[first % ring : first % ring + need - first] + self._start
            self.flat("noise").index_copy_(0, index, noise[0])
            self.single[4] = need
            return
        end, needed = self._numbers[:, 4], self.position + trees.main_length + 1
        if int((needed - end).max()) <= 0:
            return
        start = torch.maximum(end, self.position)
        grid = start.unsqueeze(1) + torch.arange(int((needed - start).max()), device=start.device)
        rows, columns = (grid < needed.unsqueeze(1)).nonzero(as_tuple=True)
        positions = grid[rows, columns]
        noise = source.gumbel(self.keys[rows], positions.unsqueeze(1))
        _check_noise(noise, (rows.shape[0], 1, self.pool.vocab_size))
        self.flat("noise").index_copy_(0, self.slots[rows] * ring + positions % ring, noise.squeeze(1))
        self._numbers[:, 4] = torch.maximum(start, needed)


def _check_noise(noise: Tensor, expected: tuple[int, int, int]) -> None:
    if noise.shape != expected:
        raise ValueError(f"noise: expected shape {expected} from gumbel(), got {tuple(noise.shape)}")
