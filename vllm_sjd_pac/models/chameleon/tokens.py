"""Chameleon's vocabulary, as far as images go; Lumina-mGPT gives a few reserved tokens a meaning."""

from __future__ import annotations

from collections.abc import Mapping

import torch

BEGIN_OF_TEXT = 0
IMAGE_START = 4
"""Id of code 0; code c is ``IMAGE_START + c``."""
IMAGE_COUNT = 8192
END_OF_IMAGE = 8196
BEGIN_OF_IMAGE = 8197
END_OF_TURN = 8710
"""``<reserved08706>``: closes each turn of a conversation."""
END_OF_LINE = 8803
"""``<reserved08799>``, Lumina-mGPT only: closes each row of codes."""
SIZE_BASE = 8804
"""Lumina-mGPT only: ``SIZE_BASE + n`` says that the picture is n patches of 32 pixels high, or wide."""

_IMAGE_NAME = "IMGIMG"


def code_order(vocabulary_map: Mapping[str, int] | None) -> torch.Tensor | None:
    """Codes of the image tokens in the order of their ids, LongTensor [IMAGE_COUNT]; None when it is 0, 1, 2, …

    The checkpoint's vocabulary names the token of code 123 ``IMGIMGBCDZ``, its digits written as letters. In all known
    checkpoints ids and codes rise together.
    """
    named = {token: name for name, token in (vocabulary_map or {}).items() if name.startswith(_IMAGE_NAME)}
    if len(named) != IMAGE_COUNT:
        return None
    digits = str.maketrans("ABCDEFGHIJ", "0123456789")
    codes = torch.tensor([int(named[token][len(_IMAGE_NAME) : -1].translate(digits)) for token in sorted(named)])
    return None if torch.equal(codes, torch.arange(IMAGE_COUNT)) else codes
