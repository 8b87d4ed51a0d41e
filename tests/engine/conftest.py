"""Tiny models and a way to run requests through a fresh in-process engine."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_model


@dataclass
class Request:
    """A prompt, its sampling parameters, and the step after which the client gives up (None: never)."""

    prompt: list[int]
    params: dict[str, Any]
    abort_after: int | None = None


@dataclass
class Run:
    """What an engine made of a list of requests, in their order; None for aborted ones."""

    tokens: list[list[int] | None]
    accepted: list[list[int]]
    preemptions: int
    free_blocks: int
    total_blocks: int
    leftovers: dict[str, int] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)


@pytest.fixture(scope="session")
def constrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("models") / "constrained")


@pytest.fixture(scope="session")
def unconstrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("models") / "unconstrained", constrained=False)


def build_engine(model: Path, speculative_config: dict[str, Any] | None, **arguments: Any) -> Any:
    from vllm import LLM

    defaults: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 16,
        "block_size": 32,
        "seed": 0,
        "disable_log_stats": False,
    }
    return LLM(str(model), speculative_config=speculative_config, **{**defaults, **arguments})


def preemptions(llm: Any) -> int:
    return sum(int(m.value) for m in llm.get_metrics() if m.name == "vllm:num_preemptions")


def run_requests(llm: Any, requests: list[Request]) -> Run:
    """Run all requests at once through an engine, aborting those that ask for it."""
    from vllm import SamplingParams, TokensPrompt

    engine = llm.llm_engine
    before = preemptions(llm)
    for index, request in enumerate(requests):
        engine.add_request(f"r{index}", TokensPrompt(prompt_token_ids=request.prompt), SamplingParams(**request.params))
    outputs: dict[str, Any] = {}
    step = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                outputs[output.request_id] = output
        step += 1
        leaving = [f"r{i}" for i, r in enumerate(requests) if r.abort_after == step and f"r{i}" not in outputs]
        if leaving:
            engine.abort_request(leaving)
        assert step < 20_000, "the engine makes no progress"
    engine.step()  # the runner hears of the last finished requests
    scheduler = engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    done = [outputs.get(f"r{index}") for index in range(len(requests))]
    done = [o if o is not None and o.outputs[0].finish_reason != "abort" else None for o in done]
    metrics = [o.outputs[0].spec_decode_metrics if o else None for o in done]
    return Run(
        tokens=[list(o.outputs[0].token_ids) if o else None for o in done],
        accepted=[list(m.per_step_accepted) if m else [] for m in metrics],
        preemptions=preemptions(llm) - before,
        free_blocks=pool.get_num_free_blocks(),
        total_blocks=pool.num_gpu_blocks - 1,
        leftovers={
            "requests": len(scheduler.requests),
            "twins": len(getattr(scheduler, "twins", ())),
            "windows": len(engine_windows(llm)),
        },
        outputs=done,
    )


def engine_windows(llm: Any) -> Any:
    """The runner's windows in use (an empty tuple for an engine without the plugin)."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    return runner.sjd_sampler.pool if hasattr(runner, "sjd_sampler") else ()


@pytest.fixture(scope="session")
def run_engine() -> Callable[..., Run]:
    def run(model: Path, speculative_config: dict[str, Any] | None, requests: list[Request], **arguments: Any) -> Run:
        llm = build_engine(model, speculative_config, **arguments)
        try:
            return run_requests(llm, requests)
        finally:
            del llm
            gc.collect()

    return run


def mixed_requests(count: int, seed: int, *, guidance: bool = True, exotic: bool = True) -> list[Request]:
    """Requests of all kinds: guided or not, many sampling parameters, different lengths, some aborted."""
    rng = random.Random(seed)
    requests = []
    for index in range(count):
        words = rng.sample(tiny_model.WORDS, rng.randint(1, 6))
        params: dict[str, Any] = {"temperature": 1.0, "seed": 1000 * seed + index, "max_tokens": 60}
        if guidance and rng.random() < 0.6:
            extra: dict[str, Any] = {"guidance_scale": rng.choice([3.0, 0.0, 1.5])}
            if rng.random() < 0.5:
                extra["negative_token_ids"] = tiny_model.prompt(*rng.sample(tiny_model.WORDS, rng.randint(0, 6)))
            params["extra_args"] = extra
        if rng.random() < 0.2:
            params["temperature"] = rng.choice([0.0, 0.7, 1.4])
        if rng.random() < 0.25:
            params["top_k"] = rng.choice([1, 5, 10])
        if rng.random() < 0.25:
            params["top_p"] = rng.choice([0.5, 0.9])
        if rng.random() < 0.15:
            params["min_p"] = 0.05
        if rng.random() < 0.2:
            params["max_tokens"] = rng.randint(1, 35)
        if exotic:
            if rng.random() < 0.1:
                params["logit_bias"] = {20: 2.0, 30: -3.0}
            if rng.random() < 0.1:
                params["repetition_penalty"] = 1.3
            if rng.random() < 0.1:
                params["stop_token_ids"] = [20, 25]
            if rng.random() < 0.1:
                params["min_tokens"] = min(10, params["max_tokens"])
            if rng.random() < 0.1:
                params["allowed_token_ids"] = list(range(2, 40))
            if rng.random() < 0.1:
                params["logprobs"] = 2
            if rng.random() < 0.05:
                params["bad_words"] = ["<20>"]
        requests.append(Request(tiny_model.prompt(*words), params))
    return requests


def tensor_parallel_requests() -> list[Request]:
    """Guided and other requests for the test of two ranks, the same in every process."""
    return mixed_requests(12, seed=9, exotic=False)
