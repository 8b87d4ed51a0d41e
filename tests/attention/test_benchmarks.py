"""The GPU script's control flow on the CPU, and the roofline's arithmetic."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def roofline() -> ModuleType:
    spec = importlib.util.spec_from_file_location("roofline", BENCHMARKS / "roofline.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["roofline"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_gpu_script_runs_on_the_cpu(tmp_path):
    pytest.importorskip("triton")
    pytest.importorskip("transformers")
    report = tmp_path / "report.json"
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--cpu-smoke", "--json", str(report)],
        capture_output=True, text=True, timeout=850, cwd=tmp_path,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    found = json.loads(report.read_text())
    assert {row["check"] for row in found["checks"]} >= {
        "attention: triton",
        "attention: virtual requests",
        "same seed, on = off",
        "tree forward = transformers",
    }
    assert all(row["ok"] for row in found["checks"])
    assert len(found["step_times"]) == 4


def test_one_token_of_one_sequence_costs_the_weights(roofline):
    model, gpu = roofline.Model(), roofline.GPUS[1]
    ideal = roofline.Setting(1, 1, 0.0, 0.0, 1.0, 1.0, 1.0, 0)
    weights = 2 * (model.layers * model.layer_parameters + model.head_parameters)
    assert weights == pytest.approx(13.5e9, rel=0.01)  # 6.7 billion parameters, the input embedding not counted
    assert roofline.step_time(model, gpu, 1, 1, ideal) == pytest.approx(weights / gpu.bandwidth, rel=0.01)


def test_speed_up_falls_with_load(roofline):
    ups = [
        roofline.speed_up(roofline.Model(), roofline.GPUS[1], images, 64, 4.8, roofline.Setting())
        for images in (1, 4, 16, 64)
    ]
    assert ups == sorted(ups, reverse=True)
    assert ups[0] > 3
    assert ups[-1] < 1


def test_table_and_plot(roofline, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "roofline.png"
    assert roofline.main(["--tokens-per-forward", "64=4.8", "--images", "1,8", "--png", str(picture)]) == 0
    assert "| 8 |" in capsys.readouterr().out
    assert picture.stat().st_size > 10_000
