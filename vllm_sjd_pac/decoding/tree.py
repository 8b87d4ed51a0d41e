"""Draft trees: which candidates a forward pass tries, and in which order their nodes are listed.

Node 0 is the root (the last committed token), nodes 1..M are the main chain (depths 1..M), the rest are
branch nodes. Parents come before children and the main chain comes first, so every prefix of the node list
is a valid tree. The token of a node depends on its depth and its rank only: rank 0 carries the main draft of
that position, rank r its r-th sibling (proactive drafting, SJD-PAC section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

_FIELDS = ("parents", "depths", "ranks", "heads", "first_children")


@dataclass(frozen=True, eq=False)
class DraftTree:
    """Topology of one draft tree; immutable, hashable, interned by its constructors.

    ``parents``: parent of each node, ``parents[0] = -1``; ``main_length``: M, the number of main-chain nodes.
    ``family`` names the constructor and its arguments, for people only.
    """

    parents: tuple[int, ...]
    main_length: int
    family: str = "custom"

    def __post_init__(self) -> None:
        parents, main = self.parents, self.main_length
        if not parents or parents[0] != -1:
            raise ValueError("parents: node 0 must be the root, with parent -1")
        if not 0 <= main < len(parents):
            raise ValueError(
                f"main_length: {main} is outside 0..{len(parents) - 1} (the number of nodes after the root)"
            )
        for node in range(1, len(parents)):
            if not 0 <= parents[node] < node:
                raise ValueError(f"parents: node {node} has parent {parents[node]}; a parent must come before its node")
            if node <= main and parents[node] != node - 1:
                raise ValueError(
                    f"parents: nodes 1..{main} must be the main chain, but node {node} hangs off {parents[node]}"
                )
        if self.max_depth > main:
            raise ValueError(f"parents: a branch reaches depth {self.max_depth}, the main chain only {main}")

    # -- constructors ---------------------------------------------------------------------------------------

    @staticmethod
    def chain(nodes: int = 64) -> DraftTree:
        """The main chain alone; ``nodes`` counts the root, as the paper counts its window L."""
        _check_int("nodes", nodes, 1)
        return _build(nodes, (), 0, f"chain({nodes})")

    @staticmethod
    def comb(nodes: int = 64, siblings: tuple[int, ...] = (8, 4, 4, 2), tail: int = 0) -> DraftTree:
        """``siblings[d-1]`` side nodes at depth d off the main chain, each followed by ``tail`` main drafts."""
        _check_int("nodes", nodes, 1)
        _check_int("tail", tail, 0)
        siblings = tuple(siblings)
        if not siblings:
            raise ValueError("siblings: give at least one number (siblings per depth), or use DraftTree.chain")
        for count in siblings:
            _check_int("siblings", count, 1)
        name = ".".join(map(str, siblings)) + (f"t{tail}" if tail else "")
        return _build(nodes, siblings, tail, f"comb({nodes}, {name})")

    @staticmethod
    def full(nodes: int = 64, width: int = 3, depth: int = 3) -> DraftTree:
        """The paper's tree: ``width`` children at every node of the first ``depth`` levels (the root is a
        level), then the main chain goes on alone until ``nodes`` nodes are used."""
        _check_int("nodes", nodes, 1)
        _check_int("width", width, 1)
        _check_int("depth", depth, 1)
        return _build_full(nodes, width, depth)

    # -- derived trees --------------------------------------------------------------------------------------

    def truncate(self, nodes: int) -> DraftTree:
        """The tree of the first ``nodes`` nodes (all of them if there are fewer)."""
        _check_int("nodes", nodes, 1)
        return self if nodes >= self.num_nodes else _truncated(self, nodes)

    def limit_depth(self, depth: int) -> DraftTree:
        """The nodes no deeper than ``depth`` (0 leaves the root): for the end of an image."""
        _check_int("depth", depth, 0)
        return self if depth >= self.max_depth else _limited(self, depth)

    # -- properties -----------------------------------------------------------------------------------------

    @property
    def num_nodes(self) -> int:
        """Number of nodes, the root included."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; the root has 0."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def max_depth(self) -> int:
        """Depth of the deepest node; a step commits at most one token more."""
        return max(self.depths)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Place of each node among its parent's children: 0 = main draft, r = r-th sibling."""
        seen = [0] * self.num_nodes
        ranks = [0]
        for parent in self.parents[1:]:
            ranks.append(seen[parent])
            seen[parent] += 1
        return tuple(ranks)

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """First node of the line of rank-0 edges through each node (the main chain's head is the root)."""
        heads = [0]
        for node in range(1, self.num_nodes):
            heads.append(heads[self.parents[node]] if self.ranks[node] == 0 else node)
        return tuple(heads)

    @cached_property
    def first_children(self) -> tuple[int, ...]:
        """The rank-0 child of each node, -1 where there is none."""
        first = [-1] * self.num_nodes
        for node in range(self.num_nodes - 1, 0, -1):
            if self.ranks[node] == 0:
                first[self.parents[node]] = node
        return tuple(first)

    @cached_property
    def width(self) -> int:
        """Largest number of candidates (children) at one node."""
        return max(self.ranks) + 1 if self.num_nodes > 1 else 1

    @cached_property
    def sibling_depth(self) -> int:
        """Deepest depth that has siblings; 0 for a chain."""
        return max((d for d, r in zip(self.depths, self.ranks, strict=True) if r > 0), default=0)

    @cached_property
    def branch_height(self) -> int:
        """Largest number of branch nodes on one path."""
        height = [0] * self.num_nodes
        for node in range(self.main_length + 1, self.num_nodes):
            height[node] = height[self.parents[node]] + 1
        return max(height)

    @cached_property
    def branch_levels(self) -> int:
        """Largest number of sibling (rank > 0) edges on one path."""
        levels = [0] * self.num_nodes
        for node in range(1, self.num_nodes):
            levels[node] = levels[self.parents[node]] + (self.ranks[node] > 0)
        return max(levels)

    @cached_property
    def ancestor_mask(self) -> Tensor:
        """Bool [n, n]: entry (u, v) says that v is u or one of its ancestors (what node u may attend to)."""
        mask = torch.eye(self.num_nodes, dtype=torch.bool)
        for node in range(1, self.num_nodes):
            mask[node] |= mask[self.parents[node]]
        return mask

    @cached_property
    def _hash(self) -> int:
        return hash((self.parents, self.main_length))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, DraftTree):
            return NotImplemented
        return self.main_length == other.main_length and self.parents == other.parents

    def __repr__(self) -> str:
        return f"DraftTree({self.family}: {self.num_nodes} nodes, main chain {self.main_length})"


