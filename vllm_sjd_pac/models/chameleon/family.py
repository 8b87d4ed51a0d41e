"""Prompts and layouts of the models with Chameleon's architecture: Lumina-mGPT and Anole."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from vllm_sjd_pac.models.chameleon.pixels import ChameleonPixels, load_pixels
from vllm_sjd_pac.models.chameleon.tokens import (
    BEGIN_OF_IMAGE,
    BEGIN_OF_TEXT,
    END_OF_IMAGE,
    END_OF_LINE,
    END_OF_TURN,
    IMAGE_COUNT,
    IMAGE_START,
    SIZE_BASE,
)
from vllm_sjd_pac.models.family import EncodedPrompt, ImageModelFamily, SamplingDefaults, Tokenizer
from vllm_sjd_pac.models.layout import ImageLayout
from vllm_sjd_pac.models.segment import SegmentFamily, require_words


class ChameleonFamily(SegmentFamily):
    """What Lumina-mGPT and Anole have in common: begin token, codes, turns, pixels."""

    code_pixels = 16

    def is_begin(self, token: int) -> bool:
        return token == BEGIN_OF_IMAGE

    def load_pixel_decoder(self) -> ChameleonPixels:
        return load_pixels(self.hf_config, self.model_path)

    def turn(self, tokenizer: Tokenizer, text: str) -> list[int]:
        """A human's turn: begin of text, the words, end of turn."""
        tokens = list(tokenizer.encode(text))
        if not tokens or tokens[0] != BEGIN_OF_TEXT:
            tokens.insert(0, BEGIN_OF_TEXT)
        return [*tokens, END_OF_TURN]


