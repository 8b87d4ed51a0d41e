"""What the family tests share: an in-process engine, teacher-forced logits, a word tokenizer, random tensors."""

from __future__ import annotations

import contextlib
import gc
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

TOLERANCE = 1e-3
"""Largest difference of two logits that counts as equal, in float32."""


def write_tokenizer(
    folder: Path, vocabulary: Mapping[str, int], *, unknown: str, special: tuple[str, ...] = ()
) -> None:
    """A tokenizer of whitespace-separated words, as ``tokenizer.json``; `special` are found anywhere in a text."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    tokenizer = Tokenizer(WordLevel(dict(vocabulary), unk_token=unknown))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": unknown}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def update_config(folder: Path, **fields: Any) -> None:
    """Set fields of ``config.json``; None removes one."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | fields
    kept = {name: value for name, value in config.items() if value is not None}
    file.write_text(json.dumps(kept), encoding="utf-8")


@torch.no_grad()
def shake(module: torch.nn.Module, seed: int = 0, size: float = 0.3) -> torch.nn.Module:
    """Add noise to vectors that start at 0 or 1 (norms, biases) and widen matrices, so that no part is an identity."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() < 2 or parameter.std() == 0:
            parameter.add_(size * noise)
        else:
            parameter.add_(noise / parameter[0].numel() ** 0.5)
    return module.float().eval()


@contextlib.contextmanager
def engine(folder: Path, **options: Any) -> Iterator[Any]:
    """An in-process, eager float32 engine; prompts are computed in chunks, so that the cache takes part."""
    from vllm import LLM

    from vllm_sjd_pac.models.registry import register_models

    register_models()
    settings: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 192,
        "max_num_batched_tokens": 48,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "seed": 0,
    } | options
    llm = LLM(str(folder), **settings)
    try:
        yield llm
    finally:
        shut_down(llm)


def shut_down(llm: Any) -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    del llm
    cleanup_dist_env_and_memory()
    gc.collect()


def network_of(llm: Any) -> torch.nn.Module:
    """The model inside an in-process engine."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.get_model()


def engine_logits(llm: Any, tokens: list[int]) -> torch.Tensor:
    """Logits [len(tokens), vocabulary] of a teacher-forced sequence, from the engine's own forward passes."""
    from vllm import SamplingParams

    network, hidden = network_of(llm), []
    handle = network.register_forward_hook(lambda module, inputs, output: hidden.append(output.detach().clone()))
    try:
        llm.generate({"prompt_token_ids": tokens}, SamplingParams(max_tokens=1), use_tqdm=False)
    finally:
        handle.remove()
    states = torch.cat(hidden)[: len(tokens)]
    assert len(states) == len(tokens), "the engine ran fewer rows than tokens"
    with torch.inference_mode():
        return network.compute_logits(states)


def whole_image(family: Any, prompt: list[int], seed: int = 0) -> list[int]:
    """The prompt and a legal image of random codes."""
    layout = family.layout(prompt)
    codes = torch.randint(layout.image_token_count, (layout.length,), generator=torch.Generator().manual_seed(seed))
    forced = layout.forced_table
    return prompt + torch.where(forced < 0, codes + layout.image_token_start, forced).tolist()


def published_config(folder: Path, config: Mapping[str, Any]) -> Path:
    """A folder with nothing but a ``config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def network_on_meta(folder: Path) -> torch.nn.Module:
    """Build the network of `folder`'s configuration without memory; starts a one-process group when there is none."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
        model_parallel_is_initialized,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    from vllm_sjd_pac.models.registry import register_models

    register_models()
    arguments = EngineArgs(str(folder), dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=64)
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        if not model_parallel_is_initialized():
            init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, backend="gloo")
            ensure_model_parallel_initialized(1, 1)
        with torch.device("meta"):
            return initialize_model(vllm_config=config)


def load_on_meta(network: torch.nn.Module, tensors: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Load tensors of the given names and shapes, without their values."""
    return network.load_weights((name, torch.empty(shape, device="meta")) for name, shape in tensors.items())


def expand(patterns: Mapping[str, list[int]], layers: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a fixture; ``{layer}`` in a name stands for every layer number."""
    return {
        name.replace("{layer}", str(layer)): tuple(shape)
        for name, shape in patterns.items()
        for layer in (range(layers) if "{layer}" in name else (0,))
    }
