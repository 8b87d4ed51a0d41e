"""The images API over a stand-in engine: shapes, formats, streaming, failures, disconnects."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from typing import Any

import pytest
from PIL import Image

from tests.serving.bad_requests import BAD_REQUESTS, PATH, PROMPT, BadRequest, check_error
from tests.serving.fake_engine import STEP

TOKENS, FORWARDS = 273, -(-273 // STEP)


def draw(client: Any, **body: Any) -> dict[str, Any]:
    response = client.post(PATH, json={"prompt": PROMPT, **body})
    assert response.status_code == 200, response.text
    return response.json()


def picture(text: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(text)))


def events(client: Any, **body: Any) -> list[dict[str, Any]]:
    response = client.post(PATH, json={"prompt": PROMPT, "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n", 1) for block in response.text.strip().split("\n\n")]
    found = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name for name, _ in blocks] == [f"event: {event['type']}" for event in found]
    return found


@pytest.mark.parametrize("bad", BAD_REQUESTS, ids=lambda bad: bad.name)
def test_bad_request_gets_its_status_and_an_openai_error(client: Any, bad: BadRequest) -> None:
    started = len(client.app.state.engine.started)
    response = client.request(bad.method, bad.path, content=bad.content, headers=bad.headers)
    check_error(bad, response.status_code, response.json())
    assert len(client.app.state.engine.started) == started


def test_response_has_the_fields_of_openai(client: Any) -> None:
    from openai.types import ImagesResponse

    body = draw(client, seed=5)
    response = ImagesResponse.model_validate(body, strict=True)
    assert response.size == "128x128"
    assert response.output_format == "png"
    assert response.background == "opaque"
    assert response.usage is not None
    assert response.usage.output_tokens == TOKENS
    assert response.usage.total_tokens == TOKENS + response.usage.input_tokens
    assert body["data"][0]["revised_prompt"] == "red apple grass"
    assert picture(body["data"][0]["b64_json"]).size == (128, 128)
    assert body["sjd_pac"]["forwards"] == FORWARDS
    assert body["sjd_pac"]["tokens_per_forward"] == pytest.approx(TOKENS / FORWARDS, abs=1e-3)
    assert sum(body["sjd_pac"]["images"][0]["accepted"]) + FORWARDS == TOKENS


def test_n_pictures_have_consecutive_seeds(client: Any) -> None:
    four = draw(client, n=4, seed=7)
    assert [image["seed"] for image in four["sjd_pac"]["images"]] == [7, 8, 9, 10]
    assert four["usage"]["output_tokens"] == 4 * TOKENS
    third = draw(client, seed=9)
    assert four["data"][2]["b64_json"] == third["data"][0]["b64_json"]
    assert len({image["b64_json"] for image in four["data"]}) == 4


def test_without_a_seed_the_answer_names_the_seed_it_used(client: Any) -> None:
    first = draw(client)
    again = draw(client, seed=first["sjd_pac"]["images"][0]["seed"])
    assert again["data"] == first["data"]


@pytest.mark.parametrize("output_format", ["png", "jpeg", "webp"])
def test_output_formats(client: Any, output_format: str) -> None:
    body = draw(client, output_format=output_format)
    assert picture(body["data"][0]["b64_json"]).format == output_format.upper()
    assert body["output_format"] == output_format


@pytest.mark.parametrize("output_format", ["jpeg", "webp"])
def test_compression_makes_smaller_files(client: Any, output_format: str) -> None:
    sizes = [
        len(draw(client, seed=3, output_format=output_format, output_compression=level)["data"][0]["b64_json"])
        for level in (5, 100)
    ]
    assert sizes[0] < sizes[1]


def test_openai_fields_without_effect_are_accepted(client: Any) -> None:
    fields = {"quality": "hd", "style": "vivid", "moderation": "low", "user": "u", "safety_identifier": "s"}
    body = draw(client, seed=1, size="auto", background="auto", response_format="b64_json", svg=None, **fields)
    assert body["data"] == draw(client, seed=1)["data"]


def test_unknown_words_are_reported(client: Any) -> None:
    body = draw(client, prompt="a purple zeppelin on grass")
    assert body["data"][0]["revised_prompt"] == "purple grass"
    assert body["sjd_pac"]["unknown_words"] == ["zeppelin"]
    assert "zeppelin" in body["sjd_pac"]["warnings"][0]


def test_sampling_parameters_reach_the_engine(client: Any) -> None:
    draw(client, guidance_scale=2.5, negative_prompt="blue", temperature=0.7, top_k=50, top_p=0.9, seed=11)
    params = client.app.state.engine.params[-1]
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.7, 50, 0.9, 11)
    assert params.extra_args["guidance_scale"] == 2.5
    assert len(params.extra_args["negative_token_ids"]) == 3


@pytest.mark.parametrize("wanted", [0, 1, 2, 3])
def test_stream_sends_partial_pictures_and_the_whole(client: Any, wanted: int) -> None:
    from openai.types import ImageGenCompletedEvent, ImageGenPartialImageEvent

    *partial, last = events(client, partial_images=wanted, seed=2)
    for number, event in enumerate(partial):
        ImageGenPartialImageEvent.model_validate(event, strict=True)
        assert event["partial_image_index"] == number
        rows = event["sjd_pac"]["rows"]
        pixels = picture(event["b64_json"])
        assert pixels.crop((0, rows * 8, 128, 128)).getcolors() == [((16 - rows) * 8 * 128, (128, 128, 128))]
    assert len(partial) == wanted
    ImageGenCompletedEvent.model_validate(last, strict=True)
    assert last["b64_json"] == draw(client, seed=2)["data"][0]["b64_json"]
    assert last["usage"]["output_tokens"] == TOKENS


def test_stream_of_every_row_of_several_pictures(client: Any) -> None:
    found = events(client, n=3, seed=2, sjd_pac={"every_row": True})
    for index in range(3):
        own = [event for event in found if event["sjd_pac"]["index"] == index]
        rows = [event["sjd_pac"]["rows"] for event in own[:-1]]
        assert rows == sorted(set(rows))
        assert len(rows) >= 10
        assert [event["type"] for event in own][-1] == "image_generation.completed"
        assert own[-1]["sjd_pac"]["images"][0]["seed"] == 2 + index


def test_wrong_key_is_401_in_the_shape_of_openai(make_client: Any) -> None:
    client = make_client(api_key="secret")
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        response = client.post(PATH, json={"prompt": PROMPT}, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
    good = {"Authorization": "Bearer secret"}
    assert client.post(PATH, json={"prompt": PROMPT}, headers=good).status_code == 200
    assert client.get("/sjd-pac").status_code == 200


def test_dead_engine_is_503(make_client: Any) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    dies = make_client(failure=EngineDeadError())
    assert dies.post(PATH, json={"prompt": PROMPT}).status_code == 503
    assert dies.post(PATH, json={"prompt": PROMPT, "n": 3}).json()["error"]["code"] == "engine_dead"
    assert events(dies)[-1]["error"]["code"] == "engine_dead"
    dead = make_client()
    dead.app.state.engine.errored = True
    assert dead.post(PATH, json={"prompt": PROMPT, "stream": True}).status_code == 503


def test_unexpected_failure_is_500_without_its_text(make_client: Any) -> None:
    response = make_client(failure=RuntimeError("secret path")).post(PATH, json={"prompt": PROMPT})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.json()["error"]["type"] == "server_error"


def test_refusal_of_the_scheduler_is_400_with_its_sentence(make_client: Any) -> None:
    client = make_client(refusal="guidance needs two sequences at once")
    response = client.post(PATH, json={"prompt": PROMPT, "n": 2})
    assert response.status_code == 400
    assert "two sequences" in response.json()["error"]["message"]


@pytest.mark.parametrize("body", [{"n": 3}, {"stream": True, "n": 3}], ids=["whole", "stream"])
def test_disconnect_aborts_every_engine_request(make_client: Any, body: dict[str, Any]) -> None:
    client = make_client(pause=0.05)
    engine = client.app.state.engine

    async def call_and_leave() -> None:
        content = json.dumps({"prompt": PROMPT, **body}).encode()
        inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        inbox.put_nowait({"type": "http.request", "body": content, "more_body": False})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": PATH,
            "raw_path": PATH.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }

        async def send(message: dict[str, Any]) -> None:
            pass

        call = asyncio.create_task(client.app(scope, inbox.get, send))
        async with asyncio.timeout(5):
            while len(engine.started) < 3:
                await asyncio.sleep(0.01)
        inbox.put_nowait({"type": "http.disconnect"})
        async with asyncio.timeout(5):
            await call

    asyncio.run(call_and_leave())
    assert sorted(engine.aborted) == sorted(engine.started)
    assert not engine.finished
