"""Draw the README's 24 prompts and their paraphrases with the shipped weights, fixed seeds, guidance 3."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

from examples.train_emoji.inference import sample
from vllm_sjd_pac.models.emoji import PARAPHRASES, README_PROMPTS, PixelDecoder, checkpoint_path

COLUMNS = 8
CELL = 128
LINE = 16


def sheet(pictures: np.ndarray, labels: list[str]) -> Image.Image:
    """Pictures ``[N, 128, 128, 3]`` in rows of eight, each with its prompt underneath."""
    rows = -(-len(pictures) // COLUMNS)
    canvas = Image.new("RGB", (COLUMNS * (CELL + 4), rows * (CELL + 2 * LINE)), "white")
    draw = ImageDraw.Draw(canvas)
    for index, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
        x, y = index % COLUMNS * (CELL + 4), index // COLUMNS * (CELL + 2 * LINE)
        canvas.paste(Image.fromarray(picture), (x, y))
        draw.multiline_text((x + 2, y + CELL), _wrap(label), fill="black", font_size=10, spacing=1)
    return canvas


def _wrap(label: str, width: int = 24) -> str:
    if len(label) <= width:
        return label
    cut = label.rfind(" ", 0, width)
    return f"{label[:cut]}\n{label[cut + 1 :]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=checkpoint_path())
    parser.add_argument("--output", type=Path, default=Path("docs/emoji/contact-sheet.png"))
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--first-seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    prompts = [prompt for pair in zip(README_PROMPTS, PARAPHRASES, strict=True) for prompt in pair]
    seeds = range(arguments.first_seed, arguments.first_seed + len(prompts))
    codes, _ = sample(arguments.checkpoint, prompts, seeds, arguments.guidance)
    pictures = PixelDecoder.from_checkpoint(arguments.checkpoint).decode(codes).numpy()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    sheet(pictures, prompts).save(arguments.output, optimize=True)


if __name__ == "__main__":
    main()
