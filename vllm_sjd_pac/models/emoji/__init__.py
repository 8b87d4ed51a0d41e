"""The bundled image-token model: small, real, drawn from 16 objects on 18 grounds.

``checkpoint_path()`` is a folder that vLLM and transformers load as a stock Llama; its ``vq``
subfolder holds the pixel decoder. Importing this module needs neither vLLM nor torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_sjd_pac.models.emoji.vocabulary import WORDS, normalise, unknown_words

if TYPE_CHECKING:
    from vllm_sjd_pac.models.emoji.vq import PixelDecoder

__all__ = ["PARAPHRASES", "README_PROMPTS", "PixelDecoder", "check_prompt", "checkpoint_path", "known_words"]

README_PROMPTS: tuple[str, ...] = (
    "a red apple on grass",
    "a green apple on a plain blue background",
    "a pumpkin in the forest",
    "a pumpkin on pebbles",
    "a red mushroom in the forest",
    "a mushroom on a plain blue background",
    "a cactus on the beach",
    "a cactus in front of bricks",
    "a sunflower in the sky",
    "a sunflower in front of bricks",
    "a yellow chick on grass",
    "a penguin in the snow",
    "a penguin by the sea",
    "a brown owl in the forest",
    "an owl in space",
    "a green frog on pebbles",
    "a pink pig on grass",
    "a panda on the beach",
    "a ladybug on a plain yellow background",
    "a blue fish on pebbles",
    "a red car on the beach",
    "a blue car in the snow",
    "a purple heart in front of bricks",
    "a yellow star in space",
)
PARAPHRASES: tuple[str, ...] = (
    "red apple, lawn",
    "green apple, solid blue backdrop",
    "pumpkins in the woods",
    "a jack-o-lantern on gravel",
    "a scarlet toadstool among trees",
    "toadstool, blue background",
    "a large cactus by the seaside",
    "a cactus against a brick wall",
    "a sunflower floating in the clouds",
    "a sunflower by a brick wall",
    "a cute little yellow chick in a meadow",
    "a winter penguin",
    "a penguin at the ocean",
    "a brown owl in the trees",
    "an owl in a galaxy",
    "a green toad sitting on stones",
    "a pink piglet in a field",
    "a panda on sand",
    "a ladybird on solid yellow",
    "a blue fish on stones",
    "a crimson car parked on the shore",
    "a blue automobile driving in winter",
    "a violet heart on brick",
    "a golden star in outer space",
)


def checkpoint_path() -> Path:
    """The folder of the bundled checkpoint."""
    return Path(__file__).parent / "checkpoint"


def known_words() -> tuple[str, ...]:
    """Every word that the model was trained on: objects, grounds, colours, ``plain``."""
    return WORDS


def check_prompt(text: str) -> tuple[str, list[str]]:
    """The caption in the model's own words, and the words of it that the model does not know.

    Unknown words become ``<unk>`` in the tokenizer; the model was trained to pass over them.

    :raises ValueError: the prompt is empty.
    """
    if not text.strip():
        raise ValueError(f"the prompt is empty ({text!r}); the bundled model knows: {', '.join(WORDS)}")
    caption = normalise(text)
    return caption, unknown_words(caption)


def __getattr__(name: str) -> Any:
    """Import torch only where the pixel decoder is asked for."""
    if name == "PixelDecoder":
        from vllm_sjd_pac.models.emoji.vq import PixelDecoder

        return PixelDecoder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
