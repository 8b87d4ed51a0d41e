"""The shipped checkpoint in plain PyTorch: guided laws over draft trees, with a key-value cache.

Used for the contact sheet and the statistics. Nothing here is needed to serve the model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer

from examples.train_emoji.language_model import LanguageModel, ModelShape, rotary_tables, rotate
from vllm_sjd_pac.decoding import CounterNoise, DraftTree, RaceRule, TreeBatch, simulate
from vllm_sjd_pac.models.emoji.vocabulary import BEGIN_ID, BEGIN_IMAGE_ID, END_OF_LINE_ID, IMAGE_TOKEN_START

GRID = 16
ROW = GRID + 1
LENGTH = GRID * ROW
END_OF_LINE = 0
"""Token 0 of the compact vocabulary used here is end-of-line, token k + 1 is code k."""


def load_model(path: Path) -> LanguageModel:
    """The checkpoint's language model, float32."""
    config = json.loads((path / "config.json").read_text())
    shape = ModelShape(
        vocabulary=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        feed_forward=config["intermediate_size"],
        rope_theta=config["rope_theta"],
        norm_epsilon=config["rms_norm_eps"],
    )
    model = LanguageModel(shape)
    model.load_state_dict({name: weight.float() for name, weight in load_file(path / "model.safetensors").items()})
    return model.eval().requires_grad_(False)


