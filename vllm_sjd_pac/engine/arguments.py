"""The user's form of the options → vLLM's configuration.

Three doors, one meaning: ``--speculative-model sjd_pac --sjd-pac-tree chain``, ``--speculative-config '{"model":
"sjd_pac", "tree": "chain"}'`` and ``LLM(..., speculative_config={"model": "sjd_pac", "tree": "chain"})``. The checked
options travel in ``additional_config["sjd_pac"]``, which reaches every worker process.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
from typing import Any

from vllm_sjd_pac.config import METHOD, SJDPACConfig
from vllm_sjd_pac.engine import compat
from vllm_sjd_pac.engine.attention.selection import Platform, choose_tree_backend
from vllm_sjd_pac.engine.trees import TreeChooser

_PREFIX = "sjd_pac_"
_SCHEDULER = "vllm_sjd_pac.engine.scheduler.GuidedScheduler"
_WORKERS = {
    "cpu": "vllm_sjd_pac.engine.worker.CPUSpecDecodeWorker",
    "cuda": "vllm_sjd_pac.engine.worker.GPUSpecDecodeWorker",
}
_OPTIONS_WITH_OWN_FLAG = {"num_speculative_tokens"}


def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--speculative-model``, ``--num-speculative-tokens`` and one ``--sjd-pac-*`` flag per option."""
    if "--speculative-model" in parser._option_string_actions:
        return parser
    group = parser.add_argument_group("SJD-PAC", "Lossless speculative decoding for image-token models (vllm-sjd-pac).")
    group.add_argument(
        "--speculative-model",
        dest="spec_model",
        default=argparse.SUPPRESS,
        metavar="NAME",
        help=f"'{METHOD}' turns on SJD-PAC; any other value is vLLM's own --spec-model",
    )
    group.add_argument(
        "--num-speculative-tokens",
        dest="spec_tokens",
        type=int,
        default=argparse.SUPPRESS,
        metavar="N",
        help="drafted nodes per step (sjd_pac: default 63); same as --spec-tokens",
    )
    for option in dataclasses.fields(SJDPACConfig):
        if option.name in _OPTIONS_WITH_OWN_FLAG:
            continue
        flag = "--sjd-pac-" + option.name.replace("_", "-")
        text = f"{option.metadata['help']} (default: {option.default})"
        dest = _PREFIX + option.name
        if isinstance(option.default, bool):
            group.add_argument(
                flag, dest=dest, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
            )
        else:
            group.add_argument(
                flag,
                dest=dest,
                type=_Parser(option.name),
                default=argparse.SUPPRESS,
                help=text,
                metavar=option.name.upper(),
            )
    return parser


