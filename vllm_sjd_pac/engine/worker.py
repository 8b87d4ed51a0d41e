"""`SpecDecodeWorker` for the CPU and for GPUs: builds the runner, reserves scratch blocks for tree attention.

The CPU worker is what the tests run. The GPU worker takes the same path over vLLM's GPU worker and has never run on a
GPU so far.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from vllm_sjd_pac.engine import compat
from vllm_sjd_pac.engine.arguments import options_of
from vllm_sjd_pac.engine.attention.virtual import blocks_per_branch, branches_of
from vllm_sjd_pac.engine.runner import JacobiRunnerMixin
from vllm_sjd_pac.engine.trees import TreeChooser

logger = init_logger(__name__)


class SpecDecodeWorkerMixin:
    """What both workers add to vLLM's own."""

    def init_device(self: Any) -> None:
        self._register_attention()
        super().init_device()  # type: ignore[misc]
        runner = self.model_runner
        runner.__class__ = type(f"Jacobi{type(runner).__name__}", (JacobiRunnerMixin, type(runner)), {})
        runner.start()

    def _register_attention(self: Any) -> None:
        """Register the attention back end that can mask draft trees, before the model is built."""

    def _scratch_blocks(self: Any) -> int:
        """Scratch blocks that all branches of a full batch need; 0 for chains."""
        config = self.vllm_config
        tree = TreeChooser(options_of(config)).largest
        per_request = len(branches_of(tree)) * blocks_per_branch(tree, config.cache_config.block_size)
        return per_request * config.scheduler_config.max_num_seqs

    def initialize_from_config(self: Any, kv_cache_config: Any) -> None:
        """Allocate the cache with scratch blocks behind those that the scheduler knows."""
        scratch = self._scratch_blocks()
        blocks = kv_cache_config.num_blocks
        super().initialize_from_config(compat.grow_kv_cache(kv_cache_config, scratch))  # type: ignore[misc]
        self.cache_config.num_gpu_blocks = blocks
        for builder in self.model_runner._tree_builders():
            if hasattr(builder, "first_scratch_block"):
                builder.first_scratch_block, builder.num_scratch_blocks = blocks, scratch

    def decode_pixels(self: Any, codes: list[list[list[int]]]) -> list[Any]:
        """Pictures of grids of codes (−1 = not drawn yet) as uint8 arrays [height, width, 3]."""
        if not hasattr(self, "_pixel_decoder"):
            self._pixel_decoder = self.model_runner.sjd_family.load_pixel_decoder()
        return list(self._pixel_decoder.decode(torch.tensor(codes)).numpy())


class CPUSpecDecodeWorker(SpecDecodeWorkerMixin, CPUWorker):
    """The worker on CPUs."""

    def _register_attention(self) -> None:
        register_backend(AttentionBackendEnum.CPU_ATTN, "vllm_sjd_pac.engine.attention.cpu.CPUTreeAttentionBackend")


class GPUSpecDecodeWorker(SpecDecodeWorkerMixin, Worker):
    """The worker on GPUs; chains only until the GPU attention of draft trees is wired in."""
