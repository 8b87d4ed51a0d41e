"""What both rules share when they draft: which window position gets which row, and the tokens of the nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from vllm_sjd_pac.decoding.acceptance import Legal, Verdict, check_window
from vllm_sjd_pac.decoding.state import WindowState
from vllm_sjd_pac.decoding.tree import TreeBatch

Proposal = Callable[[Tensor], Tensor]
"""positions long [n] -> weights [n, V] or [V], non-negative: the law of a draft that enters the window. It must not
depend on drafts or on noise of the same or later positions."""


@dataclass(frozen=True)
class WindowPlan:
    """The next window's positions in one flat list of T entries, sorted by what is known about them.

    First ``refined`` entries: a fresh row and an earlier estimate; then, up to ``continued``: a fresh row only; up to
    ``known``: a draft, but no fresh row (the tree was cut); the rest enters the window with neither.
    ``rows``, ``offsets``: long [T], batch row and window offset (0 = the token after the new root) of each entry;
    ``ring``: long [T], its flat ring index; ``source``: long [continued], flat index into rows [B * N, V] of the
    fresh row; ``fresh_length``: long [B], number of positions with a fresh row.
    """

    rows: Tensor
    offsets: Tensor
    ring: Tensor
    source: Tensor
    fresh_length: Tensor
    refined: int
    continued: int
    known: int

    @property
    def total(self) -> int:
        return self.ring.shape[0]


@lru_cache(maxsize=256)
def counting(number: int, device: torch.device) -> Tensor:
    """Long [number], 0, 1, …; not to be written to."""
    return torch.arange(number, device=device)


def plan_window(trees: TreeBatch, state: WindowState, verdict: Verdict | None) -> WindowPlan:
    """Sort the positions of the next window (``state`` has advanced past the committed tokens already)."""
    check_window(trees, state)
    grid = state.ring_grid(trees.max_main)
    if state.single is not None:
        return _plan_single(trees, state.single, grid[0], verdict)
    offsets = torch.arange(trees.max_main, device=grid.device)
    inside, length, estimated = trees.main_length, state.length, state.estimated
    if verdict is None:
        fresh = torch.zeros_like(length)
    else:
        fresh = torch.minimum((verdict.line >= 0).sum(1) - verdict.counts, inside).clamp_(min=0)
    # Each group is a range of offsets: [0, refined), [refined, fresh), [fresh, known), [known, inside).
    ends = torch.stack([torch.minimum(estimated, fresh), fresh, torch.maximum(length, fresh), inside])
    ends = torch.minimum(ends, inside).cummax(0).values
    starts = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
    groups = (offsets >= starts.unsqueeze(2)) & (offsets < ends.unsqueeze(2))
    entries = groups.nonzero()
    refined, continued, known, _ = groups.sum((1, 2)).cumsum(0).tolist()
    rows, columns = entries[:, 1], entries[:, 2]
    source = offsets[:0]
    if verdict is not None and continued:
        b = rows[:continued]
        source = verdict.line[b, verdict.counts[b] + columns[:continued]] + b * verdict.rows.shape[1]
    return WindowPlan(rows, columns, grid[rows, columns], source, fresh, refined, continued, known)


def _plan_single(trees: TreeBatch, numbers: list[int], ring: Tensor, verdict: Verdict | None) -> WindowPlan:
    """`plan_window` for one request, whose groups are slices."""
    _, position, draft_end, estimate_end, _ = numbers
    inside, continued = trees.max_main, 0
    offsets = counting(inside, ring.device)
    source = offsets[:0]
    if verdict is not None:
        count = int(verdict.counts)
        continued = max(0, min(verdict.line.shape[1] - count, inside))
        source = verdict.line[0, count : count + continued]
    known = max(continued, min(draft_end - position, inside))
    refined = max(0, min(continued, estimate_end - position))
    rows = counting(1, ring.device).expand(inside)
    return WindowPlan(rows, offsets, ring, source, torch.tensor([continued]), refined, continued, known)


def entering_weights(plan: WindowPlan, state: WindowState, legal: Legal | None, proposal: Proposal | None) -> Tensor:
    """Initial proposals float32 [E, V] for the entering positions: weights, not normalised; 0 = illegal."""
    rows, offsets = plan.rows[plan.known :], plan.offsets[plan.known :]
    entering, vocab = rows.shape[0], state.pool.vocab_size
    mask = None if legal is None else _entering_mask(rows, offsets, state, legal)
    if mask is not None and proposal is None:
        return mask.to(torch.float32)
    weights = torch.ones(entering, vocab, device=rows.device)
    if proposal is not None:
        given = proposal(state.position[rows] + offsets)
        if given.shape not in ((vocab,), (entering, vocab)):
            raise ValueError(
                f"proposal: expected weights of shape {(entering, vocab)} or {(vocab,)}, got {tuple(given.shape)}"
            )
        weights = weights * given
        if not bool((weights.sum(-1) > 0).all()) or bool((weights < 0).any()):
            raise ValueError("proposal: weights must be non-negative numbers, with at least one positive in each row")
    if mask is not None:
        allowed = weights * mask
        # A proposal that gives illegal tokens all its weight falls back to "any legal token".
        weights = torch.where(allowed.sum(-1, keepdim=True) > 0, allowed, mask.to(allowed.dtype))
    return weights


def entering_scores(plan: WindowPlan, state: WindowState, legal: Legal | None, proposal: Proposal | None) -> Tensor:
    """Logarithms float32 [E, V] of `entering_weights`."""
    if legal is not None and proposal is None:
        mask = _entering_mask(plan.rows[plan.known :], plan.offsets[plan.known :], state, legal)
        return torch.where(mask, 0.0, float("-inf"))
    return entering_weights(plan, state, legal, proposal).log_()


def _entering_mask(rows: Tensor, offsets: Tensor, state: WindowState, legal: Legal) -> Tensor:
    """Bool [E, V]: the legal tokens of each entering position (at least one of them)."""
    if state.single is not None:
        return legal((offsets + state.single[1]).unsqueeze(0))[0]
    start = torch.full_like(state.position, state.pool.ring).scatter_reduce_(0, rows, offsets, "amin")
    column = offsets - start[rows]
    width = int(column.max()) + 1
    grid = (state.position + start).unsqueeze(1) + torch.arange(width, device=rows.device)
    return legal(grid)[rows, column]


def node_tokens(trees: TreeBatch, root: Tensor, plan: WindowPlan, drafts: Tensor, siblings: Tensor | None) -> Tensor:
    """Tokens long [B, N] of all nodes, from root long [B], main drafts long [T] and siblings long [B, S, K-1]."""
    batch = trees.batch_size
    table = drafts.new_zeros(batch, trees.max_main + 1, trees.width)
    table[:, 0, 0] = root
    if batch == 1:
        table[0, 1:, 0] = drafts
    else:
        table[plan.rows, plan.offsets + 1, 0] = drafts
    if siblings is not None:
        table[:, 1 : siblings.shape[1] + 1, 1:] = siblings
    tokens = table.flatten(1).gather(1, trees.places)
    return tokens if batch == 1 else tokens.masked_fill_(~trees.valid, -1)


def window_rows(trees: TreeBatch, plan: WindowPlan, width: int) -> Tensor:
    """Index long [B, width] into the plan of the first ``width`` window offsets (0 where a window is shorter)."""
    if trees.batch_size == 1:
        return torch.arange(width, device=plan.ring.device).unsqueeze(0)
    place = plan.rows.new_zeros(trees.batch_size, trees.max_main)
    place[plan.rows, plan.offsets] = torch.arange(plan.total, device=plan.rows.device)
    return place[:, :width]


def sibling_rows(trees: TreeBatch, plan: WindowPlan) -> Tensor:
    """Index long [B * S] into the plan of the positions that have siblings (0 where a window is shorter)."""
    return window_rows(trees, plan, trees.sibling_depth).flatten()