class GuidedTarget:
    """A target for :func:`vllm_sjd_pac.decoding.simulate`: B prompts, each with its unconditional twin.

    The requests of one batch must end together: any number of plainly sampled ones, or a single one with a tree.
    ``entropies`` collects the entropy (nats) of the root's law wherever a code follows, [B] per forward.
    """

    def __init__(self, path: Path, prompts: Sequence[str], guidance: float, top_k: int = 0, nodes: int = 64):
        self.model = load_model(path)
        self.guidance, self.top_k = guidance, top_k
        tokenizer = AutoTokenizer.from_pretrained(path)
        conditional = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        twins = [*conditional, *([BEGIN_ID, BEGIN_IMAGE_ID] for _ in prompts)]
        self.codebook_size = self.model.shape.vocabulary - IMAGE_TOKEN_START
        self.prompt_slots = max(map(len, twins))
        self.lengths = torch.tensor([len(prompt) for prompt in twins])
        self.prompts = torch.tensor([[0] * (self.prompt_slots - len(p)) + p for p in twins])
        self.spare = self.prompt_slots + LENGTH
        shape = self.model.shape
        size = (shape.layers, len(twins), shape.heads, self.spare + 1, shape.head_size)
        self.keys, self.values = torch.zeros(size), torch.zeros(size)
        self.computed = 0
        self.tables = rotary_tables(self.spare + nodes, shape)
        self.entropies: list[Tensor] = []

    @property
    def vocabulary(self) -> int:
        """Size of the compact vocabulary."""
        return self.codebook_size + 1

    def legal(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Bool ``[n, W, vocabulary]``: end-of-line closes every row, codes stand everywhere else."""
        is_end = (positions % ROW == GRID)[..., None]
        column_is_end = torch.arange(self.vocabulary) == END_OF_LINE
        return is_end == column_is_end

    @torch.inference_mode()
    def __call__(
        self, committed: Tensor, position: Tensor, trees: TreeBatch, tokens: Tensor, sequences: Tensor | None = None
    ) -> Tensor:
        """Guided, masked logits ``[B, N, vocabulary]`` of the token after the path to each node.

        ``sequences`` (who is still decoding) is of no use here: all requests of a batch end together.
        """
        start = int(position[0])
        if bool((position != start).any()):
            raise ValueError("the requests of a batch must advance together")
        root_slot = self.prompt_slots + start - 1
        sequence = torch.cat([self.prompts, _to_model(committed[:, :start]).repeat(2, 1)], 1)
        late = sequence[:, self.computed : root_slot]
        nodes = _to_model(tokens.clamp(min=0)).repeat(2, 1)
        if start == 0:
            nodes[:, 0] = BEGIN_IMAGE_ID
        slots = torch.arange(self.computed, root_slot)
        ancestors = trees.ancestors.repeat(2, 1, 1) | torch.eye(trees.nodes, dtype=torch.bool)
        hidden = self._forward(torch.cat([late, nodes], 1), slots, root_slot + trees.depths.repeat(2, 1), ancestors)
        self.computed = root_slot
        logits = F.linear(hidden[:, late.shape[1] :], self.model.model.embed_tokens.weight)
        logits = torch.cat([logits[..., END_OF_LINE_ID : END_OF_LINE_ID + 1], logits[..., IMAGE_TOKEN_START:]], -1)
        conditional, unconditional = logits.chunk(2)
        rows = unconditional + self.guidance * (conditional - unconditional)
        rows = rows.masked_fill(~self.legal(position, position[:, None] + trees.depths), float("-inf"))
        if self.top_k:
            least = rows.topk(self.top_k, dim=-1).values[..., -1:]
            rows = rows.masked_fill(rows < least, float("-inf"))
        if start % ROW != GRID:
            law = rows[:, 0].softmax(-1)
            self.entropies.append(-torch.special.xlogy(law, law).sum(-1))
        return rows

    def _forward(self, tokens: Tensor, slots: Tensor, node_slots: Tensor, ancestors: Tensor) -> Tensor:
        """Hidden states ``[R, C+N, hidden]`` of C committed tokens at ``slots`` (cached) and N tree nodes (not)."""
        rows, count = tokens.shape
        late = len(slots)
        root_slot = int(node_slots.min())
        where = torch.cat([slots.expand(rows, late), node_slots], 1)
        positions = (where - (self.prompt_slots - self.lengths[:, None])).clamp(min=0)
        cos, sin = (table[positions][:, None] for table in self.tables)
        limit = torch.cat([slots, torch.full((count - late,), root_slot - 1)])
        cached = torch.arange(root_slot)
        past = (cached <= limit[:, None]) & (cached >= (self.prompt_slots - self.lengths)[:, None, None])
        inside = torch.zeros(rows, count, count - late, dtype=torch.bool)
        inside[:, late:] = ancestors
        mask = torch.cat([past, inside], -1)[:, None]
        # Padding before a short prompt may look at the first slot, so that no row of the softmax is empty.
        mask[..., 0] |= ~mask.any(-1)
        x = self.model.model.embed_tokens(tokens)
        for index, layer in enumerate(self.model.model.layers):
            attention = layer.self_attn
            normed = layer.input_layernorm(x)
            q, k, v = (
                projection(normed).view(rows, count, attention.heads, attention.head_size).transpose(1, 2)
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            self.keys[index][:, :, slots] = k[:, :, :late]
            self.values[index][:, :, slots] = v[:, :, :late]
            all_keys = torch.cat([self.keys[index][:, :, :root_slot], k[:, :, late:]], 2)
            all_values = torch.cat([self.values[index][:, :, :root_slot], v[:, :, late:]], 2)
            mixed = F.scaled_dot_product_attention(q, all_keys, all_values, attn_mask=mask)
            x = x + attention.o_proj(mixed.transpose(1, 2).reshape(rows, count, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.model.norm(x)


def _to_model(tokens: Tensor) -> Tensor:
    """Compact tokens to the model's ids."""
    return torch.where(tokens == END_OF_LINE, END_OF_LINE_ID, tokens - 1 + IMAGE_TOKEN_START)


def to_codes(tokens: Tensor) -> Tensor:
    """Compact tokens ``[B, 272]`` to codes ``[B, 16, 16]``."""
    return tokens.view(len(tokens), GRID, ROW)[:, :, :GRID] - 1


def sample(
    path: Path, prompts: Sequence[str], seeds: Sequence[int], guidance: float = 3.0, top_k: int = 0
) -> tuple[Tensor, Tensor]:
    """Plain sampling, temperature 1: codes ``[B, 16, 16]`` and entropies in nats ``[B, 256]``."""
    target = GuidedTarget(path, prompts, guidance, top_k)
    rule = RaceRule(CounterNoise(target.vocabulary), "ac", smoothing=0.0, memory=0, keep_noise=False)
    result = simulate(
        target,
        len(prompts),
        LENGTH,
        rule,
        DraftTree.chain(1),
        vocab_size=target.vocabulary,
        keys=torch.tensor(list(seeds)),
        legal=target.legal,
    )
    return to_codes(result.tokens), torch.stack(target.entropies, 1)
