"""Which draft tree a request gets: from the options, the room left, and the load."""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np

from vllm_sjd_pac.config import SJDPACConfig
from vllm_sjd_pac.decoding import DraftTree, default_tree


def parse_tree(text: str, nodes: int, rule: str) -> DraftTree:
    """A tree of `nodes` nodes (root included) from its option text; see `SJDPACConfig.tree`.

    ``comb`` without a shape is the tree that measured best for `rule` and the node budget (docs/decoding.md).

    Raises:
        ValueError: the tree does not fit into `nodes`; the message names the option.
    """
    kind, _, shape = text.partition(":")
    try:
        if kind == "chain":
            return DraftTree.chain(nodes)
        if kind == "full":
            width, depth = (int(part) for part in (shape or "3.3").split("."))
            return DraftTree.full(nodes, width, depth)
        if not shape:
            return default_tree(nodes, rule)
        match = re.fullmatch(r"([\d.]+)(?:t(\d+))?", shape)
        assert match is not None  # SJDPACConfig checked the form
        siblings = tuple(int(part) for part in match[1].split("."))
        return DraftTree.comb(nodes, siblings, int(match[2] or 0))
    except ValueError as error:
        raise ValueError(
            f"sjd_pac: tree={text!r} with num_speculative_tokens={nodes - 1} is not allowed: {error}"
        ) from None


class TreeChooser:
    """Trees by node budget and room, cached.

    Raises:
        ValueError: the options' tree does not fit its node budget.
    """

    def __init__(self, options: SJDPACConfig) -> None:
        self.options = options
        self.max_nodes = options.num_speculative_tokens + 1
        self.largest = self._build(self.max_nodes)
        self._by_nodes = {self.max_nodes: self.largest}

    def _build(self, nodes: int) -> DraftTree:
        branching = self.options.mode in ("pd", "pac")
        tree = parse_tree(self.options.tree, nodes, self.options.acceptance) if branching else DraftTree.chain(nodes)
        return tree if self.options.window is None else tree.limit_depth(self.options.window)

    def choose(self, room: int, nodes: int | None = None) -> DraftTree:
        """The tree for a request that may commit at most `room` tokens in a step.

        Args:
            room: tokens left in the image segment, the request or the context, whichever ends first.
            nodes: node budget, root included; default: the options' own.
        """
        if self.options.mode == "ar" or room <= 1:
            return DraftTree.chain(1)
        budget = self.max_nodes if nodes is None else min(nodes, self.max_nodes)
        if budget not in self._by_nodes:
            try:
                self._by_nodes[budget] = self._build(budget)
            except ValueError:
                self._by_nodes[budget] = DraftTree.chain(budget)
        return self._by_nodes[budget].limit_depth(room - 1)


@lru_cache(maxsize=1024)
def branch_nodes(tree: DraftTree) -> np.ndarray:
    """int64 [2, K]: index and depth of each branch node; not to be written to."""
    nodes = np.arange(tree.main_length + 1, tree.num_nodes)
    return np.stack([nodes, np.array(tree.depths)[nodes]])
