"""Virtual requests as mixins over a stock vLLM attention back end (see `virtual`).

They need a metadata builder that reads ``CommonAttentionMetadata`` and an implementation with ``do_kv_cache_update``
over a cache whose first dimension is the block: vLLM 0.32's CPU, FlashAttention and Triton back ends. Over the CPU's
they are tested; over the others they have never run.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from vllm.forward_context import get_forward_context

from vllm_sjd_pac.engine.attention.interface import TreeStep
from vllm_sjd_pac.engine.attention.virtual import VirtualBatch, build_virtual_batch

_ATTRIBUTE = "sjd_pac_branches"


@dataclass(frozen=True)
class BranchWrites:
    """What the cache update must do for the branches of a step.

    ``copy_from``, ``copy_to``: long [C] block ids; ``write_token``, ``write_slot``: long [W].
    """

    copy_from: torch.Tensor
    copy_to: torch.Tensor
    write_token: torch.Tensor
    write_slot: torch.Tensor

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """The copies as (block, first, end): one block to consecutive blocks ``first … end − 1``."""
        found: list[tuple[int, int, int]] = []
        for source, target in zip(self.copy_from.tolist(), self.copy_to.tolist(), strict=True):
            if found and found[-1][0] == source and found[-1][2] == target:
                found[-1] = (source, found[-1][1], target + 1)
            else:
                found.append((source, target, target + 1))
        return found


class VirtualBuilderMixin:
    """Turns a step's branches into further requests of the attention metadata.

    A step whose windows are all chains goes through the stock builder untouched. The worker sets
    ``first_scratch_block`` and ``num_scratch_blocks`` when it has allocated the cache.
    """

    tree_step = TreeStep()
    first_scratch_block = 0
    num_scratch_blocks = 0

    @property
    def max_branches(self) -> int:
        return self.num_scratch_blocks

    def build(self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        build = super().build  # type: ignore[misc]
        if not self.tree_step.has_branches:
            return build(common_prefix_len, common_attn_metadata, fast_build)
        common = common_attn_metadata
        lengths = common.seq_lens_cpu_upper_bound  # exact outside asynchronous scheduling, and no synchronisation
        batch = build_virtual_batch(
            self.tree_step,
            common.query_start_loc_cpu[: common.num_reqs + 1].tolist(),
            (common.seq_lens if lengths is None else lengths)[: common.num_reqs].tolist(),
            self.kv_cache_spec.block_size,
            self.first_scratch_block,
            self.num_scratch_blocks,
        )
        # A prefix shared by the whole batch (cascade attention) would be counted over the wrong requests.
        metadata = build(0, extend(common, batch), fast_build)
        table = common.block_table_tensor
        device = table.device
        row, column = batch.copy_from_row.to(device), batch.copy_from_column.to(device)
        writes = BranchWrites(
            table[row, column].long(),
            batch.copy_to.to(device),
            batch.write_token.to(device),
            batch.write_slot.to(device),
        )
        setattr(metadata, _ATTRIBUTE, writes)
        return metadata


def extend(common: Any, batch: VirtualBatch) -> Any:
    """``CommonAttentionMetadata`` of the real requests and the branches."""
    extended = copy.copy(common)
    device = common.block_table_tensor.device
    extended.num_reqs = len(batch.seq_lens)
    extended.query_start_loc_cpu = batch.query_start_loc
    extended.query_start_loc = batch.query_start_loc.to(device)
    extended.seq_lens = batch.seq_lens.to(device)
    if common.seq_lens_cpu_upper_bound is not None:
        extended.seq_lens_cpu_upper_bound = batch.seq_lens
    if common.is_prefilling is not None:
        extended.is_prefilling = common.is_prefilling[batch.owner.to(common.is_prefilling.device)]
    extended.max_query_len = batch.max_query_len
    extended.max_seq_len = batch.max_seq_len
    table = common.block_table_tensor[batch.owner.to(device)]
    table[batch.table_row.to(device), batch.table_column.to(device)] = batch.table_block.to(device, table.dtype)
    extended.block_table_tensor = table
    return extended


class VirtualImplMixin:
    """Writes the branches' keys and values a second time, into their scratch blocks."""

    @staticmethod
    def copy_blocks(kv_cache: torch.Tensor, writes: BranchWrites) -> None:
        """Copy blocks of a cache [blocks, ...] as ``writes`` says."""
        kv_cache.index_copy_(0, writes.copy_to, kv_cache.index_select(0, writes.copy_from))

    def do_kv_cache_update(
        self: Any,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        update = super().do_kv_cache_update  # type: ignore[misc]
        update(layer, key, value, kv_cache, slot_mapping)
        metadata = get_forward_context().attn_metadata
        mine = metadata.get(layer.layer_name) if isinstance(metadata, dict) else None
        writes: BranchWrites | None = getattr(mine, _ATTRIBUTE, None)
        if writes is None:
            return
        # The main chain's entries of this step are in place now, so the copied blocks are complete up to each branch.
        self.copy_blocks(kv_cache, writes)
        tokens = writes.write_token
        update(layer, key.index_select(0, tokens), value.index_select(0, tokens), kv_cache, writes.write_slot)
