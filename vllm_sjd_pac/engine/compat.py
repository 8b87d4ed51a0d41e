"""Every touch of a private part of vLLM, in one place.

Written for and checked against vLLM 0.32 (V1 engine, V1 model runner). Each hook names the place it wraps and why; the
series in ``patches/`` would make them unneeded. `require_supported_vllm` fails with one sentence on another version.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

SUPPORTED_VLLM = "0.32"
PROPOSER = "vllm_sjd_pac.engine.proposer.JacobiProposer"
"""Value of ``speculative_config.model`` once this plugin has been chosen; how every process recognises it."""

ENDPOINT_PLUGIN = "vllm_sjd_pac.serving.plugin"
_MARK = "_sjd_pac_hook"
_chosen_here = threading.Event()
"""Set once this process has built an engine configuration with the method on."""


def require_supported_vllm() -> None:
    """Raises:
    ValueError: the installed vLLM is not of the supported minor version.
    """
    import vllm

    if vllm.__version__.split("+")[0].rsplit(".", 1)[0] != SUPPORTED_VLLM:
        raise ValueError(
            f"sjd_pac: this version of vllm-sjd-pac works with vLLM {SUPPORTED_VLLM}.*, "
            f"but vLLM {vllm.__version__} is installed"
        )


def is_selected(speculative_config: Any) -> bool:
    """Whether a vLLM ``SpeculativeConfig`` (or None) is this plugin's."""
    return speculative_config is not None and getattr(speculative_config, "model", None) == PROPOSER


def _wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace ``owner.name`` by ``make(original)`` once, keeping class- and static-method kinds."""
    raw = vars(owner)[name] if isinstance(owner, type) else getattr(owner, name)
    kind = type(raw) if isinstance(raw, classmethod | staticmethod) else None
    original = raw.__func__ if kind else raw
    if getattr(original, _MARK, False):
        return
    hook = functools.wraps(original)(make(original))
    setattr(hook, _MARK, True)
    setattr(owner, name, kind(hook) if kind else hook)


def install() -> None:
    """Install the hooks that this process needs; calling it again changes nothing."""
    request_amx_permission()
    if is_unneeded("arguments"):
        from vllm_sjd_pac.engine import method

        method.register()
    hooks = {
        "arguments": hook_arguments,
        "sampling_parameters": hook_sampling_parameters,
        "logits_processors": hook_logits_processors,
        "endpoints": hook_endpoints,
    }
    for name, hook in hooks.items():
        if not is_unneeded(name):
            hook()


_METHODS = "vllm.plugins.speculative_methods:SpeculativeMethod"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_REPLACEMENTS = {
    "arguments": f"{_METHODS}.configure",
    "sampling_parameters": f"{_METHODS}.verify_sampling_params",
    "logits_processors": f"{_METHODS}.applies_logits_processors",
    "endpoints": f"{_METHODS}.create_endpoint_plugin",
    "custom_attention": "vllm.platforms.cpu:CpuPlatform.supports_custom_attn_backend",
    "discarded_generators": f"{_RUNNER}._keep_generators_of_discarded_rows",
    "amx_permission": "vllm.platforms.cpu:CpuPlatform.request_amx_permission",
    "kv_cache_growth": "vllm.v1.kv_cache_interface:KVCacheConfig.with_extra_blocks",
    "draft_positions": f"{_RUNNER}.place_drafts",
}
"""Hook → the name in vLLM that makes it unneeded, in the order of the series in ``patches/``, which introduces them."""


@functools.cache
def is_unneeded(hook: str) -> bool:
    """Whether the installed vLLM does without `hook`, a key of `_REPLACEMENTS`."""
    module, _, path = _REPLACEMENTS[hook].partition(":")
    try:
        owner: Any = importlib.import_module(module)
    except ModuleNotFoundError:
        return False
    for name in path.split("."):
        owner = getattr(owner, name, None)
    return owner is not None


def unneeded_hooks() -> list[str]:
    """Every hook that the installed vLLM does without; none with a stock one."""
    return [hook for hook in _REPLACEMENTS if is_unneeded(hook)]


def request_amx_permission() -> None:
    """vLLM's bf16 CPU kernels use AMX tiles without asking the kernel for them: SIGILL at the first request."""
    import torch

    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    if supported is not None and supported() and not is_unneeded("amx_permission"):
        torch.cpu._init_amx()


