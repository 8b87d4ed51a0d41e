"""Branches as virtual requests: draft trees on a stock causal attention kernel.

The main chain is causal already. Every branch path becomes a further "request" of the batch: its queries are the branch
nodes, its block table is the owner's up to the block where the branch leaves the main chain, and from there on scratch
blocks that hold a copy of that block and the branch's own keys and values. Nothing in the kernel changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from operator import sub

import torch

from vllm_sjd_pac.decoding import DraftTree
from vllm_sjd_pac.engine.attention.interface import RequestTree, TreeStep


@dataclass(frozen=True)
class Branch:
    """A run of branch nodes, each the parent of the next, that one virtual request computes.

    Attributes:
        first, count: the run's nodes in the node list.
        above: branch nodes on the path before the run (their keys and values are written again for this request).
        depth: depth of the path's first branch node.
        last_depth: depth of the run's last node.
    """

    first: int
    count: int
    above: tuple[int, ...]
    depth: int
    last_depth: int


_BRANCHES: dict[DraftTree, tuple[Branch, ...]] = {}


def branches_of(tree: DraftTree) -> tuple[Branch, ...]:
    """The tree's branch nodes as runs, in node order (cached per tree)."""
    if tree not in _BRANCHES:
        _BRANCHES[tree] = tuple(_find_branches(tree))
    return _BRANCHES[tree]


def _find_branches(tree: DraftTree) -> list[Branch]:
    found: list[Branch] = []
    node = tree.main_length + 1
    while node < tree.num_nodes:
        last = node
        while last + 1 < tree.num_nodes and tree.parents[last + 1] == last:
            last += 1
        above: list[int] = []
        parent = tree.parents[node]
        while parent > tree.main_length:
            above.insert(0, parent)
            parent = tree.parents[parent]
        depth = tree.depths[above[0] if above else node]
        found.append(Branch(node, last - node + 1, tuple(above), depth, tree.depths[last]))
        node = last + 1
    return found


def scratch_per_tree(tree: DraftTree, block_size: int) -> int:
    """Scratch blocks that a tree's branches may need, wherever the root lies in its block."""
    return sum(-(-(b.last_depth - b.depth + block_size) // block_size) for b in branches_of(tree))


@dataclass(frozen=True)
class VirtualBatch:
    """A batch with its branches as further requests (R real, E entries in all, T tokens as before).

    Attributes:
        query_start_loc: int32 [E+1]; seq_lens: int32 [E]; max_query_len, max_seq_len: the longest of them.
        owner: long [E], the real request whose block table an entry starts from.
        table_row, table_column, table_block: long [P]: entries of the block tables replaced by scratch blocks.
        copy_from_row, copy_from_column: long [C]: the owners' table entries whose blocks are copied; copy_to: long [C].
        write_token, write_slot: long [W]: tokens of the batch whose keys and values are written again, and where.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    max_seq_len: int
    owner: torch.Tensor
    table_row: torch.Tensor
    table_column: torch.Tensor
    table_block: torch.Tensor
    copy_from_row: torch.Tensor
    copy_from_column: torch.Tensor
    copy_to: torch.Tensor
    write_token: torch.Tensor
    write_slot: torch.Tensor


def build_virtual_batch(
    step: TreeStep,
    query_start_loc: list[int],
    seq_lens: list[int],
    block_size: int,
    first_scratch_block: int,
    num_scratch_blocks: int,
) -> VirtualBatch:
    """Lay out a step's branches as virtual requests.

    Args:
        step: the trees of the step; `query_start_loc` [R+1] and `seq_lens` [R] of the real batch.
        block_size: tokens per cache block; scratch blocks are ``first_scratch_block … + num_scratch_blocks − 1``.

    Raises:
        RuntimeError: the branches need more scratch blocks than there are.
    """
    trees: dict[int, RequestTree] = {request.request_index: request for request in step.requests}
    starts, lengths, owners = [0], [], []
    # Plain integers: a request has a few rows, and every array operation costs as much as a dozen of them.
    table: list[tuple[int, int, int]] = []
    copies: list[tuple[int, int, int]] = []
    writes: list[tuple[int, int]] = []
    scratch = first_scratch_block
    for index, length in enumerate(seq_lens):
        begin, end = query_start_loc[index], query_start_loc[index + 1]
        request = trees.get(index)
        if request is None:
            starts.append(end)
            lengths.append(length)
            owners.append(index)
            continue
        root, root_token, entry = request.root_position, begin + request.root_offset, len(lengths)
        layout = _layout(request.tree, root % block_size, block_size)
        block, slot = root // block_size, scratch * block_size
        table += [(entry + row, block + column, scratch + target) for row, column, target in layout.table]
        copies += [(index, block + column, scratch + target) for column, target in layout.copies]
        writes += [(root_token + node, slot + place) for node, place in layout.writes]
        starts += [root_token + node for node in layout.ends]
        lengths += [root + length for length in layout.lengths]
        owners += [index] * len(layout.ends)
        scratch += layout.scratch_blocks
    needed = scratch - first_scratch_block
    if needed > num_scratch_blocks:
        raise RuntimeError(f"sjd_pac: the step's branches need {needed} scratch blocks, {num_scratch_blocks} exist")
    # One tensor, cut into contiguous columns: vLLM's operators read slot lists without looking at strides.
    columns = [owners, *_columns(table, 3), *_columns(copies, 3), *_columns(writes, 2)]
    flat = torch.tensor(list(chain.from_iterable(columns)), dtype=torch.long)
    return VirtualBatch(
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        max(map(sub, starts[1:], starts)),
        max(lengths),
        *flat.split([len(column) for column in columns]),
    )


def _columns(rows: Sequence[tuple[int, ...]], width: int) -> list[tuple[int, ...]]:
    return list(zip(*rows, strict=True)) if rows else [()] * width


@dataclass(frozen=True)
class _Layout:
    """What one request with a tree adds to a `VirtualBatch`; it depends on the root only by its place in its block.

    Attributes:
        ends, lengths: of the request itself and of each branch: first node after its queries, and its sequence length
            without the root's position.
        table: entry less the request's first one, block less the root's, scratch block less the first.
        copies: block less the root's, scratch block less the first.
        writes: node, slot less the first scratch block's.
        scratch_blocks: how many are used.
    """

    ends: tuple[int, ...]
    lengths: tuple[int, ...]
    table: list[tuple[int, int, int]]
    copies: list[tuple[int, int]]
    writes: list[tuple[int, int]]
    scratch_blocks: int


@lru_cache(maxsize=4096)
def _layout(tree: DraftTree, root: int, block_size: int) -> _Layout:
    """Layout for a root at offset ``root`` of its block (positions below count from that block's start)."""
    ends, lengths = [tree.main_length + 1], [tree.main_length + 1]
    table: list[tuple[int, int, int]] = []
    copies: list[tuple[int, int]] = []
    writes: list[tuple[int, int]] = []
    scratch = 0
    for branch in branches_of(tree):
        first_block, last_block = (root + branch.depth) // block_size, (root + branch.last_depth) // block_size
        if (root + branch.depth) % block_size:
            copies.append((first_block, scratch))
        table += [(len(ends), first_block + k, scratch + k) for k in range(last_block - first_block + 1)]
        for node in (*branch.above, *range(branch.first, branch.first + branch.count)):
            position = root + tree.depths[node]
            writes.append((node, (scratch + position // block_size - first_block) * block_size + position % block_size))
        ends.append(branch.first + branch.count)
        lengths.append(branch.last_depth + 1)
        scratch += last_block - first_block + 1
    return _Layout(tuple(ends), tuple(lengths), table, copies, writes, scratch)
