"""Routes of the images API; the work is done in `images` and `streaming`."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.logger import init_logger

from vllm_sjd_pac.serving import answers, streaming
from vllm_sjd_pac.serving.errors import APIError, engine_error
from vllm_sjd_pac.serving.images import ImageService, Job
from vllm_sjd_pac.serving.protocol import parse

PATH = "/v1/images/generations"
MAX_BODY_BYTES = 1 << 20
_OTHER_METHODS = ["GET", "HEAD", "PUT", "PATCH", "DELETE"]
_CLIENT_CLOSED = 499

router = APIRouter()
logger = init_logger("vllm.sjd_pac.serving")  # below "vllm", whose handlers it then uses


@router.post(PATH)
async def generate_images(request: Request) -> Response:
    """OpenAI's ``images.generate``."""
    service: ImageService = request.app.state.sjd_pac_images
    try:
        job = service.prepare(parse(await _read_body(request)))
        if service.engine.errored:
            raise APIError(
                "the engine has stopped; the server is shutting down",
                status=HTTPStatus.SERVICE_UNAVAILABLE,
                code="engine_dead",
            )
        if job.request.stream:
            return StreamingResponse(
                streaming.events(service, job),
                media_type=streaming.MEDIA_TYPE,
                headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            )
        return await _until_disconnect(request, _respond(service, job))
    except APIError as error:
        return error.response()
    except Exception as error:
        logger.exception("image request failed")
        return engine_error(error).response()


@router.api_route(PATH, methods=_OTHER_METHODS, include_in_schema=False)
async def wrong_method() -> JSONResponse:
    return APIError(
        f"{PATH} takes POST only", status=HTTPStatus.METHOD_NOT_ALLOWED, code="method_not_allowed"
    ).response()


@router.post("/v1/images/edits", include_in_schema=False)
@router.post("/v1/images/variations", include_in_schema=False)
async def not_supported(request: Request) -> JSONResponse:
    return APIError(
        f"{request.url.path} is not supported: the model draws from words only; use {PATH}",
        status=HTTPStatus.NOT_FOUND,
        code="unsupported_endpoint",
    ).response()


async def _respond(service: ImageService, job: Job) -> Response:
    pictures = await service.draw_all(job)
    data = []
    for picture in pictures:
        entry = {"b64_json": await service.encode(job, picture.tokens)}
        if job.caption is not None:
            entry["revised_prompt"] = job.caption
        data.append(entry)
    width, height = job.size
    return JSONResponse(
        {
            "created": job.created,
            "data": data,
            "background": "opaque",
            "output_format": job.request.format,
            "quality": "high",
            "size": f"{width}x{height}",
            "usage": answers.usage(job, pictures),
            "sjd_pac": answers.statistics(job, pictures),
        }
    )


async def _read_body(request: Request) -> bytes:
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise APIError(
            f"content type {kind[:80] or 'missing'!r} is not supported; send application/json",
            code="invalid_content_type",
        )
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise APIError(
                f"the body is larger than {MAX_BODY_BYTES} bytes",
                status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                code="body_too_large",
            )
    return bytes(body)


async def _until_disconnect(request: Request, work: Any) -> Response:
    """Do `work` unless the client goes away first; then it is cancelled, which aborts its engine requests."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return Response(status_code=_CLIENT_CLOSED)
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class OpenAIAuthenticationErrors:
    """vLLM's key check answers ``{"error": "Unauthorized"}``; under ``/v1/images`` this gives it OpenAI's shape."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or not path.startswith("/v1/images"):
            await self.app(scope, receive, send)
            return
        refused = False

        async def rewrite(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start" and message["status"] == HTTPStatus.UNAUTHORIZED:
                refused = True
                headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
                message = {**message, "headers": [*headers, (b"content-length", str(len(_UNAUTHORIZED)).encode())]}
            elif message["type"] == "http.response.body" and refused:
                message = {"type": "http.response.body", "body": _UNAUTHORIZED}
            await send(message)

        await self.app(scope, receive, rewrite)


_UNAUTHORIZED = json.dumps(
    APIError(
        "missing or wrong API key; send it as 'Authorization: Bearer KEY'",
        status=HTTPStatus.UNAUTHORIZED,
        code="invalid_api_key",
    ).body
).encode()
