"""Two tensor-parallel ranks: the tokens of one, and equal drafts on both (the engine compares them in every step)."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.conftest import Run, tensor_parallel_requests


@pytest.mark.parametrize("executor", ["mp", "ray"])
def test_two_ranks_draw_the_tokens_of_one(
    run_engine: Callable[..., Run], constrained: Path, tmp_path: Path, executor: str
) -> None:
    if executor == "ray":
        pytest.importorskip("ray", reason="Ray is not installed")
    output = tmp_path / "tokens.json"
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    environment["RAY_ADDRESS"] = "local"  # Ray starts a cluster of its own, in which both ranks share a node
    # Otherwise Ray writes a token to the home folder, which clusters started later would take up.
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    command = [sys.executable, "-m", "tests.engine.tensor_parallel_run", str(constrained), str(output), executor]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    two = json.loads(output.read_text())
    one = run_engine(constrained, {"model": "sjd_pac", "mode": "ar"}, tensor_parallel_requests())
    assert two["tokens"] == one.tokens
    assert two["accepted"] > 20
