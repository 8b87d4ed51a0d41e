"""A cluster that cannot serve is refused within seconds, with the reason and the node's name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.ray_cluster.local_cluster import cluster, free_port
from tests import tiny_model
from tests.engine.conftest import build_engine
from tests.ray.conftest import require_ray_on_cpus

require_ray_on_cpus()
SECONDS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("models") / "sixteen-heads", heads=16)


@pytest.fixture(scope="module")
def refused(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What engines with too many ranks or replicas, and with just enough, say on four nodes of two CPUs each.

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
    cases = ["ranks:8:120", f"ranks:16:{SECONDS}", "replicas:4:120", f"replicas:5:{SECONDS}"]
    with cluster(nodes, cpus=2) as environment:
        run = subprocess.run(
            [sys.executable, str(script), str(model), str(output), *cases],
            cwd=output.parent,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    answer = json.loads(output.read_text())
    assert len(answer["refusals"]) == len(cases)
    assert len(answer["nodes"]) == 4
    return answer


@pytest.mark.parametrize("case", [0, 2], ids=["ranks", "replicas"])
def test_every_unfit_node_is_named_with_its_reason(refused: dict[str, Any], case: int) -> None:
    message = refused["refusals"][case]["message"]
    assert sum(f"(id {node})" in message for node in refused["nodes"]) == 3, "all but the sound one"
    assert "has VLLM_PLUGINS='', which leaves sjd_pac out" in message
    assert "has no working vllm-sjd-pac (ImportError: not installed): install it on every node" in message
    assert "has vllm-sjd-pac 0.0.9 and the driver" in message


def test_too_few_cpus_are_a_clear_error_and_no_endless_wait(refused: dict[str, Any]) -> None:
    message, seconds = refused["refusals"][1]["message"], refused["refusals"][1]["seconds"]
    assert "--tensor-parallel-size 16 needs 16 CPUs, but the Ray cluster has 8" in message
    assert "on 4 nodes" in message
    assert f"{SECONDS} s later that is still so" in message
    assert SECONDS <= seconds < 300


def test_replicas_that_do_not_fit_are_a_clear_error_and_no_endless_wait(refused: dict[str, Any]) -> None:
    message, seconds = refused["refusals"][3]["message"], refused["refusals"][3]["seconds"]
    assert "--data-parallel-size 5 over Ray needs for each engine 2 CPUs on one node" in message
    assert f": 2 CPUs, and {SECONDS} s later that is still so" in message
    assert SECONDS <= seconds < 300


def test_a_refused_start_holds_no_cpus(refused: dict[str, Any]) -> None:
    assert refused["groups"] == ["REMOVED"] * len(refused["groups"])
    assert len(refused["groups"]) >= 6


def test_an_address_where_nothing_answers_is_refused_at_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ValueError, match=f"no Ray cluster answers at {address} .from RAY_ADDRESS"):
        build_engine(model, {"model": "sjd_pac"}, tensor_parallel_size=2, distributed_executor_backend="ray")


def test_the_older_ray_executor_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    with pytest.raises(ValueError, match="VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0 is not supported"):
        build_engine(model, {"model": "sjd_pac"}, tensor_parallel_size=2, distributed_executor_backend="ray")


def test_pipeline_parallel_is_refused_under_ray(model: Path) -> None:
    with pytest.raises(ValueError, match="--pipeline-parallel-size 2 is not supported; use --tensor-parallel-size"):
        build_engine(model, {"model": "sjd_pac"}, pipeline_parallel_size=2, distributed_executor_backend="ray")
