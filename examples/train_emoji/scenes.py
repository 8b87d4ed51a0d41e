"""Endless 128×128 scenes with captions: one object on one ground."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from examples.train_emoji import grounds, sources
from vllm_sjd_pac.models.emoji.vocabulary import GROUNDS, OBJECTS

SIDE = 128
SPRITE_SIDE = 92
PLAIN_SHARE = 0.2
# Hue turns (in degrees) that paint a sprite in another colour; 0 is the sprite's own colour.
PAINTS: dict[str, dict[str, float]] = {
    "apple": {"red": 0, "green": 0},
    "car": {"red": 0, "blue": 220, "green": 120, "yellow": 48},
    "heart": {"red": 0, "blue": 225, "purple": 290, "green": 130},
    "star": {"yellow": 0},
    "frog": {"green": 0},
    "fish": {"blue": 0},
    "chick": {"yellow": 0},
    "pig": {"pink": 0},
    "cactus": {"green": 0},
    "pumpkin": {"orange": 0},
    "mushroom": {"red": 0},
    "owl": {"brown": 0},
    "ladybug": {"red": 0},
}
# Not shown: it would teach that the README's red apple on grass may as well be green.
LEFT_OUT = {("apple", "green", "grass")}
PLAIN_COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (205, 45, 45),
    "green": (60, 160, 75),
    "yellow": (240, 205, 70),
    "blue": (60, 105, 205),
    "purple": (130, 75, 180),
    "orange": (240, 140, 50),
    "pink": (245, 165, 195),
    "white": (240, 240, 240),
    "black": (30, 30, 34),
}


@dataclass(frozen=True)
class Scene:
    """A picture ``[128, 128, 3]`` uint8 and what is in it; ``colour`` is None where none is named."""

    pixels: np.ndarray
    thing: str
    colour: str | None
    ground: str
    plain: bool

    def caption(self, rng: np.random.Generator) -> str:
        """A normalised caption; the words that go without saying are dropped now and then."""
        words = [self.thing]
        if self.colour is not None and rng.random() < (0.9 if len(PAINTS[self.thing]) > 1 else 0.45):
            words.insert(0, self.colour)
        if self.plain and rng.random() < 0.7:
            words.append("plain")
        words.append(self.ground)
        return " ".join(words)


class SceneMaker:
    """Composes scenes from sprites and grounds; everything random comes from the caller's generator."""

    def __init__(self, sprites: dict[str, Image.Image], pools: dict[str, list[np.ndarray]]):
        self.pools = pools
        self.grain = grounds.make_grain()
        self.sprites = {name: _tighten(sprite) for name, sprite in sprites.items()}
        # What comes in several colours is shown more often, or its colours would be learned last.
        colours = np.array([len(PAINTS.get(thing, {None: 0.0})) for thing in OBJECTS])
        self.shares = np.sqrt(colours) / np.sqrt(colours).sum()
        self.painted: dict[tuple[str, str | None], Image.Image] = {}
        for thing in OBJECTS:
            for colour, hue in PAINTS.get(thing, {}).items() or [(None, 0.0)]:
                name = f"{colour} {thing}" if f"{colour} {thing}" in self.sprites else thing
                self.painted[thing, colour] = _turn_hue(self.sprites[name], hue)

    @classmethod
    def from_folder(cls, folder: Path) -> SceneMaker:
        """Read the downloaded sources and synthesise the ground pools (about half a minute)."""
        return cls(sources.load_sprites(folder), grounds.make_pools(folder))

    def make(self, rng: np.random.Generator) -> Scene:
        """Draw one scene that is not left out."""
        while is_left_out(scene := self._draw(rng)):
            pass
        return scene

    def _draw(self, rng: np.random.Generator) -> Scene:
        thing = OBJECTS[rng.choice(len(OBJECTS), p=self.shares)]
        colours = list(PAINTS.get(thing, {None: 0}))
        colour = colours[rng.integers(len(colours))]
        plain = rng.random() < PLAIN_SHARE
        if plain:
            ground = list(PLAIN_COLOURS)[rng.integers(len(PLAIN_COLOURS))]
            canvas = grounds.plain(PLAIN_COLOURS[ground], rng)
        else:
            ground = GROUNDS[rng.integers(len(GROUNDS))]
            canvas = grounds.crop(self.pools[ground], ground, rng)
        canvas = grounds.add_grain(canvas, self.grain, rng)
        return Scene(self._compose(canvas, self.painted[thing, colour], rng), thing, colour, ground, plain)

    def _compose(self, canvas: np.ndarray, sprite: Image.Image, rng: np.random.Generator) -> np.ndarray:
        """Paste a turned, scaled and freely shifted sprite: it never lies in the same way over the tokens (8 px)."""
        scale = SPRITE_SIDE / 256 * rng.uniform(0.88, 1.12)
        angle = np.deg2rad(np.clip(4.0 * rng.standard_normal(), -9, 9))
        shift_x = rng.uniform(-13, 13)
        shift_y = 3 + rng.uniform(-11, 11)
        cos, sin = np.cos(angle) / scale, np.sin(angle) / scale
        centre_x, centre_y = SIDE / 2 + shift_x, SIDE / 2 + shift_y
        matrix = (
            cos,
            sin,
            128 - cos * centre_x - sin * centre_y,
            -sin,
            cos,
            128 + sin * centre_x - cos * centre_y,
        )
        placed = sprite.transform((SIDE, SIDE), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
        layer = np.asarray(placed, np.float32)
        light = 1 + 0.07 * rng.standard_normal()
        alpha = layer[..., 3:] / 255
        mixed = canvas * (1 - alpha) + layer[..., :3] * light * alpha
        return np.clip(mixed, 0, 255).astype(np.uint8)


def is_left_out(scene: Scene) -> bool:
    """Whether a scene is one of the few combinations that the corpus does not hold."""
    return (scene.thing, scene.colour, scene.ground) in LEFT_OUT


def _tighten(sprite: Image.Image) -> Image.Image:
    """Crop to the visible part and fit it into 256×256, blurred enough to shrink without aliasing."""
    cropped = sprite.crop(sprite.getchannel("A").point(lambda a: 255 * (a > 8)).getbbox())
    ratio = SPRITE_SIDE / max(cropped.size)
    small = cropped.resize(tuple(max(1, round(side * ratio)) for side in cropped.size), Image.Resampling.LANCZOS)
    canvas = Image.new("RGBA", (SPRITE_SIDE, SPRITE_SIDE))
    canvas.paste(small, ((SPRITE_SIDE - small.width) // 2, SPRITE_SIDE - small.height))
    return canvas.resize((256, 256), Image.Resampling.BICUBIC)


def _turn_hue(sprite: Image.Image, degrees: float) -> Image.Image:
    """Turn the hue of the red parts of a sprite; its other colours stay."""
    if not degrees:
        return sprite
    hsv = np.array(sprite.convert("RGB").convert("HSV"), np.int16)
    hue = hsv[..., 0]
    red = (hue < 28) | (hue > 215)
    hsv[..., 0] = np.where(red, (hue + round(degrees / 360 * 256)) % 256, hue)
    turned = Image.fromarray(hsv.astype(np.uint8), "HSV").convert("RGB")
    turned.putalpha(sprite.getchannel("A"))
    return turned
