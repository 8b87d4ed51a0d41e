"""The method as an object of vLLM's registry, for a vLLM that has one (``patches/0001`` to ``0004``).

Never imported with a stock vLLM; there, the run-time hooks in `compat` do the same.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from vllm.plugins.speculative_methods import SpeculativeMethod, register_speculative_method

from vllm_sjd_pac.config import METHOD
from vllm_sjd_pac.engine import arguments, compat, requests


class JacobiMethod(SpeculativeMethod):
    """What vLLM may ask about ``sjd_pac``."""

    name = METHOD
    proposer = compat.PROPOSER
    applies_logits_processors = True

    def add_cli_args(self, parser: argparse.ArgumentParser) -> None:
        arguments.add_cli_args(parser)

    def check_cli_args(self, args: argparse.Namespace) -> None:
        compat.check_command_line(args)

    def configure(self, engine_args: Any) -> bool:
        return arguments.apply(engine_args) is not None

    def check_config(self, vllm_config: Any) -> None:
        arguments.check_engine_config(vllm_config)
        arguments.choose_executor(vllm_config)
        compat.method_is_in_use()

    def verify_sampling_params(self, params: Any, model_config: Any) -> None:
        requests.check_sampling_params(params, model_config)

    def create_endpoint_plugin(self) -> Any:
        # By name: the engine knows nothing of serving beyond this line.
        return importlib.import_module(compat.ENDPOINT_PLUGIN).ImagesEndpoint()


def register() -> None:
    """Add the method to vLLM's registry; calling it again changes nothing."""
    register_speculative_method(JacobiMethod())
