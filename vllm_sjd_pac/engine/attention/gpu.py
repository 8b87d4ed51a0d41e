"""Virtual requests over vLLM's stock GPU back ends, the default there. Never run on a GPU so far.

CUDA graphs of whole steps are refused: the number of entries in the attention metadata changes from step to step.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import flash_attn, triton_attn

from vllm_sjd_pac.engine.attention.virtual_backend import VirtualBuilderMixin, VirtualImplMixin


class _PiecewiseOnly:
    @classmethod
    def get_cudagraph_support(cls, *args: Any, **kwargs: Any) -> AttentionCGSupport:
        return AttentionCGSupport.NEVER


class FlashVirtualBuilder(VirtualBuilderMixin, _PiecewiseOnly, flash_attn.FlashAttentionMetadataBuilder):
    """FlashAttention's builder that knows branches."""


class FlashVirtualImpl(VirtualImplMixin, flash_attn.FlashAttentionImpl):
    """FlashAttention's implementation that writes branches."""


class FlashVirtualBackend(flash_attn.FlashAttentionBackend):
    """FlashAttention with both; registered in vLLM's CUSTOM slot."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[flash_attn.FlashAttentionImpl]:
        return FlashVirtualImpl

    @staticmethod
    def get_builder_cls() -> type[flash_attn.FlashAttentionMetadataBuilder]:
        return FlashVirtualBuilder


class TritonVirtualBuilder(VirtualBuilderMixin, _PiecewiseOnly, triton_attn.TritonAttentionMetadataBuilder):
    """Triton attention's builder that knows branches."""


class TritonVirtualImpl(VirtualImplMixin, triton_attn.TritonAttentionImpl):
    """Triton attention's implementation that writes branches."""


class TritonVirtualBackend(triton_attn.TritonAttentionBackend):
    """Triton attention with both; registered in vLLM's CUSTOM slot."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[triton_attn.TritonAttentionImpl]:
        return TritonVirtualImpl

    @staticmethod
    def get_builder_cls() -> type[triton_attn.TritonAttentionMetadataBuilder]:
        return TritonVirtualBuilder
