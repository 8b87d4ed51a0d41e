"""The grounds behind the objects: photographs, textures and a few painted landscapes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from examples.train_emoji import sources

SIDE = 128
POOL = 24
GRAIN_CELLS = (12.0, 18.0)
GRAIN_STRENGTH = (26.0, 40.0)


def plain(colour: tuple[int, int, int], rng: np.random.Generator) -> np.ndarray:
    """One colour with a soft vertical gradient, ``[128, 128, 3]`` float32."""
    base = np.array(colour, np.float32) * (1 + 0.06 * rng.standard_normal())
    ramp = 1 + np.linspace(-1, 1, SIDE, dtype=np.float32)[:, None, None] * 0.08 * rng.standard_normal()
    return np.clip(np.broadcast_to(base * ramp, (SIDE, SIDE, 3)), 0, 255)


def crop(pool: list[np.ndarray], name: str, rng: np.random.Generator) -> np.ndarray:
    """A random 128×128 window of a random picture of the pool, float32; landscapes keep their horizon."""
    picture = pool[rng.integers(len(pool))]
    height, width = picture.shape[:2]
    top = rng.integers(height - SIDE + 1)
    left = rng.integers(width - SIDE + 1)
    window = picture[top : top + SIDE, left : left + SIDE]
    if rng.random() < 0.5:
        window = window[:, ::-1]
    return window.astype(np.float32) * (1 + 0.05 * rng.standard_normal())


def make_grain(seed: int = 8, count: int = 32, side: int = 192) -> list[np.ndarray]:
    """Mottled noise, mostly in brightness, ``[side, side, 3]`` with unit deviation.

    Laid over every ground it keeps the law of its codes as uncertain as photographs make it. Its patches reach over
    the border of a token (8 px), so that each code depends on its neighbours as those of photographs do.
    """
    rng = np.random.default_rng(seed)
    fields = []
    for cell in rng.uniform(*GRAIN_CELLS, size=count):
        brightness = _octaves(rng, side, cell)[..., None]
        colour = np.stack([_octaves(rng, side, cell) for _ in range(3)], -1)
        fields.append((brightness + 0.4 * colour) / 1.08)
    return fields


def _octaves(rng: np.random.Generator, side: int, cell: float) -> np.ndarray:
    """Noise of three scales, ``[side, side]`` with unit deviation; large ones weigh more, as in photographs."""
    field = sum(
        weight * _noise(rng, side, side, cell * times, cell * times) for weight, times in ((0.6, 1), (0.8, 2), (0.6, 4))
    )
    return field / field.std()


def add_grain(canvas: np.ndarray, fields: list[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """``canvas`` with a random piece of grain of random strength."""
    field = fields[rng.integers(len(fields))]
    top, left = rng.integers(field.shape[0] - SIDE + 1, size=2)
    return np.clip(canvas + rng.uniform(*GRAIN_STRENGTH) * field[top : top + SIDE, left : left + SIDE], 0, 255)


def make_pools(folder: Path, seed: int = 7) -> dict[str, list[np.ndarray]]:
    """Pictures at least 128 px on each side, by ground."""
    rng = np.random.default_rng(seed)
    grass = _tint(_resized(sources.load_texture("grass.png"), 3.4), (52, 92, 22), (168, 214, 84))
    gravel = _tint(_resized(sources.load_texture("gravel.png"), 3.4), (48, 42, 40), (205, 192, 178))
    bricks = np.rot90(sources.load_texture("brick.png"))
    bricks = _tint(_resized(bricks, 0.6), (128, 44, 30), (222, 196, 176))
    hubble = np.clip(_resized(sources.load_texture("hubble_deep_field.jpg"), 0.55) * 1.25, 0, 255).astype(np.uint8)
    sky = sources.load_panorama(folder, "sky")[20:128]
    sky = _tint(_resized(sky, 1.6), (58, 118, 205), (255, 255, 255))
    woods = sources.load_panorama(folder, "blender forest")[120:300]
    pines = sources.load_panorama(folder, "forest")[48:150]
    pines = _tint(_resized(pines, 4.2), (14, 38, 20), (196, 226, 170))
    woods = _tint(_resized(woods, 3.6), (18, 44, 16), (206, 232, 160))
    return {
        "grass": [grass],
        "pebbles": [gravel],
        "bricks": [bricks],
        "space": [_nebula(rng, hubble) for _ in range(POOL // 4)],
        "sky": [sky],
        "forest": [woods, pines],
        "beach": [_beach(rng) for _ in range(POOL)],
        "sea": [_sea(rng) for _ in range(POOL)],
        "snow": [_snow(rng) for _ in range(POOL)],
    }


def _nebula(rng: np.random.Generator, stars: np.ndarray) -> np.ndarray:
    """Stars among coloured clouds."""
    height, width = stars.shape[:2]
    clouds = (
        np.stack([_noise(rng, height, width, 34, 34) for _ in range(3)], -1)
        + _noise(rng, height, width, 18, 18)[..., None]
    )
    return np.clip(stars + 42 * np.maximum(clouds + 0.2, 0) * np.array([1.0, 0.6, 1.3]), 0, 255).astype(np.uint8)


def _resized(picture: np.ndarray, ratio: float) -> np.ndarray:
    height, width = picture.shape[:2]
    size = (round(width * ratio), round(height * ratio))
    return np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.LANCZOS))


def _tint(picture: np.ndarray, dark: tuple[int, int, int], bright: tuple[int, int, int]) -> np.ndarray:
    """Map the brightness of a picture (5th to 95th percentile) onto a line between two colours."""
    grey = picture.astype(np.float32).mean(-1)
    low, high = np.percentile(grey, [5, 95])
    mix = np.clip((grey - low) / (high - low), 0, 1)[..., None]
    return (np.array(dark) * (1 - mix) + np.array(bright) * mix).astype(np.uint8)


def _noise(rng: np.random.Generator, height: int, width: int, cell_y: float, cell_x: float) -> np.ndarray:
    """Smooth noise with zero mean and unit deviation whose grains measure about ``cell_y × cell_x``."""
    coarse = rng.standard_normal((int(height / cell_y) + 2, int(width / cell_x) + 2)).astype(np.float32)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    return (smooth - smooth.mean()) / (smooth.std() + 1e-6)


def _landscape(heights: list[tuple[int, np.ndarray]]) -> np.ndarray:
    """Stack horizontal bands of the given heights into one picture."""
    return np.clip(np.concatenate([band[:rows] for rows, band in heights]), 0, 255).astype(np.uint8)


def _band(mix: np.ndarray, dark: tuple[int, int, int], bright: tuple[int, int, int]) -> np.ndarray:
    mix = np.clip(0.5 + 0.25 * mix, 0, 1)[..., None]
    return np.array(dark, np.float32) * (1 - mix) + np.array(bright, np.float32) * mix


def _waves(rng: np.random.Generator, rows: int, width: int) -> np.ndarray:
    waves = _noise(rng, rows, width, 4, 14) + 0.6 * _noise(rng, rows, width, 2.5, 7)
    return _band(waves, (12, 70, 130), (96, 186, 214))


def _air(rng: np.random.Generator, rows: int, width: int) -> np.ndarray:
    air = _band(0.7 * _noise(rng, rows, width, 14, 40), (130, 180, 230), (222, 236, 248))
    return air


def _sea(rng: np.random.Generator, width: int = 512) -> np.ndarray:
    return _landscape([(36, _air(rng, 36, width)), (100, _waves(rng, 100, width))])


def _beach(rng: np.random.Generator, width: int = 512) -> np.ndarray:
    grains = _noise(rng, 70, width, 2, 2) + _noise(rng, 70, width, 6, 18)
    sand = _band(0.8 * grains, (196, 158, 104), (250, 226, 178))
    foam = _band(_noise(rng, 6, width, 3, 9), (190, 220, 226), (255, 255, 255))
    return _landscape(
        [(32, _air(rng, 32, width)), (28, _waves(rng, 28, width)), (6, foam), (70, sand)],
    )


def _snow(rng: np.random.Generator, width: int = 512) -> np.ndarray:
    sky = _band(0.6 * _noise(rng, 72, width, 24, 40), (96, 116, 150), (150, 168, 196))
    drift = _band(_noise(rng, 64, width, 7, 26) + 0.4 * _noise(rng, 64, width, 2, 3), (206, 220, 238), (255, 255, 255))
    picture = _landscape([(72, sky), (64, drift)]).astype(np.float32)
    rows, columns = np.mgrid[0:136, 0:width].astype(np.float32)
    for _ in range(width * 136 // 330):
        y, x, radius = rng.uniform(0, 136), rng.uniform(0, width), rng.uniform(1.0, 2.4)
        top, left = max(0, int(y) - 4), max(0, int(x) - 4)
        part = (slice(top, top + 9), slice(left, left + 9))
        flake = np.clip(radius + 0.5 - np.hypot(rows[part] - y, columns[part] - x), 0, 1)[..., None]
        picture[part] = picture[part] * (1 - flake) + 255 * flake
    return picture.astype(np.uint8)