class LuminaMGPTFamily(ChameleonFamily):
    """Lumina-mGPT 7B-512, 7B-768 and 7B-1024 (arXiv:2408.02657).

    ``begin, height, width, (codes, end-of-line) × rows, end``: the size is written in two tokens, which count patches
    of 32 pixels. The prompt says the size in words and includes the size tokens; the unconditional prompt is the same
    without words, from the begin token on. The side of the square picture (512, 768 or 1024) is taken from
    ``target_size`` in the configuration, else from the model's name, else from its context length.
    """

    name = "lumina_mgpt"
    architectures = ("ChameleonXLLMXForConditionalGeneration", "ChameleonForConditionalGeneration")
    defaults = SamplingDefaults(guidance_scale=3.0, temperature=1.0, top_k=2000)
    header_length = 2
    patch_pixels = 32
    max_ratio = 4.0

    def __init__(self, hf_config: Any, model_path: str) -> None:
        super().__init__(hf_config, model_path)
        self.side = self._side()
        self._sizes = self._all_sizes()

    def _side(self) -> int:
        given = getattr(self.hf_config, "target_size", None)
        if given:
            return int(given)
        side = r"(?<!\d)(512|768|1024)(?!\d)"
        named = re.search(f"lumina[^/]*?{side}", self.model_path, re.IGNORECASE)
        named = named or re.search(side, self.model_path.rstrip("/").rsplit("/", 1)[-1])
        if named:
            return int(named[1])
        return 1024 if getattr(self.hf_config, "max_position_embeddings", 0) > 4400 else 768

    def _all_sizes(self) -> tuple[tuple[int, int], ...]:
        """The square first, then every (width, height) that the model was trained on.

        Those are the grids of patches whose area the square's does not exceed, and would exceed with one more column
        and row, with sides at most `max_ratio` apart.
        """
        patches = (self.side // self.patch_pixels) ** 2
        grids = [
            (width, height)
            for width in range(patches, 0, -1)
            for height in range(max(1, patches // (width + 1)), patches // width + 1)
            if max(width, height) <= self.max_ratio * min(width, height)
        ]
        square = (self.side, self.side)
        sizes = [(width * self.patch_pixels, height * self.patch_pixels) for width, height in grids]
        return (square, *(size for size in sizes if size != square))

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        return self._sizes

    def grid_after(self, tokens: Sequence[int], begin: int) -> tuple[int, int] | None:
        height, width = (token - SIZE_BASE for token in tokens[begin + 1 : begin + 3])
        return (
            (2 * height, 2 * width) if (width * self.patch_pixels, height * self.patch_pixels) in self._sizes else None
        )

    def begins_segment(self, token: int) -> bool:
        """Whether `token` can be the second size token, after which position 0 comes."""
        return SIZE_BASE < token <= SIZE_BASE + (self.side // self.patch_pixels) ** 2

    def build_layout(self, rows: int, columns: int) -> ImageLayout:
        return ImageLayout(IMAGE_START, IMAGE_COUNT, rows, columns, END_OF_LINE, (END_OF_IMAGE,))

    def encode_prompt(
        self,
        tokenizer: Tokenizer,
        prompt: str,
        *,
        size: tuple[int, int] | None = None,
        negative_prompt: str | None = None,
    ) -> EncodedPrompt:
        width, height = self.check_size(size)
        begin = [BEGIN_OF_IMAGE, SIZE_BASE + height // self.patch_pixels, SIZE_BASE + width // self.patch_pixels]

        def ask(words: str) -> list[int]:
            request = f"Generate an image of {width}x{height} according to the following prompt:\n{words}"
            return self.turn(tokenizer, request) + begin

        negative = begin if negative_prompt is None else ask(require_words(negative_prompt, "negative_prompt"))
        return EncodedPrompt(ask(require_words(prompt)), negative)

    def unconditional(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The prompt from its last begin-of-image token on."""
        tokens = list(prompt_token_ids)
        if BEGIN_OF_IMAGE not in tokens:
            return [BEGIN_OF_IMAGE]
        return tokens[len(tokens) - 1 - tokens[::-1].index(BEGIN_OF_IMAGE) :]


class AnoleFamily(ChameleonFamily):
    """Anole 7B and image-unlocked Chameleon (arXiv:2407.06135): 512 × 512, ``begin, 32 × 32 codes, end``."""

    name = "anole"
    architectures = ("ChameleonForConditionalGeneration",)
    defaults = SamplingDefaults(guidance_scale=3.0, temperature=0.7, top_p=0.9)

    @property
    def side_codes(self) -> int:
        """Codes along a side: 32, unless the configuration says otherwise (``image_grid_size``)."""
        return int(getattr(self.hf_config, "image_grid_size", 32))

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        return ((self.side_codes * self.code_pixels, self.side_codes * self.code_pixels),)

    def grid_after(self, tokens: Sequence[int], begin: int) -> tuple[int, int] | None:
        return self.side_codes, self.side_codes

    def build_layout(self, rows: int, columns: int) -> ImageLayout:
        return ImageLayout(IMAGE_START, IMAGE_COUNT, rows, columns, None, (END_OF_IMAGE,))

    def encode_prompt(
        self,
        tokenizer: Tokenizer,
        prompt: str,
        *,
        size: tuple[int, int] | None = None,
        negative_prompt: str | None = None,
    ) -> EncodedPrompt:
        self.check_size(size)
        tokens = [*self.turn(tokenizer, require_words(prompt)), BEGIN_OF_IMAGE]
        if negative_prompt is None:
            return EncodedPrompt(tokens, self.unconditional(tokens))
        negative = self.turn(tokenizer, require_words(negative_prompt, "negative_prompt"))
        return EncodedPrompt(tokens, [*negative, BEGIN_OF_IMAGE])

    def unconditional(self, prompt_token_ids: Sequence[int]) -> list[int]:
        return [BEGIN_OF_TEXT, BEGIN_OF_IMAGE]


def chameleon_family(hf_config: Any, model_path: str) -> ImageModelFamily:
    """Lumina-mGPT or Anole.

    ``image_family`` in the configuration decides. Without it, a checkpoint is Lumina-mGPT when its architecture, its
    training options or its name say so.

    Raises:
        ValueError: ``image_family`` names neither.
    """
    families = {family.name: family for family in (LuminaMGPTFamily, AnoleFamily)}
    given = getattr(hf_config, "image_family", None)
    if given is not None:
        if given not in families:
            raise ValueError(
                f"image_family={given!r} in the configuration is not known; choose {' or '.join(families)}"
            )
        return families[given](hf_config, model_path)
    architectures = getattr(hf_config, "architectures", None) or ()
    trained_by_lumina = any(hasattr(hf_config, option) for option in ("z_loss_weight", "mask_image_logits"))
    is_lumina = "ChameleonXLLMXForConditionalGeneration" in architectures or trained_by_lumina
    if is_lumina or "lumina" in model_path.lower():
        return LuminaMGPTFamily(hf_config, model_path)
    return AnoleFamily(hf_config, model_path)
