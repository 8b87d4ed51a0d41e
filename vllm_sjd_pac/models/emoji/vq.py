"""The pixel decoder of the bundled model: 16×16 codes to a 128×128 picture.

The codebook vectors have unit length; the decoder is a small residual convolutional network that
works mostly at 16×16 and 32×32 and reaches the pixels by two pixel shuffles. The matching encoder
is needed for training only and lives with the training recipe.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NOT_DRAWN = -1
NEUTRAL_GREY = 128


class ResidualBlock(nn.Module):
    """``x + conv(relu(conv(relu(x))))``; starts as the identity. ``second_kernel`` widens the view."""

    def __init__(self, channels: int, second_kernel: int = 3):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, second_kernel, padding=second_kernel // 2)
        nn.init.zeros_(self.second.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(F.relu(x))))


class Decoder(nn.Module):
    """Code vectors ``[B, dim, H, W]`` to pixels ``[B, 3, 8H, 8W]`` in about [-1, 1]."""

    def __init__(self, dimension: int, channels: tuple[int, int, int]):
        super().__init__()
        coarse, middle, fine = channels
        self.layers = nn.Sequential(
            nn.Conv2d(dimension, coarse, 3, padding=1),
            ResidualBlock(coarse),
            ResidualBlock(coarse),
            nn.Conv2d(coarse, middle * 4, 1),
            nn.PixelShuffle(2),
            ResidualBlock(middle),
            nn.Conv2d(middle, fine * 4, 1),
            nn.PixelShuffle(2),
            ResidualBlock(fine),
            nn.Conv2d(fine, 12, 3, padding=1),
            nn.PixelShuffle(2),
        )

    def forward(self, vectors: Tensor) -> Tensor:
        return self.layers(vectors)


class VQDecoder(nn.Module):
    """Codebook ``[codes, dim]`` and decoder."""

    def __init__(self, codebook_size: int, dimension: int, channels: tuple[int, int, int]):
        super().__init__()
        self.codebook: Tensor
        self.register_buffer("codebook", torch.zeros(codebook_size, dimension))
        self.decoder = Decoder(dimension, channels)

    def forward(self, codes: Tensor) -> Tensor:
        """Codes ``[B, H, W]`` to pixels ``[B, 3, 8H, 8W]``."""
        return self.decoder(self.codebook[codes].permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last))


class PixelDecoder:
    """Turns image codes into pictures; loads from the ``vq`` folder of a checkpoint."""

    def __init__(self, model: VQDecoder):
        self.model = model.float().eval().requires_grad_(False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @classmethod
    def from_checkpoint(cls, path: str | Path) -> PixelDecoder:
        """``path`` is the checkpoint folder (that holds ``vq/``) or the ``vq`` folder itself."""
        from safetensors.torch import load_file

        folder = Path(path)
        if (folder / "vq").is_dir():
            folder = folder / "vq"
        config = json.loads((folder / "config.json").read_text())
        model = VQDecoder(config["codebook_size"], config["dimension"], tuple(config["decoder_channels"]))
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return cls(model)

    @torch.inference_mode()
    def decode(self, codes: Tensor) -> Tensor:
        """Codes ``[B, 16, 16]`` (0-based; -1 = not drawn yet) to uint8 pixels ``[B, 128, 128, 3]``.

        Cells that are not drawn yet come out neutral grey. Before decoding they borrow the code above
        them, so that the drawn cells next to them look as if the picture simply went on.
        """
        missing = codes < 0
        pixels = self.model(_fill(codes) if missing.any() else codes)
        pixels = ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1)
        if missing.any():
            cell = pixels.shape[1] // codes.shape[1]
            mask = missing.repeat_interleave(cell, 1).repeat_interleave(cell, 2)
            pixels = pixels.masked_fill(mask[..., None], NEUTRAL_GREY)
        return pixels.contiguous()


def _fill(codes: Tensor) -> Tensor:
    """Replace every -1 by the nearest code above it, in the first row by the one to its left, else 0."""
    filled = codes.clone()
    filled[:, 0, 0].clamp_(min=0)
    for column in range(1, codes.shape[2]):
        here = filled[:, 0, column]
        filled[:, 0, column] = torch.where(here < 0, filled[:, 0, column - 1], here)
    for row in range(1, codes.shape[1]):
        filled[:, row] = torch.where(filled[:, row] < 0, filled[:, row - 1], filled[:, row])
    return filled
