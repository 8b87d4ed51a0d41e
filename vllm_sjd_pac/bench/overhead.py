"""Where the time of a step goes: the network's forward pass, and everything around it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from vllm_sjd_pac.bench.load import closed_loop
from vllm_sjd_pac.bench.settings import PROMPTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_sjd_pac.offline import ImageGenerator


class Timer:
    """Adds up the time spent in wrapped methods."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0

    @contextmanager
    def on(self, owner: Any, name: str) -> Iterator[None]:
        """Time every call of ``owner.name`` meanwhile."""
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.wait()
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.wait()
                self.seconds += time.perf_counter() - started
                self.calls += 1

        own = name in vars(owner)
        setattr(owner, name, timed)
        try:
            yield
        finally:
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)

    @staticmethod
    def wait() -> None:
        """On a GPU, until it has done what was launched: parts are measured one after the other, not overlapped."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def profile(
    generator: ImageGenerator,
    batches: Sequence[int],
    pictures: int,
    guidance: float,
    prompts: Sequence[str] = PROMPTS,
) -> list[dict[str, Any]]:
    """Milliseconds of a step by part, per batch size; ``pictures`` drawn for each picture of a batch.

    ``forward`` and ``logits`` are the network; ``prepare``: inputs; ``sampling``: verification; ``drafting``: the next
    drafts; ``schedule`` and ``account``: the scheduler before and after; ``elsewhere``: output processing and the rest.
    """
    engine = generator.llm.llm_engine
    core: Any = engine.engine_core.engine_core  # type: ignore[attr-defined]
    runner = core.model_executor.driver_worker.worker.model_runner
    parts = {
        "forward": (runner, "_model_forward"),
        "logits": (runner.model, "compute_logits"),
        "prepare": (runner, "_prepare_inputs"),
        "attention metadata": (runner, "_build_attention_metadata"),
        "sampling": (runner, "_sample"),
        "drafting": (runner, "propose_draft_token_ids"),
        "schedule": (core.scheduler, "schedule"),
        "account": (core.scheduler, "update_from_output"),
        "step": (engine, "step"),
    }
    rows = []
    for batch in batches:
        closed_loop(generator, batch, batch, guidance, prompts=prompts)
        with ExitStack() as stack:
            timers = {}
            for name, (owner, method) in parts.items():
                timers[name] = Timer()
                stack.enter_context(timers[name].on(owner, method))
            closed_loop(generator, batch, batch * pictures, guidance, prompts=prompts)
        steps = timers["step"].calls
        total = 1e3 * timers["step"].seconds / steps
        row: dict[str, Any] = {"pictures_at_once": batch, "steps": steps, "step_ms": round(total, 2)}
        inside = 0.0
        for name in parts:
            if name != "step":
                part = 1e3 * timers[name].seconds / steps
                inside += part
                row[f"{name.replace(' ', '_')}_ms"] = round(part, 2)
        row["elsewhere_ms"] = round(total - inside, 2)
        row["outside_forward"] = round(1 - (row["forward_ms"] + row["logits_ms"]) / total, 3)
        rows.append(row)
    return rows
