"""Launching the tree-attention kernels: explicit tensors in, explicit tensors out, no vLLM.

* `paged_prefix_attention`: the prefix part, read from the paged KV cache by block table. vLLM's own FlashAttention does
  the same with ``causal=False`` and ``return_softmax_lse``; this one serves where there is no FlashAttention (float32,
  Triton's interpreter, PyTorch without vLLM).
* `window_attention`: the dense part among the tokens of this step, masked by bit rows. It takes the prefix part as the
  *starting state* of its online softmax, so that merging costs neither a launch nor a round trip through memory.
* `merge_states`: the log-sum-exp merge of two finished parts, for back ends that cannot start from a state.
* `tree_attention`: the first two in a row.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from vllm_sjd_pac.engine.attention import triton_kernels as kernels
from vllm_sjd_pac.engine.attention.window import WORD_BITS, WindowLayout

SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_SIZES = (16, 256)
"""Smallest and largest head size; multiples of 8 between them."""


def check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise ValueError where the kernels cannot run on these tensors (the message says why)."""
    heads, head_size = query.shape[1:]
    if query.dtype not in SUPPORTED_DTYPES or not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"tree attention: query, key, value must share a float type, not {query.dtype}, {key.dtype}")
    if not HEAD_SIZES[0] <= head_size <= HEAD_SIZES[1] or head_size % 8:
        raise ValueError(f"tree attention: head size {head_size} is not a multiple of 8 from 16 to 256")
    if heads % key.shape[-2]:
        raise ValueError(f"tree attention: {heads} query heads do not divide among {key.shape[-2]} key heads")
    if any(tensor.stride(-1) != 1 for tensor in (query, key, value)):
        raise ValueError("tree attention: the head dimension of query, key and value must be contiguous")


def tile_shape(tile_rows: int, group: int, head_size: int, dtype: torch.dtype) -> dict[str, int]:
    """Compile-time sizes shared by the prefix and the window kernel.

    A key tile has 64 keys for half-precision heads up to 128, fewer where they would not fit into registers (found by
    compiling for Hopper, see ``tests/attention/test_triton_compiles.py``); all sizes divide the 64 bits of a word.
    """
    small = head_size <= 128 and dtype != torch.float32
    return {
        "GROUP": group,
        "HEAD_SIZE": head_size,
        "HEAD_PAD": triton.next_power_of_2(head_size),
        "TILE_ROWS": tile_rows,
        "BLOCK_M": max(16, triton.next_power_of_2(tile_rows * group)),
        "BLOCK_N": 64 if small else 32,
        "num_warps": 4 if small else 8,
    }


def num_splits(layout: WindowLayout, kv_heads: int, longest_prefix: int, processors: int) -> int:
    """Into how many parts to cut every prefix, so that about two programs run per multiprocessor.

    A power of two up to 16 (every value is one compilation), and no part shorter than 256 keys.
    """
    programs = max(1, layout.tiles.shape[0] * kv_heads)
    splits = 1
    while splits < 16 and programs * splits < 2 * processors and splits * 2 * 256 <= longest_prefix:
        splits *= 2
    return splits


