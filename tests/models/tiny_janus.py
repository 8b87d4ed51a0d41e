"""A small random Janus-Pro checkpoint in transformers' format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import family_harness as harness
import torch

from vllm_sjd_pac.models.janus.family import BEGIN_OF_IMAGE, PAD

TEXT, CODES, GRID = 48, 96, 5


NAMES = {"<unk>": 0, "<bos>": 1, "<eos>": 2, PAD: 3, BEGIN_OF_IMAGE: 4}


NAMES |= {word: 5 + index for index, word in enumerate(("<|User|>:", "<|Assistant|>:", "a", "red", "boat"))}


def write_reference(folder: Path) -> Any:
    from transformers import JanusConfig, JanusForConditionalGeneration

    torch.manual_seed(4)
    text = {
        "model_type": "llama", "vocab_size": TEXT, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": GRID * 4, "patch_size": 4,
        "projection_dim": 64, "num_image_tokens": GRID * GRID,
    }  # fmt: skip
    vq = {
        "embed_dim": 8, "num_embeddings": CODES, "latent_channels": 32, "base_channels": 32, "num_hidden_layers": 3,
        "channel_multiplier": [1, 1, 2], "num_res_blocks": 1, "projection_dim": 64, "image_token_embed_dim": 64,
    }  # fmt: skip
    config = JanusConfig(
        text_config=text, vision_config=vision, vq_config=vq, image_token_id=40, tie_word_embeddings=False
    )
    reference = harness.shake(JanusForConditionalGeneration(config), 4)
    reference.save_pretrained(folder)
    harness.write_tokenizer(folder, NAMES, unknown="<unk>", special=(PAD, BEGIN_OF_IMAGE))
    return reference


@torch.no_grad()
def reference_logits(reference: Any, tokens: list[int]) -> torch.Tensor:
    """The published recipe: text embeddings for words, aligned image embeddings for codes, the generation head."""
    ids = torch.tensor([tokens])
    text = reference.get_input_embeddings()(ids.clamp(max=TEXT - 1))
    image = reference.prepare_embeddings_for_image_generation((ids - TEXT).clamp(min=0))
    embeddings = torch.where((ids < TEXT)[..., None], text, image)
    return reference.model.generation_head(reference.model.language_model(inputs_embeds=embeddings).last_hidden_state)[
        0
    ]
