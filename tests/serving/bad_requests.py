"""Requests that must fail, each with its documented status; used with a fake engine and against a running server."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

PATH = "/v1/images/generations"
PROMPT = "a red apple on grass"


@dataclass(frozen=True)
class BadRequest:
    """One request; `param` is the field that the error must name (None: no particular one)."""

    name: str
    content: bytes
    status: int = 400
    param: str | None = None
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": "application/json"})
    method: str = "POST"
    path: str = PATH


def _field(name: str, param: str, value: Any, status: int = 400, **others: Any) -> BadRequest:
    field_name = param.split(".")[0]
    body = {"prompt": PROMPT, **others, field_name: value}
    return BadRequest(name, json.dumps(body).encode(), status, param)


def _raw(name: str, content: bytes, param: str | None = None, **others: Any) -> BadRequest:
    return BadRequest(name, content, param=param, **others)


BAD_REQUESTS: tuple[BadRequest, ...] = (
    # the body
    _raw("empty body", b""),
    _raw("broken JSON", b'{"prompt": "a red apple"'),
    _raw("not JSON", b"prompt=a+red+apple"),
    _raw("JSON array", b'["a red apple"]'),
    _raw("JSON string", b'"a red apple"'),
    _raw("JSON null", b"null"),
    _raw("not UTF-8", b'{"prompt": "\xff\xfe"}'),
    _raw("nested too deep", b'{"prompt": ' + b"[" * 100_000),
    _raw("NaN guidance", b'{"prompt": "a red apple", "guidance_scale": NaN}'),
    _raw("infinite temperature", b'{"prompt": "a red apple", "temperature": Infinity}'),
    _raw("overflowing guidance", b'{"prompt": "a red apple", "guidance_scale": 1e999}', "guidance_scale"),
    _raw("integer of 5,000 digits", b'{"prompt": "a red apple", "n": ' + b"1" * 5000 + b"}"),
    _raw("body over 1 MiB", b'{"prompt": "' + b"a" * (1 << 20) + b'"}', status=413),
    _raw("form content type", b"prompt=a", headers={"content-type": "application/x-www-form-urlencoded"}),
    _raw("text content type", b'{"prompt": "a"}', headers={"content-type": "text/plain"}),
    _raw("multipart content type", b'{"prompt": "a"}', headers={"content-type": "multipart/form-data; boundary=x"}),
    _raw("no content type", b'{"prompt": "a"}', headers={}),
    _raw("GET", b"", method="GET", status=405),
    _raw("DELETE", b"", method="DELETE", status=405),
    _raw("edits", b"{}", path="/v1/images/edits", status=404),
    _raw("variations", b"{}", path="/v1/images/variations", status=404),
    # the prompt
    _raw("no prompt", b"{}", "prompt"),
    _field("null prompt", "prompt", None),
    _field("empty prompt", "prompt", ""),
    _field("blank prompt", "prompt", " \t\n "),
    _field("prompt of non-breaking spaces", "prompt", "\u00a0\u2003"),
    _field("prompt list", "prompt", ["a red apple"]),
    _field("prompt number", "prompt", 7),
    _field("prompt object", "prompt", {"text": "a red apple"}),
    _field("prompt over 32,000 characters", "prompt", "apple " * 6000),
    _field("prompt over the model's context", "prompt", "apple " * 5000),
    _field("prompt of one word too long for the context", "prompt", "x " * 15_000),
    _raw("unpaired surrogate", b'{"prompt": "\\ud83c apple"}', "prompt"),
    # n, size, formats
    _field("n zero", "n", 0),
    _field("n negative", "n", -1),
    _field("n over 10", "n", 11),
    _field("n huge", "n", 10**18),
    _field("n text", "n", "2"),
    _field("n fraction", "n", 1.5),
    _field("n boolean", "n", True),
    _field("unsupported size", "size", "1024x1024"),
    _field("size of one pixel", "size", "1x1"),
    _field("huge size", "size", "99999x99999"),
    _field("size beyond all numbers", "size", "9" * 400 + "x128"),
    _field("negative size", "size", "-128x128"),
    _field("zero size", "size", "0x0"),
    _field("size in words", "size", "big"),
    _field("size with capital X and spaces", "size", "128 X 128"),
    _field("size in other digits", "size", "١٢٨x١٢٨"),
    _field("size list", "size", [128, 128]),
    _field("unknown format", "output_format", "bmp"),
    _field("gif", "output_format", "gif"),
    _field("format in capitals", "output_format", "PNG"),
    _field("compression over 100", "output_compression", 101, output_format="jpeg"),
    _field("negative compression", "output_compression", -1, output_format="webp"),
    _field("compressed png", "output_compression", 50, output_format="png"),
    _field("url response", "response_format", "url"),
    _field("unknown response format", "response_format", "base64"),
    _field("transparent background", "background", "transparent"),
    _field("unknown quality", "quality", "best"),
    _field("unknown style", "style", "cubist"),
    # streaming
    _field("stream text", "stream", "yes"),
    _field("partial images over 3", "partial_images", 4, stream=True),
    _field("negative partial images", "partial_images", -1, stream=True),
    _field("partial images without stream", "partial_images", 2),
    _field("every row without stream", "sjd_pac.every_row", {"every_row": True}),
    # sampling and guidance
    _field("guidance over 20", "guidance_scale", 20.5),
    _field("negative guidance", "guidance_scale", -1),
    _field("guidance text", "guidance_scale", "3"),
    _field("guidance boolean", "guidance_scale", True),
    _field("empty negative prompt", "negative_prompt", ""),
    _field("negative prompt without guidance", "negative_prompt", "blue", guidance_scale=1),
    _field("negative prompt over the context", "negative_prompt", "apple " * 5000),
    _field("negative prompt number", "negative_prompt", 3),
    _field("negative temperature", "temperature", -0.1),
    _field("huge temperature", "temperature", 1e6),
    _field("negative top_k", "top_k", -1),
    _field("fractional top_k", "top_k", 2.5),
    _field("top_p zero", "top_p", 0),
    _field("top_p over 1", "top_p", 1.01),
    _field("negative seed", "seed", -1),
    _field("seed over 63 bits", "seed", 2**63),
    _field("seed runs over with n", "seed", 2**63 - 1, n=2),
    _field("seed text", "seed", "42"),
    # the model and unknown fields
    _field("wrong model", "model", "dall-e-3", 404),
    _field("wrong model, very long", "model", "m" * 30_000, 404),
    _field("model number", "model", 3),
    _field("model in other letters", "model", "еmoji", 404),
    _field("misspelt field", "promt", "a"),
    _field("diffusion's field", "num_inference_steps", 20),
    _field("empty field name", "", 1),
    _raw("surrogate field name", b'{"prompt": "a red apple", "\\ud800": 1}'),
    _field("very long field name", "f" * 500, 1),
    _field("svg", "svg", {"model": "x"}),
    _field("frames", "frame_count", 4),
    _field("sjd_pac not an object", "sjd_pac", 3),
    _field("server option per request", "sjd_pac.tree", {"tree": "chain"}),
    _field("unknown sjd_pac option", "sjd_pac.wndow", {"wndow": 5}),
    _field("sjd_pac option of the wrong type", "sjd_pac.every_row", {"every_row": "yes"}, stream=True),
)


def check_error(bad: BadRequest, status: int, body: Any) -> None:
    """Assert the documented status and an OpenAI error body that names the field."""
    assert status == bad.status, (bad.name, status, body)
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}, bad.name
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert len(error["message"]) < 600, bad.name
    if bad.param:
        assert error["param"] == (bad.param if len(bad.param) <= 80 else bad.param[:80] + "…"), bad.name
