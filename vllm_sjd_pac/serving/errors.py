"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse


class APIError(Exception):
    """A request that ends with an OpenAI error body.

    Attributes:
        status: HTTP status; code: a short machine-readable word, e.g. ``unsupported_value``.
        param: the field at fault, dotted, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        status: HTTPStatus = HTTPStatus.BAD_REQUEST,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
        # A client's own words may come back in here, unpaired surrogates included, which no JSON response can hold.
        message, param = (
            None if text is None else text.encode("utf-8", "backslashreplace").decode()
            for text in (self.message, self.param)
        )
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, status_code=self.status.value)


def engine_error(error: Exception) -> APIError:
    """What a client is told about an exception of the engine; anything unknown becomes a 500 without its text."""
    from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError

    if isinstance(error, APIError):
        return error
    if isinstance(error, EngineDeadError):
        return APIError(
            "the engine has stopped; the server is shutting down",
            status=HTTPStatus.SERVICE_UNAVAILABLE,
            code="engine_dead",
        )
    if isinstance(error, GracefulHTTPError):
        return APIError(str(error), status=HTTPStatus(error.http_status), code="overloaded")
    if isinstance(error, GenerationError):
        return APIError(str(error), status=HTTPStatus(error.status_code), code="generation_error")
    if isinstance(error, VLLMClientError | ValueError):
        return APIError(str(error), param=getattr(error, "parameter", None), code="invalid_value")
    return APIError("internal error", status=HTTPStatus.INTERNAL_SERVER_ERROR, code="internal_error")
