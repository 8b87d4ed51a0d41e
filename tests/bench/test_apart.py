"""An engine in a process of its own: it keeps its state, and its errors arrive."""

from __future__ import annotations

import os
from functools import partial

import psutil
import pytest

from vllm_sjd_pac.bench.apart import Apart


def _start(first: int) -> list[int]:
    if first < 0:
        raise ValueError(f"first: expected at least 0, got {first}")
    return [first]


def _append(held: list[int], value: int) -> tuple[list[int], int]:
    held.append(10 // value)
    return held, os.getpid()


def test_it_is_built_once_elsewhere() -> None:
    with Apart(_start, 1) as apart:
        append = partial(apart.run, _append)
        held, process = append(5)
        assert held == [1, 2]
        assert append(1) == ([1, 2, 10], process)
        assert psutil.Process(process).status() == psutil.STATUS_STOPPED
    assert process != os.getpid()
    assert not psutil.pid_exists(process)


def test_errors_arrive() -> None:
    with pytest.raises(ValueError, match="first: expected at least 0, got -1"):
        Apart(_start, -1)
    with Apart(_start, 1) as apart:
        with pytest.raises(ZeroDivisionError):
            apart.run(_append, 0)
        assert apart.run(_append, 2)[0] == [1, 5]
