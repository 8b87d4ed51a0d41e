"""The tree-aware sampler: logits of a step's trees → target rows → acceptance rule → committed tokens and drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_sjd_pac.config import SJDPACConfig
from vllm_sjd_pac.decoding import DraftTree, RaceRule, RejectionRule, TreeBatch, Verdict, WindowPool, WindowState
from vllm_sjd_pac.decoding.race import DEFAULT_MEMORY
from vllm_sjd_pac.engine.noise import CPUStockNoise, ExponentialStockNoise, SeedStreams
from vllm_sjd_pac.engine.rows import (
    Columns,
    RowSettings,
    apply_settings,
    combine_guidance,
    is_greedy,
    legal_columns,
    legal_penalties,
)
from vllm_sjd_pac.engine.state import RequestState
from vllm_sjd_pac.models.layout import ImageLayout


@dataclass(frozen=True)
class TreeBatchInput:
    """One step of B requests that are inside image segments.

    Attributes:
        states: the requests; trees: the tree of each as it was scheduled.
        first_rows: of each request, the logits row of its root; those of the other nodes follow. twin_rows: the same of
            the unconditional twin (the request's own where it has no guidance).
        tokens: long [B, N] token ids of the nodes, −1 beyond a tree.
        num_tokens: tokens of each request, the root being the last.
    """

    states: Sequence[RequestState]
    trees: Sequence[DraftTree]
    first_rows: Sequence[int]
    twin_rows: Sequence[int]
    tokens: torch.Tensor
    num_tokens: Sequence[int]


class TreeRejectionSampler:
    """Verifies and drafts for a whole batch with one acceptance rule.

    Args:
        options: of the method; columns: the image vocabulary; max_window: longest main chain; device: of the logits.
        vocab_size: of the model; draws_integers: whether the stock sampler hashes integers (CPU) or draws exponentials.
    """

    def __init__(
        self,
        options: SJDPACConfig,
        columns: Columns,
        max_window: int,
        vocab_size: int,
        device: torch.device,
        draws_integers: bool,
    ) -> None:
        self.columns, self.device = columns, device
        self.streams = SeedStreams()
        self._exponential: ExponentialStockNoise | None = None
        self.rule: RaceRule | RejectionRule
        mode = "ac" if options.mode == "ar" else options.mode
        if options.acceptance == "race":
            noise: CPUStockNoise | ExponentialStockNoise
            if draws_integers:
                noise = stock = CPUStockNoise(self.streams, columns.tokens)
                stock.self_check()
            else:
                noise = self._exponential = ExponentialStockNoise(self.streams, columns.tokens, vocab_size, device)
            self.rule = RaceRule(
                noise, mode, smoothing=options.smoothing, memory=DEFAULT_MEMORY if options.memory else 0
            )
        else:
            self.rule = RejectionRule(mode=mode)
        self.pool = WindowPool(self.rule, len(columns), max_window, device)
        self._settings: tuple[tuple[str, ...], RowSettings] | None = None
        self._window: tuple[list[int | None], WindowState] | None = None

    # ---- requests come and go -------------------------------------------------------------------------------------

    def enter(self, state: RequestState, seed: int, position: int) -> None:
        """Give a request a window; `position` is its next output position."""
        if state.slot is not None:
            return
        self._window = None
        if self.rule.name == "race":
            state.key = self.streams.open(seed, is_greedy(state.params))
            if self._exponential is not None:
                self._exponential.open(state.key, seed)
            state.slot = self.pool.allocate(state.key, position)
        else:
            state.slot = self.pool.allocate(seed, position)

    def leave(self, state: RequestState) -> None:
        """Free what a request holds; O(1)."""
        if state.slot is not None:
            self._window = None
            self.pool.free(state.slot)
            state.slot = None
        if state.key is not None:
            self.streams.close(state.key)
            state.key = None

    # ---- a step ---------------------------------------------------------------------------------------------------

    def target_rows(self, logits: torch.Tensor, batch: TreeBatchInput) -> torch.Tensor:
        """float32 [B, N, C], fresh: guidance, then the layout's mask, then the sampling parameters."""
        rows = node_rows(logits, batch.trees, batch.first_rows)
        guided = [row for row, state in enumerate(batch.states) if state.guidance.is_on]
        if guided:
            scale = torch.tensor([batch.states[row].guidance.scale for row in guided], device=rows.device)
            twins = node_rows(logits, batch.trees, batch.twin_rows)
            if len(guided) == len(batch.states):
                rows = combine_guidance(rows, twins, scale)
            else:
                some = torch.tensor(guided, device=rows.device)
                mixed = combine_guidance(rows[some], twins[some], scale)
                rows = rows.float().index_copy(0, some, mixed)
        rows = self._mask(rows, batch)
        ids = tuple(state.request_id for state in batch.states)
        if self._settings is None or self._settings[0] != ids:
            self._settings = ids, RowSettings.gather([state.params for state in batch.states], self.columns)
        return apply_settings(rows, self._settings[1])

    def _mask(self, rows: torch.Tensor, batch: TreeBatchInput) -> torch.Tensor:
        """float32 [B, N, C], fresh, of rows [B, N, V] that may be a view."""
        trees = TreeBatch.stack(list(batch.trees), self.device)
        following = torch.tensor(
            [count - state.segment_start for count, state in zip(batch.num_tokens, batch.states, strict=True)],
            device=self.device,
        )
        positions = following.unsqueeze(1) + trees.depths
        groups = _by_layout(batch.states)
        if len(groups) == 1:
            (layout,) = groups
            if layout.constrained:
                # The penalties are fresh rows of the right shape: adding to them saves a copy.
                return self.columns.add_to(legal_penalties(layout, positions, self.columns), rows)
        rows = self.columns.select(rows).to(torch.float32, copy=True)  # they are changed in place
        for layout, members in groups.items():
            if not layout.constrained:
                continue
            some = torch.tensor(members, device=rows.device)
            rows.index_add_(0, some, legal_penalties(layout, positions[some], self.columns))
        return rows

    def verify(self, logits: torch.Tensor, batch: TreeBatchInput) -> tuple[Verdict, WindowState]:
        """Walk every tree; returns the verdict over columns and the advanced state."""
        trees = TreeBatch.stack(list(batch.trees), self.device)
        slots = [state.slot for state in batch.states]
        if self._window is None or self._window[0] != slots:
            self._window = slots, self.pool.gather(torch.tensor(slots, device=self.device))
        window = self._window[1]
        verdict = self.rule.verify(trees, self.columns.of_tokens(batch.tokens), self.target_rows(logits, batch), window)
        return verdict, window

    def committed(self, verdict: Verdict) -> torch.Tensor:
        """Token ids long [B, D], −1 beyond each request's count."""
        return self.columns.to_tokens(verdict.tokens)

    def draft(
        self, states: Sequence[RequestState], trees: Sequence[DraftTree], window: WindowState, verdict: Verdict
    ) -> torch.Tensor:
        """Token ids long [B, N'] of the next trees' nodes, −1 beyond each tree; column 0 is the new root."""
        offsets = torch.tensor([state.prompt_length - state.segment_start for state in states], device=self.device)
        groups = _by_layout(states)

        def legal(positions: torch.Tensor) -> torch.Tensor:
            inside = positions + offsets.unsqueeze(1)
            if len(groups) == 1:
                return legal_columns(next(iter(groups)), inside, self.columns)
            mask = torch.zeros(*positions.shape, len(self.columns), dtype=torch.bool, device=self.device)
            for layout, members in groups.items():
                mask[members] = legal_columns(layout, inside[members], self.columns)
            return mask

        drafts = self.rule.draft(TreeBatch.stack(list(trees), self.device), window, verdict, legal)
        return self.columns.to_tokens(drafts)

    def mask_row(self, row: torch.Tensor, layout: ImageLayout, position: int) -> torch.Tensor:
        """A float32 row over the vocabulary [V] with the layout's mask, for requests that run without drafts."""
        if not layout.constrained:
            return row
        legal = legal_columns(layout, torch.tensor(position, device=row.device), self.columns)
        keep = torch.zeros_like(row, dtype=torch.bool)
        keep[self.columns.tokens[legal]] = True
        return row.masked_fill(~keep, float("-inf"))

    @property
    def bytes_per_request(self) -> int:
        return self.pool.bytes_per_request


def _by_layout(states: Sequence[RequestState]) -> dict[ImageLayout, list[int]]:
    groups: dict[ImageLayout, list[int]] = {}
    for row, state in enumerate(states):
        assert state.layout is not None
        groups.setdefault(state.layout, []).append(row)
    return groups


def node_rows(logits: torch.Tensor, trees: Sequence[DraftTree], first_rows: Sequence[int]) -> torch.Tensor:
    """[B, N, V]: the rows ``first + node`` of each tree; padded nodes repeat the root's. A view where one request can
    have one."""
    if len(trees) == 1:
        return logits[first_rows[0] : first_rows[0] + trees[0].num_nodes].unsqueeze(0)
    widest = max(tree.num_nodes for tree in trees)
    nodes = torch.arange(widest, device=logits.device)
    sizes = torch.tensor([[tree.num_nodes] for tree in trees], device=logits.device)
    first = torch.tensor(first_rows, device=logits.device).unsqueeze(1)
    index = first + torch.where(nodes < sizes, nodes, 0)
    return logits.index_select(0, index.flatten()).view(len(trees), widest, -1)
