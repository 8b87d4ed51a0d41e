"""Same seed, same tokens: with `race`, speculation never changes what is generated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import tiny_model
from tests.engine.conftest import Request, Run, mixed_requests

RunEngine = Callable[..., Run]
REQUESTS = 48
FIXED = {"model": "sjd_pac", "adaptive_window": False}  # how many drafts are accepted must not depend on the clock

CONFIGURATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "adaptive window": ({"adaptive_window": True}, {}),
    "default comb of 64 nodes": ({}, {}),
    "full tree, chunked prefill": (
        {"tree": "full:3.3", "num_speculative_tokens": 40},
        {"max_num_batched_tokens": 48, "max_num_seqs": 4},
    ),
    "comb with tails, tiny cache": (
        {"tree": "comb:4.2t1", "num_speculative_tokens": 30},
        {"num_gpu_blocks_override": 14, "enable_prefix_caching": False},
    ),
    "window of 16, prefix caching, tiny cache": ({"num_speculative_tokens": 16}, {"num_gpu_blocks_override": 10}),
    "chain, batch of two": ({"tree": "chain"}, {"max_num_seqs": 2}),
    "plain sjd without memory or smoothing": ({"mode": "sjd", "memory": False, "smoothing": 0.0}, {"max_num_seqs": 3}),
}


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return mixed_requests(REQUESTS, seed=1)


@pytest.fixture(scope="module")
def plain(run_engine: RunEngine, constrained: Path, requests: list[Request]) -> Run:
    """The same engine, guidance and layout without drafts."""
    run = run_engine(constrained, {"model": "sjd_pac", "mode": "ar"}, requests)
    assert all(sum(accepted) == 0 for accepted in run.accepted)
    return run


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_speculation_changes_no_token(
    run_engine: RunEngine, constrained: Path, requests: list[Request], plain: Run, name: str
) -> None:
    options, arguments = CONFIGURATIONS[name]
    given = [dataclasses.replace(r, abort_after=7 if i % 9 == 4 else None) for i, r in enumerate(requests)]
    run = run_engine(constrained, {**FIXED, **options}, given, **arguments)
    finished = [i for i, tokens in enumerate(run.tokens) if tokens is not None]
    assert len(finished) >= REQUESTS * 0.8
    assert [run.tokens[i] for i in finished] == [plain.tokens[i] for i in finished]
    enough = 10 if "adaptive" in name else 100
    assert sum(map(sum, run.accepted)) > enough, "drafts were hardly ever accepted: the test shows nothing"
    if "tiny cache" in name:
        assert run.preemptions > 0, "the cache was large enough: the test shows nothing"
    assert run.free_blocks == run.total_blocks
    assert set(run.leftovers.values()) == {0}


def test_layout_is_exact(plain: Run, requests: list[Request]) -> None:
    full = [t for t, r in zip(plain.tokens, requests, strict=True) if t and len(t) == tiny_model.SEGMENT_LENGTH]
    assert len(full) > 10
    for tokens in full:
        for position, token in enumerate(tokens[:-1]):
            at_line_end = position % (tiny_model.COLUMNS + 1) == tiny_model.COLUMNS
            assert (token == tiny_model.EOL) if at_line_end else (token >= tiny_model.IMAGE_START)
        assert tokens[-1] == tiny_model.EOI


def test_equals_the_stock_engine(run_engine: RunEngine, unconstrained: Path) -> None:
    """Guidance off, no mask: exactly the tokens, log-probabilities and stops of vLLM without the plugin's method."""
    requests = mixed_requests(40, seed=2, guidance=False)
    for request in requests:
        request.params["ignore_eos"] = True
    stock = run_engine(unconstrained, None, requests)
    ours = run_engine(unconstrained, FIXED, requests)
    assert ours.tokens == stock.tokens
    assert sum(map(sum, ours.accepted)) > 100
    for mine, theirs in zip(ours.outputs, stock.outputs, strict=True):
        assert mine.outputs[0].finish_reason == theirs.outputs[0].finish_reason
        assert mine.outputs[0].stop_reason == theirs.outputs[0].stop_reason
        for a, b in zip(mine.outputs[0].logprobs or [], theirs.outputs[0].logprobs or [], strict=True):
            assert {t: round(v.logprob, 3) for t, v in a.items()} == {t: round(v.logprob, 3) for t, v in b.items()}


def test_guided_greedy_tokens_equal_transformers(run_engine: RunEngine, constrained: Path) -> None:
    """An independent implementation of guidance: two teacher-forced passes of the reference model per token."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(constrained).float()
    prompt, negative = tiny_model.prompt("red", "apple", "on", "grass"), tiny_model.prompt("sea")
    params = {
        "temperature": 0.0,
        "max_tokens": 60,
        "extra_args": {"guidance_scale": 2.5, "negative_token_ids": negative},
    }
    run = run_engine(constrained, FIXED, [Request(prompt, params)])
    tokens: list[int] = []
    while len(tokens) < tiny_model.SEGMENT_LENGTH:
        with torch.no_grad():
            conditional, unconditional = (model(torch.tensor([p + tokens])).logits[0, -1] for p in (prompt, negative))
        row = unconditional + 2.5 * (conditional - unconditional)
        at_end = len(tokens) == tiny_model.SEGMENT_LENGTH - 1
        at_line_end = len(tokens) % (tiny_model.COLUMNS + 1) == tiny_model.COLUMNS
        forced = tiny_model.EOI if at_end else tiny_model.EOL if at_line_end else None
        codes = row[tiny_model.IMAGE_START :].argmax().item() + tiny_model.IMAGE_START
        tokens.append(codes if forced is None else forced)
    assert run.tokens[0] == tokens
    assert sum(run.accepted[0]) > 5


@pytest.mark.parametrize("broken", ["attention mask", "positions", "catch-up"])
def test_a_broken_tree_is_noticed(
    run_engine: RunEngine,
    constrained: Path,
    requests: list[Request],
    plain: Run,
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
) -> None:
    """Negative controls: each piece that trees need, taken away, changes tokens."""
    from vllm_sjd_pac.engine import runner, scheduler
    from vllm_sjd_pac.engine.attention import interface

    if broken == "attention mask":
        empty = interface.TreeStep()
        monkeypatch.setattr(runner, "set_tree_step", lambda builders, step: interface.set_tree_step(builders, empty))
    elif broken == "positions":
        monkeypatch.setattr(
            runner, "branch_nodes", lambda tree: np.stack([np.arange(tree.main_length + 1, tree.num_nodes)] * 2)
        )
    else:
        # vLLM's own accounting: the first accepted drafts count as computed, wherever the walk went.
        monkeypatch.setattr(scheduler.step_report, "read", lambda output: scheduler.step_report.StepReport())
    unguided = [i for i, r in enumerate(requests) if "extra_args" not in r.params]
    run = run_engine(constrained, {**FIXED, "tree": "full:3.3"}, [requests[i] for i in unguided])
    assert run.tokens != [plain.tokens[i] for i in unguided]
