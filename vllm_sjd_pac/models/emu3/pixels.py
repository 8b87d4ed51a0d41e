"""Emu3's pixel decoder: `Emu3VQVAE` of transformers, whose weights lie in the model's own checkpoint."""

from __future__ import annotations

from typing import Any

import torch

from vllm_sjd_pac.models.checkpoint import read_tensors
from vllm_sjd_pac.models.vqgan import to_bytes

PREFIXES = ("vqmodel.", "model.vqmodel.")


class Emu3Pixels:
    """Codes to pixels; Emu3's decoder makes four video frames of each picture, of which the first counts."""

    def __init__(self, vq: Any) -> None:
        self.vq = vq.eval().requires_grad_(False)

    @classmethod
    def from_checkpoint(cls, hf_config: Any, model_path: str) -> Emu3Pixels:
        from transformers.models.emu3.modeling_emu3 import Emu3VQVAE  # slow to import; only pixels need it

        with torch.device("meta"):
            vq = Emu3VQVAE(hf_config.vq_config)
        tensors = {name: tensor.float() for name, tensor in read_tensors(model_path, PREFIXES).items()}
        vq.load_state_dict(tensors, strict=True, assign=True)
        return cls(vq)

    @torch.inference_mode()
    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """LongTensor [B, rows, columns] (−1 = not drawn yet) → uint8 [B, height, width, 3]."""
        return to_bytes(self.vq.decode(codes.clamp(min=0)), codes, rounds=False)
