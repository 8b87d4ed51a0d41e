"""A small random Emu3-Gen checkpoint in transformers' format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import family_harness as harness
import torch

from vllm_sjd_pac.models.emu3.family import NEGATIVE, QUALITY, SPECIAL

CODES, IMAGE_START = 64, 40


WORDS = ("a", "red", "boat", *NEGATIVE.split(), *QUALITY.split())


def vocabulary_map() -> dict[str, int]:
    specials = [name for name in SPECIAL if not name.startswith("<|visual")]
    names = {"<image>": 0, "<|extra_203|>": 1, "<|extra_204|>": 2, "<|endoftext|>": 3}
    names |= {name: 4 + index for index, name in enumerate(specials)}
    names |= {f"<|visual token {code:06d}|>": IMAGE_START + code for code in range(CODES)}
    return names | {word: IMAGE_START + CODES + index for index, word in enumerate(dict.fromkeys(WORDS))}


def write_reference(folder: Path) -> Any:
    from transformers import Emu3Config, Emu3ForConditionalGeneration

    torch.manual_seed(3)
    names = vocabulary_map()
    text = {
        "vocab_size": max(names.values()) + 1, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512,
        "pad_token_id": 3, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    vq = {
        "codebook_size": CODES, "embed_dim": 4, "latent_channels": 4, "base_channels": 32, "channel_multiplier": [1, 1],
        "num_res_blocks": 1, "attn_resolutions": [1], "hidden_size": 32, "num_attention_heads": 1,
        "temporal_downsample_factor": 4,
    }  # fmt: skip
    config = Emu3Config(text_config=text, vq_config=vq, vocabulary_map=names)
    reference = harness.shake(Emu3ForConditionalGeneration(config), 3)
    reference.save_pretrained(folder)
    harness.update_config(folder, image_area=64)
    harness.write_tokenizer(folder, names, unknown="<|endoftext|>")
    return reference


@torch.no_grad()
def reference_logits(reference: Any, tokens: list[int]) -> torch.Tensor:
    return reference(torch.tensor([tokens])).logits[0]
