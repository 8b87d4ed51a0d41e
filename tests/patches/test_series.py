"""The series in ``patches/`` applies to the installed vLLM, replaces the run-time hooks, and changes no token."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_model
from tests.patches import generate
from vllm_sjd_pac.engine import compat

ROOT = Path(__file__).parents[2]
SERIES = sorted((ROOT / "patches").glob("*.patch"))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a patched copy of the installed vLLM: hard links, and real copies of the files that are patched."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    folder = tmp_path_factory.mktemp("patched")
    shutil.copytree(Path(spec.origin).parent, folder / "vllm", copy_function=_link)
    touched = {name for patch in SERIES for name in re.findall(r"^--- a/(.+)$", patch.read_text(), re.MULTILINE)}
    for name in touched:
        if (folder / name).exists():  # else a patch of the series creates it
            shutil.copyfile(folder / name, folder / "copy")
            os.replace(folder / "copy", folder / name)
    for patch in SERIES:
        environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
        subprocess.run(["git", "apply", "--whitespace=error", str(patch)], cwd=folder, env=environment, check=True)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def result(patched: Path, model: Path) -> dict[str, Any]:
    """What the patched vLLM says, in a process of its own."""
    path = os.pathsep.join([str(patched), str(ROOT)])
    run = subprocess.run(
        [sys.executable, "-m", "tests.patches.generate", str(model)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, run.stdout[-3000:] + run.stderr[-6000:]
    answer = json.loads(lines[0].removeprefix("RESULT "))
    assert Path(answer["vllm"]).is_relative_to(patched)
    return answer


def test_the_stock_vllm_needs_every_hook() -> None:
    assert compat.unneeded_hooks() == []


def test_the_patched_vllm_needs_no_hook(result: dict[str, Any]) -> None:
    assert result["unneeded"] == list(compat._REPLACEMENTS)
    assert result["hooks"] == []
    assert result["amx_requests"] == 0


def test_both_draw_the_same_tokens(result: dict[str, Any], model: Path) -> None:
    stock = generate.drafted(model)
    assert result["drafted"] == stock
    assert sum(map(sum, stock["accepted"])) > 20, "hardly any draft was accepted, so this compares little"


def test_seeded_chunked_prefill_survives_on_the_cpu(result: dict[str, Any], model: Path) -> None:
    assert result["chunked_plain"] == generate.plain(model, 64)
    with pytest.raises(RuntimeError, match="does not use offset"):
        generate.plain(model, 4)  # the stock vLLM does not


def test_flags_errors_and_routes_come_with_the_method(result: dict[str, Any]) -> None:
    assert result["command_line"] == {"spec_model": "sjd_pac", "speculative_config": {"tree": "chain"}}
    assert result["drafted"]["refusal"].startswith("VLLMValidationError: guidance_scale=-1 is not allowed")
    assert result["endpoints_before"] == []
    assert result["endpoints"] == ["sjd_pac_images"]
    assert result["endpoints_of_other_tasks"] == []


def test_the_readme_knows_every_patch_and_every_hook() -> None:
    text = (ROOT / "patches" / "README.md").read_text()
    hooks = {name for name in vars(compat) if name.startswith("hook_")} | set(compat._REPLACEMENTS)
    for name in hooks | {patch.name for patch in SERIES}:
        assert f"`{name}`" in text, f"patches/README.md does not mention {name}"
