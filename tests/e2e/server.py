"""Start and stop a real server: ``sjd-pac serve`` in processes of its own, on a free port of this machine."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from examples.ray_cluster.local_cluster import free_port

START_SECONDS = 420


@dataclass(frozen=True)
class Server:
    """A running server; its processes form one process group."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def openai(self, key: str = "none", **options: object) -> object:
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=300, **options)  # type: ignore[arg-type]

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that carry `labels`; 0 when there is none."""
        total = 0.0
        for line in httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines():
            sample = re.fullmatch(r"([^\s{]+)(?:\{(.*)\})? (\S+)", line)
            if sample and sample[1] == name:
                found = dict(re.findall(r'(\w+)="([^"]*)"', sample[2] or ""))
                if labels.items() <= found.items():
                    total += float(sample[3])
        return total

    def wait_idle(self, seconds: float = 60) -> None:
        """Wait until nothing runs; then no KV block may be in use.

        Raises:
            AssertionError: something still runs, or blocks are lost.
        """
        names = (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "sjd_pac:twins_running",
            "vllm:kv_cache_usage_perc",
        )
        end = time.monotonic() + seconds
        while True:
            left = {name: self.metric(name) for name in names}
            if not any(left.values()):
                return
            assert time.monotonic() < end, left
            time.sleep(0.25)


def _end_with_parent() -> None:
    """A test run that is killed takes its server along (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


@contextlib.contextmanager
def serve(folder: Path, *arguments: str) -> Iterator[Server]:
    """Run ``sjd-pac serve`` with `arguments` until the block ends."""
    port = free_port()
    log = folder / f"server-{port}.log"
    command = [sys.executable, "-m", "vllm_sjd_pac.cli", "serve", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--enforce-eager", "--uvicorn-log-level", "warning", "--disable-uvicorn-access-log", *arguments]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    try:
        server = Server(process, port, log)
        _wait_healthy(server)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=10)


def _wait_healthy(server: Server) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if server.process.poll() is not None:
            break
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{server.url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    tail = server.log.read_text(errors="replace")[-3000:]
    raise AssertionError(f"the server did not start (exit status {server.process.poll()}):\n{tail}")
