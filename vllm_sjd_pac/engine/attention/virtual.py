"""Branches as virtual requests: draft trees on a stock causal attention kernel.

The main chain is causal already. Every branch path becomes a further "request" of the batch: its queries are the branch
nodes, its block table is the owner's up to the block where the branch leaves the main chain, and from there on scratch
blocks that hold a copy of that block and the branch's own keys and values. Nothing in the kernel changes.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        query_start_loc: int32 [E+1]; seq_lens: int32 [E].
        owner: long [E], the real request whose block table an entry starts from.
        table_row, table_column, table_block: long [P]: entries of the block tables replaced by scratch blocks.
        copy_from_row, copy_from_column: long [C]: the owners' table entries whose blocks are copied; copy_to: long [C].
        write_token, write_slot: long [W]: tokens of the batch whose keys and values are written again, and where.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
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
        tree, root = request.tree, request.root_position
        root_token = begin + request.root_offset
        starts.append(root_token + tree.main_length + 1)
        lengths.append(root + tree.main_length + 1)
        owners.append(index)
        for branch in branches_of(tree):
            first_block = (root + branch.depth) // block_size
            last_block = (root + branch.last_depth) // block_size
            row = len(lengths)
            starts.append(root_token + branch.first + branch.count)
            lengths.append(root + branch.last_depth + 1)
            owners.append(index)
            if (root + branch.depth) % block_size:
                copies.append((index, first_block, scratch))
            table += [(row, first_block + k, scratch + k) for k in range(last_block - first_block + 1)]
            for node in (*branch.above, *range(branch.first, branch.first + branch.count)):
                position = root + tree.depths[node]
                slot = (scratch + position // block_size - first_block) * block_size + position % block_size
                writes.append((root_token + node, slot))
            scratch += last_block - first_block + 1
    needed = scratch - first_scratch_block
    if needed > num_scratch_blocks:
        raise RuntimeError(f"sjd_pac: the step's branches need {needed} scratch blocks, {num_scratch_blocks} exist")

    def columns(rows: list[tuple[int, ...]], width: int) -> list[torch.Tensor]:
        # One contiguous tensor per column: vLLM's operators read slot lists without looking at strides.
        return [column.contiguous() for column in torch.tensor(rows, dtype=torch.long).reshape(-1, width).unbind(1)]

    return VirtualBatch(
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        torch.tensor(owners, dtype=torch.long),
        *columns(table, 3),  # type: ignore[arg-type]
        *columns(copies, 3),  # type: ignore[arg-type]
        *columns(writes, 2),  # type: ignore[arg-type]
    )
