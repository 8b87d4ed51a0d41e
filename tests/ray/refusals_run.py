"""Start engines over Ray that must be refused, in a process of its own; started by test_refusals.py.

It imports nothing of the tests and is started elsewhere: Ray lets workers import from the driver's folders first.

Arguments: model folder, file for the errors (JSON), and per engine RANKS:SECONDS (how long it waits for nodes).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main(model: str, output: str, *engines: str) -> None:
    import ray
    from vllm import LLM

    refusals = []
    for engine in engines:
        ranks, seconds = engine.split(":")
        options = {"model": "sjd_pac", "ray_wait": float(seconds)}
        started = time.monotonic()
        try:
            LLM(
                model, speculative_config=options, tensor_parallel_size=int(ranks), distributed_executor_backend="ray",
                dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=16, block_size=32, seed=0,
            )  # fmt: skip
        except ValueError as error:
            refusals.append({"message": str(error), "seconds": time.monotonic() - started})
    nodes = [node["NodeID"][:8] for node in ray.nodes()]
    Path(output).write_text(json.dumps({"refusals": refusals, "nodes": nodes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
