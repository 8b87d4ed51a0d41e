"""Prompts and layout of Janus-Pro (arXiv:2501.17811)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_sjd_pac.models.checkpoint import read_json, read_tensors, token_id
from vllm_sjd_pac.models.family import EncodedPrompt, SamplingDefaults, Tokenizer
from vllm_sjd_pac.models.janus.vocabulary import code_start
from vllm_sjd_pac.models.layout import ImageLayout
from vllm_sjd_pac.models.segment import SegmentFamily, require_words
from vllm_sjd_pac.models.vqgan import VQDecoder

BEGIN_OF_IMAGE = "<begin_of_image>"
PAD = "<｜▁pad▁｜>"


class JanusFamily(SegmentFamily):
    """``begin, 24 × 24 codes``: 384 × 384 pixels, no line ends, no end token.

    Ids are those of the merged vocabulary (`vllm_sjd_pac.models.janus.vocabulary`). The unconditional prompt is as long
    as the prompt: all but its first and last token are padding, as in the published recipe. The ids of the begin token
    and of padding are read from the model's tokenizer or generation configuration.
    """

    name = "janus"
    architectures = ("JanusForConditionalGeneration",)
    defaults = SamplingDefaults(guidance_scale=5.0, temperature=1.0, top_k=0)

    def __init__(self, hf_config: Any, model_path: str) -> None:
        super().__init__(hf_config, model_path)
        generation = read_json(model_path, "generation_config.json")
        named = (generation.get("generation_kwargs") or {}) | generation
        self.begin_token = self._special(BEGIN_OF_IMAGE, named.get("boi_token_id"))
        self.pad_token = self._special(PAD, named.get("pad_token_id"))
        self.code_start = code_start(hf_config)
        self.codes = int(hf_config.vq_config.num_embeddings)
        vision = hf_config.vision_config
        self.pixels, self.code_pixels = int(vision.image_size), int(vision.patch_size)
        self.grid = self.pixels // self.code_pixels

    def _special(self, text: str, otherwise: int | None) -> int:
        """The tokenizer's id of `text`, or else the generation configuration's."""
        token = token_id(self.model_path, text)
        token = otherwise if token is None else token
        if token is None:
            raise ValueError(
                f"{self.model_path}: neither tokenizer.json nor generation_config.json tells the id of {text}"
            )
        return token

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        return ((self.pixels, self.pixels),)

    def is_begin(self, token: int) -> bool:
        return token == self.begin_token

    def grid_after(self, tokens: Sequence[int], begin: int) -> tuple[int, int] | None:
        return self.grid, self.grid

    def build_layout(self, rows: int, columns: int) -> ImageLayout:
        return ImageLayout(self.code_start, self.codes, rows, columns)

    def _ask(self, tokenizer: Tokenizer, words: str) -> list[int]:
        """The chat template's question, the start of the answer, the begin token."""
        return [*tokenizer.encode(f"<|User|>: {words}\n\n<|Assistant|>:"), self.begin_token]

    def encode_prompt(
        self,
        tokenizer: Tokenizer,
        prompt: str,
        *,
        size: tuple[int, int] | None = None,
        negative_prompt: str | None = None,
    ) -> EncodedPrompt:
        self.check_size(size)
        tokens = self._ask(tokenizer, require_words(prompt))
        if negative_prompt is None:
            return EncodedPrompt(tokens, self.unconditional(tokens))
        return EncodedPrompt(tokens, self._ask(tokenizer, require_words(negative_prompt, "negative_prompt")))

    def unconditional(self, prompt_token_ids: Sequence[int]) -> list[int]:
        tokens = list(prompt_token_ids)
        return tokens if len(tokens) < 3 else [tokens[0], *[self.pad_token] * (len(tokens) - 2), tokens[-1]]

    def load_pixel_decoder(self) -> VQDecoder:
        return VQDecoder(read_tensors(self.model_path, ("model.vqmodel.",)), unit_codebook=True)
