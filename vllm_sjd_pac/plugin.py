"""Entry points that vLLM loads in every process. Thin, idempotent and cheap to import."""

from __future__ import annotations


def register() -> None:
    """Entry point of ``vllm.general_plugins``: add the command-line flags, the models and the hooks.

    Nothing changes for an engine that does not choose ``sjd_pac``; hooks that matter only then look at the engine's own
    configuration.
    """
    from vllm_sjd_pac.engine import compat
    from vllm_sjd_pac.models.registry import register_models

    compat.install()
    register_models()
