"""Families whose images begin with one token; size tokens around it may determine the grid."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from vllm_sjd_pac.models.family import ImageModelFamily
from vllm_sjd_pac.models.layout import ImageLayout


class SegmentFamily(ImageModelFamily):
    """Finds the open image segment by its begin token; subclasses say what the begin token is and what the grid is."""

    code_pixels: int
    """Width and height of a code's part of the picture."""

    header_length: int = 0
    """Size tokens between the begin token and position 0."""

    def __init__(self, hf_config: Any, model_path: str) -> None:
        super().__init__(hf_config, model_path)
        self.layout_of = lru_cache(maxsize=64)(self.build_layout)
        """Layouts by grid; the same object every time, so that its tables are built once."""

    @abstractmethod
    def is_begin(self, token: int) -> bool:
        """Whether `token` begins an image."""

    @abstractmethod
    def grid_after(self, tokens: Sequence[int], begin: int) -> tuple[int, int] | None:
        """(rows, columns) of the image whose begin token stands at index `begin`, or None when none can follow."""

    @abstractmethod
    def build_layout(self, rows: int, columns: int) -> ImageLayout:
        """The layout of a grid."""

    def open_segment(self, tokens: Sequence[int]) -> tuple[int, ImageLayout] | None:
        """Index of position 0 and layout of the segment that `tokens` leave open."""
        for begin in range(len(tokens) - 1, -1, -1):
            if self.is_begin(tokens[begin]):
                start = begin + 1 + self.header_length
                grid = self.grid_after(tokens, begin) if start <= len(tokens) else None
                if grid is None:
                    return None
                layout = self.layout_of(*grid)
                return (start, layout) if len(tokens) - start < layout.length else None
        return None

    def segment_start(self, tokens: Sequence[int]) -> int | None:
        found = self.open_segment(tokens)
        return None if found is None else found[0]

    def begins_segment(self, token: int) -> bool:
        return self.is_begin(token)

    def layout(self, tokens: Sequence[int]) -> ImageLayout:
        """The layout of the segment that `tokens` leave open; that of the default size when they leave none open."""
        found = self.open_segment(tokens)
        if found is not None:
            return found[1]
        width, height = self.sizes[0]
        return self.layout_of(height // self.code_pixels, width // self.code_pixels)


def require_words(text: str, what: str = "prompt") -> str:
    """The text without surrounding blanks.

    Raises:
        ValueError: it is empty.
    """
    if not text or not text.strip():
        raise ValueError(f"{what} is empty; describe the picture in a few words")
    return text.strip()
