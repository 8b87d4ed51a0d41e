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
    setting: Setting,
    model: str | None,
    pictures: int,
    guidance: float,
    engine_args: dict[str, Any],
    engines: int = 1,
    prompts: Sequence[str] = PROMPTS,
) -> dict[str, Any]:
    """Mean over pictures of tokens / forward passes, its standard error, and the histogram of tokens in a pass."""
    generator = setting.start(model, 2 * BATCH, engine_args, engines)
    speeds: list[float] = []
    histogram: Counter[int] = Counter()
    for start in range(0, pictures, BATCH):
        batch = range(start, min(start + BATCH, pictures))
        chosen = [prompts[index % len(prompts)] for index in batch]
        for picture in generator.generate(chosen, seeds=list(batch), guidance_scale=guidance):
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
    prompts: Sequence[str] = PROMPTS,
) -> list[dict[str, Any]]:
    """`measure` for all `settings` (those whose name contains one of `only`).

    Raises:
        ValueError: no setting's name contains any of `only`.
    """
    known = settings(drafts)
    chosen = [s for s in known if not only or any(part in s.name for part in only)]
    if not chosen:
        raise ValueError(
            f"--only {' '.join(only)}: no setting's name contains it; there are {', '.join(s.name for s in known)}"
        )
    rows = [measure(s, model, pictures, guidance, engine_args, len(chosen), prompts) for s in chosen]
    base = rows[0]["tokens_per_forward"]
    return [{**row, "against_first": round(row["tokens_per_forward"] / base, 3)} for row in rows]
