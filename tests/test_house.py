"""Imports point downwards: the algorithm knows no vLLM, vLLM's layer no family, models nothing of serving."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "vllm_sjd_pac"
RANK = {"decoding": 0, "models": 1, "engine": 2, "offline": 3, "serving": 3, "cli": 5, "doctor": 3, "bench": 4}


def imported(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return names


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if room not in RANK:
        return
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "vllm":
            assert room != "decoding", f"{path} imports {name}"
        if parts[0] == "vllm_sjd_pac" and len(parts) > 1:
            assert RANK.get(parts[1], -1) <= RANK[room], f"{path} imports {name}"


def test_importing_the_package_is_cheap() -> None:
    import subprocess
    import sys

    probe = "import sys, vllm_sjd_pac, vllm_sjd_pac.plugin; print('torch' in sys.modules, 'vllm' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]
