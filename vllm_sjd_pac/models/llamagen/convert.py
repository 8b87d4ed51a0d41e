"""Convert a LlamaGen checkpoint to a folder that ``vllm serve`` takes.

``python -m vllm_sjd_pac.models.llamagen.convert c2i_L_384.pt OUT --image-size 384 --vq vq_ds16_c2i.pt`` writes the
configuration, the tensors under Llama's names, a tokenizer whose words are class numbers, and the pixel decoder.

Text-conditional (t2i) checkpoints are refused: their prompts are embeddings of a T5 encoder with a padding mask, which
vLLM's requests cannot carry.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from vllm_sjd_pac.models.checkpoint import read_pickle
from vllm_sjd_pac.models.llamagen.family import CODE_PIXELS, DECODER_FOLDER

HEAD_SIZE = 64
"""Of every published class-conditional model (B, L, XL, XXL, XXXL)."""
IMAGE_SIZES = (256, 384, 512)
_LAYER_NAMES = {
    "attention.wo.weight": "self_attn.o_proj.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_DECODER_PARTS = ("decoder.", "post_quant_conv.", "quantize.embedding.")


def convert_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """LlamaGen's tensors under the names of this package's network.

    Raises:
        ValueError: a text-conditional checkpoint, or a tensor that is unexpected or missing.
    """
    if any(name.startswith("cls_embedding.") and name != "cls_embedding.embedding_table.weight" for name in tensors):
        raise ValueError(
            "this is a text-conditional (t2i) LlamaGen checkpoint: its prompts are T5 embeddings with a padding mask, "
            "which vLLM's requests cannot carry; only class-conditional (c2i) checkpoints are supported"
        )
    rest = {name: tensor for name, tensor in tensors.items() if name != "freqs_cis"}

    def take(name: str) -> torch.Tensor:
        if name not in rest:
            raise ValueError(f"the LlamaGen checkpoint lacks {name}")
        return rest.pop(name)

    codes, classes = take("tok_embeddings.weight"), take("cls_embedding.embedding_table.weight")
    converted = {
        "model.embed_tokens.weight": torch.cat([codes, classes]),
        "model.norm.weight": take("norm.weight"),
        "lm_head.weight": take("output.weight"),
    }
    hidden = codes.shape[1]
    layers = {int(name.split(".")[1]) for name in rest if name.startswith("layers.")}
    for layer in sorted(layers | set(range(max(layers, default=-1) + 1))):
        fused = take(f"layers.{layer}.attention.wqkv.weight")
        rows = (fused.shape[0] - hidden) // 2  # queries are as wide as the model, keys and values share what is left
        for part, tensor in zip("qkv", fused.split([hidden, rows, rows]), strict=True):
            converted[f"model.layers.{layer}.self_attn.{part}_proj.weight"] = tensor
        for old, new in _LAYER_NAMES.items():
            converted[f"model.layers.{layer}.{new}"] = take(f"layers.{layer}.{old}")
    if rest:
        raise ValueError(f"unexpected tensors in the LlamaGen checkpoint: {', '.join(sorted(rest)[:8])}")
    return {name: tensor.contiguous().clone() for name, tensor in converted.items()}


def build_config(tensors: Mapping[str, torch.Tensor], image_size: int, head_size: int = HEAD_SIZE) -> dict[str, object]:
    """``config.json`` for converted tensors: a Llama configuration with LlamaGen's own fields."""
    vocabulary, hidden = tensors["model.embed_tokens.weight"].shape
    codes = tensors["lm_head.weight"].shape[0]
    grid = image_size // CODE_PIXELS
    return {
        "architectures": ["LlamaGenForImageGeneration"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "codebook_size": codes,
        "num_classes": vocabulary - codes - 1,
        "grid_size": grid,
        "hidden_size": hidden,
        "intermediate_size": tensors["model.layers.0.mlp.gate_proj.weight"].shape[0],
        "num_hidden_layers": sum(name.endswith("q_proj.weight") for name in tensors),
        "num_attention_heads": hidden // head_size,
        "num_key_value_heads": tensors["model.layers.0.self_attn.k_proj.weight"].shape[0] // head_size,
        "head_dim": head_size,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1 + grid * grid,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": str(tensors["lm_head.weight"].dtype).removeprefix("torch."),
    }


def write_tokenizer(folder: Path, codes: int, classes: int) -> None:
    """A tokenizer whose words are class numbers and ``<null>``; codes have names, so that outputs can be shown."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = {f"<code_{code}>": code for code in range(codes)}
    words |= {str(number): codes + number for number in range(classes)} | {"<null>": codes + classes}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<null>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<null>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def convert(
    checkpoint: Path, folder: Path, *, image_size: int, vq: Path | None = None, head_size: int = HEAD_SIZE
) -> None:
    """Write a model folder.

    Args:
        checkpoint: LlamaGen's ``c2i_*.pt``.
        folder: where to write; created if need be.
        image_size: side of the picture that the checkpoint was trained on, in pixels.
        vq: LlamaGen's ``vq_ds16_c2i.pt``; without it the folder can draw codes but no pixels.
        head_size: size of an attention head.
    """
    tensors = convert_tensors(read_pickle(checkpoint))
    config = build_config(tensors, image_size, head_size)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    codes, vocabulary = tensors["lm_head.weight"].shape[0], tensors["model.embed_tokens.weight"].shape[0]
    write_tokenizer(folder, codes, vocabulary - codes - 1)
    if vq is not None:
        decoder = {
            name: tensor.contiguous() for name, tensor in read_pickle(vq).items() if name.startswith(_DECODER_PARTS)
        }
        (folder / DECODER_FOLDER).mkdir(exist_ok=True)
        save_file(decoder, str(folder / DECODER_FOLDER / "decoder.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert a class-conditional LlamaGen checkpoint for vLLM.")
    parser.add_argument("checkpoint", type=Path, help="c2i_*.pt")
    parser.add_argument("folder", type=Path, help="where to write the model")
    parser.add_argument("--image-size", type=int, choices=IMAGE_SIZES, required=True)
    parser.add_argument("--vq", type=Path, help="vq_ds16_c2i.pt, the pixel decoder")
    arguments = parser.parse_args()
    convert(arguments.checkpoint, arguments.folder, image_size=arguments.image_size, vq=arguments.vq)


if __name__ == "__main__":
    main()
