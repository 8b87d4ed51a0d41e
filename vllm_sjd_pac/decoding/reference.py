"""The executable specification: both rules on one page, one sequence, dictionaries instead of tensors.

Slow and obviously right; the batched rules are tested against it. The steps bear the paper's names (SJD-PAC,
Algorithm 1): extend, branch (proactive drafting), verify, commit, continue (adaptive continuation).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vllm_sjd_pac.decoding.decode import DecodeResult, Target
from vllm_sjd_pac.decoding.tree import DraftTree


def reference_decode(
    target: Target,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    vocab_size: int,
    tree: DraftTree,
    rule: str = "rejection",
    mode: str = "pac",
    noise: Callable[[int], Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> DecodeResult:
    """`jacobi_decode` without any batching. ``noise``: position -> Gumbel noise [V] (`race`; zeros = greedy)."""

    def uniform() -> float:
        return float(torch.rand((), generator=generator, dtype=torch.float64))

    def sample(law: Tensor) -> int:
        return int(torch.multinomial(law, 1, generator=generator))

    result = DecodeResult()
    out = result.tokens
    draft: dict[int, int] = {}  # x_j, the main draft of position j
    law: dict[int, Tensor] = {}  # q_j, the law x_j was drawn from (`race`: the newest row)
    root, prefix = int(prompt[-1]), list(prompt[:-1])
    while len(out) < num_tokens:
        start = len(out)
        shape = tree.limit_depth(num_tokens - start - 1)
        window = range(start, start + shape.main_length)

        # Extend: positions that enter the window get a draft from a law that knows nothing of it.
        for j in window:
            if j not in draft:
                law[j] = torch.full((vocab_size,), 1 / vocab_size, dtype=torch.float64)
                draft[j] = sample(law[j]) if noise is None else int((law[j].log() + noise(j)).argmax())

        # Branch: siblings follow q_j without replacement, x_j removed first.
        candidates: dict[int, list[int]] = {}
        for j in window:
            rest = law[j].clone()
            candidates[j] = [draft[j]]
            for _ in range(shape.width - 1):
                rest[candidates[j][-1]] = 0
                if rest.sum() == 0:
                    break
                rest = rest / rest.sum()
                candidates[j].append(sample(rest) if noise is None else int((rest.log() + noise(j)).argmax()))

        # One forward pass over the tree. A node without a candidate left repeats the main draft.
        nodes = [root]
        for depth, rank in list(zip(shape.depths, shape.ranks, strict=True))[1:]:
            row = candidates[start + depth - 1]
            nodes.append(row[rank] if rank < len(row) else row[0])
        context = torch.tensor(prefix, dtype=torch.long)
        laws = target(context, torch.tensor(nodes), torch.tensor(shape.parents)).double().softmax(-1)

        # Verify and commit: walk from the root until no candidate is accepted.
        node: int = 0
        while True:
            j = start + shape.depths[node]
            children = [v for v in range(len(nodes)) if shape.parents[v] == node]
            accepted = None
            if noise is not None:
                token = int((laws[node].log() + noise(j)).argmax())
                accepted = next((v for v in children if nodes[v] == token), None)
            else:
                p, q = laws[node], law.get(j, laws[node])  # no law: nothing is drafted at j
                for v in children:
                    x = nodes[v]
                    if q[x] == 0:  # repeats an earlier candidate: there were fewer than planned
                        continue
                    if uniform() * q[x] < p[x]:
                        accepted, token = v, x
                        break
                    p, q = residual(p, q), without(q, x)
                else:
                    token = -1
                    if not children and j in draft and mode in ("ac", "pac"):
                        # A leaf: the window's own draft is kept if it passes (adaptive continuation).
                        token = draft[j] if uniform() * q[draft[j]] < p[draft[j]] else sample(residual(p, q))
                    if token < 0:
                        token = sample(p)
            out.append(token)
            if accepted is None:
                break
            node = accepted
        result.accepted.append(len(out) - start)
        prefix, root = [*prefix, root, *out[start:-1]], out[-1]

        # Continue: later drafts are coupled to their fresh rows and mostly kept; q_j := p_j.
        line: int | None = node
        for j in range(start + shape.depths[node] + 1, start + shape.main_length + 1):
            line = next((v for v in range(len(nodes)) if shape.parents[v] == line and shape.ranks[v] == 0), None)
            p = laws[line if line is not None else j - start]  # the accepted branch, else the main chain
            if noise is not None:
                draft[j] = int((p.log() + noise(j)).argmax())
            elif j not in draft or mode in ("sjd", "pd"):
                draft[j] = sample(p)
            elif uniform() * law[j][draft[j]] >= p[draft[j]]:
                draft[j] = sample(residual(p, law[j]))
            law[j] = p
    return result


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm((p - q)+), or p where nothing is left."""
    rest = (p - q).clamp(min=0)
    return rest / rest.sum() if rest.sum() > 0 else p


def without(q: Tensor, token: int) -> Tensor:
    """q without ``token``, renormalised; all zero where nothing is left."""
    rest = q.clone()
    rest[token] = 0
    return rest / rest.sum() if rest.sum() > 0 else rest
