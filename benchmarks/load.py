"""Load on a running server: many pictures at once, random disconnects, latencies and memory.

    python benchmarks/load.py --url http://127.0.0.1:8000 --requests 200 --concurrency 16 --disconnects 0.3

Prints one JSON object. A client that disconnects does so at a random moment before its picture would be done; those
requests are counted and have no latency. With ``--server-pid`` the resident memory of the server's process tree is read
before, in the middle and at the end (Linux).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

PROMPTS = ("a red apple on grass", "a penguin in the snow", "an owl in space", "a blue fish in the sea")


@dataclass
class Tally:
    """What became of the requests; `latencies` in seconds, of complete pictures only."""

    latencies: list[float] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    forwards: int = 0
    memory: list[int] = field(default_factory=list)


async def run(
    url: str,
    *,
    requests: int,
    concurrency: int,
    disconnects: float,
    key: str | None = None,
    seed: int = 0,
    time_limit: float = 600.0,
    server_pid: int | None = None,
    body: dict[str, Any] | None = None,
) -> Tally:
    """Send `requests`, at most `concurrency` at a time; every `disconnects`-th share of them leaves early.

    Raises:
        TimeoutError: not all was done within `time_limit` seconds.
    """
    choices = random.Random(seed)
    tally = Tally()
    pending = iter(range(requests))
    headers = {"authorization": f"Bearer {key}"} if key else {}
    # A new connection per request: on a reused one, the server's keep-alive time-out could look like a failure.
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=0)

    async def worker(client: httpx.AsyncClient) -> None:
        for number in pending:
            if server_pid is not None and number % max(1, requests // 10) == 0:
                tally.memory.append(resident_kilobytes(server_pid))
            patience = None
            if choices.random() < disconnects:
                usual = sorted(tally.latencies)[len(tally.latencies) // 2] if tally.latencies else 2.0
                patience = choices.random() * usual
            content = {
                "prompt": choices.choice(PROMPTS),
                "seed": number,
                "stream": choices.random() < 0.5,
                **(body or {}),
            }
            await one(client, content, patience, tally)

    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=time_limit, limits=limits) as client:
        if server_pid is not None:
            tally.memory.append(resident_kilobytes(server_pid))
        async with asyncio.timeout(time_limit), asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(worker(client))
        if server_pid is not None:
            tally.memory.append(resident_kilobytes(server_pid))
    return tally


async def one(client: httpx.AsyncClient, content: dict[str, Any], patience: float | None, tally: Tally) -> None:
    """One request; after `patience` seconds the connection is closed, whatever has come by then."""
    started = time.perf_counter()
    try:
        async with asyncio.timeout(patience):
            response = await client.post("/v1/images/generations", json=content)
    except TimeoutError:
        tally.outcomes["disconnected"] += 1
        return
    except httpx.HTTPError as error:
        tally.outcomes[type(error).__name__] += 1
        return
    numbers = final_numbers(response) if response.status_code == 200 else None
    if numbers is None:
        tally.outcomes[f"status {response.status_code}"] += 1
        return
    tally.outcomes["finished"] += 1
    tally.latencies.append(time.perf_counter() - started)
    tally.tokens += numbers["tokens"]
    tally.forwards += numbers["forwards"] or 0


def final_numbers(response: httpx.Response) -> dict[str, Any] | None:
    """The ``sjd_pac`` object of a complete answer, streamed or not; None when it ends in an error."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        return response.json()["sjd_pac"]
    last = json.loads(response.text.strip().split("\n\n")[-1].split("data: ", 1)[1])
    return last["sjd_pac"] if last["type"] == "image_generation.completed" else None


def resident_kilobytes(pid: int) -> int:
    """Resident memory of a process and its descendants; pages they share count once per process."""
    total, family = 0, {pid}
    statuses = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                lines = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
            except OSError:
                continue
            statuses[int(folder.name)] = (int(lines["PPid"]), int(lines.get("VmRSS", "0 kB").split()[0]))
    for _ in range(8):  # generations
        family |= {child for child, (parent, _) in statuses.items() if parent in family}
    for member in family & statuses.keys():
        total += statuses[member][1]
    return total


def quantile(values: Sequence[float], share: float) -> float | None:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) if ordered else None


def summary(tally: Tally, seconds: float) -> dict[str, Any]:
    finished = tally.outcomes["finished"]
    return {
        "outcomes": dict(tally.outcomes),
        "seconds": round(seconds, 2),
        "pictures_per_second": round(finished / seconds, 3),
        "latency_p50": quantile(tally.latencies, 0.5),
        "latency_p95": quantile(tally.latencies, 0.95),
        "tokens_per_forward": round(tally.tokens / tally.forwards, 3) if tally.forwards else None,
        "resident_megabytes": [kilobytes // 1024 for kilobytes in tally.memory],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--key", default=None, help="its API key")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--disconnects", type=float, default=0.3, help="share of clients that leave early")
    parser.add_argument("--seed", type=int, default=0, help="of the clients' choices")
    parser.add_argument("--time-limit", type=float, default=1800.0, help="seconds for all requests together")
    parser.add_argument("--server-pid", type=int, default=None, help="read the memory of this process tree")
    given = parser.parse_args()
    started = time.perf_counter()
    tally = asyncio.run(
        run(
            given.url,
            requests=given.requests,
            concurrency=given.concurrency,
            disconnects=given.disconnects,
            key=given.key,
            seed=given.seed,
            time_limit=given.time_limit,
            server_pid=given.server_pid,
        )
    )
    print(json.dumps(summary(tally, time.perf_counter() - started)))
    failures = sum(count for outcome, count in tally.outcomes.items() if outcome not in ("finished", "disconnected"))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
