"""Pictures from a running server with the unmodified `openai` package: whole, several, and row by row.

sjd-pac serve                      # in another terminal
python examples/client.py "a red apple on grass"
"""

from __future__ import annotations

import argparse
import base64
from pathlib import Path

import openai


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="a red apple on grass")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--key", default="none", help="the server's --api-key, if it has one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("."), help="where to write the pictures")
    given = parser.parse_args()
    client = openai.OpenAI(base_url=given.url, api_key=given.key)
    model = client.models.list().data[0].id

    # Two pictures at once. What OpenAI's API does not know goes into extra_body.
    response = client.images.generate(
        model=model, prompt=given.prompt, n=2, extra_body={"seed": given.seed, "guidance_scale": 4.0}
    )
    for number, image in enumerate(response.data or []):
        write(given.folder / f"client-{number}.png", image.b64_json)
    numbers = response.model_extra["sjd_pac"]  # type: ignore[index]
    print(f"{numbers['tokens']} tokens in {numbers['forwards']} forward passes")

    # One picture as it appears: two partial ones, then the whole.
    for event in client.images.generate(
        model=model, prompt=given.prompt, stream=True, partial_images=2, extra_body={"seed": given.seed}
    ):
        if event.type == "image_generation.partial_image":
            write(given.folder / f"client-partial-{event.partial_image_index}.png", event.b64_json)
        else:
            write(given.folder / "client-streamed.png", event.b64_json)


def write(file: Path, content: str | None) -> None:
    file.write_bytes(base64.b64decode(content or ""))
    print(file)


if __name__ == "__main__":
    main()
