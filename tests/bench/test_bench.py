"""`sjd-pac bench`: what it computes, on a small scale. Times themselves are never asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from vllm_sjd_pac.bench import report
from vllm_sjd_pac.bench.inflate import InflatedShape, inflate
from vllm_sjd_pac.bench.memory import window_bytes
from vllm_sjd_pac.bench.picture import Timing, in_turns
from vllm_sjd_pac.cli import main
from vllm_sjd_pac.models.emoji import PixelDecoder, checkpoint_path


def test_the_inflated_copy_is_the_same_function(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    shape = InflatedShape(hidden=512, feed_forward=704, layers=7, groups=2)
    parameters = inflate(Path(checkpoint_path()), tmp_path, shape)
    small, large = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (checkpoint_path(), tmp_path)
    )
    assert PixelDecoder.from_checkpoint(tmp_path).decode(torch.zeros(1, 16, 16, dtype=torch.long)).shape[1] == 128
    assert parameters == sum(p.numel() for p in large.parameters()) > 8 * sum(p.numel() for p in small.parameters())
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, 700, (2, 40), generator=generator)
    with torch.inference_mode():
        wanted, got = small(tokens).logits, large(tokens).logits
    assert wanted.std() > 1
    torch.testing.assert_close(got, wanted, atol=2e-3, rtol=1e-3)


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="larger than the copy: 2 layers"):
        inflate(Path(checkpoint_path()), tmp_path, InflatedShape(layers=2))
    with pytest.raises(ValueError, match="hidden size 64"):
        inflate(Path(checkpoint_path()), tmp_path, InflatedShape(hidden=64))


def test_settings_take_turns_with_the_same_prompts_and_seeds() -> None:
    calls: list[tuple[str, str, int]] = []

    def draw(name: str):
        def one(prompt: str, seed: int) -> int:
            calls.append((name, prompt, seed))
            return 91

        return one

    timings = in_turns({"a": draw("a"), "b": draw("b")}, turns=2, tokens=273)
    assert [name for name, _, _ in calls] == ["b", "a", "a", "b", "b", "a"]  # each in turn goes first
    assert all(first[1:] == second[1:] for first, second in zip(calls[::2], calls[1::2], strict=True))
    assert len({seed for _, _, seed in calls}) == 3
    assert [len(timing.seconds) for timing in timings] == [2, 2]  # the warm-up is not counted
    assert timings[1].summary(timings[0])["tokens_per_forward"] == 3.0


def test_the_speed_up_is_the_median_of_the_turns_ratios() -> None:
    off, on = Timing("off", [1.0, 2.0, 30.0], [273] * 3, 273), Timing("on", [0.5, 0.5, 10.0], [91, 91, 91], 273)
    assert on.summary(off)["speed_up"] == 3.0
    assert off.summary(off)["speed_up"] == 1.0


def test_bytes_of_a_window() -> None:
    rows = 64 * 8192 * 4
    assert window_bytes(8192, 63, "rejection") == pytest.approx(rows, rel=0.01)
    assert window_bytes(8192, 63, "race", smoothing=True) == pytest.approx(2 * rows, rel=0.01)


def test_compression_of_the_bundled_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "compression", "--pictures", "3", "--only", "sjd", "default", "--output", str(tmp_path)]
    assert main(arguments) == 0
    saved = json.loads((tmp_path / "compression.json").read_text())
    baseline, default = saved["rows"]
    assert baseline["setting"].startswith("rejection, sjd")
    assert default["tokens_per_forward"] > 1.3 * baseline["tokens_per_forward"] > 1.3
    assert sum(int(count) * n for count, n in default["histogram"].items()) == 3 * 273
    assert saved["about"]["vllm"].startswith("0.32")
    assert "| race, pac (default) |" in capsys.readouterr().out
    assert (tmp_path / "compression.png").stat().st_size > 5000


def test_load_and_what_it_leaves_behind() -> None:
    from vllm_sjd_pac.bench import settings
    from vllm_sjd_pac.bench.load import closed_loop
    from vllm_sjd_pac.bench.memory import growth, state_of
    from vllm_sjd_pac.offline import set_environment

    set_environment()
    generator = settings.adaptive(31).start(None, 8, {})
    result = closed_loop(generator, 3, 7, guidance=3.0)
    assert len(result.latencies) == result.pictures == 7
    assert 7 * 273 / 20 < result.forwards < 7 * 273
    assert result.drafts is not None
    assert 0 < result.drafts <= 31
    assert max(result.latencies) <= result.seconds
    trace = growth(generator, 2, 2, guidance=1.0)
    assert trace[0][0] == 0
    assert trace[-1][0] == 2
    assert set(state_of(generator).values()) == {0}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["load", "--concurrency", "0"], "'0' is not a whole number above 0"),
        (["inflate", "x", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["everything"], "invalid choice: 'everything'"),
    ],
)
def test_bad_input_is_named(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["bench", *arguments])
    assert error.value.code == 2
    assert named in capsys.readouterr().err


def test_an_unknown_setting_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "compression", "--only", "jacobi"]) == 2
    assert "--only jacobi: no setting's name contains it; there are rejection, sjd" in capsys.readouterr().err


def test_guidance_with_peers_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "picture", "--peers", "--guidance", "3"]) == 2
    assert "--guidance 3 with --peers" in capsys.readouterr().err


def test_rows_become_a_table() -> None:
    table = report.markdown([{"setting": "off", "speed_up": 1.0, "range": [0.5, 2.0], "drafts": None, "histogram": {}}])
    assert table.splitlines() == [
        "| setting | speed up | range | drafts |",
        "| --- | ---: | ---: | ---: |",
        "| off | 1 | 0.5 to 2 | – |",
    ]
