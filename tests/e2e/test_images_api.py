"""The unmodified `openai` client against a running ``sjd-pac serve``."""

from __future__ import annotations

import base64
import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from tests.e2e.conftest import KEY
from tests.e2e.server import Server
from tests.serving.bad_requests import BAD_REQUESTS, PATH, check_error

PROMPT = "a red apple on grass"
TOKENS = 273


def picture(text: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(text)))


def draw(client: Any, **body: Any) -> Any:
    extra = {key: body.pop(key) for key in ("seed", "guidance_scale", "negative_prompt", "top_k") if key in body}
    return client.images.generate(model="emoji", prompt=body.pop("prompt", PROMPT), extra_body=extra, **body)


def test_one_picture(client: Any) -> None:
    response = draw(client, seed=1)
    assert picture(response.data[0].b64_json).size == (128, 128)
    assert response.data[0].revised_prompt == "red apple grass"
    assert response.size == "128x128"
    assert response.usage.output_tokens == TOKENS
    numbers = response.sjd_pac
    assert numbers["tokens"] == TOKENS
    assert numbers["forwards"] == len(numbers["images"][0]["accepted"])
    assert sum(numbers["images"][0]["accepted"]) + numbers["forwards"] == TOKENS


def test_four_pictures_at_once(client: Any) -> None:
    response = draw(client, n=4, seed=10)
    assert [picture(image.b64_json).size for image in response.data] == [(128, 128)] * 4
    assert len({image.b64_json for image in response.data}) == 4
    assert [image["seed"] for image in response.sjd_pac["images"]] == [10, 11, 12, 13]


def test_other_formats(client: Any) -> None:
    with ThreadPoolExecutor() as pool:
        formats = ("jpeg", "webp")
        drawn = pool.map(lambda name: draw(client, seed=10, output_format=name, output_compression=80), formats)
        assert [picture(response.data[0].b64_json).format for response in drawn] == ["JPEG", "WEBP"]


def test_stream_with_two_partial_pictures(client: Any) -> None:
    events = list(draw(client, seed=1, stream=True, partial_images=2))
    assert {event.type for event in events[:-1]} <= {"image_generation.partial_image"}
    assert 1 <= len(events) - 1 <= 2
    for event in events[:-1]:
        assert picture(event.b64_json).getpixel((127, 127)) == (128, 128, 128)
    last = events[-1]
    assert last.type == "image_generation.completed"
    assert last.usage.output_tokens == TOKENS
    assert last.b64_json == draw(client, seed=1).data[0].b64_json


def test_errors_are_the_exception_classes_of_openai(server: Server, client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        draw(client, n=11)
    assert bad.value.param == "n"
    with pytest.raises(openai.BadRequestError, match="128x128"):
        draw(client, size="1024x1024")
    with pytest.raises(openai.NotFoundError) as missing:
        client.images.generate(model="dall-e-3", prompt=PROMPT)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError) as refused:
        server.openai("wrong").images.generate(model="emoji", prompt=PROMPT)  # type: ignore[attr-defined]
    assert refused.value.code == "invalid_api_key"


def test_bad_requests_leave_the_server_whole(server: Server, client: Any) -> None:
    expected = draw(client, seed=4).data
    with httpx.Client(base_url=server.url, timeout=60) as raw:
        for bad in BAD_REQUESTS:
            headers = {**bad.headers, "authorization": f"Bearer {KEY}"}
            response = raw.request(bad.method, bad.path, content=bad.content, headers=headers)
            check_error(bad, response.status_code, response.json())
    assert len(BAD_REQUESTS) >= 60
    server.wait_idle()
    assert draw(client, seed=4).data == expected


def test_guidance_and_negative_prompt_change_the_picture(client: Any) -> None:
    extras = ({"guidance_scale": 1}, {"guidance_scale": 6}, {"guidance_scale": 6, "negative_prompt": "car"})
    with ThreadPoolExecutor() as pool:
        drawn = pool.map(lambda extra: draw(client, seed=5, **extra).data[0].b64_json, extras)
        assert len(set(drawn)) == 3


def test_same_seed_is_the_same_picture_in_a_crowd(server: Server, client: Any) -> None:
    alone = [draw(client, seed=seed).data[0].b64_json for seed in (1, 2)]
    with ThreadPoolExecutor(6) as pool:
        crowd = list(pool.map(lambda seed: draw(client, seed=seed).data[0].b64_json, (1, 2, 3, 4, 1, 2)))
    assert crowd[:2] == crowd[4:] == alone
    server.wait_idle()


@pytest.mark.parametrize("speculation", ["on", "off"])
def test_same_bytes_as_the_command_line(client: Any, tmp_path: Path, speculation: str) -> None:
    from vllm_sjd_pac import cli

    file = tmp_path / "picture.png"
    assert cli.main(["generate", PROMPT, "-o", str(file), "--seed", "6", "--speculation", speculation]) == 0
    assert base64.b64decode(draw(client, seed=6).data[0].b64_json) == file.read_bytes()


def test_metrics_count_pictures_steps_and_twins(server: Server, client: Any) -> None:
    names = (
        "sjd_pac:tokens_per_forward_sum",
        "sjd_pac:accepted_tokens_total",
        "sjd_pac:drafted_nodes_total",
        "sjd_pac:verifications_total",
        "sjd_pac:image_tokens_total",
        "sjd_pac:image_forwards_total",
        "sjd_pac:image_latency_seconds_count",
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:request_success_total",
    )
    server.wait_idle()
    before = {name: server.metric(name) for name in names}
    numbers = draw(client, seed=8, n=2).sjd_pac
    server.wait_idle()
    gained = {name: server.metric(name) - before[name] for name in names}
    accepted = sum(sum(image["accepted"]) for image in numbers["images"])
    assert gained["sjd_pac:image_tokens_total"] == 2 * TOKENS
    assert gained["sjd_pac:image_forwards_total"] == numbers["forwards"]
    assert gained["sjd_pac:image_latency_seconds_count"] == 2
    assert gained["sjd_pac:accepted_tokens_total"] == accepted
    assert gained["vllm:spec_decode_num_accepted_tokens_total"] == accepted
    assert gained["sjd_pac:verifications_total"] == gained["vllm:spec_decode_num_drafts_total"]
    assert gained["sjd_pac:tokens_per_forward_sum"] == accepted + gained["sjd_pac:verifications_total"]
    assert gained["sjd_pac:drafted_nodes_total"] > accepted
    assert gained["vllm:request_success_total"] == 2, "hidden twins must not count as requests"


def test_health_models_and_page_are_served(server: Server, client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["emoji"]
    assert httpx.get(f"{server.url}/sjd-pac").status_code == 200
    about = httpx.get(f"{server.url}/sjd-pac/about.json").json()
    assert about["sizes"] == ["128x128"]
    assert "apple" in about["known_words"]
    assert httpx.post(f"{server.url}{PATH}", json={"prompt": PROMPT}).status_code == 401
