"""The endpoint plugin: routes on vLLM's own API server, in the same process.

vLLM loads endpoint plugins only when ``VLLM_PLUGINS`` names them; ``engine.compat.hook_endpoints`` adds this one to
every API server whose engine runs the method, so that ``vllm serve MODEL --speculative-model sjd_pac`` is enough.
"""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.datastructures import State
    from vllm.engine.protocol import EngineClient

logger = init_logger("vllm.sjd_pac.serving")  # below "vllm", whose handlers it then uses


class ImagesEndpoint:
    """vLLM's ``EndpointPlugin``: the images API, ``GET /sjd-pac`` and the metrics."""

    name = "sjd_pac_images"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._app: FastAPI | None = None

    def attach_router(self, app: FastAPI) -> None:
        from vllm_sjd_pac.serving import page, routes

        app.include_router(routes.router)
        app.include_router(page.router)
        self._app = app

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        from vllm_sjd_pac.engine import metrics
        from vllm_sjd_pac.serving.images import ImageService
        from vllm_sjd_pac.serving.routes import OpenAIAuthenticationErrors

        if engine_client is None:  # vLLM's render server has no engine
            return
        model_names = [path.name for path in state.openai_serving_models.base_model_paths]
        state.sjd_pac_images = ImageService(engine_client, model_names)
        metrics.attach(engine_client)
        if self._app is not None:
            # Here and not in attach_router: vLLM adds its key check in between, and it must lie inside this one. By now
            # the stack is built, by vLLM's SageMaker set-up, so that add_middleware would come too late.
            if self._app.middleware_stack is None:
                self._app.middleware_stack = self._app.build_middleware_stack()
            self._app.middleware_stack = OpenAIAuthenticationErrors(self._app.middleware_stack)
        logger.info("SJD-PAC: POST /v1/images/generations and GET /sjd-pac are ready")


def add_to(plugins: list[Any], supported_tasks: Any) -> list[Any]:
    """`plugins` with this one, unless it is there already or the server generates nothing."""
    known = any(plugin.name == ImagesEndpoint.name for plugin in plugins)
    if known or not set(ImagesEndpoint.required_tasks) & set(supported_tasks or ()):
        return plugins
    return [*plugins, ImagesEndpoint()]
