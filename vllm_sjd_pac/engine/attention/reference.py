"""What attention over draft trees is, in float64 and said as plainly as possible: the judge of every module here.

Nothing is shared with the code under test: ancestors are found by walking up the parents, keys and values are read one
by one through the block table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def visible_in_window(length: int, root: int | None, parents: Sequence[int] | None) -> Tensor:
    """Who sees whom among the tokens that a request sends in one step.

    Args:
        length: how many tokens it sends.
        root: index of the tree's root among them; None: a prompt chunk or a one-token decode, all causal.
        parents: parent of each node, ``parents[0] = -1``; node i is token ``root + i``.

    Returns:
        bool ``[length, length]``: entry (i, j) says that token i sees token j.
    """
    visible = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        if root is None or parents is None or i < root:
            visible[i, : i + 1] = True
            continue
        visible[i, :root] = True
        node = i - root
        while node >= 0:
            visible[i, root + node] = True
            node = parents[node]
    return visible


def tree_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    prefix_lens: Sequence[int],
    query_lens: Sequence[int],
    roots: Sequence[int | None],
    parents: Sequence[Sequence[int] | None],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Tree attention over a paged cache that already holds the keys and values of this step's tokens.

    Args:
        query: ``[T, H, D]``, the requests' tokens one after the other.
        key_cache, value_cache: ``[blocks, block_size, K, D]``, H % K == 0; token t of a request (prefix first, then
            this step's tokens in order) lies in slot ``t % block_size`` of its block ``t // block_size``.
        block_table: ``[R, max_blocks]``, the requests' blocks.
        prefix_lens, query_lens: tokens computed before this step, and sent in it, for each of R requests.
        roots, parents: as in `visible_in_window`, for each request.
        scale: factor of the inner products.

    Returns:
        out float64 ``[T, H, D]`` and lse float64 ``[H, T]`` (natural logarithm of the sum of exponentials).
    """
    tokens, heads, _ = query.shape
    block_size, kv_heads = key_cache.shape[1:3]
    group = heads // kv_heads
    out = torch.zeros(query.shape, dtype=torch.float64)
    lse = torch.zeros(heads, tokens, dtype=torch.float64)
    start = 0
    for request, (prefix, length) in enumerate(zip(prefix_lens, query_lens, strict=True)):
        places = torch.arange(prefix + length)
        blocks = block_table[request].cpu().long()[places // block_size]
        keys = key_cache.detach().cpu()[blocks, places % block_size].double().repeat_interleave(group, dim=1)
        values = value_cache.detach().cpu()[blocks, places % block_size].double().repeat_interleave(group, dim=1)
        window = visible_in_window(length, roots[request], parents[request])
        visible = torch.cat([torch.ones(length, prefix, dtype=torch.bool), window], 1)
        rows = query[start : start + length].detach().cpu().double()
        scores = torch.einsum("qhd,khd->hqk", rows, keys) * scale
        scores = scores.masked_fill(~visible, float("-inf"))
        lse[:, start : start + length] = scores.logsumexp(-1)
        out[start : start + length] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        start += length
    return out, lse


def merge_states_reference(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from its two parts, in float64.

    Args:
        out_a, out_b: ``[T, H, D]``; lse_a, lse_b: ``[H, T]``, -inf where a part had no key.

    Returns:
        out float64 ``[T, H, D]`` and lse float64 ``[H, T]``; zeros and -inf where neither part had a key.
    """
    lse = torch.logaddexp(lse_a.double(), lse_b.double())
    safe = torch.where(torch.isinf(lse), torch.zeros_like(lse), lse)
    weight_a = (lse_a.double() - safe).exp().T.unsqueeze(-1)
    weight_b = (lse_b.double() - safe).exp().T.unsqueeze(-1)
    return out_a.double() * weight_a + out_b.double() * weight_b, lse
