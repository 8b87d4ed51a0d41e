"""A synthetic image-like target: each token depends on its left, up, up-left and up-right neighbours and a class.

Every token v has a vector e_v. Neighbours and class predict a mean m, and the logits are proportional to
``sharpness * (m · e_v)``. A neighbour says its own vector (images are smooth) mixed with a vector that has nothing to
do with it (``roughness``: codes that look alike need not be followed by the same). The tokens further to the left
speak too, ever more softly, as the whole context does in a real model; without them a draft whose left neighbour is
right is nearly always right. The default is calibrated so that plain speculative Jacobi decoding (rejection, mode
sjd, chain of 64) commits 2.0-2.2 tokens a forward pass, about half of the passes one token, as the paper reports.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_sjd_pac.decoding import TreeBatch

SIDE = 24
VOCAB = 512
REACH = 6  # how many tokens to the left speak


@dataclass(frozen=True)
class GridShape:
    """How strongly the neighbours and the class speak, and how sharp the laws are."""

    left: float = 0.8
    fading: float = 0.68
    up: float = 0.39
    up_left: float = 0.05
    up_right: float = 0.12
    group: float = 0.45
    roughness: float = 0.72
    sharpness: float = 1.85
    dim: int = 48


class GridModel:
    """Batched target of `decoding.simulate`: called with (committed, position, trees, tokens, sequences), it gives
    logits [B, N, V]; ``top_k`` > 0 forbids all but the k likeliest tokens."""

    def __init__(self, seed: int = 0, shape: GridShape | None = None, classes: int = 16, top_k: int = 0) -> None:
        self.shape = shape = shape or GridShape()
        self.top_k = top_k
        generator = torch.Generator().manual_seed(seed)
        self.distances = (*range(1, REACH + 1), SIDE, SIDE + 1, SIDE - 1)
        weights = [shape.left * shape.fading**k for k in range(REACH)] + [shape.up, shape.up_left, shape.up_right]
        count, dim = len(weights), shape.dim

        def directions(*size: int) -> Tensor:
            x = torch.randn(*size, dim, generator=generator)
            return x * dim**0.5 / x.norm(dim=-1, keepdim=True)

        self.vectors = directions(VOCAB)
        spoken = (1 - shape.roughness**2) ** 0.5 * self.vectors + shape.roughness * directions(count, VOCAB)
        spoken = torch.tensor(weights).view(count, 1, 1) * spoken
        self.contributions = torch.cat([spoken, torch.zeros(count, 1, dim)], 1)  # last: outside the image
        self.class_vectors = shape.group * directions(classes)

    def __call__(
        self, committed: Tensor, position: Tensor, trees: TreeBatch, tokens: Tensor, sequences: Tensor
    ) -> Tensor:
        batch, nodes = tokens.shape
        place = torch.where(trees.ancestors, trees.depths.unsqueeze(1), trees.max_main + 1)
        here = torch.arange(nodes).expand(batch, nodes, nodes)
        line = torch.zeros(batch, nodes, trees.max_main + 2, dtype=torch.long).scatter_(2, place, here)
        target = position.unsqueeze(1) + trees.depths  # absolute position that each row predicts
        column = target % SIDE
        mean = self.class_vectors[sequences % len(self.class_vectors)].unsqueeze(1)
        for number, distance in enumerate(self.distances):
            if distance <= REACH:
                inside = column >= distance
            else:
                inside = (target >= distance) & (column != {SIDE: -1, SIDE + 1: 0, SIDE - 1: SIDE - 1}[distance])
            depth = trees.depths - (distance - 1)  # of the ancestor at that distance; below 1: committed
            node = line.gather(2, depth.clamp(min=0).unsqueeze(2)).squeeze(2)
            drafted = tokens.gather(1, node)
            known = committed.gather(1, (position.unsqueeze(1) + depth - 1).clamp(0, committed.shape[1] - 1))
            token = torch.where(depth >= 1, drafted, known)
            token = torch.where(inside & (token >= 0), token, VOCAB)
            mean = mean + self.contributions[number][token]
        logits = self.shape.sharpness * (mean @ self.vectors.T) / self.shape.dim**0.5
        if self.top_k:
            least = logits.topk(self.top_k, -1).values[..., -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        return logits
