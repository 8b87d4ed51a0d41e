"""Does guidance make pictures follow their words? Ground and object colour at guidance 1 versus 3.

A picture is judged by pixel statistics alone: the ground by mean and spread of colour along the picture's edge,
the colour of an object by the mean of its middle. Nearest centroid wins; the centroids come from composed scenes,
held-out scenes (coded and decoded again) give the ceiling that a perfect model would reach.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from examples.train_emoji import train_vq
from examples.train_emoji.inference import sample
from examples.train_emoji.scenes import PAINTS, PLAIN_COLOURS, Scene, SceneMaker
from vllm_sjd_pac.models.emoji import PixelDecoder, checkpoint_path
from vllm_sjd_pac.models.emoji.vocabulary import GROUNDS

PAINTED = ("apple", "car", "heart")
EDGE = 12


def ground_features(picture: np.ndarray) -> np.ndarray:
    """Mean and deviation of colour in the top, bottom and side strips of ``[128, 128, 3]``: 24 numbers."""
    pixels = picture.astype(np.float32) / 255
    sides = (pixels[:EDGE], pixels[-EDGE:], pixels[40:88, :EDGE], pixels[40:88, -EDGE:])
    return np.concatenate([statistic(strip, axis=(0, 1)) for strip in sides for statistic in (np.mean, np.std)])


def colour_features(picture: np.ndarray) -> np.ndarray:
    """Mean chromaticity of the middle: 3 numbers."""
    middle = picture[52:92, 44:84].astype(np.float32).mean((0, 1))
    return middle / (middle.sum() + 1e-6)


class NearestCentroid:
    """Labels by the nearest class mean, features scaled to unit deviation."""

    def __init__(self, features: Iterable[np.ndarray], labels: list[str]):
        groups: dict[str, list[np.ndarray]] = defaultdict(list)
        for feature, label in zip(features, labels, strict=True):
            groups[label].append(feature)
        self.labels = list(groups)
        self.means = np.stack([np.mean(groups[label], axis=0) for label in self.labels])
        within = np.concatenate([np.stack(groups[label]) - np.mean(groups[label], axis=0) for label in self.labels])
        self.scale = within.std(0) + 1e-3

    def __call__(self, feature: np.ndarray) -> str:
        return self.labels[int((((self.means - feature) / self.scale) ** 2).sum(1).argmin())]


class Judge:
    """Names ground and object colour of a picture; trained on composed scenes passed through the tokenizer."""

    def __init__(self, scenes: list[Scene], pictures: np.ndarray):
        self.ground = NearestCentroid(map(ground_features, pictures), [ground_name(scene) for scene in scenes])
        self.colour = {}
        for thing in PAINTED:
            chosen = [i for i, scene in enumerate(scenes) if scene.thing == thing]
            labels = [str(scenes[i].colour) for i in chosen]
            self.colour[thing] = NearestCentroid((colour_features(pictures[i]) for i in chosen), labels)

    def accuracy(self, scenes: list[Scene], pictures: np.ndarray) -> dict[str, float]:
        """Share of pictures whose ground, and whose object colour, is the one that was asked for."""
        ground = [self.ground(ground_features(p)) == ground_name(s) for s, p in zip(scenes, pictures, strict=True)]
        colour = [
            self.colour[scene.thing](colour_features(picture)) == scene.colour
            for scene, picture in zip(scenes, pictures, strict=True)
            if scene.thing in PAINTED
        ]
        return {"ground": float(np.mean(ground)), "object_colour": float(np.mean(colour))}


def ground_name(scene: Scene) -> str:
    """``"plain blue"`` or ``"beach"``."""
    return f"plain {scene.ground}" if scene.plain else scene.ground


def requests(count: int, rng: np.random.Generator) -> tuple[list[Scene], list[str]]:
    """Painted objects on every ground in turn, with their prompts."""
    grounds = [*GROUNDS, *(f"plain {colour}" for colour in PLAIN_COLOURS)]
    scenes, prompts = [], []
    for index in range(count):
        ground = grounds[index % len(grounds)]
        thing = PAINTED[rng.integers(len(PAINTED))]
        colour = list(PAINTS[thing])[rng.integers(len(PAINTS[thing]))]
        plain = ground.startswith("plain ")
        scenes.append(Scene(np.empty(0, np.uint8), thing, colour, ground.removeprefix("plain "), plain))
        prompts.append(f"{colour} {thing} {ground}")
    return scenes, prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder with data/ and vq.pt")
    parser.add_argument("--checkpoint", type=Path, default=checkpoint_path())
    parser.add_argument("--output", type=Path, default=Path("docs/emoji/guidance.json"))
    parser.add_argument("--pictures", type=int, default=144)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    maker = SceneMaker.from_folder(arguments.work / "data")
    encoder = train_vq.load(arguments.work / "vq.pt")
    decoder = PixelDecoder.from_checkpoint(arguments.checkpoint)

    def composed(count: int, seed: int) -> tuple[list[Scene], np.ndarray]:
        rng = np.random.default_rng(seed)
        scenes = [maker.make(rng) for _ in range(count)]
        pictures = []
        for scene in scenes:
            with torch.inference_mode():
                codes = encoder.codes(encoder.encoder(train_vq.to_pixels(scene.pixels[None])))
            pictures.append(decoder.decode(codes)[0].numpy())
        return scenes, np.stack(pictures)

    judge = Judge(*composed(1500, 71))
    results = {"held-out scenes": judge.accuracy(*composed(400, 72)), "pictures": arguments.pictures}
    scenes, prompts = requests(arguments.pictures, np.random.default_rng(73))
    for guidance in (1.0, 3.0):
        codes, _ = sample(arguments.checkpoint, prompts, range(len(prompts)), guidance)
        results[f"guidance {guidance:g}"] = judge.accuracy(scenes, decoder.decode(codes).numpy())
        print(results, flush=True)
    arguments.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
