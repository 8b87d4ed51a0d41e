"""Tree attention on the CPU: vLLM's own kernel over virtual requests."""

from __future__ import annotations

import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from vllm_sjd_pac.engine.attention.virtual_backend import BranchWrites, VirtualBuilderMixin, VirtualImplMixin


class CPUVirtualBuilder(VirtualBuilderMixin, CPUAttentionMetadataBuilder):
    """The stock builder that knows branches."""


class CPUVirtualImpl(VirtualImplMixin, CPUAttentionBackendImpl):
    """The stock implementation that writes branches."""

    @staticmethod
    def copy_blocks(kv_cache: torch.Tensor, writes: BranchWrites) -> None:
        """As in the mixin; NumPy's slices take a third of the time of torch's indexing."""
        blocks = kv_cache.view(torch.uint8).numpy()  # as bytes: NumPy knows no bfloat16
        for source, first, end in writes.runs:
            blocks[first:end] = blocks[source]


class CPUTreeAttentionBackend(CPUAttentionBackend):
    """The stock back end with both."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return CPUVirtualImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return CPUVirtualBuilder
