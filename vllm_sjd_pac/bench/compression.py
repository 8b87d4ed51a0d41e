"""Tokens per forward pass, by rule and tree, measured with the engine: the same on every machine."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from vllm_sjd_pac.bench.settings import PROMPTS, Setting

BATCH = 16


def settings(drafts: int) -> list[Setting]:
    """The published methods, ours, and what tells them apart, at one node budget."""
    nodes = {"num_speculative_tokens": drafts}
    chain: dict[str, Any] = {**nodes, "tree": "chain"}
    result = [
        Setting("rejection, sjd, chain", {**chain, "acceptance": "rejection", "mode": "sjd"}),
        Setting("rejection, ac, chain", {**chain, "acceptance": "rejection", "mode": "ac"}),
        Setting("race, chain", {**chain, "acceptance": "race", "mode": "ac"}),
    ]
    if drafts >= 15:
        paper: dict[str, Any] = {**nodes, "tree": "full:3.3", "acceptance": "rejection"}
        result.insert(2, Setting("rejection, pd, full 3.3", {**paper, "mode": "pd"}))
        result.insert(3, Setting("rejection, pac, full 3.3", {**paper, "mode": "pac"}))
    return [*result, Setting("race, pac (default)", nodes)]


def measure(
    setting: Setting, model: str | None, pictures: int, guidance: float, engine_args: dict[str, Any]
) -> dict[str, Any]:
    """Mean over pictures of tokens / forward passes, its standard error, and the histogram of tokens in a pass."""
    generator = setting.start(model, 2 * BATCH, engine_args)
    speeds: list[float] = []
    histogram: Counter[int] = Counter()
    for start in range(0, pictures, BATCH):
        batch = range(start, min(start + BATCH, pictures))
        prompts = [PROMPTS[index % len(PROMPTS)] for index in batch]
        for picture in generator.generate(prompts, seeds=list(batch), guidance_scale=guidance):
            speeds.append(picture.tokens_per_forward)
            histogram.update(count + 1 for count in picture.accepted)
    passes = sum(histogram.values())
    return {
        "setting": setting.name,
        "tokens_per_forward": round(statistics.mean(speeds), 3),
        "standard_error": round(statistics.stdev(speeds) / len(speeds) ** 0.5, 3) if len(speeds) > 1 else None,
        "one_token_passes": round(histogram[1] / passes, 3),
        "histogram": {str(count): histogram[count] for count in sorted(histogram)},
    }


def table(
    drafts: int,
    model: str | None,
    pictures: int,
    guidance: float,
    engine_args: dict[str, Any],
    only: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """`measure` for all `settings` (those whose name contains one of `only`)."""
    chosen = [s for s in settings(drafts) if not only or any(part in s.name for part in only)]
    rows = [measure(setting, model, pictures, guidance, engine_args) for setting in chosen]
    base = rows[0]["tokens_per_forward"]
    return [{**row, "against_first": round(row["tokens_per_forward"] / base, 3)} for row in rows]
