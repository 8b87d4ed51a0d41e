"""What the tree-attention kernels need to know about one step, as a handful of small tensors.

The *window* of a request is what it sends in this step: catch-up tokens, the root, the drafted nodes. Who sees whom
inside it is one rule for every request, with or without a tree:

* everybody sees the whole prefix (the tokens computed before this step);
* tokens before the root are causal (a prompt chunk or a one-token decode has no root: it is nothing but such tokens);
* the nodes of a tree (the root is one) see all tokens before the root, themselves and their ancestors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

WORD_BITS = 64
"""Ancestor masks travel as rows of int64 words, node j of the tree in bit ``j % 64`` of word ``j // 64``."""

MAX_NODES = 513
"""The root and 512 drafted nodes, the most that ``num_speculative_tokens`` allows."""


@lru_cache(maxsize=256)
def ancestor_words(parents: tuple[int, ...]) -> np.ndarray:
    """Who sees whom inside one tree, as bit rows.

    Args:
        parents: parent of each node, ``parents[0] = -1`` (the root), ``parents[i] < i``.

    Returns:
        int64 ``[nodes, ceil(nodes / 64)]``, read-only: bit j of row i is set when j is i or an ancestor of i.

    Raises:
        ValueError: not a tree in this order, or more than `MAX_NODES` nodes.
    """
    nodes = len(parents)
    if not 1 <= nodes <= MAX_NODES:
        raise ValueError(f"a draft tree has 1 to {MAX_NODES} nodes with its root, not {nodes}")
    if parents[0] != -1 or any(not 0 <= parent < node for node, parent in enumerate(parents) if node):
        raise ValueError("draft tree: node 0 must be the root (parent -1) and parents must come before their children")
    words = np.zeros((nodes, -(-nodes // WORD_BITS)), dtype=np.uint64)
    for node, parent in enumerate(parents):
        if node:
            words[node] = words[parent]
        words[node, node // WORD_BITS] |= np.uint64(1) << np.uint64(node % WORD_BITS)
    signed = words.view(np.int64)
    signed.flags.writeable = False
    return signed


@dataclass(frozen=True)
class WindowLayout:
    """Which rows the kernels work on and what they may see; built once per step, shared by all layers.

    R requests of the batch, in order; T scheduled tokens; Q query tiles; N tree nodes in all.

    Attributes:
        query_start: int32 ``[R + 1]``, first scheduled token of each request in the flat query.
        root: int32 ``[R]``, index of the root inside the request's window; the window's length where there is no tree.
        node_start: int32 ``[R]``, first row of the request's nodes in ``ancestors``.
        ancestors: int64 ``[max(N, 1), words]``, bit rows of all trees, one below the other, padded to the widest.
        tiles: int32 ``[Q, 2]``, (request, first row in its window) of every query tile.
        tile_rows: window rows that a tile covers.
        num_tokens: T.
    """

    query_start: Tensor
    root: Tensor
    node_start: Tensor
    ancestors: Tensor
    tiles: Tensor
    tile_rows: int
    num_tokens: int

    def to(self, device: torch.device | str) -> WindowLayout:
        """The same on ``device``; copies from pinned memory do not block."""
        if torch.device(device) == self.tiles.device:
            return self

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return WindowLayout(
            move(self.query_start), move(self.root), move(self.node_start), move(self.ancestors), move(self.tiles),
            self.tile_rows, self.num_tokens,
        )  # fmt: skip


def rows_per_tile(group_size: int, longest: int) -> int:
    """Window rows in a query tile: its rows are (token, query head of one key head) pairs, 16 to 64 of them.

    Args:
        group_size: query heads per key head.
        longest: longest window of the batch; short windows take small tiles.
    """
    pairs = 16
    while pairs < 64 and pairs < longest * group_size:
        pairs *= 2
    return max(1, pairs // group_size)


def window_layout(
    query_lens: Sequence[int],
    roots: Sequence[int | None],
    parents: Sequence[Sequence[int] | None],
    group_size: int,
    only: Sequence[int] | None = None,
    pin_memory: bool = False,
) -> WindowLayout:
    """Lay out a step.

    Args:
        query_lens: scheduled tokens of each request, in batch order.
        roots: index of the root among them, None where the request has no tree.
        parents: parents of the request's nodes, root included (as `ancestor_words` takes them), None without a tree.
        group_size: query heads per key head.
        only: requests to make tiles for (the others are left to somebody else); default: all.
        pin_memory: put the tensors into pinned memory, for copies that do not block.

    Returns:
        The layout, on the CPU.

    Raises:
        ValueError: a tree does not end where its request's scheduled tokens end, or is no tree.
    """
    words: list[np.ndarray] = []
    root_of: list[int] = []
    node_start: list[int] = []
    tiles: list[tuple[int, int]] = []
    rows = 0
    chosen = range(len(query_lens)) if only is None else only
    tile_rows = rows_per_tile(group_size, max((query_lens[request] for request in chosen), default=1))
    for length, root, tree in zip(query_lens, roots, parents, strict=True):
        node_start.append(rows)
        root_of.append(length if root is None else root)
        if root is None:
            continue
        bits = ancestor_words(tuple(tree or ()))
        if root < 0 or root + len(bits) != length:
            raise ValueError(f"a tree of {len(bits)} nodes at index {root} does not fill {length} scheduled tokens")
        words.append(bits)
        rows += len(bits)
    for request in chosen:
        tiles.extend((request, start) for start in range(0, query_lens[request], tile_rows))
    width = max((bits.shape[1] for bits in words), default=1)
    ancestors = np.zeros((max(rows, 1), width), dtype=np.int64)
    row = 0
    for bits in words:
        ancestors[row : row + len(bits), : bits.shape[1]] = bits
        row += len(bits)
    query_start = np.concatenate(([0], np.cumsum(np.asarray(query_lens, dtype=np.int32)))).astype(np.int32)

    def tensor(array: np.ndarray) -> Tensor:
        made = torch.from_numpy(array)
        return made.pin_memory() if pin_memory else made

    return WindowLayout(
        query_start=tensor(query_start),
        root=tensor(np.asarray(root_of, dtype=np.int32)),
        node_start=tensor(np.asarray(node_start, dtype=np.int32)),
        ancestors=tensor(ancestors),
        tiles=tensor(np.asarray(tiles, dtype=np.int32).reshape(-1, 2)),
        tile_rows=tile_rows,
        num_tokens=int(query_start[-1]),
    )
