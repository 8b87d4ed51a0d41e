"""Dense PyTorch in the place of xformers' three CUDA operators, so that its `tree_attention` runs on a CPU."""

from __future__ import annotations

import pytest
import torch


def dense(query, keys, values, bias, scale):
    """``[B, M, G, H, D]`` attention with an additive bias that broadcasts to ``[B, G, H, M, N]``."""
    scores = torch.einsum("bmghd,bnghd->bghmn", query, keys) * scale + bias
    lse = scores.logsumexp(-1)
    return torch.einsum("bghmn,bnghd->bmghd", (scores - lse.unsqueeze(-1)).exp(), values), lse


def substitute_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch the module `xformers.ops.tree_attention`; its own control flow, shapes and views stay."""
    import xformers.ops.tree_attention as upstream

    def partial(query, keys, values, attn_bias, op):
        mask = attn_bias.materialize((query.shape[1], attn_bias.k_seqinfo.seqstart_py[-1]))
        slots = mask.shape[-1]
        keys, values = (torch.nan_to_num(tensor[:, :slots]) for tensor in (keys, values))
        return dense(query, keys, values, mask, query.shape[-1] ** -0.5)

    def suffix(query, keys, values, attn_bias, op):
        return dense(query, keys, values, attn_bias, query.shape[-1] ** -0.5)

    def merge(outs, lses, output_dtype):
        lse = torch.logaddexp(*lses)
        weights = [(part - lse).exp().permute(0, 3, 1, 2).unsqueeze(-1) for part in lses]
        return sum(out * weight for out, weight in zip(outs, weights, strict=True)).to(output_dtype), lse

    monkeypatch.setattr(upstream, "memory_efficient_attention_partial", partial)
    monkeypatch.setattr(upstream, "memory_efficient_attention_forward_requires_grad", suffix)
    monkeypatch.setattr(upstream, "merge_attentions", merge)
