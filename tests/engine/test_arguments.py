"""Options on the command line, in --speculative-config and in Python: one meaning, clear errors, nothing unasked."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import pytest

from vllm_sjd_pac.config import SJDPACConfig
from vllm_sjd_pac.engine import arguments, compat
from vllm_sjd_pac.models.emoji import checkpoint_path


@pytest.fixture(scope="module", autouse=True)
def hooks() -> None:
    from vllm_sjd_pac.plugin import register

    register()
    register()  # idempotent


def parse(*words: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    return EngineArgs.from_cli_args(parser.parse_args(["--model", str(checkpoint_path()), *words]))


def options_after(engine_args: Any) -> SJDPACConfig:
    options = arguments.apply(engine_args)
    assert options is not None
    assert arguments.apply(engine_args) == options, "a second call on the same arguments must change nothing"
    return options


def test_the_flag_alone() -> None:
    engine_args = parse("--speculative-model", "sjd_pac")
    assert options_after(engine_args) == SJDPACConfig()
    assert engine_args.speculative_config == {
        "method": "custom_class",
        "model": compat.PROPOSER,
        "num_speculative_tokens": 63,
    }
    assert engine_args.worker_cls.endswith("CPUSpecDecodeWorker")
    assert engine_args.scheduler_cls.endswith("GuidedScheduler")


def test_every_option_has_a_flag() -> None:
    common = [
        "--speculative-model", "sjd_pac", "--sjd-pac-tree", "full:3.3", "--sjd-pac-window", "20",
        "--sjd-pac-proposal", "uniform",
        "--no-sjd-pac-adaptive-window", "--sjd-pac-attention", "virtual", "--sjd-pac-verify-ranks",
        "--num-speculative-tokens", "40", "--sjd-pac-ray-wait", "30",
    ]  # fmt: skip
    wanted = SJDPACConfig(
        tree="full:3.3",
        num_speculative_tokens=40,
        window=20,
        adaptive_window=False,
        attention="virtual",
        verify_ranks=True,
        ray_wait=30.0,
    )
    rejection = parse(*common, "--sjd-pac-acceptance", "rejection", "--sjd-pac-mode", "pd")
    assert options_after(rejection) == dataclasses.replace(wanted, acceptance="rejection", mode="pd")
    race = parse(*common, "--sjd-pac-acceptance", "race", "--no-sjd-pac-memory", "--sjd-pac-smoothing", "0.5")
    assert options_after(race) == dataclasses.replace(wanted, memory=False, smoothing=0.5)
    json_form = parse("--speculative-config", '{"model": "sjd_pac", "tree": "full:3.3", "num-speculative-tokens": 40}')
    assert options_after(json_form) == SJDPACConfig(tree="full:3.3", num_speculative_tokens=40)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--speculative-model", "sjd_pca"], "did you mean 'sjd_pac'"),
        (["--speculative-model", "sjd-pac"], "did you mean 'sjd_pac'"),
        (["--speculative-model", "sjd_pac", "--sjd-pac-mode", "fast"], "pac, ac, pd, sjd, ar"),
        (["--speculative-model", "sjd_pac", "--sjd-pac-tree", "bush"], "comb"),
        (["--speculative-model", "sjd_pac", "--sjd-pac-smoothing", "2"], "0 to 0.95"),
        (["--speculative-model", "sjd_pac", "--sjd-pac-window", "many"], "not a number"),
        (["--speculative-model", "sjd_pac", "--sjd-pac-ray-wait", "0"], "1 to 86400"),
        (["--speculative-model", "sjd_pac", "--num-speculative-tokens", "0"], "1 to 512"),
        (["--speculative-model", "sjd_pac", "--sjd-pac-window", "64"], "1 to num_speculative_tokens"),
        (["--speculative-model", "sjd_pac", "--sjd-pac-tree", "full:4.4"], "at least 85 nodes"),
        (
            ["--speculative-model", "sjd_pac", "--sjd-pac-acceptance", "rejection", "--sjd-pac-smoothing", "0.5"],
            "'race' only",
        ),
        (["--sjd-pac-mode", "ac"], "needs --speculative-model sjd_pac"),
        (["--speculative-config", '{"model": "sjd_pac", "acceptence": "race"}'], "did you mean 'acceptance'"),
        (["--speculative-config", '{"model": "sjd_pac", "memory": "yes"}'], "true or false"),
        (["--speculative-config", '{"model": "sjd_pac", "tree": 3}'], "not a string"),
    ],
)
def test_bad_input_is_one_clear_line(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(*words)
    assert stop.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "error:" in last
    assert named in last


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("async_scheduling", True, "--async-scheduling"),
        ("pipeline_parallel_size", 2, "--pipeline-parallel-size 2"),
        ("enable_lora", True, "--enable-lora"),
        ("kv_transfer_config", object(), "--kv-transfer-config"),
        ("logits_processors", ["x"], "--logits-processors"),
        ("decode_context_parallel_size", 2, "--decode-context-parallel-size"),
    ],
)
def test_what_the_method_excludes_is_refused_at_start(field: str, value: Any, named: str) -> None:
    engine_args = parse("--speculative-model", "sjd_pac")
    setattr(engine_args, field, value)
    with pytest.raises(ValueError, match=named):
        arguments.apply(engine_args)


def test_waiting_for_ray_nodes_needs_ray() -> None:
    engine_args = parse("--speculative-model", "sjd_pac", "--sjd-pac-ray-wait", "30")
    with pytest.raises(ValueError, match="--sjd-pac-ray-wait needs --distributed-executor-backend ray"):
        engine_args.create_engine_config()


def test_the_v2_runner_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ValueError, match="V1 model runner"):
        arguments.apply(parse("--speculative-model", "sjd_pac"))


def test_another_vllm_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.33.1")
    with pytest.raises(ValueError, match=r"works with vLLM 0\.32.*0\.33\.1 is installed"):
        arguments.apply(parse("--speculative-model", "sjd_pac"))


def test_without_the_flag_nothing_changes() -> None:
    engine_args = parse("--max-num-seqs", "4")
    before = dict(vars(engine_args))
    assert arguments.apply(engine_args) is None
    assert vars(engine_args) == before
    other = parse("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}')
    assert arguments.apply(other) is None


def test_a_model_without_a_family_is_refused() -> None:
    from vllm_sjd_pac.models.family import find_family

    with pytest.raises(ValueError, match=r"GPT2LMHeadModel.*register_family"):
        find_family(argparse.Namespace(architectures=["GPT2LMHeadModel"]), "some/model")


def sampling_params(**fields: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**fields)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"extra_args": {"guidance_scale": "high"}}, "guidance_scale"),
        ({"extra_args": {"guidance_scale": float("nan")}}, "guidance_scale"),
        ({"extra_args": {"guidance_scale": -1}}, "0 to 20"),
        ({"extra_args": {"guidance_scale": 21}}, "0 to 20"),
        ({"extra_args": {"guidance_scale": True}}, "guidance_scale"),
        ({"extra_args": {"guidance_scale": 3, "negative_token_ids": []}}, "negative_token_ids"),
        ({"extra_args": {"guidance_scale": 3, "negative_token_ids": [1, 99]}}, "0 to 55"),
        ({"extra_args": {"negative_token_ids": [1]}}, "only together with a guidance_scale"),
        ({"extra_args": {"sjd_pac_owner": "r1"}}, "sjd_pac_owner"),
        ({"extra_args": {"guidance_scale": 3}, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_bad_requests_are_refused_with_a_clear_error(fields: dict[str, Any], named: str) -> None:
    from vllm.exceptions import VLLMValidationError

    from vllm_sjd_pac.engine.requests import check_sampling_params

    model_config = argparse.Namespace(get_vocab_size=lambda: 56)
    with pytest.raises(VLLMValidationError, match=named):
        check_sampling_params(sampling_params(**fields), model_config)
