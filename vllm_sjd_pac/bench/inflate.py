"""A costly copy of a small Llama: the same function, the arithmetic and memory traffic of a large model.

Speculation pays where a forward pass is expensive; a small model hides that behind overhead. The copy pads every matrix
with zeros to a larger hidden size, MLP and number of heads, and adds layers that add nothing, so that logits (up to
rounding), and with them drafts and acceptance, stay those of the trained model.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


@dataclass(frozen=True)
class InflatedShape:
    """Sizes of the copy; the defaults are those of a 1-billion-parameter Llama (but for its vocabulary)."""

    hidden: int = 2048
    feed_forward: int = 8192
    layers: int = 16
    groups: int = 4
    """Query heads that share one key head."""


def inflate(source: Path, target: Path, shape: InflatedShape | None = None, dtype: torch.dtype = torch.float32) -> int:
    """Write the inflated copy of checkpoint `source` to the folder `target`; returns its number of parameters.

    Args:
        source: a Llama checkpoint with as many key heads as heads, one ``model.safetensors``, tied embeddings.
        dtype: of the stored weights.

    Raises:
        ValueError: the checkpoint has another form, or is larger than `shape`.
    """
    shape = shape or InflatedShape()
    config = json.loads((source / "config.json").read_text())
    head = config["head_dim"]
    heads = shape.hidden // head
    _check(config, shape, heads)
    small = {name: weight.float() for name, weight in load_file(source / "model.safetensors").items()}
    generator = torch.Generator().manual_seed(0)

    def padded(weight: Tensor, rows: int, columns: int) -> Tensor:
        result = torch.zeros(rows, columns, dtype=dtype)
        result[: weight.shape[0], : weight.shape[1]] = weight
        return result

    def idle(rows: int, columns: int) -> Tensor:
        """Weights that cost time and change nothing: what they produce is multiplied by zero."""
        return (torch.randn(rows, columns, generator=generator) * 0.02).to(dtype)

    def spread(weight: Tensor) -> Tensor:
        """Rows of head i go to query head i * groups, which reads key head i."""
        result = torch.zeros(heads, head, shape.hidden, dtype=dtype)
        result[:: shape.groups][: config["num_attention_heads"], :, : weight.shape[1]] = weight.view(
            -1, head, weight.shape[1]
        )
        return result.flatten(0, 1)

    # A norm over more entries, the new ones zero, divides by a smaller root mean square.
    ratio = shape.hidden / config["hidden_size"]

    def norm(weight: Tensor) -> Tensor:
        result = torch.ones(shape.hidden)
        result[: len(weight)] = weight / ratio**0.5
        return result.to(dtype)

    hidden, inner, key_rows = shape.hidden, shape.feed_forward, heads // shape.groups * head
    weights = {
        "model.embed_tokens.weight": padded(small["model.embed_tokens.weight"], config["vocab_size"], hidden),
        "model.norm.weight": norm(small["model.norm.weight"]),
    }
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        if layer >= config["num_hidden_layers"]:
            sizes = {"q": (hidden, hidden), "k": (key_rows, hidden), "v": (key_rows, hidden)}
            for name, size in sizes.items():
                weights[f"{prefix}self_attn.{name}_proj.weight"] = idle(*size)
            weights[f"{prefix}self_attn.o_proj.weight"] = torch.zeros(hidden, hidden, dtype=dtype)
            weights[f"{prefix}mlp.gate_proj.weight"] = idle(inner, hidden)
            weights[f"{prefix}mlp.up_proj.weight"] = idle(inner, hidden)
            weights[f"{prefix}mlp.down_proj.weight"] = torch.zeros(hidden, inner, dtype=dtype)
            for name in ("input_layernorm", "post_attention_layernorm"):
                weights[f"{prefix}{name}.weight"] = torch.ones(hidden, dtype=dtype)
            continue
        weights[f"{prefix}self_attn.q_proj.weight"] = spread(small[f"{prefix}self_attn.q_proj.weight"])
        weights[f"{prefix}self_attn.o_proj.weight"] = spread(small[f"{prefix}self_attn.o_proj.weight"].T).T.contiguous()
        for name in ("k", "v"):
            weights[f"{prefix}self_attn.{name}_proj.weight"] = padded(
                small[f"{prefix}self_attn.{name}_proj.weight"], key_rows, hidden
            )
        for name in ("gate", "up"):
            weights[f"{prefix}mlp.{name}_proj.weight"] = padded(small[f"{prefix}mlp.{name}_proj.weight"], inner, hidden)
        weights[f"{prefix}mlp.down_proj.weight"] = padded(small[f"{prefix}mlp.down_proj.weight"], hidden, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = norm(small[f"{prefix}{name}.weight"])

    config |= {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // shape.groups,
        "rms_norm_eps": config["rms_norm_eps"] / ratio,
        "dtype": str(dtype).removeprefix("torch."),
    }

    def old_weights(folder: str, names: list[str]) -> list[str]:
        return ["model.safetensors"] if Path(folder) == source else []  # those of the pixel decoder stay

    shutil.copytree(source, target, dirs_exist_ok=True, ignore=old_weights)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return sum(weight.numel() for weight in weights.values())


def _check(config: dict[str, Any], shape: InflatedShape, heads: int) -> None:
    if config["model_type"] != "llama" or not config["tie_word_embeddings"]:
        raise ValueError("only a Llama with tied embeddings can be inflated")
    if config["num_key_value_heads"] != config["num_attention_heads"]:
        raise ValueError("only a model with as many key heads as heads can be inflated")
    if heads < config["num_attention_heads"] * shape.groups or shape.hidden < config["hidden_size"]:
        raise ValueError(f"the model is larger than the copy: hidden size {shape.hidden}, {heads} heads")
    if shape.layers < config["num_hidden_layers"] or shape.feed_forward < config["intermediate_size"]:
        raise ValueError(f"the model is larger than the copy: {shape.layers} layers, MLP {shape.feed_forward}")