def hook_arguments() -> None:
    """``EngineArgs``: the flags, and the translation of the user's form before any configuration is built.

    ``create_engine_config`` and not ``create_speculative_config``, since ``worker_cls`` is consumed before the latter.
    """
    from vllm.engine.arg_utils import EngineArgs

    from vllm_sjd_pac.engine import arguments

    def add_cli_args(original: Any) -> Any:
        def hook(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            return arguments.add_cli_args(original(parser))

        return hook

    def from_cli_args(original: Any) -> Any:
        def hook(cls: Any, args: argparse.Namespace) -> Any:
            check_command_line(args)
            return original(cls, args)

        return hook

    def create_engine_config(original: Any) -> Any:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            options = arguments.apply(self)
            config = original(self, *args, **kwargs)
            if options is not None:
                arguments.check_engine_config(config)
                arguments.choose_executor(config)
                method_is_in_use()
            return config

        return hook

    _wrap(EngineArgs, "add_cli_args", add_cli_args)
    _wrap(EngineArgs, "from_cli_args", from_cli_args)
    _wrap(EngineArgs, "create_engine_config", create_engine_config)


def check_command_line(args: argparse.Namespace) -> None:
    """Fold the method's flags into vLLM's, or end the process with one clear line instead of a traceback.

    This is the command line of ``vllm serve`` and its like.
    """
    from vllm_sjd_pac.engine import arguments

    try:
        arguments.collect_cli_options(args)
        arguments.check_early(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def method_is_in_use() -> None:
    """Remember that this process has built an engine configuration with the method on."""
    _chosen_here.set()


def hook_sampling_parameters() -> None:
    """``SamplingParams.verify`` refuses min_p and logit_bias with any speculative method; ours supports them.

    It is also where a request's own extra arguments can be refused with a clear error before they reach the engine.
    """
    from vllm.sampling_params import SamplingParams

    from vllm_sjd_pac.engine import requests

    def verify(original: Any) -> Any:
        def hook(self: Any, model_config: Any, speculative_config: Any, *args: Any, **kwargs: Any) -> None:
            if is_selected(speculative_config):
                requests.check_sampling_params(self, model_config)
                speculative_config = None
            original(self, model_config, speculative_config, *args, **kwargs)

        return hook

    _wrap(SamplingParams, "verify", verify)


def hook_logits_processors() -> None:
    """``build_logitsprocs`` leaves out min_p and logit_bias under speculation; rows without drafts need them."""
    from vllm.v1.sample import logits_processor

    def build(original: Any) -> Any:
        def hook(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
            if is_selected(vllm_config.speculative_config):
                from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors

                device, pin_memory = args[0], args[1]
                return LogitsProcessors(make(vllm_config, device, pin_memory) for make in BUILTIN_LOGITS_PROCESSORS)
            return original(vllm_config, *args, **kwargs)

        return hook

    _wrap(logits_processor, "build_logitsprocs", build)
    # The runner imported the function by name; patch it there too when it is loaded already.
    runner = sys.modules.get("vllm.v1.worker.gpu_model_runner")
    if runner is not None:
        runner.build_logitsprocs = logits_processor.build_logitsprocs  # type: ignore[attr-defined]


def hook_endpoints() -> None:
    """``load_endpoint_plugins`` loads only what ``VLLM_PLUGINS`` names; ours comes with the method."""
    from vllm import plugins

    def load(original: Any) -> Any:
        def hook(supported_tasks: Any = None) -> list[Any]:
            loaded = original(supported_tasks)
            if not _chosen_here.is_set():
                return loaded
            # By name: the engine knows nothing of serving beyond this line.
            return importlib.import_module(ENDPOINT_PLUGIN).add_to(loaded, supported_tasks)

        return hook

    _wrap(plugins, "load_endpoint_plugins", load)


def forced_v2_runner() -> bool:
    """Whether the environment forces vLLM's V2 model runner, which knows no custom speculative method."""
    return os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "").lower() in ("1", "true")


def register_attention(backend: str, path: str) -> None:
    """Let vLLM's back end `backend` (a name of ``AttentionBackendEnum``) be the class at `path`.

    A stock CPU platform ignores the CUSTOM slot, so its stock entry is overridden; the selector caches classes, and an
    engine of this process may have chosen the stock one before.
    """
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum[backend], path)
    selector._cached_get_attn_backend.cache_clear()


def register_cpu_attention(config: Any, path: str) -> None:
    """Let the back end at `path` be the CPU's, in the CUSTOM slot where the CPU platform honours it."""
    if is_unneeded("custom_attention"):
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        register_backend(AttentionBackendEnum.CUSTOM, path)
        config.attention_config.backend = AttentionBackendEnum.CUSTOM
    else:
        register_attention("CPU_ATTN", path)


def use_custom_attention(config: Any) -> None:
    """Choose the CUSTOM attention slot.

    Raises:
        ValueError: the user chose another back end, which cannot mask draft trees.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    chosen = config.attention_config.backend
    if chosen not in (None, AttentionBackendEnum.CUSTOM):
        raise ValueError(
            f"sjd_pac: --attention-backend {chosen.name} cannot mask draft trees; "
            "leave it out, or use --sjd-pac-tree chain"
        )
    config.attention_config.backend = AttentionBackendEnum.CUSTOM


def grow_kv_cache(kv_cache_config: Any, extra_blocks: int) -> Any:
    """A copy of a ``KVCacheConfig`` with `extra_blocks` more blocks, unknown to the scheduler, behind the others.

    In layer-outermost layouts a layer's region (and with it the next layer's offset) grows with the number of blocks;
    in block-outermost ones only the whole allocation does.
    """
    if not extra_blocks:
        return kv_cache_config
    if is_unneeded("kv_cache_growth"):
        return kv_cache_config.with_extra_blocks(extra_blocks)
    grown = copy.deepcopy(kv_cache_config)
    blocks = kv_cache_config.num_blocks
    for tensor in grown.kv_cache_tensors:
        layer_outermost = tensor.layer_stride == tensor.block_stride * blocks
        tensor.size = tensor.size // blocks * (blocks + extra_blocks)
        if layer_outermost:
            tensor.layer_stride = tensor.block_stride * (blocks + extra_blocks)
            tensor.offset = tensor.offset // blocks * (blocks + extra_blocks)
    grown.num_blocks = blocks + extra_blocks
    return grown


def name_ray_resource_of_cpus() -> None:
    """vLLM's CPU platform names no Ray resource and so refuses Ray; a CPU worker takes a ``CPU``."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and not current_platform.ray_device_key:
        type(current_platform).ray_device_key = "CPU"