@dataclass(frozen=True)
class TreeBatch:
    """Trees of B requests, padded to N nodes; all tensors are read-only.

    Long [B, N]: ``parents``, ``depths``, ``ranks``, ``heads``, ``first_children`` (see `DraftTree`); beyond a
    request's ``num_nodes`` they hold -1 (depths and ranks: 0). ``valid``: bool [B, N], true for real nodes.
    ``places``: depth * ``width`` + rank, the node's entry in a table of candidates. ``num_nodes``, ``main_length``:
    long [B]. ``main_line``: long [B, M+1], the main-chain node of each depth, -1 = none; ``on_main``: bool [B, M],
    whether there is one at depths 1..M. ``ancestors``: bool
    [B, N, N], entry (u, v): v is u or above it. The plain ints bound loops and shapes over the batch.
    """

    parents: Tensor
    depths: Tensor
    ranks: Tensor
    heads: Tensor
    first_children: Tensor
    valid: Tensor
    places: Tensor
    main_line: Tensor
    on_main: Tensor
    num_nodes: Tensor
    main_length: Tensor
    ancestors: Tensor
    max_main: int
    width: int
    sibling_depth: int
    branch_height: int
    branch_levels: int

    @staticmethod
    def stack(trees: Sequence[DraftTree], device: torch.device | str = "cpu") -> TreeBatch:
        """Batch of ``trees`` (cached by content: the tensors are shared and must not be written to)."""
        if not trees:
            raise ValueError("trees: give at least one DraftTree")
        return _stack(tuple(trees), str(device))

    @staticmethod
    def gather(unique: Sequence[DraftTree], index: Tensor) -> TreeBatch:
        """Batch whose request b has tree ``unique[index[b]]``; ``index`` long [B]. For large batches."""
        nodes = max(tree.num_nodes for tree in unique)
        packed = torch.full((len(unique), len(_FIELDS), nodes), -1, dtype=torch.long)
        packed[:, 1:3] = 0
        ancestors = torch.zeros(len(unique), nodes, nodes, dtype=torch.bool)
        for row, tree in enumerate(unique):
            columns = [getattr(tree, name) for name in _FIELDS]
            packed[row, :, : tree.num_nodes] = torch.tensor(columns, dtype=torch.long)
            ancestors[row, : tree.num_nodes, : tree.num_nodes] = tree.ancestor_mask
        packed = packed.to(index.device)
        sizes = torch.tensor([[tree.num_nodes, tree.main_length] for tree in unique], device=index.device)
        num_nodes, main_length = sizes[index].unbind(1)
        fields = {name: packed[:, i][index] for i, name in enumerate(_FIELDS)}
        width, max_main = max(tree.width for tree in unique), max(tree.main_length for tree in unique)
        depth = torch.arange(max_main + 1, device=index.device)
        return TreeBatch(
            **fields,
            places=fields["depths"] * width + fields["ranks"],
            main_line=torch.where(depth <= main_length.unsqueeze(1), depth, -1),
            on_main=depth[1:] <= main_length.unsqueeze(1),
            valid=torch.arange(nodes, device=index.device) < num_nodes[:, None],
            num_nodes=num_nodes.contiguous(),
            main_length=main_length.contiguous(),
            ancestors=ancestors.to(index.device)[index],
            max_main=max_main,
            width=width,
            sibling_depth=max(tree.sibling_depth for tree in unique),
            branch_height=max(tree.branch_height for tree in unique),
            branch_levels=max(tree.branch_levels for tree in unique),
        )

    @property
    def batch_size(self) -> int:
        return self.parents.shape[0]

    @cached_property
    def children_of_one(self) -> list[list[int]]:
        """Children of every node, in order, of a batch that is a single tree."""
        children: list[list[int]] = [[] for _ in range(self.nodes)]
        for node, parent in enumerate(self.parents[0].tolist()):
            if parent >= 0:
                children[parent].append(node)
        return children

    @property
    def nodes(self) -> int:
        """N, the padded number of nodes."""
        return self.parents.shape[1]


