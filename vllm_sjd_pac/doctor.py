"""``sjd-pac doctor``: checks of an installation, each with its remedy."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    what: str
    ok: bool
    detail: str


def examine() -> list[Finding]:
    """All checks, in the order in which a failing one explains the next."""
    checks: list[tuple[str, Callable[[], str]]] = [
        ("torch", _torch),
        ("torch libraries", _torch_libraries),
        ("vLLM", _vllm),
        ("vLLM metadata", _metadata),
        ("plugin", _plugin),
        ("bf16 on this CPU", _amx),
        ("bundled model", _bundled_model),
        ("KV cache", _kv_cache),
    ]
    findings = []
    for what, check in checks:
        try:
            findings.append(Finding(what, True, check()))
        except Exception as error:  # a doctor reports whatever is wrong
            findings.append(Finding(what, False, f"{type(error).__name__}: {error}"))
    return findings


def _torch() -> str:
    import torch

    return f"{torch.__version__}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"


def _torch_libraries() -> str:
    states = []
    for name in ("torchvision", "torchaudio", "torchcodec"):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            states.append(f"{name} absent")
            continue
        try:
            importlib.import_module(name)
        except Exception as error:
            raise RuntimeError(
                f"{name} does not import ({error}) and breaks vLLM; remedy: pip uninstall {name}"
            ) from None
        states.append(f"{name} works")
    return ", ".join(states)


def _vllm() -> str:
    import vllm

    from vllm_sjd_pac.engine.compat import require_supported_vllm

    require_supported_vllm()
    return vllm.__version__


def _metadata() -> str:
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        raise RuntimeError("`vllm serve` needs metadata of a distribution named vllm; remedy: make setup") from None


def _plugin() -> str:
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    if "sjd_pac" not in points.names:
        raise RuntimeError("entry point sjd_pac of vllm.general_plugins is missing; remedy: pip install -e .")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "sjd_pac" not in allowed.split(","):
        raise RuntimeError(f"VLLM_PLUGINS={allowed!r} leaves sjd_pac out; remedy: add it, or unset the variable")
    return "registered"


def _amx() -> str:
    import torch

    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    if supported is None or not supported():
        return "no AMX: use --dtype float32 unless the CPU has AVX-512 bf16"
    return "AMX tiles permitted" if torch.cpu._init_amx() else "AMX present but not permitted: use --dtype float32"


def _bundled_model() -> str:
    from vllm_sjd_pac.models.emoji import checkpoint_path

    path = checkpoint_path()
    missing = [
        name for name in ("config.json", "model.safetensors", "tokenizer.json", "vq") if not (path / name).exists()
    ]
    if missing:
        raise RuntimeError(f"{path} lacks {', '.join(missing)}; remedy: install again")
    return str(path)


def _kv_cache() -> str:
    value = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    return (
        f"VLLM_CPU_KVCACHE_SPACE={value} GiB"
        if value
        else "vLLM's default; set VLLM_CPU_KVCACHE_SPACE (GiB) to bound it on CPUs"
    )
