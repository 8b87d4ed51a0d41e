"""The VQGAN decoder that Chameleon, LlamaGen and Janus share, from codes to pixels, with each one's tensor names.

Architecture after arXiv:2012.09841 (taming transformers): a convolution, two residual blocks around one attention
block, then stages of residual blocks, each stage but the last followed by an upsampling by two. All sizes are read off
the tensors, so one class serves every checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import nn

UNDRAWN_GREY = 128
"""Value of the pixels of codes that are not drawn yet."""

_IGNORED = ("encoder.", "quant_conv.", "loss.", "quantize.codebook_used")
"""Parts of a checkpoint that only training or encoding needs."""


def taming_name(name: str, stages: int) -> str:
    """Meta's ``vqgan.ckpt``: stage 0 is the last one that runs."""
    found = re.match(r"decoder\.up\.(\d+)\.(.+)", name)
    return f"decoder.up.{stages - 1 - int(found[1])}.{found[2]}" if found else name


def running_order_name(name: str, stages: int) -> str:
    """``JanusVQVAE`` of transformers: the names used here, stages in the order in which they run."""
    return name


def llamagen_name(name: str, stages: int) -> str:
    """LlamaGen's ``vq_ds16_*.pt``."""
    name = re.sub(
        r"^decoder\.mid\.([012])\.", lambda m: f"decoder.mid.{('block_1', 'attn_1', 'block_2')[int(m[1])]}.", name
    )
    return re.sub(r"^decoder\.conv_blocks\.(\d+)\.", r"decoder.up.\1.", name).replace(".res.", ".block.")


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, channels, eps=1e-6)


