"""Clients that come in crowds and leave without a word."""

from __future__ import annotations

import asyncio
from typing import Any

from benchmarks import load
from tests.e2e.conftest import KEY
from tests.e2e.server import Server
from tests.e2e.test_images_api import draw


def test_random_disconnects_leave_nothing_behind(server: Server, client: Any) -> None:
    """A short form of ``benchmarks/load.py --requests 200 --concurrency 16``."""
    expected = draw(client, seed=30).data
    aborted = server.metric("sjd_pac:images_total", outcome="aborted")
    tally = asyncio.run(
        load.run(server.url, requests=24, concurrency=16, disconnects=0.5, key=KEY, seed=1, time_limit=400)
    )
    assert set(tally.outcomes) <= {"finished", "disconnected"}
    assert tally.outcomes["finished"] > 3
    assert tally.outcomes["disconnected"] >= 3
    server.wait_idle()
    assert server.metric("sjd_pac:images_total", outcome="aborted") > aborted
    assert server.metric("sjd_pac:images_total", outcome="failed") == 0
    assert draw(client, seed=30).data == expected
