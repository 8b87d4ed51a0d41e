"""A headless Chromium over the W3C WebDriver protocol: just what the test of the page needs."""

from __future__ import annotations

import base64
import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from examples.ray_cluster.local_cluster import free_port

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1000,1150",
)


def is_installed() -> bool:
    return bool(shutil.which("chromedriver") and _chromium())


def _chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One tab."""

    def __init__(self, session: str) -> None:
        self._session = session

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        url = f"{self._session}/{path}"
        response = httpx.get(url, timeout=60) if body is None else httpx.post(url, json=body, timeout=60)
        content = response.json()["value"]
        assert response.status_code == 200, content
        return content

    def open(self, url: str) -> None:
        self._call("url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run JavaScript in the page; ``return`` gives the result, ``arguments`` are the arguments."""
        return self._call("execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, script: str, seconds: float) -> Any:
        """Repeat `script` until its result is true.

        Raises:
            AssertionError: it was not within `seconds`.
        """
        end = time.monotonic() + seconds
        while not (result := self.run(script)):
            assert time.monotonic() < end, f"{script!r} stayed {result!r}"
            time.sleep(0.2)
        return result

    def console(self) -> list[dict[str, Any]]:
        """What the page wrote to its console since the last call, errors of loading included."""
        return self._call("se/log", {"type": "browser"})

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self._call("screenshot")))


@contextlib.contextmanager
def browse(profile: Path) -> Iterator[Browser]:
    """A browser with a new, empty profile; it ends with the block."""
    port = free_port()
    driver = subprocess.Popen(
        ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    root = f"http://127.0.0.1:{port}"
    session = None
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{root}/status", timeout=5).json()["value"]["ready"]:
                    break
            time.sleep(0.2)
        options = {"binary": _chromium(), "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        answer = httpx.post(f"{root}/session", json={"capabilities": {"alwaysMatch": wanted}}, timeout=120).json()
        assert "sessionId" in answer["value"], answer
        session = f"{root}/session/{answer['value']['sessionId']}"
        yield Browser(session)
    finally:
        if session is not None:
            with contextlib.suppress(httpx.HTTPError):
                httpx.delete(session, timeout=30)
        driver.terminate()
        driver.wait(timeout=30)
