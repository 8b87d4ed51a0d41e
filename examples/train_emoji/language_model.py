"""The Llama-architecture decoder in plain PyTorch, for training; its weights carry Hugging Face's names.

float32 weights; the caller may run it under bfloat16 autocast. ``vLLM`` and ``transformers`` run the exported weights
with their stock Llama.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the network."""

    vocabulary: int = 1280
    hidden: int = 128
    layers: int = 5
    heads: int = 4
    feed_forward: int = 352
    rope_theta: float = 1000.0
    norm_epsilon: float = 1e-5

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.heads, self.head_size = shape.heads, shape.head_size
        self.q_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x [B, T, hidden]``; ``cos, sin [T, head_size]``."""
        batch, length, hidden = x.shape

        def split(projected: Tensor) -> Tensor:
            return projected.view(batch, length, self.heads, self.head_size).transpose(1, 2)

        q, k, v = split(self.q_proj(x)), split(self.k_proj(x)), split(self.v_proj(x))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        # Written out: PyTorch's fused attention takes a quarter longer to train on CPUs at this length and head size.
        scores = q @ k.mT * self.head_size**-0.5
        future = torch.full((length, length), -torch.inf, dtype=scores.dtype).triu(1)
        mixed = (scores + future).softmax(-1).to(v.dtype) @ v
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, hidden))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.down_proj = nn.Linear(shape.feed_forward, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """Everything but the (tied) output projection."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)


class LanguageModel(nn.Module):
    """Next-token loss of image-token sequences."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.shape = shape
        self.model = Backbone(shape)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02 if "embed" in name else shape.hidden**-0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits ``[B, T, vocabulary]`` after each of ``tokens [B, T]``."""
        x = self.model.embed_tokens(tokens)
        cos, sin = rotary_tables(tokens.shape[1], self.shape)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean loss in nats of ``targets [B, T]`` (-100 = no loss) after ``tokens [B, T]``."""
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten())


def rotary_tables(length: int, shape: ModelShape) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[T, head_size]`` in Llama's half-split order."""
    frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_size, 2).float() / shape.head_size)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x [B, heads, T, head_size]``."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
