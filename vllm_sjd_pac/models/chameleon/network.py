"""The Chameleon decoder on vLLM's layers: Llama with a LayerNorm on every query and key head, image logits unmasked.

Follows the architecture of Chameleon (arXiv:2405.09818); vLLM itself dropped the model in 0.28.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM
from vllm.model_executor.utils import set_weight_attrs

from vllm_sjd_pac.models.weights import CHECKS_SHAPE, load_strictly

SKIPPED = ("model.vqmodel.",)
"""The image encoder that Hugging Face keeps in the checkpoint; generation needs only a decoder, which is not in it."""


class HeadLayerNorm(nn.Module):
    """LayerNorm over each head's features, with a gain and a bias per head.

    A checkpoint has one row per head (``transformers``) or one per shard of the original training, to be repeated over
    that shard's heads (Lumina-mGPT's own format; a single row for the 7B models).

    Args:
        total_heads: heads of the whole model.
        local_heads: heads on this tensor-parallel rank.
        head_size: features of a head.
    """

    def __init__(self, total_heads: int, local_heads: int, head_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.total_heads, self.local_heads, self.head_size, self.eps = total_heads, local_heads, head_size, eps
        self.weight = nn.Parameter(torch.ones(local_heads, head_size))
        self.bias = nn.Parameter(torch.zeros(local_heads, head_size))
        for parameter in (self.weight, self.bias):
            set_weight_attrs(parameter, {"weight_loader": self._load, CHECKS_SHAPE: True})

    def _load(self, parameter: torch.Tensor, loaded: torch.Tensor) -> None:
        """Load [rows, head_size]; every rank takes its own heads (replicated ones when there are fewer than ranks)."""
        rows = loaded.shape[0]
        if loaded.dim() != 2 or loaded.shape[1] != self.head_size or rows == 0 or self.total_heads % rows:
            raise ValueError(
                f"a qk-norm tensor {tuple(loaded.shape)} does not fit {self.total_heads} heads of size {self.head_size}"
            )
        per_head = loaded.repeat_interleave(self.total_heads // rows, dim=0)
        replicas = max(1, get_tensor_model_parallel_world_size() // self.total_heads)
        first = get_tensor_model_parallel_rank() // replicas * self.local_heads
        parameter.data.copy_(per_head[first : first + self.local_heads])

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """[N, local_heads · head_size] → the same."""
        heads = values.unflatten(-1, (self.local_heads, self.head_size))
        normed = F.layer_norm(heads, (self.head_size,), eps=self.eps) * self.weight + self.bias
        return normed.flatten(-2)


class ChameleonAttention(LlamaAttention):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.q_norm = HeadLayerNorm(self.total_num_heads, self.num_heads, self.head_dim)
        self.k_norm = HeadLayerNorm(self.total_num_kv_heads, self.num_kv_heads, self.head_dim)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        query, key, value = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        query, key = self.rotary_emb(positions, self.q_norm(query), self.k_norm(key))
        output, _ = self.o_proj(self.attn(query, key, value))
        return output


class ChameleonDecoderLayer(LlamaDecoderLayer):
    """Llama's layer with the attention above; ``swin_norm`` (34B) normalises what a block adds, not what enters it."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "", config: Any = None) -> None:
        super().__init__(vllm_config, prefix, config, attn_layer_type=ChameleonAttention)
        config = config or vllm_config.model_config.hf_config
        self.swin_norm = bool(getattr(config, "swin_norm", False))

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.swin_norm:
            return super().forward(positions, hidden_states, residual)
        entering = hidden_states if residual is None else hidden_states + residual
        attended = self.self_attn(positions=positions, hidden_states=entering)
        residual = entering + self.input_layernorm(attended)
        return self.post_attention_layernorm(self.mlp(residual)), residual


class ChameleonForImageGeneration(LlamaForCausalLM):
    """Chameleon with all its logits, those of image tokens included."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=ChameleonDecoderLayer)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return load_strictly(self, weights, skipped_prefixes=SKIPPED)
