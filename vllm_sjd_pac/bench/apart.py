"""Engines that are compared, each in a process of its own, as a server would run it.

In one process they would share what vLLM and its libraries keep there: compiled kernels, memory pools, thread teams.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

_held: Any = None
"""In a child process: what it was started for."""


def _build(build: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    global _held
    _held = build(*arguments)


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
        try:
            self._pool.submit(_build, build, arguments).result()
        except BaseException:
            self.close()
            raise

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """``function(built, *arguments)``, computed there; one call at a time."""
        return self._pool.submit(_apply, function, arguments).result()

    def close(self) -> None:
        """End the process."""
        self._pool.shutdown()

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
