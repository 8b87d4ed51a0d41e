"""What an image-token model family is: prompt, negative prompt, token layout, sampling defaults, pixel decoder.

A family is found by the model's configuration: a block ``image_token_layout`` in ``config.json`` selects the generic
`GridFamily`; otherwise the architecture's name selects a registered family.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from vllm_sjd_pac.models.layout import ImageLayout


@dataclass(frozen=True)
class SamplingDefaults:
    """Sampling of image tokens when a request says nothing; ``top_k`` 0 means all tokens."""

    guidance_scale: float = 3.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True)
class EncodedPrompt:
    """Token ids of a prompt up to and including the begin of the image, and of its unconditional twin.

    ``unknown_words`` lists words that the model's vocabulary lacks; they were treated as the family's docstring says.
    """

    prompt_token_ids: list[int]
    negative_token_ids: list[int]
    unknown_words: tuple[str, ...] = ()


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...


class PixelDecoder(Protocol):
    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """LongTensor [B, rows, columns] (−1 = not drawn yet) → uint8 [B, height, width, 3]."""
        ...


class ImageModelFamily(ABC):
    """One model family. Instances are built once per process from the model's ``config.json``."""

    name: ClassVar[str]
    architectures: ClassVar[tuple[str, ...]] = ()
    defaults: SamplingDefaults = SamplingDefaults()

    def __init__(self, hf_config: Any, model_path: str) -> None:
        self.hf_config = hf_config
        self.model_path = model_path

    @property
    @abstractmethod
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Supported (width, height) in pixels, the default first."""

    @abstractmethod
    def segment_start(self, tokens: Sequence[int]) -> int | None:
        """Index of position 0 of the image segment that `tokens` leave open, or None when they leave none open.

        Called with prompt and output tokens; also for outputs in which the model itself begins an image.
        """

    @abstractmethod
    def begins_segment(self, token: int) -> bool:
        """Whether sampling `token` can open an image segment (a cheap test on every text token)."""

    @abstractmethod
    def layout(self, tokens: Sequence[int]) -> ImageLayout:
        """The layout of the segment that `tokens` leave open (its size may be written in them)."""

    @abstractmethod
    def encode_prompt(
        self,
        tokenizer: Tokenizer,
        prompt: str,
        *,
        size: tuple[int, int] | None = None,
        negative_prompt: str | None = None,
    ) -> EncodedPrompt:
        """Build the model's own prompt around a user's words.

        Raises:
            ValueError: an empty prompt, or a size that is not supported (the message lists the supported ones).
        """

    @abstractmethod
    def unconditional(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The unconditional prompt that belongs to `prompt_token_ids` when a request gives no negative prompt."""

    @abstractmethod
    def load_pixel_decoder(self) -> PixelDecoder:
        """The decoder from codes to pixels."""

    def check_size(self, size: tuple[int, int] | None) -> tuple[int, int]:
        """The size to draw: the default for None.

        Raises:
            ValueError: the size is not supported.
        """
        if size is None:
            return self.sizes[0]
        if size not in self.sizes:
            supported = ", ".join(f"{w}x{h}" for w, h in self.sizes)
            raise ValueError(f"size {size[0]}x{size[1]} is not supported by this model; supported: {supported}")
        return size


_FAMILIES: dict[str, str | type[ImageModelFamily]] = {}
_PIXEL_DECODERS: dict[str, Callable[[str], PixelDecoder] | str] = {
    "emoji_vq": "vllm_sjd_pac.models.emoji:PixelDecoder.from_checkpoint",
}


def register_family(architecture: str, family: str | type[ImageModelFamily]) -> None:
    """Register a family for an architecture name of ``config.json``.

    Args:
        architecture: e.g. ``"ChameleonForConditionalGeneration"``.
        family: the class, or ``"module:Class"`` to import it only when such a model is loaded.
    """
    _FAMILIES[architecture] = family


def register_pixel_decoder(name: str, loader: Callable[[str], PixelDecoder] | str) -> None:
    """Register a pixel decoder for ``image_token_layout.pixel_decoder``; `loader` takes the model's folder."""
    _PIXEL_DECODERS[name] = loader


def known_architectures() -> tuple[str, ...]:
    return tuple(sorted(_FAMILIES))


