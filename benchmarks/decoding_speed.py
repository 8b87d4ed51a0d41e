"""How long one batched step of the acceptance rules takes, without any model: verify and draft, per rule and shape.

    python -m benchmarks.decoding_speed [--threads 2] [--repeats 20] [--json results.json]

Printed: the median over the repeats and, in brackets, the fastest repeat, both in CPU time of the calling thread
(all there is with one thread; wall time means nothing on a busy machine). ``--wall`` measures wall time.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from vllm_sjd_pac.decoding import (
    AcceptanceRule,
    CounterNoise,
    RaceRule,
    RejectionRule,
    TreeBatch,
    WindowPool,
    default_tree,
)

SHAPES = [(1, 64, 1280), (16, 64, 1280), (8, 64, 8192)]


def rules(vocab: int) -> dict[str, AcceptanceRule]:
    return {
        "race": RaceRule(CounterNoise(vocab)),
        "race, λ=.25": RaceRule(CounterNoise(vocab), smoothing=0.25),
        "race, noise asked again": RaceRule(CounterNoise(vocab), keep_noise=False),
        "rejection": RejectionRule(),
        "rejection, residual": RejectionRule(candidates="residual"),
    }


def measure(
    rule: AcceptanceRule, batch: int, nodes: int, vocab: int, repeats: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Milliseconds of verify and draft with rows that change a little from step to step."""
    tree = default_tree(nodes)
    pool = WindowPool(rule, vocab, tree.main_length, capacity=batch)
    state = pool.gather(pool.allocate_many(torch.arange(batch)))
    trees = TreeBatch.stack([tree] * batch)
    tokens = rule.draft(trees, state, None)
    tokens[:, 0] = 0
    generator = torch.Generator().manual_seed(0)
    picture = 2.5 * torch.randn(batch, 1, vocab, generator=generator)
    times: dict[str, list[float]] = {"verify": [], "draft": [], "tokens": []}
    for step in range(repeats + 3):
        rows = picture + 0.3 * torch.randn(batch, nodes, vocab, generator=generator)
        start = clock()
        verdict = rule.verify(trees, tokens, rows, state)
        middle = clock()
        tokens = rule.draft(trees, state, verdict)
        end = clock()
        if step >= 3:
            times["verify"].append(1e3 * (middle - start))
            times["draft"].append(1e3 * (end - middle))
            times["tokens"].append(float(verdict.counts.float().mean()))
    result = {name: statistics.median(values) for name, values in times.items()}
    result |= {f"{name}_least": min(times[name]) for name in ("verify", "draft")}
    return result | {"bytes_per_request": pool.bytes_per_request}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--wall", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.perf_counter if options.wall else time.thread_time
    results = []
    print("| B, N, V | rule | verify ms (least) | draft ms (least) | MB a request | tokens a step here |")
    print("| --- | --- | --- | --- | --- | --- |")
    for batch, nodes, vocab in SHAPES:
        for name, rule in rules(vocab).items():
            row = measure(rule, batch, nodes, vocab, options.repeats, clock)
            results.append({"batch": batch, "nodes": nodes, "vocab": vocab, "rule": name, **row})
            print(
                f"| {batch}, {nodes}, {vocab} | {name} | {row['verify']:.2f} ({row['verify_least']:.2f}) | "
                f"{row['draft']:.2f} ({row['draft_least']:.2f}) | {row['bytes_per_request'] / 1e6:.2f} | "
                f"{row['tokens']:.1f} |",
                flush=True,
            )
    if options.json:
        system = {"torch": torch.__version__, "machine": platform.machine(), "threads": options.threads}
        options.json.write_text(json.dumps({"system": system, "results": results}, indent=1))


if __name__ == "__main__":
    main()
