"""Start engines over Ray that must be refused, in a process of its own; started by test_refusals.py.

It imports nothing of the tests and is started elsewhere: Ray lets workers import from the driver's folders first.

Arguments: model folder, file for the errors (JSON), and per case KIND:COUNT:SECONDS: ``ranks`` or ``replicas``, and how
long it waits for nodes.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 16, "block_size": 32, "seed": 0,
}  # fmt: skip


def start_ranks(model: str, count: int, speculative: dict[str, Any]) -> None:
    from vllm import LLM

    ray = {"distributed_executor_backend": "ray", "tensor_parallel_size": count}
    LLM(model, speculative_config=speculative, **ray, **COMMON)


def start_replicas(model: str, count: int, speculative: dict[str, Any]) -> None:
    """The part of ``vllm serve`` that places engines and waits for them."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine import utils

    ray: dict[str, Any] = {"data_parallel_backend": "ray", "data_parallel_size": count, "data_parallel_size_local": 1}
    # vLLM wants one node at an address; those of the tests share one.
    utils._dp_nodes_master_first = lambda resources, _: list(resources.items())
    config = AsyncEngineArgs(model, speculative_config=speculative, **ray, **COMMON).create_engine_config()
    utils.CoreEngineActorManager(config, addresses=None, executor_class=None, log_stats=False)  # type: ignore[arg-type]


def main(model: str, output: str, *cases: str) -> None:
    import ray

    refusals = []
    for case in cases:
        kind, count, seconds = case.split(":")
        start = {"ranks": start_ranks, "replicas": start_replicas}[kind]
        started = time.monotonic()
        try:
            start(model, int(count), {"model": "sjd_pac", "ray_wait": float(seconds)})
        except ValueError as error:
            refusals.append({"message": str(error), "seconds": time.monotonic() - started})
    nodes = [node["NodeID"][:8] for node in ray.nodes()]
    groups = [group["state"] for group in ray.util.placement_group_table().values()]
    Path(output).write_text(json.dumps({"refusals": refusals, "nodes": nodes, "groups": groups}))


if __name__ == "__main__":
    main(*sys.argv[1:])
