"""Write the shipped checkpoint from the training checkpoints, at any time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from examples.train_emoji import train_vq
from examples.train_emoji.language_model import ModelShape
from vllm_sjd_pac.models.emoji import vocabulary


def llama_config(shape: ModelShape) -> dict[str, Any]:
    """``config.json``: stock Llama plus the image layout that the engine reads."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.feed_forward,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rope_theta": shape.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "bos_token_id": vocabulary.BEGIN_ID,
        "eos_token_id": vocabulary.END_IMAGE_ID,
        "pad_token_id": vocabulary.PAD_ID,
        "image_token_layout": {
            "begin_token_id": vocabulary.BEGIN_IMAGE_ID,
            "end_token_id": vocabulary.END_IMAGE_ID,
            "end_of_line_token_id": vocabulary.END_OF_LINE_ID,
            "image_token_start": vocabulary.IMAGE_TOKEN_START,
            "image_token_count": shape.vocabulary - vocabulary.IMAGE_TOKEN_START,
            "grid_rows": 16,
            "grid_columns": 16,
            "pixels_per_token": 8,
            "constrained": True,
            "pixel_decoder": "emoji_vq",
        },
    }


def export(work: Path, output: Path) -> None:
    """Language model in bfloat16, decoder in float16, tokenizer and configurations."""
    state = torch.load(work / "lm.pt")
    shape = ModelShape(**state["shape"])
    (output / "vq").mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in state["model"].items()}
    _save(weights, output / "model.safetensors")
    _write(output / "config.json", llama_config(shape))
    generation = {
        "bos_token_id": vocabulary.BEGIN_ID,
        "eos_token_id": vocabulary.END_IMAGE_ID,
        "pad_token_id": vocabulary.PAD_ID,
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "max_new_tokens": 273,
    }
    _write(output / "generation_config.json", generation)
    vocabulary.build_tokenizer(shape.vocabulary - vocabulary.IMAGE_TOKEN_START).save_pretrained(output)

    vq = train_vq.load(work / "vq.pt").vq
    half = {name: tensor.half().contiguous() for name, tensor in vq.state_dict().items()}
    _save(half, output / "vq" / "model.safetensors")
    codebook_size, dimension = vq.codebook.shape
    vq_config = {
        "codebook_size": codebook_size,
        "dimension": dimension,
        "decoder_channels": list(train_vq.DECODER_CHANNELS),
        "pixels_per_token": 8,
    }
    _write(output / "vq" / "config.json", vq_config)


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    default = Path(vocabulary.__file__).parent / "checkpoint"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for data and checkpoints")
    parser.add_argument("--output", type=Path, default=default)
    arguments = parser.parse_args()
    export(arguments.work, arguments.output)


if __name__ == "__main__":
    main()
