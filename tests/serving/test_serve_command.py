"""``sjd-pac serve`` becomes ``vllm serve`` with the right arguments."""

from __future__ import annotations

import os
from typing import Any

import pytest

from vllm_sjd_pac import cli
from vllm_sjd_pac.models.emoji import checkpoint_path


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    seen: list[list[str]] = []

    def execv(executable: Any, command: list[str]) -> None:
        assert os.path.basename(executable) == "vllm"
        seen.append(command)

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    return seen


def test_bundled_model_is_served_as_emoji(commands: list[list[str]]) -> None:
    cli.main(["serve"])
    command = commands[0]
    assert command[:5] == ["vllm", "serve", str(checkpoint_path()), "--speculative-model", "sjd_pac"]
    assert command[command.index("--served-model-name") + 1] == "emoji"
    assert command.count("--enforce-eager") == 1


def test_values_of_flags_are_not_taken_for_the_model(commands: list[list[str]]) -> None:
    cli.main(["serve", "--host", "127.0.0.1", "--port", "8123", "--enforce-eager", "--served-model-name=other"])
    command = commands[0]
    assert command[2] == str(checkpoint_path())
    assert command[command.index("--port") + 1] == "8123"
    assert command.count("--enforce-eager") == 1
    assert "--served-model-name" not in command


def test_another_model_keeps_vllm_s_defaults(commands: list[list[str]]) -> None:
    cli.main(["serve", "some/model", "--speculative-model", "sjd_pac", "--sjd-pac-tree", "chain"])
    assert commands[0] == ["vllm", "serve", "some/model", "--speculative-model", "sjd_pac", "--sjd-pac-tree", "chain"]


def test_other_commands_refuse_unknown_arguments(commands: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--port", "8000"])
    assert "unrecognized arguments" in capsys.readouterr().err


def test_help_is_ours(commands: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["serve", "--help"])
    assert end.value.code == 0
    assert "--speculative-model sjd_pac" in capsys.readouterr().out
