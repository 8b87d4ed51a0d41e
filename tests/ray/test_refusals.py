"""A cluster that cannot serve is refused within seconds, with the reason and the node's name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from examples.ray_cluster.local_cluster import cluster, free_port
from tests import tiny_model
from tests.engine.conftest import build_engine

SECONDS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("models") / "eight-heads", heads=8)


@pytest.fixture(scope="module")
def refused(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What engines with four and eight ranks say on four nodes of one CPU each.

    The nodes: a sound head, one that loads no plugins, one without ours, and one with another version of it.
    """
    nodes: list[dict[str, str]] = [{}, {"VLLM_PLUGINS": ""}]
    for content in ("raise ImportError('not installed')", "__version__ = '0.0.9'"):
        package = tmp_path_factory.mktemp("stub") / "vllm_sjd_pac"
        package.mkdir()
        (package / "__init__.py").write_text(content)
        nodes.append({"PYTHONPATH": str(package.parent)})
    output = tmp_path_factory.mktemp("refusals") / "refusals.json"
    script = Path(__file__).with_name("refusals_run.py")
    with cluster(nodes) as environment:
        run = subprocess.run(
            [sys.executable, str(script), str(model), str(output), "4:120", f"8:{SECONDS}"],
            cwd=output.parent,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    answer = json.loads(output.read_text())
    assert len(answer["refusals"]) == 2
    assert len(answer["nodes"]) == 4
    return answer


def test_every_unfit_node_is_named_with_its_reason(refused: dict[str, Any]) -> None:
    message = refused["refusals"][0]["message"]
    assert sum(f"(id {node})" in message for node in refused["nodes"]) == 3, "all but the sound one"
    assert "has VLLM_PLUGINS='', which leaves sjd_pac out" in message
    assert "has no vllm-sjd-pac: install it on every node" in message
    assert "has vllm-sjd-pac 0.0.9 and the driver" in message


def test_too_few_cpus_are_a_clear_error_and_no_endless_wait(refused: dict[str, Any]) -> None:
    message, seconds = refused["refusals"][1]["message"], refused["refusals"][1]["seconds"]
    assert "--tensor-parallel-size 8 needs 8 CPUs, but the Ray cluster has 4" in message
    assert "on 4 nodes" in message
    assert f"{SECONDS} s later that is still so" in message
    assert SECONDS <= seconds < 60


def test_an_address_where_nothing_answers_is_refused_at_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    started = time.monotonic()
    with pytest.raises(ValueError, match=f"no Ray cluster answers at {address} .from RAY_ADDRESS"):
        build_engine(model, {"model": "sjd_pac"}, tensor_parallel_size=2, distributed_executor_backend="ray")
    assert time.monotonic() - started < 30


def test_the_older_ray_executor_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    with pytest.raises(ValueError, match="VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0 is not supported"):
        build_engine(model, {"model": "sjd_pac"}, tensor_parallel_size=2, distributed_executor_backend="ray")


def test_pipeline_parallel_is_refused_under_ray(model: Path) -> None:
    with pytest.raises(ValueError, match="--pipeline-parallel-size 2 is not supported; use --tensor-parallel-size"):
        build_engine(model, {"model": "sjd_pac"}, pipeline_parallel_size=2, distributed_executor_backend="ray")