def paged_prefix_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    prefix_lens: Tensor,
    layout: WindowLayout,
    scale: float,
    splits: int = 1,
) -> tuple[Tensor, Tensor]:
    """Every query of the layout's tiles against the whole prefix of its request.

    Args:
        query: ``[T, H, D]`` float16, bfloat16 or float32.
        key_cache, value_cache: ``[blocks, block_size, K, D]`` views of the cache, any strides but the last; H % K == 0.
        block_table: int32 ``[R, max_blocks]``.
        prefix_lens: int32 ``[R]``, tokens computed before this step.
        layout: which queries; on the same device.
        scale: factor of the inner products.
        splits: parts that each prefix is cut into; each is a part of its own in the result.

    Returns:
        out ``[splits, T, H, D]`` in the query's type (float32 where there are several parts) and lse float32
        ``[splits, H, T]``. Rows outside the tiles are not written.

    Raises:
        ValueError: see `check_shapes`.
    """
    check_shapes(query, key_cache, value_cache)
    tokens, heads, head_size = query.shape
    kv_heads, block_size = key_cache.shape[2], key_cache.shape[1]
    out = query.new_empty((splits, tokens, heads, head_size), dtype=torch.float32 if splits > 1 else query.dtype)
    lse = query.new_empty((splits, heads, tokens), dtype=torch.float32)
    shape = tile_shape(layout.tile_rows, heads // kv_heads, head_size, query.dtype)
    grid = (layout.tiles.shape[0], kv_heads, splits)
    if not grid[0]:
        return out, lse
    kernels._prefix_kernel[grid](
        query, key_cache, value_cache, out, lse, block_table, prefix_lens, layout.query_start, layout.tiles,
        float(scale),
        query.stride(0), query.stride(1), *key_cache.stride()[:3], *value_cache.stride()[:3],
        *out.stride()[:3], *lse.stride(), block_table.stride(0),
        **shape, BLOCK_SIZE=block_size, SPLITS=splits,
    )  # fmt: skip
    return out, lse


def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: WindowLayout,
    prefix_out: Tensor,
    prefix_lse: Tensor,
    scale: float,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Every query of the layout's tiles against the window tokens that it may see, merged with its prefix part.

    Args:
        query: ``[T, H, D]``; key, value: ``[T, K, D]``, this step's tokens, same type; H % K == 0.
        layout: windows and trees; on the same device.
        prefix_out: ``[S, T, H, D]`` or ``[T, H, D]``, any float type; prefix_lse: float32 ``[S, H, T]`` or ``[H, T]``:
            S parts of the prefix (S = 0: nothing before the window counts).
        scale: factor of the inner products.
        out: where to write, ``[T, H, D]``; may be the very memory of a single prefix part. Default: a new tensor.
        lse: float32 ``[H, T]``, where to write the log-sum-exp, if anybody wants it.

    Returns:
        out; rows outside the tiles are not written.

    Raises:
        ValueError: see `check_shapes`.
    """
    check_shapes(query, key, value)
    heads, head_size = query.shape[1:]
    kv_heads = key.shape[1]
    if prefix_out.dim() == 3:
        prefix_out, prefix_lse = prefix_out.unsqueeze(0), prefix_lse.unsqueeze(0)
    out = torch.empty_like(query) if out is None else out
    shape = tile_shape(layout.tile_rows, heads // kv_heads, head_size, query.dtype)
    grid = (layout.tiles.shape[0], kv_heads)
    if not grid[0]:
        return out
    kernels._window_kernel[grid](
        query, key, value, prefix_out, prefix_lse, out, prefix_lse if lse is None else lse,
        layout.query_start, layout.root, layout.node_start, layout.ancestors, layout.tiles,
        float(scale), layout.ancestors.shape[1],
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        *prefix_out.stride()[:3], *prefix_lse.stride(),
        out.stride(0), out.stride(1), *((0, 0) if lse is None else lse.stride()),
        **shape, SPLITS=prefix_out.shape[0], WORD=WORD_BITS, WRITE_LSE=lse is not None,
    )  # fmt: skip
    return out


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys, from attention over each.

    Args:
        out_a, out_b: ``[T, H, D]``, last stride 1; lse_a, lse_b: float32 ``[H, T]``, -inf where there was no key.

    Returns:
        out ``[T, H, D]`` in the type of ``out_a`` and lse ``[H, T]``; zeros and -inf where neither had a key.
    """
    tokens, heads, head_size = out_a.shape
    out = torch.empty_like(out_a)
    lse = torch.empty_like(lse_a)
    if tokens:
        kernels._merge_kernel[(tokens, heads)](
            out_a, lse_a, out_b, lse_b, out, lse,
            *out_a.stride()[:2], *out_b.stride()[:2], *out.stride()[:2],
            *lse_a.stride(), *lse_b.stride(), *lse.stride(),
            HEAD_SIZE=head_size, HEAD_PAD=triton.next_power_of_2(head_size), num_warps=1,
        )  # fmt: skip
    return out, lse


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    prefix_lens: Tensor,
    layout: WindowLayout,
    scale: float,
    splits: int = 1,
) -> Tensor:
    """`paged_prefix_attention`, then `window_attention`: two launches. Shapes and errors as there."""
    prefix_out, prefix_lse = paged_prefix_attention(
        query, key_cache, value_cache, block_table, prefix_lens, layout, scale, splits
    )
    return window_attention(query, key, value, layout, prefix_out, prefix_lse, scale)
