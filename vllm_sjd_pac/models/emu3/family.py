"""Prompts and layout of Emu3-Gen (arXiv:2409.18869)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import sqrt
from typing import Any

from vllm_sjd_pac.models.emu3.pixels import Emu3Pixels
from vllm_sjd_pac.models.family import EncodedPrompt, SamplingDefaults, Tokenizer
from vllm_sjd_pac.models.layout import ImageLayout
from vllm_sjd_pac.models.segment import SegmentFamily, require_words

QUALITY = " masterpiece, film grained, best quality."
"""What the published recipe appends to every prompt."""
NEGATIVE = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, worst quality, "
    "low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)
"""The published recipe's negative prompt."""

SPECIAL = {
    "<|extra_200|>": 151846,  # end of line
    "<|extra_201|>": 151847,  # end of frame
    "<|image token|>": 151851,
    "<|image start|>": 151852,
    "<|image end|>": 151853,
    "<|visual token 000000|>": 151854,
    "*": 9,
    **{str(digit): 15 + digit for digit in range(10)},
}
"""Token ids of the published vocabulary, for checkpoints whose configuration has no ``vocabulary_map``."""

RATIOS = ((1, 1), (4, 3), (3, 4), (3, 2), (2, 3), (16, 9), (9, 16))
"""Width to height of the supported sizes; the area is the same for all."""


class Emu3Family(SegmentFamily):
    """``start, "rows*columns" as text, image token, (codes, end-of-line) × rows, end-of-frame, end``.

    720 × 720 pixels are 90 rows of 90 codes. ``image_area`` in the configuration sets the pixels of a picture (518,400
    by default). The unconditional prompt is the recipe's negative prompt with the same size; where only token ids are
    at hand it is encoded with the tokenizer of the model's folder.
    """

    name = "emu3"
    architectures = ("Emu3ForConditionalGeneration",)
    defaults = SamplingDefaults(guidance_scale=3.0, temperature=1.0, top_k=2048)

    def __init__(self, hf_config: Any, model_path: str) -> None:
        super().__init__(hf_config, model_path)
        vocabulary = getattr(hf_config, "vocabulary_map", None) or {}
        self.ids = {name: int(vocabulary.get(name, token)) for name, token in SPECIAL.items()}
        self.names = {self.ids[name]: name for name in "*0123456789"}
        self.bos = int(hf_config.get_text_config().bos_token_id)
        self.code_pixels = 2 ** (len(hf_config.vq_config.channel_multiplier) - 1)
        self.codebook_size = int(hf_config.vq_config.codebook_size)
        self.area = int(getattr(hf_config, "image_area", 518_400))
        self._sizes = tuple(dict.fromkeys(self._size(*ratio) for ratio in RATIOS))

    def _size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) in pixels at this ratio: whole codes, the area as near as rounding each side allows."""
        scale = sqrt(self.area / (width * height)) / self.code_pixels
        return round(width * scale) * self.code_pixels, round(height * scale) * self.code_pixels

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        return self._sizes

    def is_begin(self, token: int) -> bool:
        return token == self.ids["<|image token|>"]

    def grid_after(self, tokens: Sequence[int], begin: int) -> tuple[int, int] | None:
        """Read ``rows*columns`` from the text between the image's start token and `begin`."""
        text = ""
        for index in range(begin - 1, max(begin - 12, -1), -1):
            if tokens[index] == self.ids["<|image start|>"]:
                rows, star, columns = text.partition("*")
                if not (star and rows.isdecimal() and columns.isdecimal()):
                    return None
                size = (int(columns) * self.code_pixels, int(rows) * self.code_pixels)
                return (int(rows), int(columns)) if size in self._sizes else None
            text = self.names.get(tokens[index], "?") + text
        return None

    def build_layout(self, rows: int, columns: int) -> ImageLayout:
        return ImageLayout(
            image_token_start=self.ids["<|visual token 000000|>"],
            image_token_count=self.codebook_size,
            rows=rows,
            columns=columns,
            end_of_line=self.ids["<|extra_200|>"],
            end_tokens=(self.ids["<|extra_201|>"], self.ids["<|image end|>"]),
        )

    def _header(self, size: tuple[int, int]) -> list[int]:
        columns, rows = (side // self.code_pixels for side in size)
        written = [self.ids[character] for character in f"{rows}*{columns}"]
        return [self.ids["<|image start|>"], *written, self.ids["<|image token|>"]]

    def _words(self, tokenizer: Tokenizer, text: str) -> list[int]:
        tokens = list(tokenizer.encode(text))
        return tokens if tokens and tokens[0] == self.bos else [self.bos, *tokens]

    def encode_prompt(
        self,
        tokenizer: Tokenizer,
        prompt: str,
        *,
        size: tuple[int, int] | None = None,
        negative_prompt: str | None = None,
    ) -> EncodedPrompt:
        header = self._header(self.check_size(size))
        negative = NEGATIVE if negative_prompt is None else require_words(negative_prompt, "negative_prompt")
        return EncodedPrompt(
            self._words(tokenizer, require_words(prompt) + QUALITY) + header, self._words(tokenizer, negative) + header
        )

    @cached_property
    def _negative_words(self) -> list[int]:
        from transformers import AutoTokenizer  # only for requests that bring token ids and no negative prompt

        return self._words(AutoTokenizer.from_pretrained(self.model_path), NEGATIVE)

    def unconditional(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The recipe's negative prompt with the size that `prompt_token_ids` end on (the default size if with none)."""
        tokens = list(prompt_token_ids)
        start = self.ids["<|image start|>"]
        if start in tokens:
            return self._negative_words + tokens[len(tokens) - 1 - tokens[::-1].index(start) :]
        return self._negative_words + self._header(self.sizes[0])

    def load_pixel_decoder(self) -> Emu3Pixels:
        return Emu3Pixels.from_checkpoint(self.hf_config, self.model_path)
