"""``/v1/completions`` with an image model: image tokens, guidance over ``vllm_xargs``, and ordinary text parameters."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.e2e.server import Server
from tests.e2e.test_images_api import TOKENS, draw, picture

PROMPT = "red apple grass"
NEGATIVE = [1, 2]
"""The bundled model's unconditional prompt: begin of sequence, begin of image."""


def complete(client: Any, seed: int, **extra: Any) -> list[int]:
    body = {"return_token_ids": True, **extra}
    response = client.completions.create(
        model="emoji", prompt=PROMPT, max_tokens=TOKENS, temperature=1.0, seed=seed, extra_body=body
    )
    return response.choices[0].token_ids


def test_eight_requests_at_once_return_whole_pictures(server: Server, client: Any) -> None:
    guidance = {"vllm_xargs": {"guidance_scale": 3.0, "negative_token_ids": NEGATIVE}}
    with ThreadPoolExecutor(8) as pool:
        crowd = list(pool.map(lambda seed: complete(client, seed, **(guidance if seed % 2 else {})), range(8)))
    for tokens in crowd:
        assert len(tokens) == TOKENS
        assert tokens[16:TOKENS:17] == [3] * 16
        assert tokens[-1] == 4
        codes = [token for position, token in enumerate(tokens[:-1]) if position % 17 != 16]
        assert all(256 <= token < 1280 for token in codes)
    assert crowd[3] == complete(client, 3, **guidance)
    assert crowd[4] == complete(client, 4)
    server.wait_idle()


def test_guidance_over_xargs_is_the_guidance_of_the_images_api(client: Any) -> None:
    from vllm_sjd_pac.models.emoji import PixelDecoder, checkpoint_path
    from vllm_sjd_pac.models.layout import ImageLayout

    tokens = complete(client, 21, vllm_xargs={"guidance_scale": 4.0})
    layout = ImageLayout(256, 1024, 16, 16, end_of_line=3, end_tokens=(4,))
    pixels = PixelDecoder.from_checkpoint(checkpoint_path()).decode(layout.grid(tokens).unsqueeze(0))[0]
    drawn = picture(draw(client, seed=21, guidance_scale=4.0).data[0].b64_json)
    assert drawn.tobytes() == pixels.numpy().tobytes()
    assert tokens != complete(client, 21)


def test_chat_returns_the_same_tokens(client: Any) -> None:
    response = client.chat.completions.create(
        model="emoji",
        messages=[{"role": "user", "content": PROMPT}],
        temperature=1.0,
        seed=4,
        extra_body={"return_token_ids": True},
    )
    assert response.choices[0].token_ids == complete(client, 4)


@pytest.mark.parametrize(
    "arguments",
    [{"guidance_scale": 21}, {"guidance_scale": "strong"}, {"guidance_scale": 3, "negative_token_ids": [99_999]}],
    ids=str,
)
def test_bad_guidance_is_refused(client: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match="not allowed"):
        complete(client, 0, vllm_xargs=arguments)


def test_streamed_completions_return_the_same_tokens(client: Any) -> None:
    stream = client.completions.create(
        model="emoji",
        prompt=PROMPT,
        max_tokens=TOKENS,
        temperature=1.0,
        seed=2,
        stream=True,
        extra_body={"return_token_ids": True},
    )
    tokens = [token for chunk in stream for token in (chunk.choices[0].token_ids or [])]
    assert tokens == complete(client, 2)
