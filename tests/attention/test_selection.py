"""The selection rule of attention back ends."""

from __future__ import annotations

import importlib

import pytest
import torch

from vllm_sjd_pac.engine.attention.selection import (
    FLASH_TREE,
    TRITON_TREE,
    XFORMERS_TREE,
    Platform,
    choose_tree_backend,
)

GPU = Platform("cuda", has_flash_attention=True, has_triton=True, has_xformers=True)
BARE_GPU = Platform("cuda", has_flash_attention=False, has_triton=True, has_xformers=False)
CPU = Platform("cpu", has_flash_attention=False, has_triton=True, has_xformers=True)


@pytest.mark.parametrize(
    ("choice", "dtype", "platform", "backend"),
    [
        ("auto", torch.bfloat16, GPU, None),
        ("auto", torch.float32, CPU, None),
        ("virtual", torch.float16, BARE_GPU, None),
        ("triton", torch.bfloat16, GPU, FLASH_TREE),
        ("triton", torch.float32, GPU, TRITON_TREE),
        ("triton", torch.bfloat16, BARE_GPU, TRITON_TREE),
        ("xformers", torch.float16, GPU, XFORMERS_TREE),
    ],
)
def test_choice(choice, dtype, platform, backend):
    assert choose_tree_backend(choice, dtype, platform) == backend


@pytest.mark.parametrize(
    ("choice", "dtype", "platform", "message"),
    [
        ("triton", torch.float32, CPU, "needs a GPU"),
        ("xformers", torch.float32, CPU, "needs a GPU"),
        ("xformers", torch.float32, GPU, "float16 or bfloat16"),
        ("xformers", torch.bfloat16, BARE_GPU, "not installed"),
        ("flash", torch.bfloat16, GPU, "choose one of auto, virtual, triton, xformers"),
    ],
)
def test_what_cannot_run_is_an_error_that_says_why(choice, dtype, platform, message):
    with pytest.raises(ValueError, match=message):
        choose_tree_backend(choice, dtype, platform)


@pytest.mark.parametrize("path", [FLASH_TREE, TRITON_TREE, XFORMERS_TREE])
def test_the_named_classes_exist(path):
    pytest.importorskip("vllm")
    module, _, name = path.rpartition(".")
    backend = getattr(importlib.import_module(module), name)
    assert backend.get_impl_cls() is not None
    assert hasattr(backend.get_builder_cls(), "max_branches")


def test_this_process_can_be_asked():
    pytest.importorskip("vllm")
    here = Platform.here("cpu")
    assert here.device == "cpu"
    with pytest.raises(ValueError, match="needs a GPU"):
        choose_tree_backend("triton", torch.float32, here)