def _resolve(reference: Any) -> Any:
    if not isinstance(reference, str):
        return reference
    module, _, path = reference.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def find_family(hf_config: Any, model_path: str) -> ImageModelFamily:
    """The family of a model.

    Args:
        hf_config: the model's Hugging Face configuration object.
        model_path: the model's folder or hub name.

    Raises:
        ValueError: no family knows this architecture; the message lists the known ones and says how to add one.
    """
    if getattr(hf_config, "image_token_layout", None):
        return GridFamily(hf_config, model_path)
    architectures = getattr(hf_config, "architectures", None) or ()
    for architecture in architectures:
        if architecture in _FAMILIES:
            return _resolve(_FAMILIES[architecture])(hf_config, model_path)
    raise ValueError(
        f"sjd_pac: no image-token family for architecture {', '.join(architectures) or 'unknown'} of {model_path}. "
        f"Known: {', '.join((*known_architectures(), 'any model with an image_token_layout block in config.json'))}. "
        "Register another with vllm_sjd_pac.models.family.register_family."
    )


class GridFamily(ImageModelFamily):
    """Any decoder-only model whose ``config.json`` has an ``image_token_layout`` block (the bundled model is one).

    The prompt is the tokenizer's encoding of the words, which adds begin-of-sequence and begin-of-image itself; the
    unconditional prompt is the encoding of nothing. Words outside the vocabulary are reported and become ``<unk>``.
    """

    name = "grid"

    def __init__(self, hf_config: Any, model_path: str) -> None:
        super().__init__(hf_config, model_path)
        block = dict(hf_config.image_token_layout)
        try:
            self.begin_token = int(block["begin_token_id"])
            end, line = block["end_token_id"], block.get("end_of_line_token_id")
            self.pixels_per_token = int(block.get("pixels_per_token", 1))
            self.decoder_name = block.get("pixel_decoder")
            self._layout = ImageLayout(
                image_token_start=int(block["image_token_start"]),
                image_token_count=int(block["image_token_count"]),
                rows=int(block["grid_rows"]),
                columns=int(block["grid_columns"]),
                end_of_line=None if line is None else int(line),
                end_tokens=() if end is None else (int(end),),
                constrained=bool(block.get("constrained", True)),
            )
        except KeyError as missing:
            raise ValueError(f"sjd_pac: image_token_layout in {model_path}/config.json lacks {missing}") from None
        bos = getattr(hf_config, "bos_token_id", None)
        self._unconditional = [self.begin_token] if bos is None else [int(bos), self.begin_token]
        guidance = block.get("guidance_scale", SamplingDefaults.guidance_scale)
        self.defaults = SamplingDefaults(guidance_scale=float(guidance), top_k=int(block.get("top_k", 0)))

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        return ((self._layout.columns * self.pixels_per_token, self._layout.rows * self.pixels_per_token),)

    def segment_start(self, tokens: Sequence[int]) -> int | None:
        for index in range(len(tokens) - 1, -1, -1):
            if tokens[index] == self.begin_token:
                start = index + 1
                return start if len(tokens) - start < self._layout.length else None
        return None

    def begins_segment(self, token: int) -> bool:
        return token == self.begin_token

    def layout(self, tokens: Sequence[int]) -> ImageLayout:
        return self._layout

    def encode_prompt(
        self,
        tokenizer: Tokenizer,
        prompt: str,
        *,
        size: tuple[int, int] | None = None,
        negative_prompt: str | None = None,
    ) -> EncodedPrompt:
        self.check_size(size)
        unknown: list[str] = []

        def encode(text: str, what: str) -> list[int]:
            if not text or not text.strip():
                raise ValueError(f"{what} is empty; describe the picture in a few words")
            if self.decoder_name == "emoji_vq":
                from vllm_sjd_pac.models.emoji import check_prompt  # only the bundled model needs its vocabulary

                text, words = check_prompt(text)
                unknown.extend(words)
            return list(tokenizer.encode(text))

        prompt_ids = encode(prompt, "prompt")
        negative_ids = self._unconditional if negative_prompt is None else encode(negative_prompt, "negative_prompt")
        return EncodedPrompt(prompt_ids, list(negative_ids), tuple(dict.fromkeys(unknown)))

    def unconditional(self, prompt_token_ids: Sequence[int]) -> list[int]:
        return list(self._unconditional)

    def load_pixel_decoder(self) -> PixelDecoder:
        if self.decoder_name not in _PIXEL_DECODERS:
            raise ValueError(
                f"sjd_pac: pixel_decoder {self.decoder_name!r} of {self.model_path} is not registered "
                f"(known: {', '.join(sorted(_PIXEL_DECODERS))}); add it with register_pixel_decoder"
            )
        return _resolve(_PIXEL_DECODERS[self.decoder_name])(str(Path(self.model_path)))
