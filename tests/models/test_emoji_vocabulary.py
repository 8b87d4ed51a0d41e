"""Captions of the bundled model: one normal form, unknown words named, empty prompts refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vllm_sjd_pac.models import emoji
from vllm_sjd_pac.models.emoji import vocabulary


@pytest.mark.parametrize(
    ("text", "caption"),
    [
        ("a red apple on grass", "red apple grass"),
        ("Red apple, on the LAWN!", "red apple grass"),
        ("two penguins in outer space", "two penguin space"),
        ("a blue car in front of a brick wall", "blue car bricks"),
        ("a jack-o-lantern on gravel", "pumpkin pebbles"),
        ("a frog on a plain yellow background", "frog plain yellow"),
    ],
)
def test_captions_have_one_normal_form(text: str, caption: str) -> None:
    assert emoji.check_prompt(text)[0] == caption


def test_unknown_words_are_named_once_each() -> None:
    assert emoji.check_prompt("a zebra and a zebra on grass with hats")[1] == ["zebra", "hats"]


@pytest.mark.parametrize("text", ["", "  \n"])
def test_an_empty_prompt_is_an_error_that_names_it(text: str) -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        emoji.check_prompt(text)


@pytest.mark.parametrize("prompt", emoji.README_PROMPTS + emoji.PARAPHRASES)
def test_listed_prompts_use_known_words_only(prompt: str) -> None:
    assert emoji.check_prompt(prompt)[1] == []


def test_paraphrases_have_an_object_and_a_ground_of_their_prompt() -> None:
    assert len(emoji.README_PROMPTS) == len(emoji.PARAPHRASES) == 24
    for prompt, paraphrase in zip(emoji.README_PROMPTS, emoji.PARAPHRASES, strict=True):
        words = set(emoji.check_prompt(prompt)[0].split())
        other = set(emoji.check_prompt(paraphrase)[0].split())
        assert words & other & set(vocabulary.OBJECTS), (prompt, paraphrase)
        assert words & other & set(vocabulary.GROUNDS + vocabulary.COLOURS), (prompt, paraphrase)


def test_words_fit_below_the_image_tokens() -> None:
    assert len(vocabulary.SPECIAL_TOKENS) + len(emoji.known_words()) <= vocabulary.IMAGE_TOKEN_START
    assert set(vocabulary.SYNONYMS.values()) <= set(emoji.known_words())


def test_importing_the_package_needs_neither_torch_nor_vllm() -> None:
    program = (
        "import importlib, sys; importlib.import_module('vllm_sjd_pac.models.emoji');"
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
