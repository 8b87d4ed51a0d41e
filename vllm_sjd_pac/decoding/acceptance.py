"""The interface of both acceptance rules: verify what was drafted, then draft again.

One decoding step is ``verify`` (walk the tree, commit) and then ``draft`` (continue, extend, branch).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from vllm_sjd_pac.decoding.state import WindowState
from vllm_sjd_pac.decoding.tree import TreeBatch

MODES = ("sjd", "ac", "pd", "pac")

Legal = Callable[[Tensor], Tensor]
"""positions long [B, W] -> bool [B, W, V]: which tokens are legal at these absolute positions of each request."""


@dataclass(frozen=True)
class Verdict:
    """What one verification decided, for B requests and trees whose main chains have at most M nodes.

    ``tokens``: long [B, M+1], the committed tokens, -1 beyond ``counts``; ``counts``: long [B], at least 1;
    ``kept``: long [B], main-chain nodes that the walk passed before it left the main chain or stopped (their KV
    entries are final); ``path``: long [B, M], the nodes walked, -1 beyond.
    For ``draft``: ``rows`` [B, N, V] (logits, or laws under `rejection`), and ``line`` long [B, M+1]: the node
    whose row is the freshest law of the token at depth m+1: on the accepted branch where the tree has such a
    node, else on the main chain; -1 where there is none; ``nodes`` long [B, N]: the tokens that were verified;
    ``winners`` long [B, M+1]: under `race`, the token that won after each node of ``line``, None = not known.
    """

    tokens: Tensor
    counts: Tensor
    kept: Tensor
    path: Tensor
    rows: Tensor
    line: Tensor
    nodes: Tensor
    winners: Tensor | None = None

    @property
    def last(self) -> Tensor:
        """The last committed token of each request, long [B]: the next root."""
        if self.tokens.shape[0] == 1 and self.tokens.device.type == "cpu":
            return self.tokens[:, int(self.counts) - 1]
        return self.tokens.gather(1, self.counts.unsqueeze(1) - 1).squeeze(1)

    def select(self, index: Tensor) -> Verdict:
        """The verdict of the requests ``index`` long [n] only (when others have finished)."""
        chosen = {item.name: getattr(self, item.name) for item in fields(self)}
        return replace(self, **{name: value[index] for name, value in chosen.items() if value is not None})


class AcceptanceRule(ABC):
    """How candidates are verified against the target's rows, and how the next candidates are drawn."""

    name: str
    mode: str
    smoothing: float
    keeps_estimates: bool
    keeps_noise: bool
    memory: int

    def check_mode(self, mode: str) -> str:
        if mode not in MODES:
            raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
        return mode

    @abstractmethod
    def verify(self, trees: TreeBatch, tokens: Tensor, rows: Tensor, state: WindowState) -> Verdict:
        """Walk the trees and commit.

        ``tokens``: long [B, N], the node tokens as ``draft`` returned them, or a prefix of the columns;
        ``rows``: float32 [B, N, V], row u = target logits of the token after the path to node u (-inf =
        forbidden). Rows of padded nodes may hold anything. ``state`` advances by the committed tokens.
        """

    @abstractmethod
    def draft(
        self, trees: TreeBatch, state: WindowState, verdict: Verdict | None, legal: Legal | None = None
    ) -> Tensor:
        """Tokens long [B, N'] for the nodes of the next ``trees``: column 0 the root (the last committed token; -1
        where ``verdict`` is None, i.e. for a fresh window), -1 beyond each tree. Every real node gets a token of
        the vocabulary, so that the forward pass can always run."""

    def step(
        self,
        trees: TreeBatch,
        tokens: Tensor,
        rows: Tensor,
        state: WindowState,
        next_trees: TreeBatch | None = None,
        legal: Legal | None = None,
    ) -> tuple[Verdict, Tensor]:
        """``verify``, then ``draft`` for ``next_trees`` (default: the same trees)."""
        verdict = self.verify(trees, tokens, rows, state)
        return verdict, self.draft(next_trees or trees, state, verdict, legal)


def check_rows(trees: TreeBatch, tokens: Tensor, rows: Tensor, state: WindowState, *, values: bool = True) -> None:
    """Raise ValueError where shapes, tokens or rows cannot be used; ``values=False`` checks shapes only (no sync)."""
    batch, nodes = trees.parents.shape
    if tokens.shape != (batch, nodes):
        raise ValueError(f"tokens: expected shape {(batch, nodes)} (requests, nodes), got {tuple(tokens.shape)}")
    if rows.shape != (batch, nodes, state.pool.vocab_size):
        expected = (batch, nodes, state.pool.vocab_size)
        raise ValueError(f"rows: expected shape {expected} (requests, nodes, vocabulary), got {tuple(rows.shape)}")
    check_window(trees, state)
    if not rows.is_floating_point():
        raise ValueError(f"rows: expected floating-point logits, got {rows.dtype}")
    if not values:
        return
    real = rows[trees.valid]
    if bool(torch.isnan(real).any()):
        raise ValueError("rows: a row of logits contains NaN; logits must be finite, or -inf for forbidden tokens")
    if bool((real == float("inf")).any()):
        raise ValueError("rows: a row of logits contains +inf; logits must be finite, or -inf for forbidden tokens")
    if bool((real.amax(-1) == float("-inf")).any()):
        raise ValueError("rows: a row of logits is -inf everywhere (it sums to 0); at least one token must be allowed")
    drafted = tokens[:, 1:][trees.valid[:, 1:]]
    if drafted.numel() and not 0 <= int(drafted.min()) <= int(drafted.max()) < rows.shape[2]:
        raise ValueError(f"tokens: a drafted token is outside the vocabulary 0..{rows.shape[2] - 1}")


def check_window(trees: TreeBatch, state: WindowState) -> None:
    """Raise ValueError where a tree is larger than the window or the batches differ."""
    if trees.max_main > state.pool.max_window:
        window = state.pool.max_window
        raise ValueError(f"trees: a main chain of {trees.max_main} nodes exceeds the window (max_window = {window})")
    if trees.batch_size != state.slots.shape[0]:
        raise ValueError(f"trees: {trees.batch_size} trees for a state of {state.slots.shape[0]} requests")


def freshest_line(trees: TreeBatch, node: Tensor) -> Tensor:
    """For each depth 0..M the node with the freshest row, given the node where the walk ended.

    The line of rank-0 edges through ``node`` long [B], below it; elsewhere the main chain. Returns long
    [B, M+1], -1 where the tree has no such node.
    """
    line = trees.main_line
    if trees.branch_height < 2:  # no node hangs below a branch node
        return line
    column = node.unsqueeze(1)
    below = (
        (trees.heads == trees.heads.gather(1, column)) & (trees.depths > trees.depths.gather(1, column)) & trees.valid
    )
    target = torch.where(below, trees.depths, trees.max_main + 1)
    line = torch.cat([line, line.new_zeros(line.shape[0], 1)], 1)
    nodes = torch.arange(trees.nodes, device=node.device).expand_as(target)
    return line.scatter_(1, target, nodes)[:, :-1]
