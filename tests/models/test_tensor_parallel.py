"""Two tensor-parallel ranks compute what one does: qk-norm, merged embeddings and heads are split rightly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import family_harness as harness
import pytest
import tiny_chameleon
import tiny_emu3
import tiny_janus
import tiny_llamagen
import torch

WORLD = 2
MODELS = ("anole", "emu3", "janus", "llamagen", "lumina_mgpt")


def write_models(folder: Path) -> dict[str, torch.Tensor]:
    """All small checkpoints, each with a token sequence; returns the reference's logits of the columns it has."""
    generator = torch.Generator().manual_seed(8)
    expected = {}

    def tokens(name: str, first: int, count: int) -> list[int]:
        ids = torch.randint(first, first + count, (24,), generator=generator).tolist()
        (folder / name / "tokens.json").write_text(json.dumps(ids), encoding="utf-8")
        return ids

    for name, write in (("anole", tiny_chameleon.write_anole), ("lumina_mgpt", tiny_chameleon.write_lumina)):
        reference = write(folder / name)
        expected[name] = tiny_chameleon.reference_logits(reference, tokens(name, 0, tiny_chameleon.VOCABULARY))
    reference = tiny_emu3.write_reference(folder / "emu3")
    expected["emu3"] = tiny_emu3.reference_logits(reference, tokens("emu3", 0, tiny_emu3.IMAGE_START + tiny_emu3.CODES))
    reference = tiny_janus.write_reference(folder / "janus")
    ids = tokens("janus", 0, tiny_janus.TEXT + tiny_janus.CODES)
    expected["janus"] = tiny_janus.reference_logits(reference, ids)
    tiny_llamagen.write_checkpoint(folder / "llamagen")
    codes = tokens("llamagen", 0, tiny_llamagen.CODES)
    (folder / "llamagen" / "tokens.json").write_text(json.dumps([tiny_llamagen.CODES + 3, *codes]), encoding="utf-8")
    expected["llamagen"] = tiny_llamagen.plain_logits(tiny_llamagen.random_checkpoint(), 3, codes)
    return expected


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[torch.Tensor, list[torch.Tensor]]]:
    folder = tmp_path_factory.mktemp("models")
    expected = write_models(folder)
    program = str(Path(__file__).with_name("tensor_parallel_rank.py"))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    ranks = [
        subprocess.Popen([sys.executable, program, str(rank), str(WORLD), str(folder)], env=environment)
        for rank in range(WORLD)
    ]
    try:
        assert [rank.wait(timeout=600) for rank in ranks] == [0] * WORLD
    finally:
        for rank in ranks:
            rank.kill()
    return {
        name: (logits, [torch.load(folder / name / f"logits{rank}.pt") for rank in range(WORLD)])
        for name, logits in expected.items()
    }


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_equal_the_reference(name: str, results: dict[str, tuple[torch.Tensor, list[torch.Tensor]]]) -> None:
    expected, ranks = results[name]
    assert torch.equal(ranks[0], ranks[1]), "every rank samples for itself and must see the same logits"
    start = tiny_janus.TEXT if name == "janus" else 0
    ours = ranks[0][:, start : start + expected.shape[1]]
    assert (ours - expected).abs().max() <= harness.TOLERANCE
    assert expected.std() > 0.5
