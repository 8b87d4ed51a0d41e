"""Ray clusters on this machine, and what runs in them."""

from __future__ import annotations

import psutil
import pytest

pytest.importorskip("ray", reason="Ray is not installed")


def workers() -> list[psutil.Process]:
    """Our executor's worker processes in clusters that this process has started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "JacobiRayWorkerProc" in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found
