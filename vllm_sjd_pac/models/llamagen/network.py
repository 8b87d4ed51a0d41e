"""The class-conditional LlamaGen decoder on vLLM's layers: a Llama with 2-D RoPE.

One vocabulary: the codes, then the classes, then the null class of guidance (`vllm_sjd_pac.models.llamagen.convert`
writes the embedding table that way). Follows arXiv:2406.06525 and its published code.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.models.llama import LlamaAttention, LlamaDecoderLayer

from vllm_sjd_pac.models.backbone import MergedVocabularyModel
from vllm_sjd_pac.models.weights import load_strictly

SLACK = 1024
"""Rows beyond the picture, for drafts that reach past its end; the layout never lets their tokens live."""


class GridRotaryEmbedding(RotaryEmbedding):
    """RoPE by row and column, looked up by sequence position.

    Position p + 1 is grid cell (p // columns, p % columns): the first half of the rotation angles goes by the row, the
    second by the column. The class token at position 0 is not rotated but zeroed, as in the published model.
    """

    def __init__(self, head_size: int, columns: int, base: float, dtype: torch.dtype) -> None:
        self.columns = columns
        super().__init__(head_size, head_size, 1 + columns * columns, base, False, dtype)

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        """[positions + SLACK, head_size]: cosines, then sines."""
        quarter = torch.arange(0, self.rotary_dim // 2, 2, dtype=torch.float)
        inverse = self.base ** (-quarter / (self.rotary_dim // 2))
        cell = torch.arange(self.max_position_embeddings - 1 + SLACK)
        row, column = cell // self.columns, cell % self.columns
        angles = torch.cat([row[:, None] * inverse, column[:, None] * inverse], dim=-1)
        cells = torch.cat([angles.cos(), angles.sin()], dim=-1)
        return torch.cat([cells.new_zeros(1, self.rotary_dim), cells])


class LlamaGenAttention(LlamaAttention):
    def _init_rotary_emb(self, config: Any, quant_config: Any) -> None:
        self.rotary_emb = GridRotaryEmbedding(
            self.head_dim, config.grid_size, config.rope_parameters["rope_theta"], torch.get_default_dtype()
        )


class LlamaGenDecoderLayer(LlamaDecoderLayer):
    def __init__(self, vllm_config: VllmConfig, prefix: str = "", config: Any = None) -> None:
        super().__init__(vllm_config, prefix, config, attn_layer_type=LlamaGenAttention)


class LlamaGenForImageGeneration(MergedVocabularyModel):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        super().__init__(
            vllm_config=vllm_config,
            config=config,
            code_start=0,
            code_count=config.codebook_size,
            head_width=config.hidden_size,
            layer_type=LlamaGenDecoderLayer,
            prefix=prefix,
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return load_strictly(self, weights)
