"""Throughput and latency at a constant number of pictures in flight."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_sjd_pac.bench.apart import Apart
from vllm_sjd_pac.bench.settings import PROMPTS, Setting, rotated

if TYPE_CHECKING:
    from vllm_sjd_pac.offline import ImageGenerator

_WARM_UP = 8
"""Pictures before the first turn, at least: an engine that learns has learnt by then."""


@dataclass(frozen=True)
class Round:
    """One closed loop: ``pictures`` finished in ``seconds``; ``latencies`` in seconds; ``forwards`` of all
    requests; ``drafts``: mean drafted nodes per request and step, None = no speculation."""

    pictures: int
    seconds: float
    latencies: list[float]
    forwards: int
    drafts: float | None

    @property
    def per_minute(self) -> float:
        return 60 * self.pictures / self.seconds


def closed_loop(
    generator: ImageGenerator,
    concurrency: int,
    pictures: int,
    guidance: float,
    seed: int = 0,
    prompts: Sequence[str] = PROMPTS,
) -> Round:
    """Keep `concurrency` pictures in flight until `pictures` are done. Tokens only: pixels are not decoded.

    Raises:
        RuntimeError: the engine refused a request; the message is its reason.
    """
    from vllm import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    from vllm_sjd_pac.engine.requests import image_sampling_params

    engine, family, tokenizer = generator.llm.llm_engine, generator.family, generator.llm.get_tokenizer()
    encoded = [family.encode_prompt(tokenizer, prompt) for prompt in prompts]
    window: Any = engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    born: dict[str, float] = {}
    latencies: list[float] = []
    forwards = sent = 0
    chosen: list[int] = []
    mark = time.monotonic_ns()
    started = time.perf_counter()
    while len(latencies) < pictures:
        while sent < pictures and sent - len(latencies) < concurrency:
            prompt = encoded[sent % len(encoded)]
            params = image_sampling_params(family, prompt, seed=seed + sent, guidance_scale=guidance)
            params.output_kind = RequestOutputKind.FINAL_ONLY
            name = f"{mark}-{sent}"
            engine.add_request(name, TokensPrompt(prompt_token_ids=prompt.prompt_token_ids), params)
            born[name] = time.perf_counter()
            sent += 1
        for output in engine.step():
            if output.finished:
                completions: Any = output.outputs
                if completions[0].finish_reason == "error":
                    raise RuntimeError(f"the engine refused a request: {completions[0].stop_reason}")
                forwards += len(completions[0].spec_decode_metrics.per_step_accepted)
                name = "-".join(output.request_id.split("-")[:2])
                latencies.append(time.perf_counter() - born.pop(name))
        chosen.append(window.dynamic_sd_lookup[0])
    seconds = time.perf_counter() - started
    speculates = window.sjd_pac_options.mode != "ar"
    return Round(pictures, seconds, latencies, forwards, statistics.mean(chosen) if speculates else None)


def compare(
    settings: Sequence[Setting],
    model: str | None,
    concurrencies: Sequence[int],
    *,
    turns: int,
    rounds: int,
    guidance: float,
    engine_args: dict[str, Any],
    prompts: Sequence[str] = PROMPTS,
) -> list[dict[str, Any]]:
    """One row per concurrency and setting; ratios are medians over turns against the first setting.

    Each setting's engine runs in a process of its own; one works at a time.

    Args:
        turns: how often the settings take turns; rounds: pictures of a turn, per picture in flight.
    """
    most = 2 * max(concurrencies)
    with ExitStack() as stack:
        engines = {
            setting.name: stack.enter_context(Apart(Setting.start, setting, model, most, engine_args, len(settings)))
            for setting in settings
        }
        return [
            row
            for concurrency in concurrencies
            for row in _at_load(engines, concurrency, turns, rounds, guidance, prompts)
        ]


def _at_load(
    engines: dict[str, Apart], concurrency: int, turns: int, rounds: int, guidance: float, prompts: Sequence[str]
) -> list[dict[str, Any]]:
    """The rows of one concurrency."""
    rows = []
    results: dict[str, list[Round]] = {name: [] for name in engines}
    for turn in range(-1, turns):
        for name in rotated(list(engines), turn):
            count = concurrency * rounds if turn >= 0 else max(2 * concurrency, _WARM_UP)
            result = engines[name].run(closed_loop, concurrency, count, guidance, 1000 * turn, prompts)
            if turn >= 0:
                results[name].append(result)
    base = next(iter(results.values()))
    for name, finished in results.items():
        ratios = sorted(r.per_minute / b.per_minute for r, b in zip(finished, base, strict=True))
        latencies = sorted(latency for r in finished for latency in r.latencies)
        drafts = [r.drafts for r in finished if r.drafts is not None]
        rows.append(
            {
                "concurrency": concurrency,
                "setting": name,
                "pictures_per_minute": round(statistics.median(r.per_minute for r in finished), 2),
                "against_first": round(statistics.median(ratios), 3),
                "against_first_range": [round(ratios[0], 3), round(ratios[-1], 3)],
                "latency_p50": round(latencies[len(latencies) // 2], 3),
                "latency_p95": round(latencies[min(len(latencies) - 1, int(0.95 * len(latencies)))], 3),
                "drafted_nodes": round(statistics.mean(drafts), 1) if drafts else None,
                "pictures_per_forward_of_a_request": round(
                    sum(r.pictures for r in finished) / max(1, sum(r.forwards for r in finished)), 4
                ),
            }
        )
    return rows
