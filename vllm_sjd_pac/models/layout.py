"""Which tokens are legal at each position of an image segment: codes in rows, end-of-line, end-of-image."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

FREE = -1
"""In a table of forced tokens: any image token may stand here."""


@dataclass(frozen=True)
class ImageLayout:
    """The token layout of one picture: ``(columns codes [end-of-line]) × rows, end tokens``.

    Positions count from 0 at the first token after the segment's begin token(s).

    Attributes:
        image_token_start: vocabulary id of code 0.
        image_token_count: size of the codebook; codes are ``start … start + count − 1``.
        rows, columns: the grid of codes.
        end_of_line: id that closes every row, or None.
        end_tokens: ids that follow the last row, in order.
        constrained: whether illegal tokens are masked; False leaves the model free (the draft layout still follows it).
    """

    image_token_start: int
    image_token_count: int
    rows: int
    columns: int
    end_of_line: int | None = None
    end_tokens: tuple[int, ...] = ()
    constrained: bool = True

    @property
    def row_length(self) -> int:
        return self.columns + (self.end_of_line is not None)

    @property
    def length(self) -> int:
        """Tokens of the whole segment, structural ones included."""
        return self.rows * self.row_length + len(self.end_tokens)

    @cached_property
    def forced_table(self) -> torch.Tensor:
        """LongTensor [length]: the one legal token of each position, or `FREE`."""
        table = torch.full((self.length,), FREE, dtype=torch.long)
        if self.end_of_line is not None:
            table[self.columns : self.rows * self.row_length : self.row_length] = self.end_of_line
        if self.end_tokens:
            table[self.rows * self.row_length :] = torch.tensor(self.end_tokens)
        return table

    @cached_property
    def vocabulary(self) -> torch.Tensor:
        """LongTensor [C], sorted: every token id that may occur in the segment."""
        structural = {*self.end_tokens} | ({self.end_of_line} if self.end_of_line is not None else set())
        codes = torch.arange(self.image_token_start, self.image_token_start + self.image_token_count)
        return torch.cat([torch.tensor(sorted(structural), dtype=torch.long), codes]).unique(sorted=True)

    def grid(self, tokens: list[int] | torch.Tensor) -> torch.Tensor:
        """Codes of a (possibly unfinished) segment as LongTensor [rows, columns]; −1 where nothing stands yet.

        Args:
            tokens: the segment's tokens from position 0 on; tokens that are no image tokens count as not drawn.
        """
        values = torch.as_tensor(tokens, dtype=torch.long)[: self.rows * self.row_length]
        flat = torch.full((self.rows * self.row_length,), -1, dtype=torch.long)
        codes = values - self.image_token_start
        flat[: len(values)] = torch.where((codes >= 0) & (codes < self.image_token_count), codes, -1)
        return flat.view(self.rows, self.row_length)[:, : self.columns]
