"""Train the pixel tokenizer: 128×128 pictures ↔ 16×16 codes out of a codebook of 1024.

Schedule (by steps): unquantised warm-up, then the codebook is initialised from encoder outputs and
follows them by exponential moving averages; for the last part encoder and codebook are frozen and the
decoder is trained alone. 64-px crops first, whole pictures later.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.train_emoji.scenes import SceneMaker
from vllm_sjd_pac.models.emoji.vq import ResidualBlock, VQDecoder

DIMENSION = 8
ENCODER_CHANNELS = (64, 128)
DECODER_CHANNELS = (128, 64, 32)


@dataclass(frozen=True)
class VQSchedule:
    """Steps of each phase, and the batch sizes that go with the two picture sizes."""

    warm_up: int = 60
    crops: int = 1800
    frozen_share: float = 0.3
    full: int = 700
    crop_batch: int = 16
    full_batch: int = 4
    codebook_size: int = 1024
    learning_rate: float = 2e-3

    @property
    def steps(self) -> int:
        return self.crops + self.full


class Encoder(nn.Module):
    """Pixels ``[B, 3, 8H, 8W]`` to unit vectors ``[B, dim, H, W]``; sees about ±24 px."""

    def __init__(self) -> None:
        super().__init__()
        fine, coarse = ENCODER_CHANNELS
        self.layers = nn.Sequential(
            nn.PixelUnshuffle(4),
            nn.Conv2d(48, fine, 3, padding=1),
            ResidualBlock(fine, second_kernel=1),
            nn.PixelUnshuffle(2),
            nn.Conv2d(fine * 4, coarse, 1),
            ResidualBlock(coarse, second_kernel=1),
            ResidualBlock(coarse, second_kernel=1),
            nn.ReLU(),
            nn.Conv2d(coarse, DIMENSION, 1),
        )

    def forward(self, pixels: Tensor) -> Tensor:
        return F.normalize(self.layers(pixels), dim=1)


class VQTrainer(nn.Module):
    """Encoder, codebook with its moving averages, decoder."""

    def __init__(self, codebook_size: int):
        super().__init__()
        self.encoder = Encoder()
        self.vq = VQDecoder(codebook_size, DIMENSION, DECODER_CHANNELS)
        self.register_buffer("counts", torch.ones(codebook_size))
        self.register_buffer("sums", torch.zeros(codebook_size, DIMENSION))

    def codes(self, vectors: Tensor) -> Tensor:
        """Nearest codes ``[B, H, W]`` of unit vectors ``[B, dim, H, W]``."""
        return torch.einsum("bdhw,kd->bhwk", vectors, self.vq.codebook).argmax(-1)

    def initialise_codebook(self, vectors: Tensor) -> None:
        """Start from a spread-out sample of encoder outputs ``[N, dim]`` (k-means++-like)."""
        size = len(self.vq.codebook)
        chosen = vectors[:1]
        nearest = vectors @ chosen[0]
        while len(chosen) < size:
            index = torch.multinomial((1 - nearest).clamp(min=1e-6), 1)
            chosen = torch.cat([chosen, vectors[index]])
            nearest = torch.maximum(nearest, vectors @ vectors[index[0]])
        self.vq.codebook.copy_(chosen)
        self.sums.copy_(chosen)

    def follow(self, vectors: Tensor, codes: Tensor, decay: float) -> None:
        """Move the codebook towards the mean of its vectors; dead codes restart at random vectors."""
        flat, index = vectors.permute(0, 2, 3, 1).reshape(-1, DIMENSION), codes.flatten()
        counts = torch.bincount(index, minlength=len(self.counts)).float()
        sums = torch.zeros_like(self.sums).index_add_(0, index, flat)
        self.counts.mul_(decay).add_(counts, alpha=1 - decay)
        self.sums.mul_(decay).add_(sums, alpha=1 - decay)
        dead = self.counts < 0.02
        if dead.any():
            fresh = flat[torch.randint(len(flat), (int(dead.sum()),))]
            self.sums[dead], self.counts[dead] = fresh, 1.0
        self.vq.codebook.copy_(F.normalize(self.sums, dim=1))


def reconstruction_loss(output: Tensor, target: Tensor) -> Tensor:
    """L1 on the pixels plus L1 on three levels of a Laplacian pyramid of the error."""
    error = output - target
    loss = error.abs().mean()
    for _ in range(3):
        coarse = F.avg_pool2d(error, 2)
        loss = loss + (error - F.interpolate(coarse, scale_factor=2.0)).abs().mean()
        error = coarse
    return loss + error.abs().mean()


def to_pixels(pictures: np.ndarray) -> Tensor:
    """uint8 ``[B, H, W, 3]`` to float ``[B, 3, H, W]`` in [-1, 1], channels last in memory."""
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1


def draw_batch(pictures: np.ndarray, side: int, batch: int, rng: np.random.Generator) -> Tensor:
    """Random pictures, cropped to ``side`` where it is less than the whole."""
    chosen = pictures[rng.integers(len(pictures), size=batch)]
    if side < chosen.shape[1]:
        offsets = rng.integers(chosen.shape[1] - side + 1, size=(batch, 2))
        chosen = np.stack([p[y : y + side, x : x + side] for p, (y, x) in zip(chosen, offsets, strict=True)])
    return to_pixels(chosen)


def train(pictures: np.ndarray, schedule: VQSchedule, path: Path, log_every: int = 100) -> VQTrainer:
    """Train (or resume) on pictures ``[N, 128, 128, 3]`` uint8 and keep a checkpoint at ``path``."""
    torch.manual_seed(1)
    model = VQTrainer(schedule.codebook_size).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=schedule.learning_rate, betas=(0.9, 0.98))
    start = 0
    if path.exists():
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    freeze = round(schedule.steps * (1 - schedule.frozen_share))
    began = time.time()
    for step in range(start, schedule.steps):
        rng = np.random.default_rng((11, step))
        full = step >= schedule.crops
        pixels = draw_batch(pictures, 128 if full else 64, schedule.full_batch if full else schedule.crop_batch, rng)
        ramp = min(1.0, (step + 1) / 50)
        rate = schedule.learning_rate * ramp * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / schedule.steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        frozen = step >= freeze
        with torch.set_grad_enabled(not frozen):
            vectors = model.encoder(pixels)
        loss = torch.zeros(())
        if step < schedule.warm_up:
            quantised = vectors
        else:
            if step == schedule.warm_up:
                with torch.no_grad():
                    sample = model.encoder(draw_batch(pictures, 64, 256, rng))
                    model.initialise_codebook(sample.permute(0, 2, 3, 1).reshape(-1, DIMENSION))
            codes = model.codes(vectors.detach())
            nearest = model.vq.codebook[codes].permute(0, 3, 1, 2)
            if frozen:
                quantised = nearest
            else:
                loss = 0.5 * (vectors - nearest).pow(2).sum(1).mean()
                quantised = vectors + (nearest - vectors).detach()
                model.follow(vectors.detach(), codes, 0.97 if step < freeze // 2 else 0.99)
        output = model.vq.decoder(quantised)
        reconstruction = reconstruction_loss(output, pixels)
        optimizer.zero_grad(set_to_none=True)
        (reconstruction + loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % log_every == 0:
            psnr = 10 * torch.log10(4 / (output.detach().clamp(-1, 1) - pixels).pow(2).mean())
            print(
                f"vq step {step + 1} loss {reconstruction.item():.4f} psnr {psnr.item():.2f} "
                f"seconds {time.time() - began:.0f}",
                flush=True,
            )
        if (step + 1) % 500 == 0 or step + 1 == schedule.steps:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, path.with_suffix(".new"))
            path.with_suffix(".new").rename(path)
    return model


def load(path: Path) -> VQTrainer:
    """The trained tokenizer of a checkpoint written by :func:`train`."""
    state = torch.load(path)["model"]
    model = VQTrainer(len(state["vq.codebook"]))
    model.load_state_dict(state)
    return model.eval().requires_grad_(False).to(memory_format=torch.channels_last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for data and checkpoints")
    parser.add_argument("--pictures", type=int, default=5000)
    parser.add_argument("--crop-steps", type=int, default=VQSchedule.crops)
    parser.add_argument("--full-steps", type=int, default=VQSchedule.full)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    maker = SceneMaker.from_folder(arguments.work / "data")
    rng = np.random.default_rng(3)
    pictures = np.stack([maker.make(rng).pixels for _ in range(arguments.pictures)])
    schedule = VQSchedule(crops=arguments.crop_steps, full=arguments.full_steps)
    train(pictures, schedule, arguments.work / "vq.pt")


if __name__ == "__main__":
    main()
