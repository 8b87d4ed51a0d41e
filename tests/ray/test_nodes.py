"""What makes a node unfit, and which network interface a node uses."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from vllm_sjd_pac.config import SJDPACConfig
from vllm_sjd_pac.engine import nodes
from vllm_sjd_pac.models.emoji import checkpoint_path


@pytest.fixture
def here() -> dict[str, Any]:
    return nodes.reporter()(SJDPACConfig().to_mapping(), str(checkpoint_path()))


def test_a_node_like_the_driver_is_fit(here: dict[str, Any]) -> None:
    assert here["model"] is not None
    assert here["source"]
    nodes.check(here, {"a": dict(here), "b": dict(here)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"plugin": None, "failure": "OSError: x"}, "has no working vllm-sjd-pac (OSError: x)"),
        ({"plugin": "0.0.9"}, "has vllm-sjd-pac 0.0.9 and the driver"),
        ({"source": "0" * 16}, "has source files of vllm-sjd-pac (SHA-256) 0000"),
        ({"vllm": "0.31.0"}, "has vLLM 0.31.0 and the driver 0.32"),
        ({"python": "3.8"}, "has Python 3.8"),
        ({"options": "ValueError: unknown"}, "reading of the options"),
        ({"entry_point": False}, "no entry point sjd_pac"),
        ({"allowed": ""}, "has VLLM_PLUGINS=''"),
        ({"allowed": "other,sjd_pac2"}, "leaves sjd_pac out"),
        ({"model": None}, f"has no config.json in the model's folder {checkpoint_path()}"),
        ({"model": "1"}, "has another config.json"),
    ],
)
def test_a_node_that_differs_is_refused_by_name(here: dict[str, Any], change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match="node b ") as error:
        nodes.check(here, {"a": dict(here), "b": {**here, **change}})
    assert words in str(error.value)
    assert "node a" not in str(error.value)


def test_allowing_this_plugin_among_others_is_fit(here: dict[str, Any]) -> None:
    nodes.check(here, {"a": {**here, "allowed": "other,sjd_pac"}})


def test_other_options_are_seen(here: dict[str, Any]) -> None:
    other = nodes.reporter()(SJDPACConfig(tree="chain").to_mapping(), str(checkpoint_path()))
    assert nodes.difference(here, other) is not None
    assert nodes.reporter()({"unknown": 1}, str(checkpoint_path()))["options"].startswith("ValueError")


def test_a_folder_without_a_model_is_seen(here: dict[str, Any], tmp_path: Path) -> None:
    there = nodes.reporter()(SJDPACConfig().to_mapping(), str(tmp_path))
    assert "no config.json" in (nodes.difference(here, there) or "")


def test_a_relative_model_folder_is_the_same_for_workers_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    from vllm_sjd_pac.engine.ray import JacobiRayExecutor, use_our_executor

    folder = checkpoint_path()
    monkeypatch.chdir(folder.parent)
    model = SimpleNamespace(model=f"./{folder.name}", tokenizer="organisation/name")
    parallel = SimpleNamespace(distributed_executor_backend="ray", data_parallel_backend="mp")
    use_our_executor(SimpleNamespace(model_config=model, parallel_config=parallel))
    assert model == SimpleNamespace(model=str(folder), tokenizer="organisation/name")
    assert parallel.distributed_executor_backend is JacobiRayExecutor


def test_gloo_uses_the_interface_that_ray_uses() -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    from vllm_sjd_pac.engine.ray import gloo_interface

    loopback = next(
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(entry.family == socket.AF_INET and entry.address == "127.0.0.1" for entry in addresses)
    )
    assert gloo_interface("127.0.0.1", None) == loopback
    assert gloo_interface("127.0.0.2", None) == loopback
    assert gloo_interface("203.0.113.7", None) is None, "an address of no interface here"
    assert gloo_interface("203.0.113.7", loopback) == loopback, "the driver's choice holds where it exists"
    assert gloo_interface("127.0.0.1", "no-such-interface") == loopback, "and nowhere else"
