"""``GET /sjd-pac``: the demo page; three static files, nothing from elsewhere.

Like ``/health`` and ``/metrics`` the page is open under ``--api-key``; drawing needs the key, which the page asks for.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, JSONResponse

from vllm_sjd_pac.serving import answers

_FOLDER = Path(__file__).parent
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
_FILES = {
    "/sjd-pac": ("index.html", "text/html; charset=utf-8"),
    "/sjd-pac/page.css": ("page.css", "text/css; charset=utf-8"),
    "/sjd-pac/page.js": ("page.js", "text/javascript; charset=utf-8"),
}

router = APIRouter(include_in_schema=False)


@router.get("/sjd-pac/about.json")
async def about(request: Request) -> JSONResponse:
    """Sizes, sampling defaults and known words of the model."""
    service = request.app.state.sjd_pac_images
    return JSONResponse(answers.about(service.family, service.model_names))


def _add(path: str, name: str, kind: str) -> None:
    @router.get(path)
    async def file() -> FileResponse:
        return FileResponse(_FOLDER / name, media_type=kind, headers=_HEADERS)


for _path, (_name, _kind) in _FILES.items():
    _add(_path, _name, _kind)
