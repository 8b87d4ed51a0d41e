"""Which attention back end computes draft trees: one rule, and an error at start-up where the choice cannot run.

| choice | CPU | GPU |
| --- | --- | --- |
| ``auto`` | virtual | virtual: stock kernels only, until the others have been measured on a GPU |
| ``virtual`` | virtual requests | virtual requests |
| ``triton`` | error | our window kernel over FlashAttention; in float32 or without it, over vLLM's Triton back end |
| ``xformers`` | error | ``xformers.ops.tree_attention`` over FlashAttention; half precision only |
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch

CHOICES = ("auto", "virtual", "triton", "xformers")

_PACKAGE = "vllm_sjd_pac.engine.attention"
FLASH_TREE = f"{_PACKAGE}.triton.FlashTreeBackend"
TRITON_TREE = f"{_PACKAGE}.triton.TritonTreeBackend"
XFORMERS_TREE = f"{_PACKAGE}.xformers_backend.XformersTreeBackend"

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Platform:
    """What the rule looks at: ``device`` is "cpu", "cuda" …; the rest says what can be imported."""

    device: str
    has_flash_attention: bool
    has_triton: bool
    has_xformers: bool

    @staticmethod
    def here(device: str) -> Platform:
        """The platform of this process; asks vLLM whether its FlashAttention runs here."""
        from vllm.v1.attention.backends.fa_utils import is_flash_attn_varlen_func_available

        return Platform(
            device=device,
            has_flash_attention=is_flash_attn_varlen_func_available(),
            has_triton=find_spec("triton") is not None,
            has_xformers=find_spec("xformers") is not None,
        )


def choose_tree_backend(choice: str, dtype: torch.dtype, platform: Platform) -> str | None:
    """The class to register as vLLM's CUSTOM attention back end, by its dotted path.

    Args:
        choice: one of `CHOICES`.
        dtype: of the model.
        platform: from `Platform.here`.

    Returns:
        The path; None where branches become virtual requests of the stock back end.

    Raises:
        ValueError: the choice is unknown or cannot run here; the message says why and what can.
    """
    if choice not in CHOICES:
        raise ValueError(f"sjd_pac: attention={choice!r} is not allowed; choose one of {', '.join(CHOICES)}")
    if choice in ("auto", "virtual"):
        return None

    def refuse(why: str) -> ValueError:
        return ValueError(f"sjd_pac: attention={choice!r} cannot run here: {why}; use attention='virtual'")

    if platform.device == "cpu":
        raise refuse("it needs a GPU")
    if choice == "xformers":
        if not platform.has_xformers:
            raise refuse("xformers is not installed (pip install --no-deps 'xformers>=0.0.35')")
        if dtype not in _HALF or not platform.has_flash_attention or platform.device != "cuda":
            raise refuse("it needs CUDA, float16 or bfloat16, and vLLM's FlashAttention for everything but the trees")
        return XFORMERS_TREE
    if not platform.has_triton:
        raise refuse("Triton is not installed")
    return FLASH_TREE if platform.has_flash_attention and dtype in _HALF else TRITON_TREE
