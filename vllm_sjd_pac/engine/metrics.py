"""Prometheus metrics ``sjd_pac:*``, next to vLLM's own on ``/metrics``.

All of them live in the API-server process. The engine's part arrives once per step with vLLM's ``SchedulerStats``: its
speculative statistics count, for every guided pair once, the drafted nodes and how many requests accepted at least
``i + 1`` drafts; since a walk goes down a tree one depth at a time, that is acceptance by depth, and differences of
neighbouring counts give the exact histogram of tokens per forward.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.metrics.loggers import PerEngineStatLoggerAdapter, StatLoggerBase
from vllm.v1.spec_decode.metrics import SpecDecodingLogging

from vllm_sjd_pac.engine.twins import TWINS_STATISTIC

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.sjd_pac.metrics")  # below "vllm", whose handlers it then uses
_TOKENS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 128)
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
_DECODE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class ServingMetrics:
    """What the images API counts itself."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Histogram

        self.images = Counter("sjd_pac:images", "Pictures by outcome: finished, aborted, refused, failed.", ["outcome"])
        self.latency = Histogram(
            "sjd_pac:image_latency_seconds", "From accepting a picture to its last token.", buckets=_SECONDS
        )
        self.decode_seconds = Histogram(
            "sjd_pac:pixel_decode_seconds", "Tokens to encoded picture, partial ones included.", buckets=_DECODE_SECONDS
        )
        self.image_forwards = Counter("sjd_pac:image_forwards", "Forward passes of finished pictures.")
        self.image_tokens = Counter("sjd_pac:image_tokens", "Tokens of finished pictures.")
        self.image_rate = Histogram(
            "sjd_pac:image_tokens_per_forward", "Tokens per forward pass of each finished picture.", buckets=_TOKENS
        )

    def image_finished(self, seconds: float, tokens: int, accepted: list[int] | None) -> None:
        """Count a finished picture; `accepted` holds one entry per forward pass."""
        self.latency.observe(seconds)
        if accepted:
            self.image_forwards.inc(len(accepted))
            self.image_tokens.inc(tokens)
            self.image_rate.observe(tokens / len(accepted))


@functools.cache
def serving() -> ServingMetrics:
    """The metrics of this process; Prometheus allows each name once."""
    return ServingMetrics()


class _EngineMetrics:
    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        labels = ["model_name", "engine"]
        self.tokens_per_forward = Histogram(
            "sjd_pac:tokens_per_forward",
            "Tokens that one request gained in one verifying forward pass (accepted drafts and one more).",
            labels,
            buckets=_TOKENS,
        )
        self.accepted = Counter(
            "sjd_pac:accepted_tokens", "Accepted drafts by depth in the draft tree, from 1.", [*labels, "depth"]
        )
        self.drafted = Counter("sjd_pac:drafted_nodes", "Drafted nodes that a forward pass verified.", labels)
        self.forwards = Counter("sjd_pac:verifications", "Requests times forward passes that verified drafts.", labels)
        self.window = Gauge(
            "sjd_pac:window_nodes",
            "Drafted nodes per request in the newest verifying step.",
            labels,
            multiprocess_mode="mostrecent",
        )
        self.twins = Gauge(
            "sjd_pac:twins_running",
            "Hidden unconditional sequences that run for guided requests.",
            labels,
            multiprocess_mode="mostrecent",
        )


@functools.cache
def _engine_metrics() -> _EngineMetrics:
    return _EngineMetrics()


class EngineStatLogger(StatLoggerBase):
    """A vLLM stat logger for one engine: `SchedulerStats` of every step into the metrics."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        metrics, labels = _engine_metrics(), (str(vllm_config.model_config.served_model_name), str(engine_index))
        self._labels = labels
        self._accepted = metrics.accepted
        self._tokens_per_forward = metrics.tokens_per_forward.labels(*labels)
        self._drafted = metrics.drafted.labels(*labels)
        self._forwards = metrics.forwards.labels(*labels)
        self._window = metrics.window.labels(*labels)
        self._twins = metrics.twins.labels(*labels)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is None:
            return
        self._twins.set(scheduler_stats.num_kv_fetch_reqs_by_stage.get(TWINS_STATISTIC, 0))
        speculative = scheduler_stats.spec_decoding_stats
        if speculative is None or not speculative.num_drafts:
            return
        self._forwards.inc(speculative.num_drafts)
        self._drafted.inc(speculative.num_draft_tokens)
        self._window.set(speculative.num_draft_tokens / speculative.num_drafts)
        reached = [speculative.num_drafts, *speculative.num_accepted_tokens_per_pos, 0]
        for depth, (here, deeper) in enumerate(itertools.pairwise(reached)):
            if not here:
                break
            if depth:
                self._accepted.labels(*self._labels, str(depth)).inc(here)
            for _ in range(here - deeper):
                self._tokens_per_forward.observe(depth + 1)

    def log_engine_initialized(self) -> None:
        pass


class _EveryEngine(PerEngineStatLoggerAdapter):
    """One `EngineStatLogger` per engine."""


class TreeLogging(SpecDecodingLogging):
    """vLLM's periodic log line, for draft trees: their siblings exclude each other, so no acceptance rate is given."""

    def log(self, log_fn: Callable[..., Any] = logger.info) -> None:
        verifications = sum(self.num_drafts)
        if verifications:
            seconds = max(time.monotonic() - self.last_log_time, 1e-6)
            tokens = verifications + sum(self.num_accepted_tokens)
            log_fn(
                "SJD-PAC: %.2f tokens per forward (%.1f tokens/s), %.1f drafted nodes per request and step",
                tokens / verifications,
                tokens / seconds,
                sum(self.num_draft_tokens) / verifications,
            )
        self.reset()


def attach(engine_client: Any) -> None:
    """Feed the metrics from the engine's statistics; without these (``--disable-log-stats``) only pictures count."""
    serving()
    manager = getattr(engine_client, "logger_manager", None)
    if manager is None or any(isinstance(logger, _EveryEngine) for logger in manager.stat_loggers):
        return
    for stat_logger in manager.stat_loggers:
        for one in getattr(stat_logger, "per_engine_stat_loggers", {0: stat_logger}).values():
            if hasattr(one, "spec_decoding_logging"):
                one.spec_decoding_logging = TreeLogging()
    manager.stat_loggers.append(_EveryEngine(engine_client.vllm_config, manager.engine_indexes, EngineStatLogger))
