"""Runs the kernel and back-end cases under Triton's interpreter, in a process of their own.

Triton decides at import time whether functions are interpreted, so the variable must be set before anything imports it,
and must not reach other tests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent


@pytest.mark.parametrize(("cases", "at_least"), [("kernel_cases.py", 35), ("backend_cases.py", 10)])
def test_cases_under_the_interpreter(cases, at_least):
    if cases == "backend_cases.py":
        pytest.importorskip("vllm")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / cases)],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "ERROR"},
        cwd=HERE.parents[1], capture_output=True, text=True, timeout=850,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    passed = re.search(r"(\d+) passed", result.stdout)
    assert int(passed[1] if passed else 0) >= at_least, result.stdout[-2000:]
