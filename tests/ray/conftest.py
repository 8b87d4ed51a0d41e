"""Ray clusters on this machine, and what runs in them."""

from __future__ import annotations

import psutil
import pytest


def require_ray_on_cpus() -> None:
    """Skip a module whose workers need Ray, and a vLLM for CPUs."""
    pytest.importorskip("ray", reason="Ray is not installed")
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("the clusters of these tests have CPU nodes only", allow_module_level=True)


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
