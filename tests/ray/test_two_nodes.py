"""A server whose two ranks run on two Ray nodes: same tokens, pictures, a killed worker, and a restart."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from examples.ray_cluster.local_cluster import cluster
from tests.e2e.server import Server, serve
from tests.engine.conftest import Request, run_engine  # noqa: F401 (a fixture)
from tests.ray.conftest import require_ray_on_cpus, workers
from vllm_sjd_pac.models.emoji import checkpoint_path

require_ray_on_cpus()

ARGUMENTS = ("--distributed-executor-backend", "ray", "--tensor-parallel-size", "2", "--sjd-pac-verify-ranks")
PROMPT, SEED, TOKENS = "a red apple on grass", 3, 64
SECONDS = 120


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[None]:
    with cluster() as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def server(two_nodes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("ray"), *ARGUMENTS) as running:
        yield running


def complete(server: Server, guidance: float, seed: int) -> list[int]:
    body: dict[str, Any] = {"model": "emoji", "prompt": PROMPT, "seed": seed, "max_tokens": TOKENS}
    body |= {"return_token_ids": True, "vllm_xargs": {"guidance_scale": guidance}}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def test_two_nodes_draw_the_tokens_of_one_process(server: Server, run_engine: Callable[..., Any]) -> None:  # noqa: F811
    from transformers import AutoTokenizer

    cases = [(4.0, SEED), (4.0, SEED + 1), (1.0, SEED)]
    with ThreadPoolExecutor() as pool:
        over_ray = list(pool.map(lambda case: complete(server, *case), cases))
    prompt = AutoTokenizer.from_pretrained(checkpoint_path())(PROMPT)["input_ids"]
    plain = [
        Request(prompt, {"seed": seed, "max_tokens": TOKENS, "extra_args": {"guidance_scale": guidance}})
        for guidance, seed in cases
    ]
    assert over_ray == run_engine(checkpoint_path(), {"model": "sjd_pac", "mode": "ar"}, plain).tokens
    assert len({tuple(tokens) for tokens in over_ray}) == len(cases)
    assert server.metric("sjd_pac:accepted_tokens_total") > 30, "drafts must have been accepted"
    assert server.metric("sjd_pac:accepted_tokens_total", depth="2") > 0


def test_the_ranks_are_on_two_nodes(server: Server) -> None:
    raylets = {process.ppid() for process in workers()}
    assert len(workers()) == len(raylets) == 2
    assert all("raylet" in psutil.Process(pid).name() for pid in raylets)


def left_behind(server: Server) -> list[str]:
    """Processes of the server's group, and workers, that still run."""
    group = [process for process in psutil.process_iter() if in_group(process, server.process.pid)]
    return [repr(process) for process in group + workers()]


def in_group(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def test_a_killed_worker_is_an_error_within_seconds_and_a_restart_serves(server: Server, tmp_path: Path) -> None:
    import openai

    client: Any = server.openai()
    request: dict[str, Any] = {"model": "emoji", "prompt": PROMPT, "extra_body": {"seed": SEED}}
    before = client.images.generate(**request).data[0].b64_json
    victim = workers()[1]
    stream = iter(client.images.generate(**request, n=4, stream=True, partial_images=3))
    assert next(stream).type == "image_generation.partial_image"  # of the first picture's first quarter
    victim.suspend()  # no rank draws on without it
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.images.generate, **request)
        time.sleep(1)
        assert not waiting.done()
        victim.kill()
        with pytest.raises(openai.APIError):
            list(stream)
        assert isinstance(waiting.exception(timeout=SECONDS), openai.APIError)
    with contextlib.suppress(httpx.TransportError):  # until nothing listens any more
        while server.process.poll() is None:
            assert httpx.get(f"{server.url}/health", timeout=SECONDS).status_code == 503
    server.process.wait(timeout=SECONDS)
    end = time.monotonic() + SECONDS
    while left_behind(server) and time.monotonic() < end:
        time.sleep(0.2)
    assert left_behind(server) == []
    with serve(tmp_path, *ARGUMENTS) as again:
        client = again.openai()
        assert client.images.generate(**request).data[0].b64_json == before
