"""What the runner tells an attention back end about the draft trees of a step, and how it is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from vllm_sjd_pac.decoding import DraftTree


@dataclass(frozen=True)
class RequestTree:
    """The draft tree of one request in a step.

    Attributes:
        request_index: row of the request in the batch.
        root_offset: index of the root among the request's scheduled tokens (catch-up tokens come before it).
        root_position: absolute position of the root, which is also its slot index in the paged cache. The slot index of
            node i is ``root_position + i``, its position for the network ``root_position + depth(i)``.
        tree: the topology; its main chain is causal, its branch nodes see the prefix and their ancestors.
    """

    request_index: int
    root_offset: int
    root_position: int
    tree: DraftTree


@dataclass(frozen=True)
class TreeStep:
    """All trees of a step whose branches need masked attention; empty when every window is a chain."""

    requests: tuple[RequestTree, ...] = ()

    @property
    def has_branches(self) -> bool:
        return bool(self.requests)


@runtime_checkable
class TreeAttentionBuilder(Protocol):
    """A metadata builder that can mask draft trees.

    The runner sets `tree_step` before vLLM calls ``build``. `max_branches` is how many branches it can serve in a step.
    """

    tree_step: TreeStep

    @property
    def max_branches(self) -> int: ...


_MASKING: dict[type, bool] = {}


def _masks_trees(builder: Any) -> bool:
    # Remembered per class: asking a protocol takes as long as laying out a step's branches.
    kind = type(builder)
    if kind not in _MASKING:
        _MASKING[kind] = isinstance(builder, TreeAttentionBuilder)
    return _MASKING[kind]


def set_tree_step(builders: list[Any], step: TreeStep) -> None:
    """Hand the step's trees to every metadata builder.

    Raises:
        RuntimeError: a builder cannot mask trees although the step has branches.
    """
    for builder in builders:
        if _masks_trees(builder):
            builder.tree_step = step
        elif step.has_branches:
            raise RuntimeError(
                f"sjd_pac: attention builder {type(builder).__name__} cannot mask draft trees; use --sjd-pac-tree chain"
            )
