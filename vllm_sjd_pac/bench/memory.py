"""Bytes that a request adds, by acceptance rule, and resident memory over many requests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_sjd_pac.bench.settings import PROMPTS

if TYPE_CHECKING:
    from vllm_sjd_pac.offline import ImageGenerator


def window_bytes(image_vocabulary: int, drafts: int, rule: str, smoothing: bool = False) -> int:
    """Bytes of one request's window state.

    Args:
        image_vocabulary: tokens that an image may hold; drafts: length of the main chain at most.
        rule: ``race`` keeps noise rows (with smoothing estimate rows, too), ``rejection`` the laws of its drafts.
    """
    from vllm_sjd_pac.decoding import CounterNoise, RaceRule, RejectionRule, WindowPool

    chosen: Any = RejectionRule() if rule == "rejection" else RaceRule(CounterNoise(1), smoothing=0.25 * smoothing)
    return WindowPool(chosen, image_vocabulary, drafts, capacity=1).bytes_per_request


def resident_megabytes() -> float:
    """Resident memory of this process (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def growth(
    generator: ImageGenerator, requests: int, at_once: int, guidance: float, prompts: Sequence[str] = PROMPTS
) -> list[tuple[int, float]]:
    """(requests done, resident MiB) at about twenty moments while `requests` pictures are drawn."""
    from vllm_sjd_pac.bench.load import closed_loop

    # Full batches first, so that buffers have their size; then what is measured.
    closed_loop(generator, at_once, at_once * 2, guidance, prompts=prompts)
    trace = [(0, resident_megabytes())]
    done = 0
    while done < requests:
        count = min(max(at_once, requests // 20), requests - done)
        closed_loop(generator, at_once, count, guidance, done, prompts)
        done += count
        trace.append((done, resident_megabytes()))
    generator.llm.llm_engine.step()  # the workers hear of the last requests' end with the next step
    return trace


def state_of(generator: ImageGenerator) -> dict[str, int]:
    """Slots, streams and requests that the engine still holds: all zero when nothing is running."""
    core: Any = generator.llm.llm_engine.engine_core
    runner = core.engine_core.model_executor.driver_worker.worker.model_runner
    return {
        "requests": len(runner.sjd_requests),
        "windows": len(runner.sjd_sampler.pool),
        "scheduler_requests": len(core.engine_core.scheduler.requests),
    }
