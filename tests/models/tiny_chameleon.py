"""Small random Lumina-mGPT and Anole checkpoints in their published formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import family_harness as harness
import torch
from safetensors.torch import load_file, save_file

from vllm_sjd_pac.models.chameleon import tokens as ids

VOCABULARY = 8960


HEADS, HEAD_SIZE = 2, 32


WORDS = ("a", "red", "boat", "Generate", "an", "image", "of", "64x64", "according", "to", "the", "following", "prompt:")


def vocabulary_map() -> dict[str, int]:
    names = {
        "<s>": 0,
        "<pad>": 1,
        "</s>": 2,
        "<unk>": 3,
        "<eoss>": ids.END_OF_IMAGE,
        "<racm3:break>": ids.BEGIN_OF_IMAGE,
    }
    for code in range(ids.IMAGE_COUNT):
        letters = "".join("ABCDEFGHIJ"[int(digit)] for digit in str(code))
        names[f"IMGIMG{letters}Z"] = ids.IMAGE_START + code
    names |= {f"<reserved{number:05d}>": number + 4 for number in range(8706, VOCABULARY - 4)}
    names["<image>"] = 8711
    return names | {word: 8200 + index for index, word in enumerate(WORDS)}


def write_reference(folder: Path, *, rows: int, seed: int) -> Any:
    """A random ``ChameleonForConditionalGeneration``, saved; its qk-norm has `rows` different rows."""
    from transformers import ChameleonConfig, ChameleonForConditionalGeneration

    torch.manual_seed(seed)
    config = ChameleonConfig(
        vocab_size=VOCABULARY,
        hidden_size=HEADS * HEAD_SIZE,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=512,
        vocabulary_map=vocabulary_map(),
        bos_token_id=0,
        eos_token_id=8710,
        pad_token_id=1,
        vq_config={
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "latent_channels": 32,
            "embed_dim": 32,
            "resolution": 32,
        },
    )
    reference = harness.shake(ChameleonForConditionalGeneration(config), seed)
    with torch.no_grad():
        for layer in reference.model.layers:
            for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                for parameter in (norm.weight, norm.bias):
                    parameter.copy_(parameter[:rows].repeat_interleave(HEADS // rows, dim=0))
    reference.save_pretrained(folder)
    torch.save({"state_dict": random_vqgan() | {"loss.logvar": torch.zeros(())}}, folder / "vqgan.ckpt")
    harness.write_tokenizer(folder, vocabulary_map(), unknown="<unk>")
    return reference


def write_lumina(folder: Path) -> Any:
    """Lumina-mGPT's own format: one qk-norm row for all heads, no image tokenizer, its trainer's architecture name."""
    reference = write_reference(folder, rows=1, seed=1)
    tensors = {
        name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if "vqmodel" not in name
    }
    for name in tensors:
        if "self_attn.q_norm." in name or "self_attn.k_norm." in name:
            tensors[name] = tensors[name][:1].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    harness.update_config(folder, architectures=["ChameleonXLLMXForConditionalGeneration"], target_size=64)
    return reference


def write_anole(folder: Path) -> Any:
    """The format of transformers: one qk-norm row per head, the image encoder in the checkpoint."""
    reference = write_reference(folder, rows=HEADS, seed=2)
    harness.update_config(folder, image_grid_size=4)
    return reference


def random_vqgan(seed: int = 7) -> dict[str, torch.Tensor]:
    """Meta's ``vqgan.ckpt`` in small: its names, 5 stages of (1, 1, 2, 2, 4) × 32 channels, 2 + 1 blocks each."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}

    def add(name: str, *shape: int) -> None:
        noise = torch.randn(shape, generator=generator)
        tensors[f"{name}.weight"] = 1 + 0.2 * noise if len(shape) == 1 else noise / torch.Size(shape[1:]).numel() ** 0.5
        tensors[f"{name}.bias"] = 0.2 * torch.randn(shape[0], generator=generator)

    def residual(name: str, entering: int, leaving: int) -> None:
        add(f"{name}.norm1", entering)
        add(f"{name}.conv1", leaving, entering, 3, 3)
        add(f"{name}.norm2", leaving)
        add(f"{name}.conv2", leaving, leaving, 3, 3)
        if entering != leaving:
            add(f"{name}.nin_shortcut", leaving, entering, 1, 1)

    widths = [32, 32, 64, 64, 128]
    add("decoder.conv_in", 128, 16, 3, 3)
    residual("decoder.mid.block_1", 128, 128)
    add("decoder.mid.attn_1.norm", 128)
    for part in ("q", "k", "v", "proj_out"):
        add(f"decoder.mid.attn_1.{part}", 128, 128, 1, 1)
    residual("decoder.mid.block_2", 128, 128)
    entering = 128
    for stage in reversed(range(5)):
        for block in range(3):
            residual(f"decoder.up.{stage}.block.{block}", entering, widths[stage])
            entering = widths[stage]
        if stage:
            add(f"decoder.up.{stage}.upsample.conv", entering, entering, 3, 3)
    add("decoder.norm_out", 32)
    add("decoder.conv_out", 3, 32, 3, 3)
    add("post_quant_conv", 16, 24, 1, 1)
    add("quant_conv", 24, 16, 1, 1)
    add("encoder.conv_in", 32, 3, 3, 3)
    tensors["quantize.embedding.weight"] = torch.randn(ids.IMAGE_COUNT, 24, generator=generator)
    return tensors


@torch.no_grad()
def reference_logits(reference: Any, tokens: list[int]) -> torch.Tensor:
    """Unmasked logits: `forward` of transformers hides image tokens, which these models draw."""
    return reference.lm_head(reference.model(torch.tensor([tokens])).last_hidden_state[0])
