"""The object that vLLM's ``custom_class`` slot instantiates."""

from __future__ import annotations

from typing import Any


class JacobiProposer:
    """Drafts come from the target's own stale predictions, so no draft model exists.

    vLLM builds this object and asks it to `propose`; the runner (`engine.runner.JacobiRunnerMixin`) drafts itself,
    since drafting needs the rows that verification used, and never calls `propose`.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config

    def load_model(self, target_model: Any) -> None:
        """Nothing to load."""

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """Raises:
        RuntimeError: always: a runner without the mixin asked, so the worker class was overridden.
        """
        raise RuntimeError(
            "sjd_pac: the worker class was overridden; use vllm_sjd_pac.engine.worker's SpecDecodeWorker"
        )
