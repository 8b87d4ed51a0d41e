"""Tree attention on GPUs: a stock back end for everything that is causal, our window kernel for trees.

Two back ends with one builder:

* `FlashTreeBackend` over vLLM's FlashAttention. Per layer: the prefix of the requests with trees (FlashAttention,
  ``causal=False``, with log-sum-exp), then `window_attention`, which merges while it writes. Requests without trees in
  the same batch take one more, ordinary causal call, in which the trees have no keys and cost next to nothing.
* `TritonTreeBackend` over vLLM's Triton back end, where there is no FlashAttention or the model is float32: our prefix
  kernel instead of FlashAttention's, and one path for all requests of a step that has trees.

A step without branches goes through the stock path untouched in both. docs/gpu.md says why it is done this way.
Attention runs outside CUDA graphs (piecewise graphs): a tree step has its own number of launches and tiles.
Never run on a GPU: the kernels are tested in Triton's interpreter, the dispatch with a substitute for FlashAttention.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides, is_quantized_kv_cache
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends import flash_attn as stock_flash
from vllm.v1.attention.backends import triton_attn as stock_triton

from vllm_sjd_pac.engine.attention.interface import TreeStep
from vllm_sjd_pac.engine.attention.triton_ops import num_splits, paged_prefix_attention, window_attention
from vllm_sjd_pac.engine.attention.window import WindowLayout, window_layout

# Absent on a machine without FlashAttention.
flash_attn_varlen_func = getattr(stock_flash, "flash_attn_varlen_func", None)


@dataclass(frozen=True)
class TreePlan:
    """What a step with trees needs beyond the stock metadata; R requests.

    Attributes:
        layout: the windows; tiles for the requests that the window kernel computes.
        prefix_lens: int32 ``[R]``, tokens computed before this step; 0 for requests that the stock call computes.
        causal_lens: int32 ``[R]``, sequence lengths for the stock causal call, 0 for requests with trees; None where no
            such call is needed.
        longest_prefix: the largest of ``prefix_lens``.
    """

    layout: WindowLayout
    prefix_lens: Tensor
    causal_lens: Tensor | None
    longest_prefix: int


def plan_step(step: TreeStep, query_lens: list[int], seq_lens: Tensor, group_size: int, split_plain: bool) -> TreePlan:
    """Turn the step's trees into kernel arguments on the device of ``seq_lens``, without waiting for it.

    Args:
        step: the trees; requests that it does not list are causal.
        query_lens: scheduled tokens of each of R requests.
        seq_lens: int32 ``[R]`` on the device, tokens of each request with those scheduled.
        group_size: query heads per key head.
        split_plain: leave requests without trees to a stock causal call.

    Raises:
        ValueError: a tree does not end where its request's scheduled tokens end.
    """
    device = seq_lens.device
    requests = len(query_lens)
    trees = {tree.request_index: tree for tree in step.requests}
    layout = window_layout(
        query_lens,
        [trees[index].root_offset if index in trees else None for index in range(requests)],
        [trees[index].tree.parents if index in trees else None for index in range(requests)],
        group_size,
        only=sorted(trees) if split_plain else None,
        pin_memory=device.type == "cuda",
    ).to(device)
    if not split_plain:
        # The trees' prefixes decide into how many parts all are cut; the plain requests' are not known on the host.
        window_lens = layout.query_start.diff()
        longest = max(tree.root_position - tree.root_offset for tree in step.requests)
        return TreePlan(layout, seq_lens[:requests] - window_lens, None, longest)
    prefix = torch.zeros(requests, dtype=torch.int32, pin_memory=device.type == "cuda")
    for index, tree in trees.items():
        prefix[index] = tree.root_position - tree.root_offset
    causal_lens = None
    if len(trees) < requests:
        plain = torch.ones(requests, dtype=torch.int32, pin_memory=device.type == "cuda")
        plain[list(trees)] = 0
        causal_lens = seq_lens[:requests] * plain.to(device, non_blocking=True)
    return TreePlan(layout, prefix.to(device, non_blocking=True), causal_lens, int(prefix.max()))


class _TreeBuilder:
    """Adds a `TreePlan` to the stock metadata of steps that have branches."""

    metadata_type: type
    split_plain: bool
    num_heads_q: int
    num_heads_kv: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tree_step = TreeStep()

    @property
    def max_branches(self) -> int:
        """Branches cost no scratch memory here."""
        return 1 << 30

    @classmethod
    def get_cudagraph_support(cls, *args: Any, **kwargs: Any) -> AttentionCGSupport:
        return AttentionCGSupport.NEVER

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)  # type: ignore[misc]
        if not self.tree_step.has_branches:
            return metadata
        requests = common_attn_metadata.num_reqs
        starts = common_attn_metadata.query_start_loc_cpu[: requests + 1]
        group = self.num_heads_q // self.num_heads_kv
        plan = plan_step(self.tree_step, starts.diff().tolist(), metadata.seq_lens, group, self.split_plain)
        values = {field.name: getattr(metadata, field.name) for field in dataclasses.fields(metadata)}
        return self.metadata_type(**values, plan=plan)


class _TreeImpl(ABC):
    """Refuses, when the model is built, what the window kernel does not compute; steps without trees stay stock."""

    head_size: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_supported(self)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """As the stock implementation: query and output ``[T, H, D]``, cache ``[blocks, K, block_size, 2 D]``."""
        if getattr(attn_metadata, "plan", None) is None:
            stock: Tensor = super().forward(  # type: ignore[misc]
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
            return stock
        tokens = attn_metadata.num_actual_tokens
        caches = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        self._attend_step(query[:tokens], key[:tokens], value[:tokens], caches, attn_metadata, output[:tokens])
        return output

    @abstractmethod
    def _attend_step(
        self, query: Tensor, key: Tensor, value: Tensor, caches: tuple[Tensor, Tensor], metadata: Any, out: Tensor
    ) -> None:
        """Write ``out`` ``[T, H, D]`` for a step with trees.

        ``query`` ``[T, H, D]``, ``key`` and ``value`` ``[T, K, D]``: of the step; ``caches``: paged keys and values
        ``[blocks, block_size, K, D]``.
        """


def check_supported(impl: Any) -> None:
    """Raise ValueError where a layer needs more than plain causal decoder attention over an unquantised cache."""
    wants = {
        "ALiBi": impl.alibi_slopes is not None,
        "a sliding window": tuple(impl.sliding_window) != (-1, -1),
        "soft-capped logits": bool(impl.logits_soft_cap),
        "attention sinks": impl.sinks is not None,
        f"attention of type {impl.attn_type}": impl.attn_type != AttentionType.DECODER,
        f"a {impl.kv_cache_dtype} KV cache": is_quantized_kv_cache(impl.kv_cache_dtype),
        "decode context parallelism": getattr(impl, "dcp_world_size", 1) > 1,
    }
    for what, wanted in wants.items():
        if wanted:
            raise ValueError(f"sjd_pac: masked tree attention does not support {what}; use --sjd-pac-attention virtual")


# -- over FlashAttention ----------------------------------------------------------------------------------------------


@dataclass
class FlashTreeMetadata(stock_flash.FlashAttentionMetadata):
    """Stock metadata and the trees of the step."""

    plan: TreePlan | None = None


class FlashTreeMetadataBuilder(_TreeBuilder, stock_flash.FlashAttentionMetadataBuilder):
    metadata_type = FlashTreeMetadata
    split_plain = True


class FlashTreeImpl(_TreeImpl, stock_flash.FlashAttentionImpl):
    def _attend_step(
        self, query: Tensor, key: Tensor, value: Tensor, caches: tuple[Tensor, Tensor], metadata: Any, out: Tensor
    ) -> None:
        plan: TreePlan = metadata.plan
        paged = tuple(canonicalize_singleton_dim_strides(cache) for cache in caches)
        if plan.causal_lens is not None:
            # Requests with trees have no keys in this call; it fills their rows with zeros.
            self._flash(query, paged, metadata, plan.causal_lens, metadata.max_seq_len, True, out)
        self._attend_trees(query, key, value, paged, metadata, out)

    def _attend_trees(
        self, query: Tensor, key: Tensor, value: Tensor, caches: tuple[Tensor, ...], metadata: Any, out: Tensor
    ) -> None:
        """Write the rows of ``out`` that belong to requests with trees; leave the others as they are."""
        plan = metadata.plan
        prefix_out = out if plan.causal_lens is None else torch.empty_like(out)
        lse = self._flash(query, caches, metadata, plan.prefix_lens, max(plan.longest_prefix, 1), False, prefix_out)
        window_attention(query, key, value, plan.layout, prefix_out, lse, self.scale, out=out)

    def _flash(
        self,
        query: Tensor,
        caches: tuple[Tensor, ...],
        metadata: FlashTreeMetadata,
        seq_lens: Tensor,
        longest: int,
        causal: bool,
        out: Tensor,
    ) -> Tensor:
        """One FlashAttention call over the paged cache; writes ``out``, returns the log-sum-exp float32 ``[H, T]``.

        No ahead-of-time schedule: the stock one was made for other lengths.
        """
        assert flash_attn_varlen_func is not None
        _, lse = flash_attn_varlen_func(
            q=query,
            k=caches[0],
            v=caches[1],
            out=out,
            cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_q=metadata.max_query_len,
            seqused_k=seq_lens,
            max_seqlen_k=longest,
            softmax_scale=self.scale,
            causal=causal,
            block_table=metadata.block_table,
            return_softmax_lse=True,
            fa_version=self.vllm_flash_attn_version,
        )
        return lse


class FlashTreeBackend(stock_flash.FlashAttentionBackend):
    """FlashAttention with draft trees."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[stock_flash.FlashAttentionImpl]:
        return FlashTreeImpl

    @staticmethod
    def get_builder_cls() -> type[stock_flash.FlashAttentionMetadataBuilder]:
        return FlashTreeMetadataBuilder


