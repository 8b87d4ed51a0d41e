"""The bundled model through `sjd-pac generate`'s own path."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest

from vllm_sjd_pac.models.emoji import README_PROMPTS

PROMPTS = README_PROMPTS[:10]


def test_speculation_off_gives_the_same_tokens() -> None:
    """Ten prompts, guidance 1 and 3."""
    from vllm_sjd_pac.offline import ImageGenerator

    drawn = []
    for speculation in (True, False):
        generator = ImageGenerator(speculation=speculation, max_num_seqs=40)
        pictures = [
            p for scale in (1.0, 3.0) for p in generator.generate(PROMPTS, seeds=range(10), guidance_scale=scale)
        ]
        drawn.append(pictures)
        del generator
        gc.collect()
    on, off = drawn
    assert [p.token_ids for p in on] == [p.token_ids for p in off]
    assert all(p.forwards == len(p.token_ids) for p in off)
    guided = on[10:]
    assert sum(len(p.token_ids) for p in guided) / sum(p.forwards for p in guided) > 2.5
    assert all(len(p.token_ids) == 273 and p.image.size == (128, 128) for p in on)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    from vllm_sjd_pac.cli import main

    output = tmp_path / "owl.webp"
    assert main(["generate", "a flying brown owl at the zoo", "--seed", "7", "-o", str(output), "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out.splitlines()[-1])
    assert {"forwards", "tokens", "tokens_per_forward", "token_ids", "seconds"} <= result.keys()
    assert result["tokens"] == len(result["token_ids"]) == 273
    assert result["unknown_words"] == ["zoo"]
    assert "zoo" in captured.err
    assert "penguin" in captured.err, "the warning names the known vocabulary"
    assert Image.open(output).size == (128, 128)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["generate", "  "], "prompt is empty"),
        (["generate", "an apple", "-o", "apple.gif"], ".png, .jpg, .jpeg or .webp"),
        (["generate", "an apple", "-o", "/no/such/folder/a.png"], "no folder"),
        (["generate", "an apple", "--tree", "bush"], "tree='bush'"),
        (["generate", "an apple", "--num-speculative-tokens", "0"], "1 to 512"),
        (["generate", "an apple", "--guidance", "50"], "0 to 20"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    from vllm_sjd_pac.cli import main

    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.strip().splitlines()[-1].startswith("error: ")
    assert named in captured.err
    assert "Traceback" not in captured.err


def test_help_and_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    from vllm_sjd_pac.cli import main

    for arguments, status, named in (
        (["--help"], 0, "generate"),
        (["generate", "x", "--size", "big"], 2, "WIDTHxHEIGHT"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == status
        captured = capsys.readouterr()
        assert named in captured.out + captured.err
    assert main(["model-path"]) == 0
    assert Path(capsys.readouterr().out.strip(), "config.json").exists()
