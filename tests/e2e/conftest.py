"""One server for the whole session: starting it costs more than all tests together."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.e2e.server import Server, serve

KEY = "a-key-for-tests"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """``sjd-pac serve`` with the bundled model and an API key.

    ``SJD_PAC_TEST_SERVER=PORT`` uses a server that runs already (started with the same key) instead.
    """
    port = os.environ.get("SJD_PAC_TEST_SERVER")
    if port:
        yield Server(None, int(port), None)  # type: ignore[arg-type]
        return
    with serve(tmp_path_factory.mktemp("server"), "--api-key", KEY) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: Server) -> object:
    """The unmodified `openai` client."""
    return server.openai(KEY)
