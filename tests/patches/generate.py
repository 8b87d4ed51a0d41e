"""What a vLLM, stock or patched, makes of the same requests; run as a script, it prints JSON for the one it finds."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tests.conftest  # noqa: F401  (settings of the process, before vLLM is imported)
from tests import tiny_model
from tests.engine.conftest import Request, build_engine, mixed_requests, run_requests

# A fixed window: acceptances are compared, and must not depend on the clock.
METHOD = {"model": "sjd_pac", "num_speculative_tokens": 15, "adaptive_window": False}


@contextmanager
def _engine(model: Path, speculative_config: dict[str, Any] | None, **arguments: Any) -> Iterator[Any]:
    llm = build_engine(model, speculative_config, **arguments)
    try:
        yield llm
    finally:
        del llm
        gc.collect()


def drafted(model: Path) -> dict[str, Any]:
    """Requests of all kinds with the method on (some prompts take two chunks), and the error for one it refuses."""
    requests = [*mixed_requests(5, 3), Request(tiny_model.prompt("sea"), {"min_p": 0.2, "seed": 1, "max_tokens": 30})]
    requests.append(Request(tiny_model.prompt("red"), {"logit_bias": {20: 9.0}, "seed": 2, "max_tokens": 30}))
    with _engine(model, METHOD, max_num_batched_tokens=32) as llm:
        run = run_requests(llm, requests)
        try:
            run_requests(llm, [Request(tiny_model.prompt("sea"), {"extra_args": {"guidance_scale": -1}})])
            refusal = "none"
        except Exception as error:
            refusal = f"{type(error).__name__}: {error}"
    return {"tokens": run.tokens, "accepted": run.accepted, "refusal": refusal}


def plain(model: Path, max_num_batched_tokens: int) -> list[list[int] | None]:
    """Seeded requests without the method."""
    request = Request(tiny_model.prompt(*tiny_model.WORDS), {"seed": 5, "temperature": 1.0, "max_tokens": 12})
    with _engine(model, None, max_num_seqs=2, max_num_batched_tokens=max_num_batched_tokens) as llm:
        return run_requests(llm, [request]).tokens


def command_line(model: Path) -> dict[str, Any]:
    """The method's flags, through vLLM's own parser."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    flags = ["--model", str(model), "--speculative-model", "sjd_pac", "--sjd-pac-tree", "chain"]
    engine_args = AsyncEngineArgs.from_cli_args(parser.parse_args(flags))
    return {"spec_model": engine_args.spec_model, "speculative_config": engine_args.speculative_config}


def hooks_in_place() -> list[str]:
    """The run-time hooks that sit in vLLM's own objects."""
    from vllm import plugins
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import SamplingParams
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.sample import logits_processor

    from vllm_sjd_pac.engine import compat

    places = {
        "add_cli_args": EngineArgs.add_cli_args,
        "from_cli_args": EngineArgs.from_cli_args,
        "create_engine_config": EngineArgs.create_engine_config,
        "verify": SamplingParams.verify,
        "build_logitsprocs": logits_processor.build_logitsprocs,
        "load_endpoint_plugins": plugins.load_endpoint_plugins,
    }
    hooked = [name for name, function in places.items() if hasattr(function, compat._MARK)]
    return hooked + ["CPU_ATTN"] * AttentionBackendEnum.CPU_ATTN.get_path().startswith("vllm_sjd_pac")


def amx_requests() -> int:
    """How often the plugin itself asks for AMX on a machine that has it."""
    from unittest import mock

    import torch

    from vllm_sjd_pac.engine import compat

    with (
        mock.patch.object(torch.cpu, "_is_amx_tile_supported", return_value=True),
        mock.patch.object(torch.cpu, "_init_amx") as init,
    ):
        compat.request_amx_permission()
    return init.call_count


def main(model: Path) -> None:
    import vllm
    from vllm.plugins import load_endpoint_plugins

    from vllm_sjd_pac.engine import compat

    result = {
        "vllm": vllm.__file__,
        "unneeded": compat.unneeded_hooks(),
        "endpoints_before": [plugin.name for plugin in load_endpoint_plugins(("generate",))],
        "drafted": drafted(model),
        "endpoints": [plugin.name for plugin in load_endpoint_plugins(("generate",))],
        "endpoints_of_other_tasks": [plugin.name for plugin in load_endpoint_plugins(("embed",))],
        "chunked_plain": plain(model, 4),
        "command_line": command_line(model),
        "hooks": hooks_in_place(),
        "amx_requests": amx_requests(),
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
