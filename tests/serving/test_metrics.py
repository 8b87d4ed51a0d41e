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
