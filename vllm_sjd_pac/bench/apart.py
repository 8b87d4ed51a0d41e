"""Engines that are compared, each in a process of its own, as a server would run it.

In one process they would share what vLLM and its libraries keep there: compiled kernels, memory pools, thread teams.
While one works the others are stopped: an idle engine wakes more than a thousand times a second (a dozen communication
threads, each 10 ms), which on few cores costs the working one up to a tenth of its speed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import psutil

_held: Any = None
"""In a child process: what it was started for."""


_PR_SET_PDEATHSIG = 1


def _build(build: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
    global _held
    if sys.platform == "linux":
        # A stopped process would not notice that the one that started it was killed.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _held = build(*arguments)
    return os.getpid()


def _apply(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return function(_held, *arguments)


class Apart:
    """What ``build(*arguments)`` returns, in a new process.

    ``build``, ``arguments`` and everything that `run` passes or returns must be picklable; the built thing need not be.
    To be closed, or used as a context.

    Raises:
        Exception: whatever ``build`` raised there.
    """

    def __init__(self, build: Callable[..., Any], *arguments: Any) -> None:
        # Spawned: a fork would copy threads' locks without the threads that hold them.
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        self._processes: list[psutil.Process] = []
        try:
            process = psutil.Process(self._pool.submit(_build, build, arguments).result())
            self._processes = [process, *process.children(recursive=True)]
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """``function(built, *arguments)``, computed there; one call at a time."""
        self._signal(signal.SIGCONT)
        try:
            return self._pool.submit(_apply, function, arguments).result()
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.is_running():
                process.send_signal(number)

    def close(self) -> None:
        """End the process."""
        self._signal(signal.SIGCONT)
        self._pool.shutdown()

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