class ResidualBlock(nn.Module):
    def __init__(self, entering: int, leaving: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = _norm(entering), nn.Conv2d(entering, leaving, 3, padding=1)
        self.norm2, self.conv2 = _norm(leaving), nn.Conv2d(leaving, leaving, 3, padding=1)
        if entering != leaving:
            self.nin_shortcut = nn.Conv2d(entering, leaving, 1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        change = self.conv1(F.silu(self.norm1(values)))
        change = self.conv2(F.silu(self.norm2(change)))
        return change + (self.nin_shortcut(values) if hasattr(self, "nin_shortcut") else values)


class AttentionBlock(nn.Module):
    """Single-head attention over all cells."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _norm(channels)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        normed = self.norm(values)
        query, key, value = (part(normed).flatten(2).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(query, key, value)
        return values + self.proj_out(attended.transpose(1, 2).reshape(values.shape))


class Upsampling(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.conv(F.interpolate(values, scale_factor=2.0, mode="nearest"))


class Middle(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block_1, self.block_2 = ResidualBlock(channels, channels), ResidualBlock(channels, channels)
        self.attn_1 = AttentionBlock(channels)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.block_2(self.attn_1(self.block_1(values)))


class Stage(nn.Module):
    def __init__(self, widths: list[tuple[int, int]], attends: bool, upsamples: bool) -> None:
        super().__init__()
        self.block = nn.ModuleList(ResidualBlock(*width) for width in widths)
        self.attn = nn.ModuleList(AttentionBlock(width[1]) for width in widths if attends)
        if upsamples:
            self.upsample = Upsampling(widths[-1][1])

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.block):
            values = block(values)
            if self.attn:
                values = self.attn[index](values)
        return self.upsample(values) if hasattr(self, "upsample") else values


class Decoder(nn.Module):
    """Built with the sizes that `tensors` (names of this module, prefix ``decoder.``) have."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], stages: int) -> None:
        super().__init__()

        def width(name: str) -> tuple[int, int]:
            leaving, entering = tensors[f"decoder.{name}.weight"].shape[:2]
            return int(entering), int(leaving)

        self.conv_in = nn.Conv2d(*width("conv_in"), 3, padding=1)
        self.mid = Middle(width("conv_in")[1])
        self.up = nn.ModuleList()
        for stage in range(stages):
            numbers = _numbers(tensors, rf"decoder\.up\.{stage}\.block\.(\d+)\.")
            self.up.append(
                Stage(
                    [width(f"up.{stage}.block.{number}.conv1") for number in range(numbers)],
                    attends=_numbers(tensors, rf"decoder\.up\.{stage}\.attn\.(\d+)\.") > 0,
                    upsamples=f"decoder.up.{stage}.upsample.conv.weight" in tensors,
                )
            )
        self.norm_out = _norm(width("conv_out")[0])
        self.conv_out = nn.Conv2d(*width("conv_out"), 3, padding=1)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        values = self.mid(self.conv_in(latents))
        for stage in self.up:
            values = stage(values)
        return self.conv_out(F.silu(self.norm_out(values)))


def _numbers(tensors: Mapping[str, torch.Tensor], pattern: str) -> int:
    """How many different numbers `pattern` finds in the names."""
    return len({found[1] for name in tensors if (found := re.match(pattern, name))})


class VQDecoder(nn.Module):
    """Codes to pixels; satisfies `PixelDecoder`.

    Args:
        tensors: an image tokenizer's checkpoint; its encoder, if any, is left out.
        rename: from the checkpoint's names to this module's (one of the ``*_name`` functions above).
        unit_codebook: codes' vectors are scaled to length one (LlamaGen, Janus).
        rounds: pixels are rounded to the next integer (LlamaGen) instead of cut off.

    Raises:
        ValueError: a tensor is unexpected or missing.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        rename: Callable[[str, int], str] = running_order_name,
        *,
        unit_codebook: bool = False,
        rounds: bool = False,
    ) -> None:
        super().__init__()
        self.unit_codebook, self.rounds = unit_codebook, rounds
        stages = _numbers(tensors, r"decoder\.(?:up|conv_blocks)\.(\d+)\.")
        own = {
            rename(name, stages): tensor.float() for name, tensor in tensors.items() if not name.startswith(_IGNORED)
        }
        for name in (
            "quantize.embedding.weight",
            "post_quant_conv.weight",
            "decoder.conv_in.weight",
            "decoder.conv_out.weight",
        ):
            if name not in own:
                raise ValueError(f"the image tokenizer lacks {name}")
        self.codebook = nn.Parameter(own.pop("quantize.embedding.weight"))
        leaving, entering = own["post_quant_conv.weight"].shape[:2]
        self.post_quant_conv = nn.Conv2d(entering, leaving, 1)
        self.decoder = Decoder(own, stages)
        missing, unexpected = self.load_state_dict(own, strict=False, assign=True)
        missing = [name for name in missing if name != "codebook"]
        if missing or unexpected:
            raise ValueError(f"image tokenizer: missing tensors {missing[:8]}, unexpected tensors {unexpected[:8]}")
        self.requires_grad_(False).eval()

    @property
    def code_count(self) -> int:
        return self.codebook.shape[0]

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """LongTensor [B, rows, columns] → float [B, 3, height, width], nominally in [−1, 1]."""
        vectors = self.codebook[codes]
        if self.unit_codebook:
            vectors = F.normalize(vectors, dim=-1)
        return self.decoder(self.post_quant_conv(vectors.permute(0, 3, 1, 2)))

    @torch.inference_mode()
    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """LongTensor [B, rows, columns] (−1 = not drawn yet, shown grey) → uint8 [B, height, width, 3]."""
        return to_bytes(self(codes.to(self.codebook.device).clamp(min=0)), codes, rounds=self.rounds)


def to_bytes(pixels: torch.Tensor, codes: torch.Tensor, *, rounds: bool) -> torch.Tensor:
    """Float [B, 3, height, width] in [−1, 1] → uint8 [B, height, width, 3] on the CPU; cells of code −1 become grey."""
    values = (pixels.float().cpu().clamp(-1, 1) + 1) / 2 * 255 + (0.5 if rounds else 0.0)
    image = values.clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()
    undrawn = (codes.cpu() < 0).to(torch.uint8)[:, None]
    if undrawn.any():
        cells = F.interpolate(undrawn, size=image.shape[1:3], mode="nearest")[:, 0].bool()
        image[cells] = UNDRAWN_GREY
    return image
