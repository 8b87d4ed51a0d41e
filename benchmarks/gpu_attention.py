"""The attention choices as plain functions of tensors, for `gpu_check`."""

from __future__ import annotations

from typing import Any

import torch
from scenes import Scene

from vllm_sjd_pac.decoding import DraftTree
from vllm_sjd_pac.engine.attention import triton_ops
from vllm_sjd_pac.engine.attention.interface import RequestTree, TreeStep
from vllm_sjd_pac.engine.attention.virtual import build_virtual_batch
from vllm_sjd_pac.engine.attention.window import window_layout


def main_length(parents: tuple[int, ...]) -> int:
    """Length of the main chain of a tree that lists it first."""
    length = 0
    while length + 1 < len(parents) and parents[length + 1] == length:
        length += 1
    return length


def tree_step(step: Scene) -> TreeStep:
    """The scene's trees as the runner describes them."""
    trees = (
        RequestTree(
            index, request.before, request.prefix + request.before, DraftTree(request.tree, main_length(request.tree))
        )
        for index, request in enumerate(step.requests)
        if request.tree
    )
    return TreeStep(tuple(trees))


def processors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 1


def kernel_attention(longest: int, splits: int | None = None) -> Any:
    """Our two kernels as an `Attention`."""

    def attend(query, key, value, key_cache, value_cache, table, prefix_lens, layout):
        parts = splits or triton_ops.num_splits(layout, key.shape[1], longest, processors())
        scale = query.shape[-1] ** -0.5
        return triton_ops.tree_attention(
            query, key, value, key_cache, value_cache, table, prefix_lens, layout, scale, parts
        )

    return attend


def flash_attention(longest: int) -> Any:
    """vLLM's FlashAttention for the prefix, our kernel for the window; None where there is no FlashAttention."""
    try:
        from vllm.v1.attention.backends.fa_utils import get_flash_attn_version, is_flash_attn_varlen_func_available

        if not is_flash_attn_varlen_func_available():
            return None
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func
    except ImportError:
        return None
    version = get_flash_attn_version()

    def attend(query, key, value, key_cache, value_cache, table, prefix_lens, layout):
        scale = query.shape[-1] ** -0.5
        out, lse = flash_attn_varlen_func(
            q=query, k=key_cache, v=value_cache, out=torch.empty_like(query), cu_seqlens_q=layout.query_start,
            max_seqlen_q=layout.num_tokens, seqused_k=prefix_lens, max_seqlen_k=longest, softmax_scale=scale,
            causal=False, block_table=table, return_softmax_lse=True, fa_version=version,
        )  # fmt: skip
        return triton_ops.window_attention(query, key, value, layout, out, lse, scale, out=out)

    return attend


def xformers_result(step: Scene) -> torch.Tensor | None:
    """`xformers.ops.tree_attention` on the scene's trees; rows of other requests are NaN. None where it cannot run."""
    from vllm_sjd_pac.engine.attention import xformers as path

    dtype, block_size = step.query.dtype, step.key_cache.shape[1]
    if step.query.device.type == "cpu" or dtype == torch.float32 or block_size % path.BLOCK_MULTIPLE:
        return None
    if step.query.shape[-1] not in path.HEAD_SIZES:
        return None
    try:
        import xformers.ops.tree_attention  # noqa: F401
    except ImportError:
        return None
    starts = [0, *torch.tensor(step.query_lens).cumsum(0).tolist()]
    caches = torch.cat([step.key_cache, step.value_cache], -1).contiguous().split(step.query.shape[-1], dim=-1)
    out = torch.full_like(step.query, float("nan"))
    for group in path.group_trees(tree_step(step), starts, dtype, step.query.device):
        prefixes = path.prefix_bias(group, step.block_table, block_size)
        part = path.attend_group(step.query, step.key, step.value, *caches, group, prefixes, step.scale)
        out.index_copy_(0, group.tokens.flatten(), part)
    return out


def virtual_result(step: Scene) -> torch.Tensor:
    """Branches as virtual requests of a causal paged attention (our kernels without any tree)."""
    starts = [0, *torch.tensor(step.query_lens).cumsum(0).tolist()]
    totals = [request.prefix + request.length for request in step.requests]
    blocks, block_size, kv_heads, _ = step.key_cache.shape
    scratch = 4 * len(starts) * max(step.query_lens)
    batch = build_virtual_batch(tree_step(step), starts, totals, block_size, blocks, scratch)
    device = step.query.device
    copies = step.block_table[batch.copy_from_row.to(device), batch.copy_from_column.to(device)].long()
    caches = []
    for cache, own in ((step.key_cache, step.key), (step.value_cache, step.value)):
        larger = torch.cat([cache, cache.new_zeros(scratch, *cache.shape[1:])])
        larger[batch.copy_to.to(device)] = larger[copies]
        larger.view(-1, kv_heads, cache.shape[-1])[batch.write_slot.to(device)] = own[batch.write_token.to(device)]
        caches.append(larger)
    table = torch.nn.functional.pad(step.block_table, (0, 2))[batch.owner.to(device)]
    table[batch.table_row.to(device), batch.table_column.to(device)] = batch.table_block.int().to(device)
    lens = batch.query_start_loc.diff().tolist()
    group = step.query.shape[1] // kv_heads
    layout = window_layout(lens, [None] * len(lens), [None] * len(lens), group).to(device)
    prefix = (batch.seq_lens - batch.query_start_loc.diff()).to(device)
    return kernel_attention(0, 1)(step.query, step.key, step.value, *caches, table, prefix, layout)
