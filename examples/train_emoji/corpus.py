"""The training corpus: scenes encoded once, captions drawn anew every time."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from examples.train_emoji import train_vq
from examples.train_emoji.scenes import Scene, SceneMaker, is_left_out
from vllm_sjd_pac.models.emoji.vocabulary import (
    BEGIN_ID,
    BEGIN_IMAGE_ID,
    END_IMAGE_ID,
    END_OF_LINE_ID,
    IMAGE_TOKEN_START,
    PAD_ID,
    SPECIAL_TOKENS,
    UNKNOWN_ID,
    WORDS,
)

GRID = 16
MAXIMUM_WORDS = 5
NO_LOSS = -100
CAPTION_DROPOUT = 0.1
UNKNOWN_SHARE = 0.08
CHUNK = 8
WORD_IDS = {word: len(SPECIAL_TOKENS) + index for index, word in enumerate(WORDS)}


@dataclass(frozen=True)
class Corpus:
    """Codes ``[N, 16, 16]`` int16 and what the scenes show (their pixels are not kept)."""

    codes: np.ndarray
    scenes: list[Scene]

    def batch(self, size: int, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and shifted targets ``[size, T]``; loss only on image, end-of-line and end-of-image."""
        length = 2 + MAXIMUM_WORDS + GRID * (GRID + 1) + 1
        sequences = np.full((size, length), PAD_ID, np.int64)
        targets = np.full((size, length), NO_LOSS, np.int64)
        for row, index in enumerate(rng.integers(len(self.codes), size=size)):
            prompt = [BEGIN_ID, *caption_ids(self.scenes[index], rng), BEGIN_IMAGE_ID]
            image = image_sequence(self.codes[index])
            end = len(prompt) + len(image)
            sequences[row, :end] = [*prompt, *image]
            targets[row, len(prompt) : end] = image
        return torch.from_numpy(sequences[:, :-1].copy()), torch.from_numpy(targets[:, 1:].copy())


def caption_ids(scene: Scene, rng: np.random.Generator) -> list[int]:
    """Word ids of a caption: dropped for guidance in 10 %, an unknown word slipped in now and then."""
    if rng.random() < CAPTION_DROPOUT:
        return []
    ids = [WORD_IDS[word] for word in scene.caption(rng).split()]
    if rng.random() < UNKNOWN_SHARE:
        ids.insert(int(rng.integers(len(ids) + 1)), UNKNOWN_ID)
    return ids


def image_sequence(codes: np.ndarray) -> list[int]:
    """``[16, 16]`` codes to 273 tokens: rows that end with end-of-line, then end-of-image."""
    sequence: list[int] = []
    for row in codes.astype(int):
        sequence += [*(row + IMAGE_TOKEN_START), END_OF_LINE_ID]
    return [*sequence, END_IMAGE_ID]


def encode(maker: SceneMaker, model: train_vq.VQTrainer, count: int, seed: int) -> Corpus:
    """Compose and encode ``count`` scenes."""
    rng = np.random.default_rng(seed)
    # Written in place: small arrays kept between the large ones of each chunk would hold the heap apart (23 GB).
    codes, scenes = np.empty((count, GRID, GRID), np.int16), []
    began = time.time()
    for start in range(0, count, CHUNK):
        made = [maker.make(rng) for _ in range(min(CHUNK, count - start))]
        with torch.inference_mode():
            vectors = model.encoder(train_vq.to_pixels(np.stack([scene.pixels for scene in made])))
            codes[start : start + len(made)] = model.codes(vectors).numpy()
        scenes += [Scene(np.empty(0, np.uint8), s.thing, s.colour, s.ground, s.plain) for s in made]
        if start % 2000 == 0:
            print(f"encoded {start} seconds {time.time() - began:.0f}", flush=True)
    return Corpus(codes, scenes)


def save(corpus: Corpus, path: Path) -> None:
    """One .npz file."""
    facts = np.array([[s.thing, s.colour or "", s.ground, str(int(s.plain))] for s in corpus.scenes])
    np.savez(path, codes=corpus.codes, facts=facts)


def load(path: Path) -> Corpus:
    """Read what :func:`save` wrote, without scenes that have come to be left out since."""
    with np.load(path) as data:
        codes, facts = data["codes"], data["facts"]
    empty = np.empty(0, np.uint8)
    scenes = [Scene(empty, t, c or None, g, p == "1") for t, c, g, p in facts.tolist()]
    keep = [index for index, scene in enumerate(scenes) if not is_left_out(scene)]
    return Corpus(codes[keep], [scenes[index] for index in keep])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for data and checkpoints")
    parser.add_argument("--scenes", type=int, default=42000)
    parser.add_argument("--held-out", type=int, default=512)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    maker = SceneMaker.from_folder(arguments.work / "data")
    model = train_vq.load(arguments.work / "vq.pt")
    for name, count, seed in (("held_out", arguments.held_out, 1000), ("corpus", arguments.scenes, 1001)):
        path = arguments.work / f"{name}.npz"
        if not path.exists():
            save(encode(maker, model, count, seed), path)


if __name__ == "__main__":
    main()
