"""What both rules share when they draft: which window position gets which row, and the tokens of the nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
    """The next window's positions in one flat list of T = continued + held + entering entries.

    ``rows``, ``offsets``: long [T], batch row and window offset (0 = the token after the new root) of each entry.
    ``source``: long [continued], flat index into rows [B * N, V] of the freshest row: **continue**.
    Held positions keep their draft although no row was computed for them (the tree was cut).
    Entering positions have neither draft nor row: **extend**.
    """

    rows: Tensor
    offsets: Tensor
    source: Tensor
    continued: int
    held: int

    @property
    def total(self) -> int:
        return self.rows.shape[0]


def plan_window(trees: TreeBatch, state: WindowState, verdict: Verdict | None) -> WindowPlan:
    """Sort the positions of the next window by what is known about them (``state`` has advanced already)."""
    check_window(trees, state)
    offsets = torch.arange(trees.max_main, device=state.slots.device)
    inside = offsets < trees.main_length.unsqueeze(1)
    if verdict is None:
        has_row = torch.zeros_like(inside)
        node = None
    else:
        depth = verdict.counts.unsqueeze(1) + offsets  # depth of the node whose row this position continues
        last = verdict.line.shape[1] - 1
        node = verdict.line.gather(1, depth.clamp(max=last))
        has_row = inside & (depth <= last) & (node >= 0)
    has_draft = offsets < state.length.unsqueeze(1)
    groups = [has_row, inside & ~has_row & has_draft, inside & ~has_row & ~has_draft]
    pairs = [group.nonzero(as_tuple=True) for group in groups]
    if node is None or verdict is None:
        source = offsets.new_empty(0)
    else:
        source = pairs[0][0] * verdict.rows.shape[1] + node[pairs[0]]
    return WindowPlan(
        rows=torch.cat([rows for rows, _ in pairs]),
        offsets=torch.cat([columns for _, columns in pairs]),
        source=source,
        continued=pairs[0][0].shape[0],
        held=pairs[1][0].shape[0],
    )


def entering_weights(plan: WindowPlan, state: WindowState, legal: Legal | None, proposal: Proposal | None) -> Tensor:
    """Initial proposals float32 [E, V] for the entering positions: weights, not normalised; 0 = illegal."""
    first = plan.continued + plan.held
    rows, offsets = plan.rows[first:], plan.offsets[first:]
    entering, vocab = rows.shape[0], state.pool.vocab_size
    weights = torch.ones(entering, vocab, device=rows.device)
    if not entering:
        return weights
    if proposal is not None:
        given = proposal(state.position[rows] + offsets)
        if given.shape not in ((vocab,), (entering, vocab)):
            raise ValueError(
                f"proposal: expected weights of shape {(entering, vocab)} or {(vocab,)}, got {tuple(given.shape)}"
            )
        weights = weights * given
        if not bool((weights.sum(-1) > 0).all()) or bool((weights < 0).any()):
            raise ValueError("proposal: weights must be non-negative numbers, with at least one positive in each row")
    if legal is not None:
        start = torch.full_like(state.position, state.pool.ring).scatter_reduce_(0, rows, offsets, "amin")
        width = int((offsets - start[rows]).max()) + 1
        grid = (state.position + start).unsqueeze(1) + torch.arange(width, device=rows.device)
        mask = legal(grid)[rows, offsets - start[rows]]
        allowed = weights * mask
        # A proposal that gives illegal tokens all its weight falls back to "any legal token".
        weights = torch.where(allowed.sum(-1, keepdim=True) > 0, allowed, mask.to(allowed.dtype))
    return weights


def node_tokens(trees: TreeBatch, root: Tensor, plan: WindowPlan, drafts: Tensor, siblings: Tensor | None) -> Tensor:
    """Tokens long [B, N] of all nodes, from root long [B], main drafts long [T] and siblings long [B, S, K-1]."""
    batch = trees.batch_size
    table = drafts.new_zeros(batch, trees.max_main + 1, trees.width)
    table[:, 0, 0] = root
    table[plan.rows, plan.offsets + 1, 0] = drafts
    if siblings is not None:
        table[:, 1 : siblings.shape[1] + 1, 1:] = siblings
    tokens = table.flatten(1).gather(1, trees.depths * trees.width + trees.ranks)
    return torch.where(trees.valid, tokens, -1)


def sibling_rows(trees: TreeBatch, plan: WindowPlan) -> Tensor:
    """Index long [B, S] into the plan of the positions that have siblings (0 where a window is shorter)."""
    place = plan.rows.new_zeros(trees.batch_size, trees.max_main)
    place[plan.rows, plan.offsets] = torch.arange(plan.total, device=plan.rows.device)
    return place[:, : trees.sibling_depth]
