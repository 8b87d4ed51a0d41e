"""Target rows: exactly the laws that plain vLLM would sample from, for every node of every tree."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_sjd_pac.models.layout import FREE, ImageLayout

_MOST_LAYOUTS = 64
_MOST_RUNS = 8
_EPSILON = 1e-5  # vLLM's own bound below which a temperature means greedy


class Columns:
    """The vocabulary of image segments: column c of a row is token ``tokens[c]``.

    Args:
        tokens: LongTensor [C], sorted token ids; vocab_size: of the model.
    """

    def __init__(self, tokens: torch.Tensor, vocab_size: int) -> None:
        self.tokens = tokens
        # One entry more than there are tokens or columns: -1, "none", stands for itself in both directions.
        self._token_of = torch.cat([tokens, tokens.new_full((1,), -1)])
        self._of_token = torch.full((vocab_size + 1,), -1, dtype=torch.long, device=tokens.device)
        self._of_token[tokens] = torch.arange(len(tokens), device=tokens.device)
        self.vocab_size = vocab_size
        self.is_everything = len(tokens) == vocab_size
        # Runs of consecutive ids: a few copied pieces are twice as fast as a gather of every column.
        ends = ((tokens.diff() != 1).nonzero().flatten() + 1).tolist()
        edges = [0, *ends, len(tokens)]
        self._runs = [(int(tokens[a]), int(tokens[b - 1]) + 1) for a, b in itertools.pairwise(edges)]
        self._kinds: dict[ImageLayout, tuple[torch.Tensor, torch.Tensor]] = {}
        self._penalties: dict[ImageLayout, torch.Tensor] = {}

    def of_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Columns of token ids, both long and of any shape; -1 for -1 and for tokens that have no column."""
        return self._of_token[tokens]

    def to_tokens(self, columns: torch.Tensor) -> torch.Tensor:
        """Token ids of columns, both long and of any shape; -1 for -1."""
        return self._token_of[columns]

    def __len__(self) -> int:
        return len(self.tokens)

    def select(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows over the vocabulary [..., V] → rows over the columns [..., C]."""
        if self.is_everything:
            return rows
        if len(self._runs) <= _MOST_RUNS:
            return torch.cat([rows[..., first:end] for first, end in self._runs], -1)
        return rows.index_select(-1, self.tokens)

    def add_to(self, base: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """``base`` [..., C], to which rows over the vocabulary [..., V] are added in place."""
        if self.is_everything or len(self._runs) > _MOST_RUNS:
            return base.add_(self.select(rows))
        column = 0
        for first, end in self._runs:
            base[..., column : column + end - first] += rows[..., first:end]
            column += end - first
        return base

    def kinds_of(self, layout: ImageLayout) -> tuple[torch.Tensor, torch.Tensor]:
        """The few kinds of positions of a layout: kind of each position, long [length], and bool [kinds, C], the legal
        columns of each kind; built once per layout."""
        if layout not in self._kinds:
            if len(self._kinds) >= _MOST_LAYOUTS:
                self._kinds.clear()
                self._penalties.clear()
            device = self.tokens.device
            forced, kind = torch.unique(layout.forced_table.to(device), return_inverse=True)
            codes = self.tokens - layout.image_token_start
            is_code = (codes >= 0) & (codes < layout.image_token_count)
            legal = torch.where(forced.unsqueeze(1) == FREE, is_code, self.tokens == forced.unsqueeze(1))
            self._kinds[layout] = kind, legal
        return self._kinds[layout]

    def penalties_of(self, layout: ImageLayout) -> torch.Tensor:
        """float32 [kinds, C]: 0 for the legal columns of each kind of position, -inf for the others."""
        if layout not in self._penalties:
            self._penalties[layout] = torch.where(self.kinds_of(layout)[1], 0.0, float("-inf"))
        return self._penalties[layout]


@dataclass(frozen=True)
class RowSettings:
    """Sampling parameters of the requests of a tree batch, as tensors over requests [B]; None where no one asks."""

    temperature: torch.Tensor | None
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    min_p: torch.Tensor | None
    bias: list[tuple[int, torch.Tensor, torch.Tensor]]
    allowed: list[tuple[int, torch.Tensor]]

    @classmethod
    def gather(cls, params: Sequence[Any], columns: Columns) -> RowSettings:
        count, device = len(columns), columns.tokens.device

        def column(values: list[Any], neutral: Any) -> torch.Tensor | None:
            return torch.tensor(values, device=device) if any(value != neutral for value in values) else None

        # vLLM caps top_k to its whole vocabulary; a row over the columns holds the same tokens.
        top_k = [min(p.top_k, count) if p.top_k > 0 and not is_greedy(p) else count for p in params]
        bias = []
        for row, p in enumerate(params):
            if p.logit_bias:
                ids = columns.of_tokens(torch.tensor(list(p.logit_bias), device=device))
                values = torch.tensor(list(p.logit_bias.values()), dtype=torch.float32, device=device)
                bias.append((row, ids[ids >= 0], values[ids >= 0]))
        allowed = []
        for row, p in enumerate(params):
            if p.allowed_token_ids:
                mask = torch.zeros(columns.vocab_size, dtype=torch.bool, device=device)
                mask[torch.tensor(p.allowed_token_ids, device=device)] = True
                allowed.append((row, mask[columns.tokens]))
        return cls(
            temperature=column([1.0 if is_greedy(p) else p.temperature for p in params], 1.0),
            top_k=column(top_k, count),
            top_p=column([1.0 if is_greedy(p) else p.top_p for p in params], 1.0),
            min_p=column([0.0 if is_greedy(p) else p.min_p for p in params], 0.0),
            bias=bias,
            allowed=allowed,
        )


def is_greedy(params: Any) -> bool:
    return params.temperature < _EPSILON


def combine_guidance(conditional: torch.Tensor, unconditional: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Classifier-free guidance ``l_u + s · (l_c − l_u)`` in float32.

    Args:
        conditional, unconditional: logits of equal shape, leading dimension B; scale: float [B].
    """
    unconditional = unconditional.float()
    change = conditional.float() - unconditional
    return change.mul_(scale.view(-1, *[1] * (conditional.dim() - 1))).add_(unconditional)


def legal_columns(layout: ImageLayout, positions: torch.Tensor, columns: Columns) -> torch.Tensor:
    """bool [..., C]: which columns are legal at `positions` (long [...]) of a segment; all of them if unconstrained."""
    if not layout.constrained:
        return torch.ones(*positions.shape, len(columns), dtype=torch.bool, device=positions.device)
    kind, legal = columns.kinds_of(layout)
    return _by_kind(legal, kind, positions)


def legal_penalties(layout: ImageLayout, positions: torch.Tensor, columns: Columns) -> torch.Tensor:
    """float32 [..., C] to add to rows at `positions` (long [...]) of a constrained segment: 0 = legal, else -inf.

    Adding is several times as fast on a CPU as filling by a mask.
    """
    kind, _ = columns.kinds_of(layout)
    return _by_kind(columns.penalties_of(layout), kind, positions)


def _by_kind(table: torch.Tensor, kind: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    at = kind.index_select(0, positions.flatten().clamp(0, len(kind) - 1))
    return table.index_select(0, at).view(*positions.shape, -1)


def apply_settings(rows: torch.Tensor, settings: RowSettings) -> torch.Tensor:
    """Sampling parameters in vLLM's order: allowed tokens, bias, temperature, min_p, top_k and top_p.

    Args:
        rows: float32 [B, N, C], changed in place where possible.
    """
    batch, nodes, count = rows.shape
    for row, mask in settings.allowed:
        rows[row].masked_fill_(~mask, float("-inf"))
    for row, ids, values in settings.bias:
        rows[row, :, ids] += values
    if settings.temperature is not None:
        rows = rows.div_(settings.temperature.view(-1, 1, 1))
    if settings.min_p is not None:
        probabilities = rows.softmax(-1)
        floor = probabilities.amax(-1, keepdim=True) * settings.min_p.view(-1, 1, 1)
        rows.masked_fill_(probabilities < floor, float("-inf"))
    if settings.top_k is not None or settings.top_p is not None:

        def repeat(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else values.repeat_interleave(nodes)

        flat = apply_top_k_top_p(rows.reshape(batch * nodes, count), repeat(settings.top_k), repeat(settings.top_p))
        rows = flat.view(batch, nodes, count)
    return rows