# -- over vLLM's Triton back end --------------------------------------------------------------------------------------


@dataclass
class TritonTreeMetadata(stock_triton.TritonAttentionMetadata):
    """Stock metadata and the trees of the step."""

    plan: TreePlan | None = None


class TritonTreeMetadataBuilder(_TreeBuilder, stock_triton.TritonAttentionMetadataBuilder):
    metadata_type = TritonTreeMetadata
    split_plain = False


class TritonTreeImpl(_TreeImpl, stock_triton.TritonAttentionImpl):
    def _attend_step(
        self, query: Tensor, key: Tensor, value: Tensor, caches: tuple[Tensor, Tensor], metadata: Any, out: Tensor
    ) -> None:
        plan: TreePlan = metadata.plan
        processors = torch.cuda.get_device_properties(query.device).multi_processor_count if query.is_cuda else 1
        splits = num_splits(plan.layout, self.num_kv_heads, plan.longest_prefix, processors)
        prefix_out, prefix_lse = paged_prefix_attention(
            query, *caches, metadata.block_table, plan.prefix_lens, plan.layout, self.scale, splits
        )
        window_attention(query, key, value, plan.layout, prefix_out, prefix_lse, self.scale, out=out)


class TritonTreeBackend(stock_triton.TritonAttentionBackend):
    """vLLM's Triton attention with draft trees."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[stock_triton.TritonAttentionImpl]:
        return TritonTreeImpl

    @staticmethod
    def get_builder_cls() -> type[stock_triton.TritonAttentionMetadataBuilder]:
        return TritonTreeMetadataBuilder