class _Parser:
    """Converts and checks one option's text, so that argparse reports the flag's name with the error."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, text: str) -> Any:
        kind = {"window": int, "smoothing": float, "ray_wait": float}.get(self.name, str)
        try:
            value = kind(text)
        except ValueError:
            allowed = SJDPACConfig.allowed(self.name)
            raise argparse.ArgumentTypeError(f"{text!r} is not a number; allowed: {allowed}") from None
        if self.name != "window":  # its upper bound depends on another option
            try:
                SJDPACConfig(**{self.name: value})
            except ValueError as error:
                raise argparse.ArgumentTypeError(str(error)) from None
        return value


def collect_cli_options(args: argparse.Namespace) -> None:
    """Move ``--sjd-pac-*`` values of a parsed command line into ``args.speculative_config``.

    Raises:
        ValueError: such a flag was given although the method was not chosen, or twice with ``--speculative-config``.
    """
    given = {name[len(_PREFIX) :]: value for name, value in vars(args).items() if name.startswith(_PREFIX)}
    if not given:
        return
    config = dict(getattr(args, "speculative_config", None) or {})
    if METHOD not in (getattr(args, "spec_model", None), config.get("model"), config.get("method")):
        flag = "--sjd-pac-" + next(iter(given)).replace("_", "-")
        raise ValueError(f"{flag} needs --speculative-model {METHOD}")
    for name, value in given.items():
        if config.get(name, value) != value:
            raise ValueError(f"--sjd-pac-{name.replace('_', '-')} and --speculative-config['{name}'] differ")
        config[name] = value
        delattr(args, _PREFIX + name)
    args.speculative_config = config


def check_early(args: argparse.Namespace) -> None:
    """Check the chosen options of a parsed command line before anything is loaded.

    Raises:
        ValueError: an unknown option or value, or a misspelt method name.
    """
    _options_of(
        getattr(args, "spec_model", None), getattr(args, "spec_tokens", None), getattr(args, "speculative_config", None)
    )


def _options_of(spec_model: str | None, spec_tokens: int | None, config: dict[str, Any] | None) -> SJDPACConfig | None:
    """The options when the method is chosen, None when it is not."""
    config = {key.replace("-", "_"): value for key, value in (config or {}).items()}
    names = [name for name in (spec_model, config.get("model"), config.get("method")) if isinstance(name, str)]
    if METHOD not in names:
        for name in names:
            if (
                name != METHOD
                and difflib.get_close_matches(name.lower(), [METHOD, "sjd"], 1, 0.75)
                and not os.path.exists(name)
            ):
                raise ValueError(f"unknown speculative model {name!r}; did you mean {METHOD!r}?")
        return None
    for key in ("model", "method"):
        if config.get(key) == METHOD:
            del config[key]
    if spec_model not in (None, METHOD):
        raise ValueError(f"--spec-model {spec_model!r} and the speculative method {METHOD!r} exclude each other")
    if spec_tokens is not None:
        if config.get("num_speculative_tokens", spec_tokens) != spec_tokens:
            raise ValueError("--num-speculative-tokens and --speculative-config['num_speculative_tokens'] differ")
        config["num_speculative_tokens"] = spec_tokens
    options = SJDPACConfig.from_mapping(config)
    if options.acceptance == "rejection":
        for name in ("memory", "smoothing"):
            if name in config:
                raise ValueError(
                    f"sjd_pac: {name} is an option of acceptance='race' only; leave it out with 'rejection'"
                )
    TreeChooser(options)  # the tree must fit its node budget
    return options


def apply(engine_args: Any) -> SJDPACConfig | None:
    """Translate the user's form in ``EngineArgs`` in place; None when the method is not chosen.

    Raises:
        ValueError: an unknown option, a value that is not allowed, or something vLLM offers that the method excludes.
    """
    current = engine_args.speculative_config or {}
    if current.get("model") == compat.PROPOSER:  # a second call on the same arguments
        return SJDPACConfig.from_mapping(engine_args.additional_config[METHOD])
    options = _options_of(engine_args.spec_model, engine_args.spec_tokens, engine_args.speculative_config)
    if options is None:
        return None
    compat.require_supported_vllm()
    _refuse_excluded(engine_args)
    engine_args.spec_model = engine_args.spec_tokens = None
    engine_args.speculative_config = {
        "method": "custom_class",
        "model": compat.PROPOSER,
        "num_speculative_tokens": options.num_speculative_tokens,
    }
    engine_args.additional_config = {**(engine_args.additional_config or {}), METHOD: options.to_mapping()}
    if engine_args.worker_cls == "auto":
        engine_args.worker_cls = _worker_class()
    if engine_args.scheduler_cls is None:
        engine_args.scheduler_cls = _SCHEDULER
    # Forwards, tokens and acceptance of every request travel on vLLM's own per-request statistics.
    engine_args.per_request_spec_decode_metrics = "detailed"
    return options


def _worker_class() -> str:
    from vllm.platforms import current_platform

    kind = "cpu" if current_platform.is_cpu() else "cuda" if current_platform.is_cuda_alike() else None
    if kind is None:
        raise ValueError(f"sjd_pac: no worker for platform {current_platform.device_name!r}; supported: CPU, CUDA")
    return _WORKERS[kind]


def _refuse_excluded(engine_args: Any) -> None:
    def refuse(condition: Any, sentence: str) -> None:
        if condition:
            raise ValueError(f"sjd_pac: {sentence}")

    refuse(
        compat.forced_v2_runner(), "VLLM_USE_V2_MODEL_RUNNER=1 is not supported; the method needs the V1 model runner"
    )
    refuse(engine_args.async_scheduling, "--async-scheduling is not supported; leave it out")
    refuse(
        engine_args.pipeline_parallel_size > 1,
        f"--pipeline-parallel-size {engine_args.pipeline_parallel_size} is not supported; use --tensor-parallel-size",
    )
    refuse(engine_args.decode_context_parallel_size > 1, "--decode-context-parallel-size is not supported")
    refuse(engine_args.prefill_context_parallel_size > 1, "--prefill-context-parallel-size is not supported")
    refuse(engine_args.enable_lora, "--enable-lora is not supported")
    refuse(engine_args.kv_transfer_config, "--kv-transfer-config (KV connectors) is not supported")
    refuse(engine_args.logits_processors, "--logits-processors is not supported; use sampling parameters")
    refuse(engine_args.enable_dbo, "--enable-dbo is not supported")


def check_engine_config(config: Any) -> None:
    """Checks that need the whole configuration.

    Raises:
        ValueError: no image-token family knows the model, or the configuration excludes the method.
    """
    from vllm_sjd_pac.models.family import find_family

    model = config.model_config
    find_family(model.hf_config, model.model)
    options, device = options_of(config), config.device_config.device_type
    if options.attention not in ("auto", "virtual"):
        choose_tree_backend(options.attention, model.dtype, Platform.here(device))
    if config.scheduler_config.async_scheduling:
        raise ValueError("sjd_pac: asynchronous scheduling is on although the method excludes it")
    if model.use_fp64_gumbel:
        raise ValueError("sjd_pac: use_fp64_gumbel is not supported")
    if options.ray_wait != SJDPACConfig().ray_wait and not _uses_ray(config.parallel_config):
        raise ValueError(
            "sjd_pac: --sjd-pac-ray-wait needs --distributed-executor-backend ray or --data-parallel-backend ray; "
            "leave it out"
        )


def choose_executor(config: Any) -> None:
    """Under Ray, the executor of this plugin in place of vLLM's.

    Raises:
        ValueError: see `vllm_sjd_pac.engine.ray.use_our_executor`.
    """
    if _uses_ray(config.parallel_config):
        from vllm_sjd_pac.engine.ray import use_our_executor  # Ray is an optional dependency

        use_our_executor(config)


def _uses_ray(parallel_config: Any) -> bool:
    return parallel_config.use_ray or parallel_config.data_parallel_backend == "ray"


def options_of(config: Any) -> SJDPACConfig:
    """The options in a vLLM ``VllmConfig``, in any process."""
    return SJDPACConfig.from_mapping(config.additional_config[METHOD])
