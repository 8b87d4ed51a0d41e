"""The shipped files: they load, they fit together, they are small and fast enough."""

from __future__ import annotations

import json
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_sjd_pac.models import emoji
from vllm_sjd_pac.models.emoji import vocabulary

PATH = emoji.checkpoint_path()


@pytest.fixture(scope="module")
def decoder() -> emoji.PixelDecoder:
    return emoji.PixelDecoder.from_checkpoint(PATH)


def test_all_files_together_stay_below_12_megabytes() -> None:
    assert sum(file.stat().st_size for file in PATH.rglob("*") if file.is_file()) < 12_000_000


def test_configuration_carries_the_image_layout() -> None:
    config = json.loads((PATH / "config.json").read_text())
    layout = config["image_token_layout"]
    assert layout["image_token_start"] + layout["image_token_count"] == config["vocab_size"]
    assert layout["end_token_id"] == config["eos_token_id"] == vocabulary.END_IMAGE_ID
    assert layout["begin_token_id"] == vocabulary.BEGIN_IMAGE_ID
    assert layout["end_of_line_token_id"] == vocabulary.END_OF_LINE_ID
    assert (layout["grid_rows"], layout["grid_columns"], layout["pixels_per_token"]) == (16, 16, 8)
    assert layout["constrained"] is True
    assert layout["pixel_decoder"] == "emoji_vq"


def test_tokenizer_frames_a_prompt_by_itself() -> None:
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("A red apple, on the lawn!")["input_ids"])
    assert tokens == ["<bos>", "red", "apple", "grass", "<boi>"]
    assert tokenizer("")["input_ids"] == [vocabulary.BEGIN_ID, vocabulary.BEGIN_IMAGE_ID]
    assert vocabulary.UNKNOWN_ID in tokenizer("a zebra")["input_ids"]
    assert len(tokenizer) == json.loads((PATH / "config.json").read_text())["vocab_size"]


@pytest.mark.parametrize("text", emoji.README_PROMPTS + emoji.PARAPHRASES)
def test_tokenizer_and_check_prompt_agree(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    assert tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])[1:-1] == emoji.check_prompt(text)[0].split()


def test_stock_llama_closes_every_row_and_the_picture() -> None:
    model = AutoModelForCausalLM.from_pretrained(PATH, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    prompt = torch.tensor([tokenizer("a red apple on grass")["input_ids"]])
    torch.manual_seed(0)
    row = model.generate(prompt, do_sample=True, top_k=0, max_new_tokens=17)[0, prompt.shape[1] :]
    assert row[16] == vocabulary.END_OF_LINE_ID
    assert (row[:16] >= vocabulary.IMAGE_TOKEN_START).all()


def test_codes_become_a_picture_quickly(decoder: emoji.PixelDecoder) -> None:
    codes = torch.randint(0, 1024, (1, 16, 16), generator=torch.Generator().manual_seed(0))
    pixels = decoder.decode(codes)
    assert pixels.shape == (1, 128, 128, 3)
    assert pixels.dtype == torch.uint8
    times = []
    for _ in range(7):
        began = time.process_time()
        decoder.decode(codes)
        times.append(time.process_time() - began)
    # 25 ms of one core; process time counts every thread, and the machine may be busy.
    assert min(times) < 0.2


def test_cells_that_are_not_drawn_are_grey(decoder: emoji.PixelDecoder) -> None:
    codes = torch.randint(0, 1024, (2, 16, 16), generator=torch.Generator().manual_seed(1))
    whole = decoder.decode(codes)
    partial = codes.clone()
    partial[0, 7, 5:] = -1
    partial[0, 8:] = -1
    partial[1] = -1
    pixels = decoder.decode(partial)
    assert (pixels[0, 64:] == 128).all()
    assert (pixels[0, 56:64, 40:] == 128).all()
    assert (pixels[1] == 128).all()
    # The decoder sees almost seven cells far, and what stands in for the missing ones is not what was there.
    assert (pixels[0, :16].int() - whole[0, :16].int()).abs().max() <= 4
    assert (pixels[0, 40:56].int() - whole[0, 40:56].int()).abs().max() > 4
