"""The words that the bundled model knows, and the one normal form of a caption.

A caption is reduced to its content words in order: ``[colour] object ground`` or
``[colour] object plain colour``. The same rules are compiled into the checkpoint's
``tokenizer.json`` (see :func:`build_tokenizer`), so that a raw prompt sent straight to the
language model and one that went through :func:`normalise` give the same tokens.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, BEGIN, BEGIN_IMAGE, END_OF_LINE, END_IMAGE, UNKNOWN = (
    "<pad>",
    "<bos>",
    "<boi>",
    "<eol>",
    "<eoi>",
    "<unk>",
)
SPECIAL_TOKENS = (PAD, BEGIN, BEGIN_IMAGE, END_OF_LINE, END_IMAGE, UNKNOWN)
PAD_ID, BEGIN_ID, BEGIN_IMAGE_ID, END_OF_LINE_ID, END_IMAGE_ID, UNKNOWN_ID = range(6)
IMAGE_TOKEN_START = 256

OBJECTS = (
    "apple",
    "pumpkin",
    "mushroom",
    "cactus",
    "sunflower",
    "chick",
    "penguin",
    "owl",
    "frog",
    "pig",
    "panda",
    "ladybug",
    "fish",
    "car",
    "heart",
    "star",
)
GROUNDS = ("grass", "beach", "sea", "sky", "snow", "space", "forest", "bricks", "pebbles")
COLOURS = ("red", "green", "yellow", "blue", "purple", "orange", "pink", "white", "black", "brown")
PLAIN = "plain"
WORDS = (*OBJECTS, *GROUNDS, *COLOURS, PLAIN)

# Words and phrases with the same meaning as a known word. Longer phrases come first.
SYNONYMS: dict[str, str] = {
    "brick wall": "bricks",
    "outer space": "space",
    "starry sky": "space",
    "night sky": "space",
    "sandy beach": "beach",
    "toadstool": "mushroom",
    "jack-o-lantern": "pumpkin",
    "automobile": "car",
    "ladybird": "ladybug",
    "beetle": "ladybug",
    "chicken": "chick",
    "piglet": "pig",
    "toad": "frog",
    "lawn": "grass",
    "meadow": "grass",
    "field": "grass",
    "sand": "beach",
    "seaside": "beach",
    "shore": "beach",
    "coast": "beach",
    "ocean": "sea",
    "water": "sea",
    "waves": "sea",
    "clouds": "sky",
    "air": "sky",
    "winter": "snow",
    "snowy": "snow",
    "galaxy": "space",
    "cosmos": "space",
    "universe": "space",
    "woods": "forest",
    "trees": "forest",
    "jungle": "forest",
    "brick": "bricks",
    "gravel": "pebbles",
    "stones": "pebbles",
    "rocks": "pebbles",
    "scarlet": "red",
    "crimson": "red",
    "golden": "yellow",
    "violet": "purple",
    "rose": "pink",
    "solid": "plain",
    "simple": "plain",
    **{f"{word}s": word for word in OBJECTS if word not in ("fish", "cactus")},
    "cacti": "cactus",
    "fishes": "fish",
    "pebble": "pebbles",
}
# Words that carry no meaning for the model.
# fmt: off
IGNORED = (
    "a", "an", "the", "of", "on", "in", "at", "by", "with", "to", "and", "is", "it", "its", "this", "that",
    "there", "some", "one", "front", "against", "near", "under", "above", "over", "before", "behind",
    "beside", "among", "between", "through", "floating", "flying", "lying", "sitting", "standing", "driving",
    "swimming", "parked", "resting", "lies", "sits", "stands", "background", "backdrop", "ground", "floor",
    "colour", "color", "coloured", "colored", "wall", "emoji", "picture", "image", "photo", "drawing", "draw",
    "small", "little", "big", "large", "cute", "round", "nice",
)
# fmt: on


def rewrite_rules() -> list[tuple[str, str]]:
    """Regular expressions and replacements that turn lower-case text into content words."""
    rules = [(r"[^a-z\- ]+", " ")]
    phrases = sorted(SYNONYMS, key=lambda phrase: -len(phrase.split()))
    rules += [(rf"\b{re.escape(phrase)}\b".replace(r"\ ", r" +"), SYNONYMS[phrase]) for phrase in phrases]
    rules.append((rf"\b(?:{'|'.join(IGNORED)})\b", " "))
    rules.append((r"-", " "))
    return rules


_COMPILED = [(re.compile(pattern), replacement) for pattern, replacement in rewrite_rules()]


def normalise(text: str) -> str:
    """``"A red apple, on the lawn!"`` → ``"red apple grass"``; unknown words stay as they are."""
    text = text.lower()
    for pattern, replacement in _COMPILED:
        text = pattern.sub(replacement, text)
    return " ".join(text.split())


def unknown_words(caption: str) -> list[str]:
    """Words of a normalised caption that the model was not trained on, in order, once each."""
    return [word for word in dict.fromkeys(caption.split()) if word not in WORDS]


def build_tokenizer(codebook_size: int) -> PreTrainedTokenizerFast:
    """The tokenizer of the checkpoint: ``text`` → ``<bos> content words <boi>``."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *WORDS))}
    for index in range(len(vocabulary), IMAGE_TOKEN_START):
        vocabulary[f"<reserved_{index}>"] = index
    for code in range(codebook_size):
        vocabulary[f"<image_{code}>"] = IMAGE_TOKEN_START + code
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase()]
        + [normalizers.Replace(Regex(pattern), replacement) for pattern, replacement in rewrite_rules()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A {BEGIN_IMAGE}",
        special_tokens=[(BEGIN, BEGIN_ID), (BEGIN_IMAGE, BEGIN_IMAGE_ID)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END_IMAGE,
        unk_token=UNKNOWN,
        pad_token=PAD,
        additional_special_tokens=[BEGIN_IMAGE, END_OF_LINE],
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
