"""A Llama over a paged KV cache that attends to draft trees: Hugging Face's weights, our attention, no vLLM.

Small on purpose: `gpu_check` measures with it where only PyTorch, Triton and transformers exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_sjd_pac.engine.attention.window import WindowLayout, window_layout

Attention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, WindowLayout], Tensor]
"""(query, key, value, key cache, value cache, block table, prefix lengths, layout) -> out; see `triton_ops`."""

SIZES: dict[str, dict[str, int]] = {
    "smoke": {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 48},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 16384},
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 32, "vocab_size": 65536},
}  # fmt: skip


def random_llama(size: str, dtype: torch.dtype, device: str, seed: int = 0, **changes: int) -> LlamaForCausalLM:
    """A Llama with random weights whose next token depends on the context; ``size`` is a key of `SIZES`."""
    torch.manual_seed(seed)
    shape = {**SIZES[size], **changes}
    config = LlamaConfig(**shape, max_position_embeddings=4096, tie_word_embeddings=False, initializer_range=0.04)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)
    # Logits with a standard deviation of about 3: few likely tokens, as image models have.
    model.lm_head.weight.mul_(3.0 / (float(model.lm_head.weight.float().std()) * shape["hidden_size"] ** 0.5))
    return model


class PagedLlama:
    """The model with a paged cache for ``batch`` requests of ``max_tokens`` tokens, their blocks scattered."""

    def __init__(
        self, model: LlamaForCausalLM, attention: Attention, batch: int, max_tokens: int, block_size: int = 16
    ):
        self.model, self.attention, self.block_size = model, attention, block_size
        config = model.config
        weight = model.lm_head.weight
        self.device, per_request = weight.device, -(-max_tokens // block_size)
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_size = config.hidden_size // self.heads
        shape = (config.num_hidden_layers, batch * per_request, block_size, self.kv_heads, 2 * self.head_size)
        self.cache = torch.zeros(shape, dtype=weight.dtype, device=self.device)
        order = torch.randperm(batch * per_request, generator=torch.Generator().manual_seed(1))
        self.block_table = order.view(batch, per_request).int().to(self.device)

    def slots(self, prefix_lens: Sequence[int], query_lens: Sequence[int]) -> Tensor:
        """Flat cache slot of every token of a step: token t of a request in its slot t."""
        table, found = self.block_table.cpu().long(), []
        for request, (prefix, length) in enumerate(zip(prefix_lens, query_lens, strict=True)):
            places = torch.arange(prefix, prefix + length)
            found.append(table[request][places // self.block_size] * self.block_size + places % self.block_size)
        return torch.cat(found).to(self.device)

    def layout(self, query_lens: Sequence[int], roots: list[Any], parents: list[Any]) -> WindowLayout:
        return window_layout(query_lens, roots, parents, self.heads // self.kv_heads).to(self.device)

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, prefix_lens: Tensor, layout: WindowLayout, rows: Tensor
    ) -> Tensor:
        """Logits of the tokens at ``rows``.

        Args:
            tokens, positions, slots: int64 ``[T]``; position = base + depth, slot = index in the node list.
            prefix_lens: int32 ``[R]``.
            rows: int64, indices into the T tokens.
        """
        body = self.model.model
        hidden = body.embed_tokens(tokens)
        cos, sin = body.rotary_emb(hidden.unsqueeze(0), positions.unsqueeze(0))
        cos, sin = cos[0].unsqueeze(1), sin[0].unsqueeze(1)

        def rotate(part: Tensor) -> Tensor:
            low, high = part.chunk(2, dim=-1)
            return part * cos + torch.cat((-high, low), dim=-1) * sin

        count = tokens.shape[0]
        for index, layer in enumerate(body.layers):
            normed = layer.input_layernorm(hidden)
            attention = layer.self_attn
            query = rotate(attention.q_proj(normed).view(count, self.heads, -1))
            key = rotate(attention.k_proj(normed).view(count, self.kv_heads, -1))
            value = attention.v_proj(normed).view(count, self.kv_heads, -1)
            cache = self.cache[index]
            cache.view(-1, self.kv_heads, 2 * self.head_size).index_copy_(0, slots, torch.cat((key, value), -1))
            key_cache, value_cache = cache.split(self.head_size, dim=-1)
            attended = self.attention(query, key, value, key_cache, value_cache, self.block_table, prefix_lens, layout)
            hidden = hidden + attention.o_proj(attended.reshape(count, -1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.model.lm_head(body.norm(hidden[rows]))


class TreeTarget:
    """One request as a target of `jacobi_decode`: keeps its cache, and computes again what is not final in it."""

    def __init__(self, llama: PagedLlama) -> None:
        self.llama = llama
        self.cached: list[int] = []
        self.forwards = 0

    def __call__(self, prefix: Tensor, tokens: Tensor, parents: Tensor) -> Tensor:
        """Logits ``[nodes, vocabulary]`` on the CPU: prefix int64 ``[P]`` comes before the root ``tokens[0]``."""
        known, nodes, tree = prefix.tolist(), tokens.tolist(), tuple(parents.tolist())
        final = 0
        while final < min(len(known), len(self.cached)) and known[final] == self.cached[final]:
            final += 1
        depths: list[int] = []
        for parent in tree:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        chain = 1
        while chain < len(tree) and tree[chain] == chain - 1:
            chain += 1
        root, query = len(known) - final, len(known) - final + len(nodes)
        device = self.llama.device
        positions = [*range(final, len(known)), *(len(known) + depth for depth in depths)]
        logits = self.llama.forward(
            torch.tensor([*known[final:], *nodes], device=device),
            torch.tensor(positions, device=device),
            self.llama.slots([final], [query]),
            torch.tensor([final], dtype=torch.int32, device=device),
            self.llama.layout([query], [root], [tree]),
            torch.arange(root, query, device=device),
        )
        # Slots of the main chain hold what a later prefix may start with; a branch token lies in a wrong slot.
        self.cached = known + nodes[:chain]
        self.forwards += 1
        return logits.float().cpu()
