"""A small random LlamaGen checkpoint in its own names, and its conversion."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

from vllm_sjd_pac.models.llamagen.convert import convert

CODES, CLASSES, HIDDEN, HEAD_SIZE, LAYERS, GRID = 80, 10, 64, 32, 2, 6


HEADS = HIDDEN // HEAD_SIZE


Tensors = dict[str, torch.Tensor]


def random_checkpoint(seed: int = 5) -> Tensors:
    """LlamaGen's names and shapes; matrices scaled so that activations neither vanish nor explode."""
    shapes: dict[str, tuple[int, ...]] = {
        "tok_embeddings.weight": (CODES, HIDDEN), "cls_embedding.embedding_table.weight": (CLASSES + 1, HIDDEN),
        "norm.weight": (HIDDEN,), "output.weight": (CODES, HIDDEN),
    }  # fmt: skip
    for layer in range(LAYERS):
        shapes |= {
            f"layers.{layer}.attention.wqkv.weight": (3 * HIDDEN, HIDDEN),
            f"layers.{layer}.attention.wo.weight": (HIDDEN, HIDDEN),
            f"layers.{layer}.feed_forward.w1.weight": (96, HIDDEN),
            f"layers.{layer}.feed_forward.w3.weight": (96, HIDDEN),
            f"layers.{layer}.feed_forward.w2.weight": (HIDDEN, 96),
            f"layers.{layer}.attention_norm.weight": (HIDDEN,),
            f"layers.{layer}.ffn_norm.weight": (HIDDEN,),
        }
    generator = torch.Generator().manual_seed(seed)
    random = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: 1 + 0.2 * t if t.dim() == 1 else t * 1.5 / t.shape[1] ** 0.5 for name, t in random.items()}


def random_tokenizer(seed: int = 6) -> Tensors:
    """A small image tokenizer in LlamaGen's names: five stages as VQ-16, stubs of the encoder."""
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}

    def add(name: str, *shape: int) -> None:
        fan = torch.Size(shape[1:]).numel()
        tensors[f"{name}.weight"] = torch.randn(shape, generator=generator) / fan**0.5
        if len(shape) == 1:
            tensors[f"{name}.weight"] = 1 + 0.2 * tensors[f"{name}.weight"]
        tensors[f"{name}.bias"] = 0.2 * torch.randn(shape[0], generator=generator)

    def residual(name: str, entering: int, leaving: int) -> None:
        add(f"{name}.norm1", entering)
        add(f"{name}.conv1", leaving, entering, 3, 3)
        add(f"{name}.norm2", leaving)
        add(f"{name}.conv2", leaving, leaving, 3, 3)
        if entering != leaving:
            add(f"{name}.nin_shortcut", leaving, entering, 1, 1)

    def attention(name: str, channels: int) -> None:
        add(f"{name}.norm", channels)
        for part in ("q", "k", "v", "proj_out"):
            add(f"{name}.{part}", channels, channels, 1, 1)

    add("decoder.conv_in", 64, 32, 3, 3)
    residual("decoder.mid.0", 64, 64)
    attention("decoder.mid.1", 64)
    residual("decoder.mid.2", 64, 64)
    entering = 64
    for stage, leaving in enumerate((64, 32, 32, 32, 32)):
        for block in range(2):
            residual(f"decoder.conv_blocks.{stage}.res.{block}", entering, leaving)
            entering = leaving
            if stage == 0:
                attention(f"decoder.conv_blocks.{stage}.attn.{block}", leaving)
        if stage < 4:
            add(f"decoder.conv_blocks.{stage}.upsample.conv", leaving, leaving, 3, 3)
    add("decoder.norm_out", 32)
    add("decoder.conv_out", 3, 32, 3, 3)
    add("post_quant_conv", 32, 8, 1, 1)
    add("quant_conv", 8, 32, 1, 1)
    add("encoder.conv_in", 32, 3, 3, 3)
    tensors["quantize.embedding.weight"] = torch.randn(CODES, 8, generator=generator)
    tensors["quantize.codebook_used"] = torch.zeros(65536)
    return tensors


def write_checkpoint(folder: Path) -> None:
    """Save LlamaGen's ``.pt`` files and convert them to a model folder."""
    files = folder / "original"
    files.mkdir(parents=True)
    torch.save({"model": random_checkpoint() | {"freqs_cis": torch.zeros(1)}, "steps": 1}, files / "c2i.pt")
    torch.save({"model": random_tokenizer()}, files / "vq.pt")
    convert(files / "c2i.pt", folder, image_size=GRID * 16, vq=files / "vq.pt", head_size=HEAD_SIZE)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rotations() -> torch.Tensor:
    """Complex rotation of every position, [1 + GRID², HEAD_SIZE / 2]: zero for the class, then by row and column."""
    frequencies = [10000.0 ** (-2 * k / (HEAD_SIZE // 2)) for k in range(HEAD_SIZE // 4)]
    table = [[0j] * (HEAD_SIZE // 2)]
    for row in range(GRID):
        for column in range(GRID):
            angles = [row * f for f in frequencies] + [column * f for f in frequencies]
            table.append([complex(torch.tensor(a).cos(), torch.tensor(a).sin()) for a in angles])
    return torch.tensor(table, dtype=torch.complex64)


def rotate(heads: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """[T, heads, HEAD_SIZE]: neighbouring features are one complex number."""
    return torch.view_as_real(torch.view_as_complex(heads.unflatten(-1, (-1, 2)).contiguous()) * turn[:, None]).flatten(
        -2
    )


def plain_logits(t: Tensors, label: int, codes: list[int]) -> torch.Tensor:
    """LlamaGen's forward for one class and a sequence of codes: [1 + len(codes), CODES]."""
    x = torch.cat([t["cls_embedding.embedding_table.weight"][[label]], t["tok_embeddings.weight"][codes]])
    length = len(x)
    turn = rotations()[:length]
    hidden_later = torch.ones(length, length, dtype=torch.bool).triu(1)
    for layer in range(LAYERS):
        w = {name.removeprefix(f"layers.{layer}."): v for name, v in t.items() if name.startswith(f"layers.{layer}.")}
        qkv = norm(x, w["attention_norm.weight"]) @ w["attention.wqkv.weight"].T
        q, k, v = (part.view(length, HEADS, HEAD_SIZE) for part in qkv.split(HIDDEN, dim=-1))
        scores = torch.einsum("qhd,khd->hqk", rotate(q, turn), rotate(k, turn)) / HEAD_SIZE**0.5
        weights = scores.masked_fill(hidden_later, -torch.inf).softmax(-1)
        x = x + torch.einsum("hqk,khd->qhd", weights, v).flatten(1) @ w["attention.wo.weight"].T
        y = norm(x, w["ffn_norm.weight"])
        gate = F.silu(y @ w["feed_forward.w1.weight"].T) * (y @ w["feed_forward.w3.weight"].T)
        x = x + gate @ w["feed_forward.w2.weight"].T
    return norm(x, t["norm.weight"]) @ t["output.weight"].T
