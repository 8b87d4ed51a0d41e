"""Random steps to run attention on: trees, prefixes, a paged cache with scattered blocks, mixed batches."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_sjd_pac.engine.attention.reference import tree_attention_reference
from vllm_sjd_pac.engine.attention.window import WindowLayout, window_layout

Tree = tuple[int, ...]


def random_tree(nodes: int, rng: random.Random) -> Tree:
    """A main chain of about half the nodes, then branches that hang off anything before them."""
    main = max(0, min(nodes - 1, nodes // 2))
    return (-1, *range(main), *(rng.randrange(node) for node in range(main + 1, nodes)))


@dataclass
class Request:
    """One request of the batch: computed tokens, tokens before the root (or all of them), tree (root included)."""

    prefix: int
    before: int
    tree: Tree | None

    @property
    def length(self) -> int:
        return self.before + (len(self.tree) if self.tree else 0)


@dataclass
class Scene:
    """A step: what a kernel is given, and `expected`, what it must return."""

    requests: list[Request]
    query: Tensor
    key: Tensor
    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    scale: float

    @property
    def query_lens(self) -> list[int]:
        return [request.length for request in self.requests]

    @property
    def prefix_lens(self) -> list[int]:
        return [request.prefix for request in self.requests]

    @property
    def roots(self) -> list[int | None]:
        return [request.before if request.tree else None for request in self.requests]

    @property
    def trees(self) -> list[Tree | None]:
        return [request.tree for request in self.requests]

    def layout(self, trees: list[Tree | None] | None = None) -> WindowLayout:
        group = self.query.shape[1] // self.key.shape[1]
        layout = window_layout(self.query_lens, self.roots, trees or self.trees, group)
        return layout.to(self.query.device)

    def prefix_tensor(self) -> Tensor:
        return torch.tensor(self.prefix_lens, dtype=torch.int32, device=self.query.device)

    def expected(self) -> tuple[Tensor, Tensor]:
        return tree_attention_reference(
            self.query, self.key_cache, self.value_cache, self.block_table, self.prefix_lens, self.query_lens,
            self.roots, self.trees, self.scale,
        )  # fmt: skip


def scene(
    requests: list[Request],
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str | None = None,
) -> Scene:
    """Random tensors for these requests; blocks are scattered, and slots that belong to nobody hold NaN."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    made = torch.Generator().manual_seed(seed)
    totals = [request.prefix + request.length for request in requests]
    blocks = [-(-total // block_size) for total in totals]
    order = torch.randperm(sum(blocks) + 3, generator=made)
    cache = torch.full((len(order), kv_heads, block_size, 2 * head_size), float("nan"), dtype=dtype)
    key_cache, value_cache = cache.transpose(1, 2).split(head_size, dim=-1)
    block_table = torch.full((len(requests), max(blocks) + 1), int(order[-1]), dtype=torch.int32)
    queries, keys, values, used = [], [], [], 0
    for index, (request, total) in enumerate(zip(requests, totals, strict=True)):
        mine = order[used : used + blocks[index]]
        used += blocks[index]
        block_table[index, : len(mine)] = mine.int()
        places = torch.arange(total)
        k, v = torch.randn(2, total, kv_heads, head_size, generator=made).to(dtype)
        key_cache[mine[places // block_size], places % block_size] = k
        value_cache[mine[places // block_size], places % block_size] = v
        keys.append(k[request.prefix :])
        values.append(v[request.prefix :])
        queries.append(1.5 * torch.randn(request.length, heads, head_size, generator=made).to(dtype))
    key_cache, value_cache = cache.to(device).transpose(1, 2).split(head_size, dim=-1)
    return Scene(
        requests, torch.cat(queries).to(device), torch.cat(keys).to(device), torch.cat(values).to(device),
        key_cache, value_cache, block_table.to(device), head_size**-0.5,
    )  # fmt: skip