def ray_executor_v2() -> bool:
    """Whether ``ray`` means vLLM's newer Ray executor."""
    from vllm import envs

    return bool(envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND)


@contextlib.contextmanager
def ray_workers(kind: type) -> Iterator[None]:
    """Let ``RayExecutorV2._init_executor`` start workers of class `kind`; it names its own class."""
    from vllm.v1.executor import ray_executor_v2 as module

    original = module.RayWorkerProc
    module.RayWorkerProc = kind  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        module.RayWorkerProc = original  # type: ignore[misc]


def place_ray_replicas(reserve: Callable[[Any, Any], tuple[list[Any], list[int]]]) -> None:
    """Let `reserve` place the engines of ``--data-parallel-backend ray`` that run the method.

    Called with the configuration and with vLLM's own placement, in the process that starts the engines.
    ``CoreEngineActorManager`` itself looks at no node and waits for ever for what does not fit.
    """
    from vllm.v1.engine.utils import CoreEngineActorManager

    def init(original: Any) -> Any:
        def hook(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            if not is_selected(vllm_config.speculative_config):
                original(self, vllm_config, *args, **kwargs)
                return
            groups, ranks = reserve(vllm_config, CoreEngineActorManager.create_dp_placement_groups)
            original(self, vllm_config, *args, placement_groups=groups, local_dp_ranks=ranks, **kwargs)
            self.created_placement_groups = groups  # for the manager to remove at its end

        return hook

    _wrap(CoreEngineActorManager, "__init__", init)


@contextlib.contextmanager
def ray_bundles(world_size: int, group: Any) -> Iterator[None]:
    """Keep workers out of bundles that are not theirs, unless the user has chosen the bundles.

    vLLM's Ray data parallelism adds a ``CPU`` bundle for the engine behind those of the workers; where workers take
    CPUs too, vLLM would count it as one more worker.
    """
    name = "VLLM_RAY_BUNDLE_INDICES"
    if os.environ.get(name) or len(group.bundle_specs) <= world_size or "GPU" in group.bundle_specs[0]:
        yield
        return
    os.environ[name] = ",".join(str(index) for index in range(world_size))
    try:
        yield
    finally:
        del os.environ[name]


def ray_cluster_address() -> tuple[str | None, str]:
    """Where ``ray.init()`` would look for a cluster, and why; None when it would start one."""
    from ray._private.utils import read_ray_address

    if os.environ.get("RAY_ADDRESS"):
        return os.environ["RAY_ADDRESS"], "RAY_ADDRESS"
    return read_ray_address(), "Ray's file of the last cluster on this machine"


def use_host_in_shared_memory_names(host: str) -> None:
    """Let the shared memory of CPU ranks carry their host's name.

    vLLM names it by a port only, so that ranks on two hosts think they share it and fail to open it; with different
    names it falls back to ``torch.distributed``.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    def make_group_name(original: Any) -> Any:
        def hook(communicator: Any) -> str:
            return f"{original(communicator)}-{host[:12]}"

        return hook

    _wrap(_CPUSHMDistributed, "make_group_name", make_group_name)
