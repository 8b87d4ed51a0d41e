"""On a CPU a step computes one of few numbers of rows, since every number costs the compilation of its products."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.conftest import build_engine, mixed_requests, run_requests
from vllm_sjd_pac.engine.sizes import padded_size


def test_sizes_are_few_and_near() -> None:
    sizes = [padded_size(tokens) for tokens in range(1, 4097)]
    assert sizes[:16] == list(range(1, 17))
    assert sizes == sorted(sizes)
    assert all(tokens <= size < tokens + max(8, tokens // 4) for tokens, size in enumerate(sizes, 1))
    assert [padded_size(size) for size in sizes] == sizes
    assert len(set(sizes)) < 128, "vLLM keeps 128 compiled products for each weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_without_a_slot_are_not_written(dtype: torch.dtype) -> None:
    """The padding's slot is -1: the last one of the block before the cache, if the kernel took it for a number."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    heads, block, size = 2, 32, 32
    memory = torch.zeros(3, heads, 2 * block, size, dtype=dtype)
    key_cache, value_cache = memory[1:].chunk(2, dim=2)
    key, value = torch.ones(2, 5, heads, size, dtype=dtype).unbind(0)
    slots = torch.tensor([3, -1, 40, -1, -1])
    ops.cpu_attn_reshape_and_cache(
        key, value, key_cache, value_cache, slots, _get_attn_isa(dtype, block, size), k_scale=1.0, v_scale=1.0,
        kv_cache_dtype="auto",
    )  # fmt: skip
    assert not memory[0].any()
    assert int((memory != 0).sum()) == 2 * 2 * heads * size


def test_steps_of_an_engine_have_these_sizes(constrained: Path) -> None:
    llm = build_engine(constrained, {"model": "sjd_pac", "adaptive_window": False}, max_num_batched_tokens=500)
    try:
        runner: Any = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        scheduled, computed, heads = [], [], []
        execute, forward, logits = runner.execute_model, runner._model_forward, runner.model.compute_logits

        def note_scheduled(output: Any, *args: Any, **kwargs: Any) -> Any:
            scheduled.append(output.total_num_scheduled_tokens)
            return execute(output, *args, **kwargs)

        def note_computed(input_ids: Any, *args: Any, **kwargs: Any) -> Any:
            computed.append(len(input_ids))
            return forward(input_ids, *args, **kwargs)

        def note_head(hidden: Any, *args: Any, **kwargs: Any) -> Any:
            heads.append(len(hidden))
            return logits(hidden, *args, **kwargs)

        runner.execute_model, runner._model_forward = note_scheduled, note_computed
        runner.model.compute_logits = note_head
        run_requests(llm, mixed_requests(24, seed=4))
    finally:
        del llm
        gc.collect()
    assert computed == [min(padded_size(tokens), 500) for tokens in scheduled if tokens]
    assert all(padded_size(rows) == rows for rows in heads)
    assert len(set(computed)) < len(set(scheduled)) / 2, "hardly any step was padded: the test shows nothing"