def default_tree(nodes: int = 64, rule: str = "race") -> DraftTree:
    """A tree of this many nodes that measured well (docs/benchmarks.md): a thin comb for `race`, the paper's tree for
    `rejection`. A long main chain matters more than many siblings, since drafts need several passes to settle; and on
    stock attention kernels every branch costs the time of a further request."""
    _check_int("nodes", nodes, 1)
    if rule not in ("race", "rejection"):
        raise ValueError(f"rule: expected one of race, rejection, got {rule!r}")
    if rule == "rejection" and nodes >= 32:
        return DraftTree.full(nodes, width=3, depth=3)
    for least, siblings in ((16, (2, 1)), (8, (1,))):
        if nodes >= least:
            return DraftTree.comb(nodes, siblings)
    return DraftTree.chain(nodes)


@lru_cache(maxsize=256)
def _stack(trees: tuple[DraftTree, ...], device: str) -> TreeBatch:
    unique = list(dict.fromkeys(trees))
    place = {tree: row for row, tree in enumerate(unique)}
    return TreeBatch.gather(unique, torch.tensor([place[tree] for tree in trees], device=device))


@lru_cache(maxsize=1024)
def _build(nodes: int, siblings: tuple[int, ...], tail: int, family: str) -> DraftTree:
    side = sum(siblings) * (1 + tail)
    main = nodes - 1 - side
    if siblings and main < len(siblings) + tail:
        need = 1 + side + len(siblings) + tail
        raise ValueError(f"nodes: {family} needs at least {need} nodes, got {nodes}")
    parents = list(range(-1, main))
    for depth, count in enumerate(siblings, start=1):
        for _ in range(count):
            parents.append(depth - 1)
            for _ in range(tail):
                parents.append(len(parents) - 1)
    return DraftTree(tuple(parents), main, family)


@lru_cache(maxsize=256)
def _build_full(nodes: int, width: int, depth: int) -> DraftTree:
    side = sum(width**level - 1 for level in range(1, depth))
    main = nodes - 1 - side
    family = f"full({nodes}, {width}.{depth})"
    if main < depth - 1:
        raise ValueError(f"nodes: {family} needs at least {side + depth} nodes, got {nodes}")
    parents = list(range(-1, main))
    level = [0]
    for reached in range(1, depth):
        children = []
        for parent in level:
            first = [reached] if parent == reached - 1 else []  # the main chain's own node comes first
            fresh = list(range(len(parents), len(parents) + width - len(first)))
            parents.extend(parent for _ in fresh)
            children += first + fresh
        level = children
    return DraftTree(tuple(parents), main, family)


@lru_cache(maxsize=4096)
def _truncated(tree: DraftTree, nodes: int) -> DraftTree:
    return DraftTree(tree.parents[:nodes], min(tree.main_length, nodes - 1), f"{tree.family}[:{nodes}]")


@lru_cache(maxsize=4096)
def _limited(tree: DraftTree, depth: int) -> DraftTree:
    keep = [node for node in range(tree.num_nodes) if tree.depths[node] <= depth]
    place = {node: new for new, node in enumerate(keep)} | {-1: -1}
    parents = tuple(place[tree.parents[node]] for node in keep)
    return DraftTree(parents, min(tree.main_length, depth), f"{tree.family}, depth {depth}")


def _check_int(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}")
