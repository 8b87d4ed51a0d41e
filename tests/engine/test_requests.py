"""Single requests in unusual places: several outputs, the context's end, caches, hidden twins, pairs that never fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import tiny_model
from tests.engine.conftest import Request, build_engine, run_requests

PROMPT = tiny_model.prompt("red", "apple", "on", "grass")
LONG_NEGATIVE = [tiny_model.BOS, *[tiny_model.FIRST_WORD + 1] * 66, tiny_model.BOI]


def params(**fields: Any) -> dict[str, Any]:
    return {"temperature": 1.0, "seed": 5, "max_tokens": 60, **fields}


def guided(scale: float = 3.0, **extra: Any) -> dict[str, Any]:
    return {"extra_args": {"guidance_scale": scale, **extra}}


@pytest.fixture(scope="module")
def plain(constrained: Path) -> Any:
    return build_engine(constrained, {"model": "sjd_pac", "mode": "ar"}, max_model_len=128, max_num_seqs=8)


@pytest.fixture(scope="module")
def engine(constrained: Path, plain: Any) -> Any:
    """Built after `plain`: vLLM's metrics are those of the process's newest engine."""
    return build_engine(constrained, {"model": "sjd_pac"}, max_model_len=128, max_num_seqs=8)


def test_several_outputs_of_one_request(engine: Any, plain: Any) -> None:
    from vllm import SamplingParams, TokensPrompt

    asked = SamplingParams(n=3, **params(**guided()))
    outputs = [
        [o.token_ids for o in llm.generate([TokensPrompt(prompt_token_ids=PROMPT)], asked, use_tqdm=False)[0].outputs]
        for llm in (engine, plain)
    ]
    assert outputs[0] == outputs[1]
    assert len({tuple(tokens) for tokens in outputs[0]}) == 3


@pytest.mark.parametrize("length", [92, 100, 110, 126, 127])
def test_the_context_ends_within_the_image(engine: Any, plain: Any, length: int) -> None:
    prompt = [tiny_model.BOS, *[tiny_model.FIRST_WORD] * (length - 2), tiny_model.BOI]
    ours, theirs = (run_requests(llm, [Request(prompt, params(**guided()))]) for llm in (engine, plain))
    assert ours.tokens == theirs.tokens
    assert len(ours.tokens[0] or []) == min(tiny_model.SEGMENT_LENGTH, 128 - length)


def test_text_runs_as_plain_text(engine: Any, plain: Any) -> None:
    prompt = [tiny_model.BOS, 6, 7]  # no begin-of-image
    request = Request(prompt, params(ignore_eos=True, max_tokens=30, allowed_token_ids=list(range(5, 16))))
    ours, theirs = (run_requests(llm, [request]) for llm in (engine, plain))
    assert ours.tokens == theirs.tokens
    assert sum(ours.accepted[0]) == 0


def test_text_has_a_top_k_of_its_own(engine: Any) -> None:
    prompt = [tiny_model.BOS, 6, 7]  # no begin-of-image
    text = params(ignore_eos=True, max_tokens=12, extra_args={"text_top_k": 1})
    greedy = {**text, "temperature": 0.0, "extra_args": {}}
    first, second, free = (
        run_requests(engine, [Request(prompt, p)]).tokens for p in (text, greedy, {**text, "extra_args": {}})
    )
    assert first == second != free
    image = [
        run_requests(engine, [Request(PROMPT, params(**e))]).tokens for e in ({}, {"extra_args": {"text_top_k": 1}})
    ]
    assert image[0] == image[1]


def test_equal_negative_prompts_hit_the_prefix_cache(engine: Any) -> None:
    def hits() -> int:
        return sum(int(m.value) for m in engine.get_metrics() if m.name == "vllm:prefix_cache_hits")

    request = Request(PROMPT, params(**guided(negative_token_ids=LONG_NEGATIVE)))
    run_requests(engine, [request])
    before = hits()
    run_requests(engine, [Request(tiny_model.prompt("blue", "boat"), request.params)])
    assert hits() - before >= 64  # the two full blocks of the negative prompt


def test_the_prefix_cache_can_be_reset(engine: Any) -> None:
    assert engine.reset_prefix_cache()
    free = run_requests(engine, [Request(PROMPT, params())])
    assert free.free_blocks == free.total_blocks


def test_twins_never_show(engine: Any) -> None:
    from vllm import SamplingParams, TokensPrompt

    running = []
    llm = engine.llm_engine
    for index in range(3):
        llm.add_request(f"g{index}", TokensPrompt(prompt_token_ids=PROMPT), SamplingParams(**params(**guided())))
    ids = set()
    while llm.has_unfinished_requests():
        ids |= {output.request_id for output in llm.step()}
        running.append(max(m.value for m in engine.get_metrics() if m.name == "vllm:num_requests_running"))
    assert ids == {"g0", "g1", "g2"}
    assert max(running) == 3


def test_guidance_one_makes_no_twin(engine: Any) -> None:
    with_one = run_requests(engine, [Request(PROMPT, params(**guided(1.0)))])
    without = run_requests(engine, [Request(PROMPT, params())])
    assert with_one.tokens == without.tokens


def test_guidance_zero_is_the_negative_prompt_alone(engine: Any) -> None:
    negative = tiny_model.prompt("sea")
    run = run_requests(engine, [Request(PROMPT, params(**guided(0.0, negative_token_ids=negative)))])
    alone = run_requests(engine, [Request(negative, params())])
    assert run.tokens == alone.tokens


def test_a_pair_that_can_never_fit_ends_with_an_error(constrained: Path) -> None:
    llm = build_engine(constrained, {"model": "sjd_pac"}, max_model_len=128, max_num_seqs=1)
    run = run_requests(llm, [Request(PROMPT, params(**guided())), Request(PROMPT, params())])
    assert run.outputs[0].outputs[0].finish_reason == "error"
    assert "--max-num-seqs" in str(run.outputs[0].outputs[0].stop_reason)
    assert len(run.tokens[1] or []) == tiny_model.SEGMENT_LENGTH
    assert run.free_blocks == run.total_blocks
