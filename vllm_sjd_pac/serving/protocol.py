"""The body of ``POST /v1/images/generations``: fields, ranges, and an error that names the field.

Policy for fields: OpenAI's own are all known. Those that cannot change a picture here (``quality``, ``style``,
``moderation``, ``user``, ``safety_identifier``) are checked and accepted; those that ask for something this server does
not do are refused with the reason; any other unknown field is refused by name, so that a misspelt one is never ignored.
"""

from __future__ import annotations

import difflib
import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_sjd_pac.config import SJDPACConfig
from vllm_sjd_pac.serving.errors import APIError

MAX_PROMPT_CHARACTERS = 32_000
MAX_IMAGES = 10
MAX_SEED = 2**63 - 1
_SIZE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})")

# OpenAI's fields that this server knows and does not do, with the reason.
_UNSUPPORTED = {
    "svg": "this model draws pixels, not SVG",
    "frame_count": "animated pictures are not supported",
    "frame_duration_ms": "animated pictures are not supported",
    "complexity": "the model has no planning stage",
}


class Extension(BaseModel):
    """The request's ``sjd_pac`` object: what the engine or this server honours per request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    every_row: bool | None = None


class ImageRequest(BaseModel):
    """A checked request; build it with `parse`. ``None`` means the default, as in OpenAI's reference."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS)]
    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_IMAGES)] | None = None
    size: str | None = None
    quality: Literal["auto", "low", "medium", "high", "xhigh", "max", "standard", "hd"] | None = None
    background: Literal["auto", "opaque", "transparent"] | None = None
    style: Literal["vivid", "natural"] | None = None
    moderation: Literal["auto", "low"] | None = None
    output_format: Literal["png", "jpeg", "webp", "gif", "svg"] | None = None
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = None
    response_format: Literal["b64_json", "url"] | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Field(ge=0, le=3)] | None = None
    user: str | None = None
    safety_identifier: str | None = None

    negative_prompt: Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS)] | None = None
    guidance_scale: Annotated[float, Field(ge=0, le=20, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    temperature: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    sjd_pac: Extension | None = None

    @property
    def count(self) -> int:
        return self.n or 1

    @property
    def format(self) -> str:
        return self.output_format or "png"

    @property
    def compression(self) -> int:
        return 100 if self.output_compression is None else self.output_compression

    @property
    def every_row(self) -> bool:
        return bool(self.sjd_pac and self.sjd_pac.every_row)

    def requested_size(self) -> tuple[int, int] | None:
        """(width, height), or None for the model's default.

        Raises:
            APIError: not "WIDTHxHEIGHT".
        """
        if self.size in (None, "auto"):
            return None
        found = _SIZE.fullmatch(self.size or "")
        if found is None:
            raise APIError(
                f"size {_shown(self.size)} is not a size; write WIDTHxHEIGHT, e.g. 128x128, or auto",
                param="size",
                code="invalid_value",
            )
        return int(found[1]), int(found[2])


def parse(body: bytes) -> ImageRequest:
    """Decode and check a request body.

    Raises:
        APIError: (400) the message names the field, the value and what is allowed.
    """
    try:
        content = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise APIError("the body is not UTF-8", code="invalid_json") from None
    except (ValueError, RecursionError) as error:
        raise APIError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(content, dict):
        raise APIError(f"the body must be a JSON object, not {_kind(content)}", code="invalid_json")
    _check_fields(content)
    try:
        request = ImageRequest.model_validate(content)
    except ValidationError as error:
        raise _api_error(error) from None
    _check_combinations(request)
    return request


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _check_fields(content: dict[str, Any]) -> None:
    known = list(ImageRequest.model_fields)
    for name, value in content.items():
        if name in _UNSUPPORTED and value is not None:
            raise APIError(f"{name} is not supported: {_UNSUPPORTED[name]}", param=name, code="unsupported_parameter")
        if name not in known and name not in _UNSUPPORTED:
            raise _unknown(name, name, known)
    for name in _UNSUPPORTED:
        content.pop(name, None)
    if content.get("prompt") is None:
        raise APIError("prompt is required", param="prompt", code="missing_required_parameter")
    extension = content.get("sjd_pac")
    if isinstance(extension, dict):
        for name in extension:
            if name.replace("-", "_") in SJDPACConfig.option_names():
                flag = "--sjd-pac-" + name.replace("_", "-")
                raise APIError(
                    f"sjd_pac.{name} cannot be set per request; start the server with {flag}",
                    param=f"sjd_pac.{name}",
                    code="unsupported_parameter",
                )
            if name not in Extension.model_fields:
                raise _unknown(f"sjd_pac.{name}", name, list(Extension.model_fields))


def _unknown(path: str, name: str, known: list[str]) -> APIError:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    shown = path if len(path) <= 80 else path[:80] + "…"
    return APIError(f"unknown parameter: {shown!r}{hint}", param=shown, code="unknown_parameter")


def _check_combinations(request: ImageRequest) -> None:
    def refuse(condition: bool, param: str, message: str, code: str = "unsupported_value") -> None:
        if condition:
            raise APIError(message, param=param, code=code)

    for param, text in (("prompt", request.prompt), ("negative_prompt", request.negative_prompt)):
        refuse(text is not None and not text.strip(), param, f"{param} is empty; describe it in a few words")
        refuse(text is not None and not _is_encodable(text), param, f"{param} holds an unpaired surrogate")
    refuse(
        request.response_format == "url",
        "response_format",
        "response_format 'url' is not supported: this server stores no pictures; use 'b64_json'",
    )
    refuse(
        request.background == "transparent",
        "background",
        "background 'transparent' is not supported: the model draws opaque pictures",
    )
    refuse(
        request.format in ("gif", "svg"),
        "output_format",
        f"output_format {request.format!r} is not supported; supported: png, jpeg, webp",
    )
    refuse(
        request.format == "png" and request.compression != 100,
        "output_compression",
        "output_compression applies to output_format jpeg and webp only; png is lossless",
    )
    refuse(
        not request.stream and bool(request.partial_images),
        "partial_images",
        "partial_images needs stream=true",
    )
    refuse(not request.stream and request.every_row, "sjd_pac.every_row", "sjd_pac.every_row needs stream=true")
    refuse(
        request.seed is not None and request.seed + request.count - 1 > MAX_SEED,
        "seed",
        f"seed + n − 1 must not exceed {MAX_SEED}",
        "invalid_value",
    )
    request.requested_size()


def _is_encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _api_error(error: ValidationError) -> APIError:
    """One line about the first problem, e.g. ``n=11 is not allowed: input should be less than or equal to 10``."""
    first = error.errors(include_url=False, include_context=False)[0]
    param = ".".join(str(part) for part in first["loc"])
    shown = param if first["type"] == "string_too_long" else f"{param}={_shown(first['input'])}"
    message = first["msg"][0].lower() + first["msg"][1:]
    code = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    return APIError(f"{shown} is not allowed: {message}", param=param, code=code)


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return _kind(value)
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 60 else text[:60] + "…"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
