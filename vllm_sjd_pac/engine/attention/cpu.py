"""Tree attention on the CPU: vLLM's own kernel over virtual requests.

A step whose windows are all chains goes through the stock path untouched.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_sjd_pac.engine.attention.interface import TreeStep
from vllm_sjd_pac.engine.attention.virtual import VirtualBatch, build_virtual_batch


class CPUTreeAttentionBackend(CPUAttentionBackend):
    """The stock back end with a builder and an implementation that know branches."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return CPUTreeAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return CPUTreeAttentionMetadataBuilder


@dataclass
class CPUTreeAttentionMetadata(CPUAttentionMetadata):
    """Stock metadata plus what `do_kv_cache_update` must do for the branches.

    ``copy_from``, ``copy_to``: long [C] block ids; ``write_token``, ``write_slot``: long [W].
    """

    copy_from: torch.Tensor | None = None
    copy_to: torch.Tensor | None = None
    write_token: torch.Tensor | None = None
    write_slot: torch.Tensor | None = None


class CPUTreeAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """Turns a step's branches into further requests of the attention metadata.

    The worker sets ``first_scratch_block`` and ``num_scratch_blocks`` when it has allocated the cache.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tree_step = TreeStep()
        self.first_scratch_block = 0
        self.num_scratch_blocks = 0

    @property
    def max_branches(self) -> int:
        return self.num_scratch_blocks

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        if not self.tree_step.has_branches:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        common = common_attn_metadata
        reals = common.num_reqs
        batch = build_virtual_batch(
            self.tree_step,
            common.query_start_loc_cpu[: reals + 1].tolist(),
            common.seq_lens[:reals].tolist(),
            self.block_size,
            self.first_scratch_block,
            self.num_scratch_blocks,
        )
        metadata = super().build(common_prefix_len, self._extend(common, batch), fast_build)
        table = common.block_table_tensor
        return CPUTreeAttentionMetadata(
            **vars(metadata),
            copy_from=table[batch.copy_from_row, batch.copy_from_column].long(),
            copy_to=batch.copy_to,
            write_token=batch.write_token,
            write_slot=batch.write_slot,
        )

    @staticmethod
    def _extend(common: Any, batch: VirtualBatch) -> Any:
        extended = copy.copy(common)
        extended.num_reqs = len(batch.seq_lens)
        extended.query_start_loc = extended.query_start_loc_cpu = batch.query_start_loc
        extended.seq_lens = batch.seq_lens
        extended.max_query_len = int(batch.query_start_loc.diff().max())
        extended.max_seq_len = int(batch.seq_lens.max())
        table = common.block_table_tensor[batch.owner]
        table[batch.table_row, batch.table_column] = batch.table_block.to(table.dtype)
        extended.block_table_tensor = table
        return extended


class CPUTreeAttentionImpl(CPUAttentionBackendImpl):
    """Writes the branches' keys and values a second time, into their scratch blocks."""

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        metadata = get_forward_context().attn_metadata
        mine = metadata.get(layer.layer_name) if isinstance(metadata, dict) else None
        if not isinstance(mine, CPUTreeAttentionMetadata):
            return
        assert mine.copy_from is not None and mine.write_token is not None and mine.write_slot is not None
        # The main chain's entries of this step are in place now, so the copied blocks are complete up to each branch.
        kv_cache[mine.copy_to] = kv_cache[mine.copy_from]
        super().do_kv_cache_update(
            layer,
            key.index_select(0, mine.write_token),
            value.index_select(0, mine.write_token),
            kv_cache,
            mine.write_slot,
        )
