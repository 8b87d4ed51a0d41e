"""The demo page in a real browser: prompt in, rows appear, picture and acceptance map shown, nothing from elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e import browser
from tests.e2e.conftest import KEY
from tests.e2e.server import Server

pytestmark = pytest.mark.skipif(not browser.is_installed(), reason="needs chromium and chromedriver")

# Pixels of a canvas that are not the grey of an empty panel, as a share.
COLOURED = """
const canvas = document.getElementById(arguments[0]);
const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
let count = 0;
for (let i = 0; i < data.length; i += 4) {
  if (data[i + 3] && (data[i] !== 128 || data[i + 1] !== 128 || data[i + 2] !== 128)) count += 1;
}
return count / (canvas.width * canvas.height);
"""
ELSEWHERE = """
return performance.getEntriesByType("resource").map((entry) => entry.name)
  .filter((name) => !name.startsWith(location.origin) && !name.startsWith("data:"));
"""


def test_page_draws_row_by_row_and_shows_the_acceptance_map(server: Server, tmp_path: Path) -> None:
    with browser.browse(tmp_path / "profile") as tab:
        tab.open(f"{server.url}/sjd-pac")
        tab.wait("return document.querySelectorAll('#examples button').length > 2", 30)
        tab.run(
            """
            document.getElementById("key").value = arguments[0];
            document.getElementById("seed").value = "3";
            document.getElementById("prompt").value = "a red apple on the glorp <b>lawn</b>";
            document.getElementById("form").requestSubmit();
            """,
            KEY,
        )
        tab.wait("return Number(document.body.dataset.partials) >= 2", 120)
        tab.wait("return document.body.dataset.state === 'done'", 120)
        text = tab.run("return document.body.innerText")
        assert "Understood: red apple grass" in text
        assert "glorp" in text
        numbers = {key: tab.run(f"return document.getElementById('{key}').textContent") for key in ("tokens", "rate")}
        assert numbers["tokens"] == "273"
        assert float(numbers["rate"]) >= 1
        assert tab.run("return document.getElementById('map').dataset.tokens") == "273"
        for canvas in ("picture", "map", "steps", "scale"):
            assert tab.run(COLOURED, canvas) > 0.1, canvas
        assert tab.run(ELSEWHERE) == []
        assert [entry for entry in tab.console() if entry["level"] in ("SEVERE", "WARNING")] == []
        if target := os.environ.get("SJD_PAC_SCREENSHOT"):  # for the documentation
            tab.run("document.querySelector('#examples button').click()")
            tab.wait("return document.body.dataset.state === 'done'", 120)
            tab.screenshot(Path(target))


def test_page_shows_the_server_s_error(server: Server, tmp_path: Path) -> None:
    with browser.browse(tmp_path / "profile") as tab:
        tab.open(f"{server.url}/sjd-pac")
        tab.run(
            """
            document.getElementById("key").value = arguments[0];
            document.getElementById("guidance").removeAttribute("max");
            document.getElementById("guidance").value = "50";
            document.getElementById("prompt").value = "an owl";
            document.getElementById("form").requestSubmit();
            """,
            KEY,
        )
        tab.wait("return document.body.dataset.state === 'failed'", 60)
        assert "guidance_scale=50" in tab.run("return document.getElementById('message').textContent")
        assert not tab.run("return document.getElementById('draw').disabled")
