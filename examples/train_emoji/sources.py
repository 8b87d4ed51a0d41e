"""Pictures that the scenes are made of, fetched through package clients only (npm, apt, pip).

========================== ======================================== ==================
package                    what we take                             licence
========================== ======================================== ==================
npm @lobehub/fluent-emoji  sprites of 16 objects (Microsoft Fluent) MIT
npm @pmndrs/assets         Poly Haven panoramas: sky, forest        CC0
apt blender-data           HDRI Haven panorama: forest              CC0
pip scikit-image           grass, gravel, brick, Hubble deep field  CC0 / public domain
========================== ======================================== ==================
"""

from __future__ import annotations

import base64
import re
import subprocess
import tarfile
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

SPRITE_FILES = {
    "apple": "1f34e",
    "green apple": "1f34f",
    "pumpkin": "1f383",
    "mushroom": "1f344",
    "cactus": "1f335",
    "sunflower": "1f33b",
    "chick": "1f425",
    "penguin": "1f427",
    "owl": "1f989",
    "frog": "1f438",
    "pig": "1f437",
    "panda": "1f43c",
    "ladybug": "1f41e",
    "fish": "1f41f",
    "car": "1f697",
    "heart": "2764-fe0f",
    "star": "2b50",
}
NPM_PACKAGES = {"fluent": "@lobehub/fluent-emoji-3d@1.1.0", "pmndrs": "@pmndrs/assets@1.7.0"}
BLENDER_FOREST = "usr/share/blender/datafiles/studiolights/world/forest.exr"


def download(folder: Path) -> None:
    """Fetch and unpack what is missing below ``folder`` with npm and apt-get."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, package in NPM_PACKAGES.items():
        if (folder / name).exists():
            continue
        packed = subprocess.run(
            ["npm", "pack", "--silent", package], cwd=folder, check=True, capture_output=True, text=True
        )
        with tarfile.open(folder / packed.stdout.split()[-1]) as archive:
            archive.extractall(folder / f"{name}.partial", filter="data")
        (folder / f"{name}.partial" / "package").rename(folder / name)
    if not (folder / "blender").exists():
        subprocess.run(["apt-get", "download", "blender-data"], cwd=folder, check=True)
        package_file = next(folder.glob("blender-data_*.deb"))
        subprocess.run(["dpkg-deb", "-x", package_file.name, "blender"], cwd=folder, check=True)


def load_sprites(folder: Path) -> dict[str, Image.Image]:
    """RGBA sprites, 256×256, by object name."""
    assets = folder / "fluent" / "assets"
    return {name: Image.open(assets / f"{code}.webp").convert("RGBA") for name, code in SPRITE_FILES.items()}


def load_panorama(folder: Path, name: str) -> np.ndarray:
    """A tone-mapped panorama ``[height, width, 3]`` uint8: ``forest``, ``sky`` … or ``blender forest``."""
    import OpenEXR

    if name == "blender forest":
        return _tone_map(OpenEXR.File(str(folder / "blender" / BLENDER_FOREST)))
    script = (folder / "pmndrs" / "hdri" / f"{name}.exr.js").read_text()
    encoded = re.search(r"base64,([A-Za-z0-9+/=]+)", script)
    if encoded is None:
        raise ValueError(f"no base64 data in the panorama {name!r}")
    with tempfile.NamedTemporaryFile(suffix=".exr") as file:
        file.write(base64.b64decode(encoded.group(1)))
        file.flush()
        return _tone_map(OpenEXR.File(file.name))


def load_texture(name: str) -> np.ndarray:
    """A texture that ships inside scikit-image, ``[height, width, 3]`` uint8."""
    import skimage

    path = Path(skimage.__file__).parent / "data" / name
    return np.asarray(Image.open(path).convert("RGB"))


def _tone_map(file) -> np.ndarray:
    """Linear light to display values: exposure by the 60th percentile, a soft shoulder, gamma 2.2."""
    from scipy.ndimage import median_filter

    channels = file.channels()
    if len(channels) == 1:
        linear = next(iter(channels.values())).pixels
    else:
        linear = np.stack([channels[channel].pixels for channel in "RGB"], axis=-1)
    linear = np.asarray(linear, np.float32)[..., :3]
    # Lossy compression rings around bright spots: below zero, a median of the neighbours is put instead.
    negative = (linear <= 0).any(-1, keepdims=True)
    linear = np.clip(np.where(negative, median_filter(linear, size=(5, 5, 1)), linear), 0, None)
    linear /= np.percentile(linear.mean(-1), 60) * 2.2 + 1e-6
    linear = np.clip(linear / (1 + 0.3 * linear), 0, 1)
    return (linear ** (1 / 2.2) * 255).astype(np.uint8)
