"""`SpecDecodeWorker` for the CPU and for GPUs: builds the runner, reserves scratch blocks for tree attention.

The CPU worker is what the tests run. The GPU worker takes the same path over vLLM's GPU worker and has never run on a
GPU so far.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from vllm_sjd_pac.engine import compat
from vllm_sjd_pac.engine.arguments import options_of
from vllm_sjd_pac.engine.attention.selection import Platform, choose_tree_backend
from vllm_sjd_pac.engine.attention.virtual import scratch_per_tree
from vllm_sjd_pac.engine.runner import JacobiRunnerMixin
from vllm_sjd_pac.engine.trees import TreeChooser

logger = init_logger("vllm.sjd_pac.worker")  # below vLLM's own logger, so that its level and format hold

_SCRATCH_SEQUENCES = 4


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

    def _scratch_blocks(self: Any, cache_blocks: int) -> int:
        """Scratch blocks beside a cache of `cache_blocks`; 0 for chains.

        Enough for every sequence of a full batch, or an eighth of the cache, but at least for `_SCRATCH_SEQUENCES`;
        the runner gives chains to requests for which none are left in a step. Equal on all ranks.
        """
        config = self.vllm_config
        per_request = scratch_per_tree(TreeChooser(options_of(config)).largest, config.cache_config.block_size)
        sequences = config.scheduler_config.max_num_seqs
        return min(per_request * sequences, max(cache_blocks // 8, per_request * _SCRATCH_SEQUENCES))

    def determine_available_memory(self: Any) -> int:
        """Memory for the cache, less what the scratch blocks will take."""
        available = super().determine_available_memory()  # type: ignore[misc]
        page = sum(spec.page_size_bytes for spec in self.model_runner.get_kv_cache_spec().values())
        return available - self._scratch_blocks(available // page * 8 // 9) * page if page else available

    def initialize_from_config(self: Any, kv_cache_config: Any) -> None:
        """Allocate the cache with scratch blocks behind those that the scheduler knows."""
        blocks = kv_cache_config.num_blocks
        scratch = self._scratch_blocks(blocks)
        self.model_runner.sjd_scratch_blocks = scratch
        super().initialize_from_config(compat.grow_kv_cache(kv_cache_config, scratch))  # type: ignore[misc]
        self.cache_config.num_gpu_blocks = blocks
        self.model_runner.sjd_builders = self.model_runner.tree_builders()
        for builder in self.model_runner.sjd_builders:
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
        path = "vllm_sjd_pac.engine.attention.cpu.CPUTreeAttentionBackend"
        compat.register_cpu_attention(self.vllm_config, path)


class GPUSpecDecodeWorker(SpecDecodeWorkerMixin, Worker):
    """The worker on GPUs; never run on one so far."""

    def _register_attention(self) -> None:
        config: Any = self.vllm_config
        options = options_of(config)
        if TreeChooser(options).largest.branch_height == 0:
            return  # chains need no masks: the stock back end stays
        platform = Platform.here("cuda")
        path = choose_tree_backend(options.attention, config.model_config.dtype, platform)
        virtual = "FlashVirtualBackend" if platform.has_flash_attention else "TritonVirtualBackend"
        compat.register_attention("CUSTOM", path or f"vllm_sjd_pac.engine.attention.gpu.{virtual}")
        compat.use_custom_attention(config)
