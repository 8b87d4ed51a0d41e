"""A tiny random image-token model in the bundled model's format, for engine tests: seconds to build, quick to run."""

from __future__ import annotations

import json
from pathlib import Path

import torch

ROWS, COLUMNS, CODES = 5, 6, 40
BOS, BOI, EOL, EOI, UNK = 0, 1, 2, 3, 4
FIRST_WORD, WORDS = 5, ("red", "green", "blue", "apple", "boat", "on", "grass", "sea")
IMAGE_START = 16


def build(
    folder: Path,
    *,
    constrained: bool = True,
    seed: int = 0,
    sharpness: float = 3.0,
    rows: int = ROWS,
    columns: int = COLUMNS,
    codes: int = CODES,
    heads: int = 2,
) -> Path:
    """Write a random Llama checkpoint with an ``image_token_layout`` block.

    Args:
        sharpness: standard deviation of the logits, roughly; larger makes the next token depend more on the context.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    vocab_size = IMAGE_START + codes
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32 * heads,
        intermediate_size=64 * heads,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOI,
        pad_token_id=None,
        initializer_range=0.15,
    )
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness / (model.lm_head.weight.std() * (32 * heads) ** 0.5))
    model.save_pretrained(folder)
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content["image_token_layout"] = {
        "begin_token_id": BOI,
        "end_token_id": EOI,
        "end_of_line_token_id": EOL,
        "image_token_start": IMAGE_START,
        "image_token_count": codes,
        "grid_rows": rows,
        "grid_columns": columns,
        "pixels_per_token": 8,
        "constrained": constrained,
        "pixel_decoder": "tiny",
    }
    path.write_text(json.dumps(content))
    vocabulary = {"<bos>": BOS, "<boi>": BOI, "<eol>": EOL, "<eoi>": EOI, "<unk>": UNK}
    vocabulary |= {word: FIRST_WORD + index for index, word in enumerate(WORDS)}
    vocabulary |= {f"<{index}>": index for index in range(FIRST_WORD + len(WORDS), vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <boi>", special_tokens=[("<bos>", BOS), ("<boi>", BOI)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eoi>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


def prompt(*words: str) -> list[int]:
    return [BOS, *(FIRST_WORD + WORDS.index(word) for word in words), BOI]


SEGMENT_LENGTH = ROWS * (COLUMNS + 1) + 1
