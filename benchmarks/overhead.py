"""Time of a step outside the model's forward pass, by batch size, on the bundled model.

    python benchmarks/overhead.py --batches 1 8 16

Prints a Markdown table: milliseconds per step, in the forward pass, in sampling and drafting, and elsewhere (scheduler,
attention metadata, input preparation, output processing). Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

PROMPT = "a red apple on grass"


class Timer:
    """Adds up the time spent in wrapped methods."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0

    def wrap(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started
                self.calls += 1

        setattr(owner, name, timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16])
    options = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm_sjd_pac.offline import ImageGenerator

    generator = ImageGenerator(max_num_seqs=2 * max(options.batches))
    core = generator.llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
    runner = core.model_executor.driver_worker.worker.model_runner
    forward, sampling, step = Timer(), Timer(), Timer()
    forward.wrap(runner, "_model_forward")
    sampling.wrap(runner, "sample_tokens")
    step.wrap(generator.llm.llm_engine, "step")
    generator.generate(PROMPT)
    print("| batch | steps | ms a step | forward | sampling and drafting | elsewhere | outside the forward pass |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for batch in options.batches:
        for timer in (forward, sampling, step):
            timer.seconds, timer.calls = 0.0, 0
        generator.generate([PROMPT] * batch, seeds=list(range(batch)))
        total, inside, drafting = (1e3 * t.seconds / step.calls for t in (step, forward, sampling))
        print(
            f"| {batch} | {step.calls} | {total:.1f} | {inside:.1f} | {drafting:.1f} | {total - inside - drafting:.1f} "
            f"| {100 * (1 - inside / total):.0f} % |"
        )


if __name__ == "__main__":
    main()
