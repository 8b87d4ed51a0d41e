"""Two engine replicas that vLLM places over Ray: both draw, and the same seed is the same picture in each."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from examples.ray_cluster.local_cluster import cluster
from tests.e2e.server import Server, serve
from tests.ray.conftest import require_ray_on_cpus

require_ray_on_cpus()

REPLICAS = 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # Each replica takes one CPU for its engine and one for its worker.
    with cluster([{}], cpus=2 * REPLICAS) as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        arguments = ("--data-parallel-size", str(REPLICAS), "--data-parallel-backend", "ray")
        with serve(tmp_path_factory.mktemp("replicas"), *arguments) as running:
            yield running


def test_both_replicas_draw_and_agree(server: Server) -> None:
    client: Any = server.openai()

    def draw(seed: int) -> str:
        answer = client.images.generate(model="emoji", prompt="a red apple on grass", extra_body={"seed": seed})
        return answer.data[0].b64_json

    with ThreadPoolExecutor() as pool:
        pictures = list(pool.map(draw, [1] * 4))
    for engine in range(REPLICAS):
        assert server.metric("sjd_pac:accepted_tokens_total", engine=str(engine)) > 0, f"replica {engine} has not drawn"
    assert len(set(pictures)) == 1
    assert draw(2) != pictures[0]
