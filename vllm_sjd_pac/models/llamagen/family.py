"""Classes as prompts, and the layout, of class-conditional LlamaGen (arXiv:2406.06525)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_sjd_pac.models.checkpoint import model_folder, read_tensors
from vllm_sjd_pac.models.family import EncodedPrompt, SamplingDefaults, Tokenizer
from vllm_sjd_pac.models.layout import ImageLayout
from vllm_sjd_pac.models.segment import SegmentFamily
from vllm_sjd_pac.models.vqgan import VQDecoder, llamagen_name

CODE_PIXELS = 16
DECODER_FOLDER = "image_tokenizer"
"""Folder of the converted pixel decoder, beside the model's own tensors, which vLLM would else try to load."""


class LlamaGenFamily(SegmentFamily):
    """``class token, rows × columns codes``; no line ends, no end token. A checkpoint draws one size.

    A prompt is the number of an ImageNet class, 0 to 999; the unconditional prompt is the null class.
    """

    name = "llamagen"
    architectures = ("LlamaGenForImageGeneration",)
    defaults = SamplingDefaults(guidance_scale=4.0, temperature=1.0, top_k=2000)
    code_pixels = CODE_PIXELS

    def __init__(self, hf_config: Any, model_path: str) -> None:
        super().__init__(hf_config, model_path)
        self.codes, self.classes = int(hf_config.codebook_size), int(hf_config.num_classes)
        self.grid = int(hf_config.grid_size)

    @property
    def null_class(self) -> int:
        return self.codes + self.classes

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        return ((self.grid * CODE_PIXELS, self.grid * CODE_PIXELS),)

    def is_begin(self, token: int) -> bool:
        return token >= self.codes

    def grid_after(self, tokens: Sequence[int], begin: int) -> tuple[int, int] | None:
        return self.grid, self.grid

    def build_layout(self, rows: int, columns: int) -> ImageLayout:
        return ImageLayout(0, self.codes, rows, columns)

    def _class_token(self, prompt: str, what: str) -> int:
        number = prompt.strip() if prompt else ""
        if not number.isdecimal() or int(number) >= self.classes:
            raise ValueError(
                f"{what}={prompt!r}: this model draws classes; give the number of one, 0 to {self.classes - 1}"
            )
        return self.codes + int(number)

    def encode_prompt(
        self,
        tokenizer: Tokenizer,
        prompt: str,
        *,
        size: tuple[int, int] | None = None,
        negative_prompt: str | None = None,
    ) -> EncodedPrompt:
        self.check_size(size)
        negative = self.null_class if negative_prompt is None else self._class_token(negative_prompt, "negative_prompt")
        return EncodedPrompt([self._class_token(prompt, "prompt")], [negative])

    def unconditional(self, prompt_token_ids: Sequence[int]) -> list[int]:
        return [self.null_class]

    def load_pixel_decoder(self) -> VQDecoder:
        folder = model_folder(self.model_path) / DECODER_FOLDER
        return VQDecoder(read_tensors(str(folder), ("",)), llamagen_name, unit_codebook=True, rounds=True)
