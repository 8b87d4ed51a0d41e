"""A stand-in for vLLM's asynchronous engine: draws a known picture in known steps, and remembers what became of it."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from vllm_sjd_pac.models.emoji import checkpoint_path

STEP = 20
"""Tokens per forward pass of the stand-in."""


class FakeEngine:
    """Speaks the part of ``EngineClient`` that the images API uses.

    Attributes:
        pause: seconds between steps; refusal: what the engine answers instead of a picture; failure: what it raises.
        started, finished, aborted: request ids.
    """

    def __init__(self, *, pause: float = 0.0, refusal: str | None = None, failure: Exception | None = None) -> None:
        from transformers import AutoTokenizer

        folder = checkpoint_path()
        config = SimpleNamespace(**json.loads((folder / "config.json").read_text()))
        self.model_config = SimpleNamespace(hf_config=config, model=str(folder), max_model_len=512)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.renderer = SimpleNamespace(get_tokenizer=lambda: tokenizer)
        self.errored = False
        self.pause, self.refusal, self.failure = pause, refusal, failure
        self.started: list[str] = []
        self.finished: list[str] = []
        self.aborted: list[str] = []
        self.params: list[Any] = []

    async def generate(self, prompt: Any, params: Any, request_id: str) -> Any:
        self.started.append(request_id)
        self.params.append(params)
        try:
            if self.failure is not None:
                raise self.failure
            if self.refusal is not None:
                yield _output([], "error", stop_reason=self.refusal)
                return
            tokens = picture_tokens(params.seed, params.max_tokens)
            final_only = params.output_kind.name == "FINAL_ONLY"
            accepted = []
            for start in range(0, len(tokens), STEP):
                await asyncio.sleep(self.pause)
                step = tokens[start : start + STEP]
                accepted.append(len(step) - 1)
                last = start + STEP >= len(tokens)
                if last:
                    self.finished.append(request_id)
                    yield _output(tokens if final_only else step, "stop", accepted=accepted)
                elif not final_only:
                    yield _output(step, None)
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(request_id)
            raise


def picture_tokens(seed: int, length: int) -> list[int]:
    """A picture of 16 rows of one code that depends on the seed; line ends as the bundled model writes them."""
    code = 256 + seed % 200
    return [3 if position % 17 == 16 else code for position in range(length - 1)] + [4]


def _output(
    tokens: list[int], finish_reason: str | None, *, accepted: list[int] | None = None, stop_reason: str | None = None
) -> Any:
    statistics = None if accepted is None else SimpleNamespace(per_step_accepted=accepted)
    completion = SimpleNamespace(
        token_ids=tokens, finish_reason=finish_reason, stop_reason=stop_reason, spec_decode_metrics=statistics
    )
    return SimpleNamespace(outputs=[completion], finished=finish_reason is not None)
