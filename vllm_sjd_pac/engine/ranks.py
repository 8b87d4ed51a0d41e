"""A check that all tensor-parallel ranks hold the same drafts (option ``verify_ranks``)."""

from __future__ import annotations

import hashlib

import torch


def compare_ranks(drafts: list[list[int]]) -> None:
    """Debugging: all tensor-parallel ranks must hold the same drafts.

    Raises:
        RuntimeError: they differ.
    """
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    digest = int.from_bytes(hashlib.blake2b(repr(drafts).encode(), digest_size=8).digest(), "little") >> 1
    gathered = [torch.zeros(1, dtype=torch.long) for _ in range(group.world_size)]
    torch.distributed.all_gather(gathered, torch.tensor([digest]), group=group.cpu_group)
    if len({int(value) for value in gathered}) > 1:
        raise RuntimeError(f"sjd_pac: rank {group.rank_in_group} holds other drafts than its peers")
