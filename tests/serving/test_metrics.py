"""Engine statistics become exact metrics, for draft trees too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def _value(name: str, **labels: str) -> float | None:
    from prometheus_client import REGISTRY

    return REGISTRY.get_sample_value(name, {"model_name": "tree", "engine": "0", **labels})


def _stats(steps: list[tuple[int, int]], twins: int = 0) -> Any:
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    from vllm_sjd_pac.engine.twins import TWINS_STATISTIC

    speculative = SpecDecodingStats.new(63)
    for drafted, accepted in steps:
        speculative.observe_draft(drafted, accepted)
    stats = SchedulerStats(spec_decoding_stats=speculative)
    if twins:
        stats.num_kv_fetch_reqs_by_stage[TWINS_STATISTIC] = twins
    return stats


def test_histogram_of_tokens_per_forward_is_exact() -> None:
    from vllm_sjd_pac.engine.metrics import EngineStatLogger

    logger = EngineStatLogger(SimpleNamespace(model_config=SimpleNamespace(served_model_name="tree")))  # type: ignore[arg-type]
    # Nodes drafted and drafts accepted by five requests in two steps: 1, 4, 4 and 3, 20 tokens.
    logger.record(_stats([(63, 0), (63, 3), (40, 3)], twins=3), None)
    logger.record(_stats([(63, 2), (63, 19)]), None)
    assert _value("sjd_pac:verifications_total") == 5
    assert _value("sjd_pac:drafted_nodes_total") == 63 * 4 + 40
    assert _value("sjd_pac:tokens_per_forward_sum") == 1 + 4 + 4 + 3 + 20
    assert _value("sjd_pac:tokens_per_forward_count") == 5
    assert _value("sjd_pac:tokens_per_forward_bucket", le="1.0") == 1
    assert _value("sjd_pac:tokens_per_forward_bucket", le="3.0") == 2
    assert _value("sjd_pac:tokens_per_forward_bucket", le="4.0") == 4
    assert _value("sjd_pac:accepted_tokens_total", depth="1") == 4
    assert _value("sjd_pac:accepted_tokens_total", depth="3") == 3
    assert _value("sjd_pac:accepted_tokens_total", depth="19") == 1
    assert _value("sjd_pac:accepted_tokens_total", depth="20") is None
    assert _value("sjd_pac:window_nodes") == 63
    assert _value("sjd_pac:twins_running") == 0


def test_twins_are_a_gauge() -> None:
    from vllm_sjd_pac.engine.metrics import EngineStatLogger

    logger = EngineStatLogger(SimpleNamespace(model_config=SimpleNamespace(served_model_name="tree")))  # type: ignore[arg-type]
    logger.record(_stats([], twins=3), None)
    assert _value("sjd_pac:twins_running") == 3
    logger.record(None, None)
    assert _value("sjd_pac:twins_running") == 3


def test_log_line_speaks_of_tokens_per_forward() -> None:
    from vllm_sjd_pac.engine.metrics import TreeLogging

    logging = TreeLogging()
    logging.observe(_stats([(63, 0), (63, 3)]).spec_decoding_stats)
    logging.observe(_stats([(40, 5)]).spec_decoding_stats)
    lines: list[str] = []
    logging.log(lambda text, *values: lines.append(text % values))
    logging.log(lambda text, *values: lines.append(text % values))
    assert len(lines) == 1
    assert lines[0].startswith("SJD-PAC: 3.67 tokens per forward")
    assert "55.3 drafted nodes" in lines[0]


def test_attaching_replaces_vllm_s_log_line_once() -> None:
    from vllm.v1.metrics.loggers import PerEngineStatLoggerAdapter

    from vllm_sjd_pac.engine import metrics

    class Plain:
        spec_decoding_logging = "vLLM's"

    plain = Plain()
    adapter = PerEngineStatLoggerAdapter.__new__(PerEngineStatLoggerAdapter)
    adapter.per_engine_stat_loggers = {0: plain}  # type: ignore[dict-item]
    manager = SimpleNamespace(stat_loggers=[adapter], engine_indexes=[0])
    config = SimpleNamespace(model_config=SimpleNamespace(served_model_name="tree"))
    for _ in range(2):
        metrics.attach(SimpleNamespace(logger_manager=manager, vllm_config=config))
    assert isinstance(plain.spec_decoding_logging, metrics.TreeLogging)
    assert len(manager.stat_loggers) == 2
