"""Registering the families is cheap, complete and needs no torchvision."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import SimpleNamespace

import pytest

from vllm_sjd_pac.models.family import find_family, known_architectures, register_family
from vllm_sjd_pac.models.registry import FAMILIES, NETWORKS


def test_every_architecture_has_a_network_and_a_family() -> None:
    assert set(NETWORKS) == set(FAMILIES)


@pytest.mark.parametrize("reference", sorted({*FAMILIES.values()}))
def test_families_are_where_the_registry_says(reference: str) -> None:
    module, _, name = reference.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_an_unknown_architecture_gets_the_list_of_known_ones() -> None:
    for architecture, family in FAMILIES.items():
        register_family(architecture, family)
    assert set(FAMILIES) <= set(known_architectures())
    with pytest.raises(
        ValueError, match=r"architecture Unknown of m.*ChameleonForConditionalGeneration.*register_family"
    ):
        find_family(SimpleNamespace(architectures=["Unknown"]), "m")


def test_families_need_neither_vllm_nor_torchvision() -> None:
    """Prompts, layouts and pixels run in a web server or a notebook; the network alone needs the engine."""
    modules = sorted({reference.partition(":")[0] for reference in FAMILIES.values()})
    program = "\n".join(
        [
            "import sys",
            "sys.modules['torchvision'] = None",
            *(f"import {module}" for module in modules),
            "import transformers.models.emu3.modeling_emu3",
            "assert not any(name == 'vllm' or name.startswith('vllm.') for name in sys.modules), 'vllm was imported'",
        ]
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
