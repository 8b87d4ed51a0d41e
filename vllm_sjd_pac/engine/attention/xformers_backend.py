"""The vLLM back end over `xformers`: FlashAttention for everything causal, xformers for draft trees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.v1.attention.backends import flash_attn as stock_flash
from vllm.v1.kv_cache_interface import KVCacheLayout

from vllm_sjd_pac.engine.attention.triton import (
    FlashTreeBackend,
    FlashTreeImpl,
    FlashTreeMetadata,
    FlashTreeMetadataBuilder,
)
from vllm_sjd_pac.engine.attention.xformers import (
    BLOCK_MULTIPLE,
    HEAD_SIZES,
    TreeGroup,
    attend_group,
    group_trees,
    prefix_bias,
)


@dataclass
class XformersTreeMetadata(FlashTreeMetadata):
    """``groups``: the trees with their prefixes described for xformers."""

    groups: tuple[tuple[TreeGroup, Any], ...] = ()


class XformersTreeMetadataBuilder(FlashTreeMetadataBuilder):
    metadata_type = XformersTreeMetadata
    # The prefixes' description holds the block table, so the metadata cannot be reused for another table.
    supports_update_block_table = False

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if isinstance(metadata, XformersTreeMetadata):
            starts = common_attn_metadata.query_start_loc_cpu[: common_attn_metadata.num_reqs + 1].tolist()
            table = metadata.block_table
            spec: Any = self.kv_cache_spec
            groups = group_trees(self.tree_step, starts, spec.dtype, table.device)
            metadata.groups = tuple((group, prefix_bias(group, table, self.block_size)) for group in groups)
        return metadata


class XformersTreeImpl(FlashTreeImpl):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.head_size not in HEAD_SIZES:
            raise ValueError(f"sjd_pac: xformers has no head size {self.head_size}; use --sjd-pac-attention virtual")

    def _attend_trees(
        self, query: Tensor, key: Tensor, value: Tensor, caches: tuple[Tensor, ...], metadata: Any, out: Tensor
    ) -> None:
        for group, prefixes in metadata.groups:
            part = attend_group(query, key, value, caches[0], caches[1], group, prefixes, self.scale)
            out.index_copy_(0, group.tokens.flatten(), part.to(out.dtype))


class XformersTreeBackend(FlashTreeBackend):
    """FlashAttention with draft trees by xformers; wants slots of a block one after the other, heads inside them."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [stock_flash.MultipleOf(BLOCK_MULTIPLE)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBNHC,)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in HEAD_SIZES

    @staticmethod
    def get_impl_cls() -> type[stock_flash.FlashAttentionImpl]:
        return XformersTreeImpl

    @staticmethod
    def get_builder_cls() -> type[stock_flash.FlashAttentionMetadataBuilder]:
        return XformersTreeMetadataBuilder
