"""Chameleon's pixel decoder: Meta's VQGAN, which is published beside the checkpoint and not in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vllm_sjd_pac.models.chameleon.tokens import code_order
from vllm_sjd_pac.models.checkpoint import model_folder, read_pickle
from vllm_sjd_pac.models.vqgan import VQDecoder, taming_name

PLACES = (
    "vqgan.ckpt",
    "tokenizer/vqgan.ckpt",
    "chameleon/tokenizer/vqgan.ckpt",
    "ckpts/chameleon/tokenizer/vqgan.ckpt",
)
"""Where the file is looked for, relative to the model's folder; the last is Lumina-mGPT's own arrangement."""


class ChameleonPixels:
    """Codes to pixels; `order` puts codes right where a vocabulary is shuffled."""

    def __init__(self, decoder: VQDecoder, order: torch.Tensor | None = None) -> None:
        self.decoder, self.order = decoder, order

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        if self.order is not None:
            codes = torch.where(codes < 0, codes, self.order.to(codes.device)[codes.clamp(min=0)])
        return self.decoder.decode(codes)


def load_pixels(hf_config: Any, model_path: str) -> ChameleonPixels:
    """Read ``vqgan.ckpt`` of Meta's Chameleon release.

    Raises:
        FileNotFoundError: it is in none of the usual places; the message lists them.
    """
    folder = model_folder(model_path)
    given = getattr(hf_config, "vqgan_path", None)
    candidates = [Path(given)] if given else [folder / place for place in PLACES]
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        raise FileNotFoundError(
            f"the pixel decoder vqgan.ckpt (from Meta's Chameleon release) is missing; looked for "
            f"{', '.join(str(candidate) for candidate in candidates)}; put it there, or name the file with "
            '--hf-overrides \'{"vqgan_path": "…"}\''
        )
    return ChameleonPixels(
        VQDecoder(read_pickle(file), taming_name), code_order(getattr(hf_config, "vocabulary_map", None))
    )
