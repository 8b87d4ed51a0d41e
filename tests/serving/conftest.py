"""An application with the images API over a stand-in engine."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(scope="session")
def make_client() -> Callable[..., Any]:
    """Build a test client over a `FakeEngine`; ``client.app.state.engine`` is the engine."""
    import asyncio

    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    from tests.serving.fake_engine import FakeEngine
    from vllm_sjd_pac.serving.plugin import ImagesEndpoint

    def make(api_key: str | None = None, **engine_options: Any) -> Any:
        app = FastAPI()
        plugin = ImagesEndpoint()
        plugin.attach_router(app)
        if api_key is not None:
            from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

            app.add_middleware(AuthenticationMiddleware, tokens=[api_key])
        engine = FakeEngine(**engine_options)
        app.state.openai_serving_models = SimpleNamespace(base_model_paths=[SimpleNamespace(name="emoji")])
        app.state.engine = engine
        asyncio.run(plugin.init_state(engine, app.state, SimpleNamespace()))  # type: ignore[arg-type]
        return TestClient(app)

    return make


@pytest.fixture(scope="session")
def client(make_client: Callable[..., Any]) -> Any:
    return make_client()
