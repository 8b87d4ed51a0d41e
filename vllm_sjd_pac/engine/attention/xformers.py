"""Tree attention with `xformers.ops.tree_attention`: a second implementation behind the same interface.

xformers computes prefix and tree as two attentions and merges them by log-sum-exp, as `triton` does, but wants one tree
for all requests of a call. So the requests are grouped by window (catch-up tokens and tree); in a steady state there
are few groups: one tree, and as many lengths of catch-up as a branch is deep. Others take the stock causal call.

xformers' limits come on top: half precision, head sizes 16, 32, 64, 128 or 256, blocks of a multiple of 64 tokens.
Never run on a GPU: metadata, biases and the call are tested on the CPU with substitutes for xformers' CUDA operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_sjd_pac.engine.attention.interface import RequestTree, TreeStep
from vllm_sjd_pac.engine.attention.window import ancestor_words

HEAD_SIZES = (16, 32, 64, 128, 256)
BLOCK_MULTIPLE = 64


@dataclass(frozen=True)
class TreeGroup:
    """Requests of a step that share a window; B requests, L tokens each.

    Attributes:
        requests: their rows in the batch.
        prefix_lens: tokens computed before this step, for each.
        tokens: int64 ``[B, L]``, their tokens in the flat query.
        bias: float ``[L, L]``, 0 where a token sees another, -inf elsewhere.
    """

    requests: tuple[int, ...]
    prefix_lens: tuple[int, ...]
    tokens: Tensor
    bias: Tensor


@lru_cache(maxsize=64)
def window_bias(root: int, parents: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The mask of one window as an additive bias.

    Args:
        root: tokens before the root; they are causal, and every node sees them.
        parents: parents of the nodes, root included, ``parents[0] = -1``.

    Returns:
        ``[L, L]`` of ``dtype``, L = root + nodes; a slice of a buffer whose rows are a multiple of 8 apart, as aligned
        loads want.
    """
    words = ancestor_words(parents).view(np.uint8)
    nodes = len(parents)
    ancestors = torch.from_numpy(np.unpackbits(words, axis=1, bitorder="little")[:, :nodes].astype(bool))
    length = root + nodes
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    visible[root:, root:] = ancestors
    bias = torch.zeros(length, -(-length // 8) * 8, dtype=dtype)
    bias[:, :length].masked_fill_(~visible, float("-inf"))
    return bias.to(device)[:, :length]


def group_trees(
    step: TreeStep, query_start: Sequence[int], dtype: torch.dtype, device: torch.device
) -> list[TreeGroup]:
    """The step's trees, grouped by window.

    Args:
        step: the trees.
        query_start: first scheduled token of each request of the batch, and the end, ``R + 1`` numbers.
        dtype, device: of the biases; the token indices go to ``device`` too.

    Raises:
        ValueError: a tree does not end where its request's scheduled tokens end.
    """
    alike: dict[tuple[int, tuple[int, ...]], list[RequestTree]] = {}
    for request in step.requests:
        length = query_start[request.request_index + 1] - query_start[request.request_index]
        nodes = request.tree.num_nodes
        if request.root_offset + nodes != length:
            at = request.root_offset
            raise ValueError(f"a tree of {nodes} nodes at index {at} does not fill {length} scheduled tokens")
        alike.setdefault((request.root_offset, request.tree.parents), []).append(request)
    groups = []
    for (root, parents), members in alike.items():
        starts = torch.tensor([query_start[member.request_index] for member in members])
        groups.append(
            TreeGroup(
                requests=tuple(member.request_index for member in members),
                prefix_lens=tuple(member.root_position - member.root_offset for member in members),
                tokens=(starts[:, None] + torch.arange(root + len(parents))).to(device),
                bias=window_bias(root, parents, dtype, device),
            )
        )
    return groups


def prefix_bias(group: TreeGroup, block_table: Tensor, block_size: int) -> Any:
    """xformers' description of the prefixes: no mask, paged, as long as each request's computed tokens.

    Args:
        block_table: int32 ``[R, max_blocks]`` of the whole batch.
    """
    from xformers.ops.fmha.attn_bias import PagedBlockDiagonalPaddedKeysMask

    length = group.bias.shape[0]
    return PagedBlockDiagonalPaddedKeysMask.from_seqlens(
        q_seqlen=[length] * len(group.requests),
        kv_seqlen=list(group.prefix_lens),
        block_tables=block_table[list(group.requests)],
        page_size=block_size,
        device=block_table.device,
    )


def attend_group(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    group: TreeGroup,
    prefixes: Any,
    scale: float,
) -> Tensor:
    """Tree attention for one group.

    Args:
        query: ``[T, H, D]``; key, value: ``[T, K, D]``, this step's tokens of the whole batch; H % K == 0.
        key_cache, value_cache: ``[blocks, block_size, K, D]`` whose first two dimensions can be viewed as one.
        prefixes: from `prefix_bias`.
        scale: factor of the inner products; xformers knows only ``D ** -0.5``, so the query takes the difference.

    Returns:
        ``[B * L, H, D]``, in the order of ``group.tokens``.
    """
    from xformers.ops.fmha import triton_splitk
    from xformers.ops.tree_attention import tree_attention

    requests, length = group.tokens.shape
    heads, head_size = query.shape[1:]
    kv_heads = key.shape[1]
    shared = (kv_heads, heads // kv_heads, head_size)
    rows = group.tokens.flatten()

    def window(tensor: Tensor) -> Tensor:
        return tensor.index_select(0, rows).view(requests, length, kv_heads, 1, head_size).expand(-1, -1, *shared)

    def paged(cache: Tensor) -> Tensor:
        slots = cache.shape[0] * cache.shape[1]
        return cache.view(1, slots, kv_heads, 1, head_size).expand(-1, -1, *shared)

    out = tree_attention(
        (query.index_select(0, rows) * (scale * head_size**0.5)).view(requests, length, *shared),
        window(key),
        window(value),
        paged(key_cache),
        paged(value_cache),
        spec_attn_bias=group.bias,
        prefix_attn_bias=prefixes,
        prefix_op=triton_splitk.FwOp,
        suffix_op=triton_splitk.FwOp,
    )
    return out.reshape(requests * length, heads, head_size)
