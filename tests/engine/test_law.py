"""`rejection` through the engine, trees on: the joint law of the generated tokens is the model's."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from tests import tiny_model
from tests.engine.conftest import Request, Run, build_engine, run_requests

CODES, LENGTH, SEQUENCES = 4, 4, 6000
PROMPT = tiny_model.prompt("red", "sea")
OPTIONS = {
    "model": "sjd_pac",
    "acceptance": "rejection",
    "tree": "full:3.3",
    "num_speculative_tokens": 14,
    "adaptive_window": False,
}
ALPHA = 1e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "law"
    return tiny_model.build(folder, rows=1, columns=LENGTH, codes=CODES, sharpness=1.5, seed=3)


@pytest.fixture(scope="module")
def exact_law(model: Path) -> dict[tuple[int, ...], float]:
    """Probability of every sequence, from the reference implementation's logits."""
    from transformers import LlamaForCausalLM

    reference = LlamaForCausalLM.from_pretrained(model).float()
    sequences = list(itertools.product(range(CODES), repeat=LENGTH))
    tokens = torch.tensor([[*PROMPT, *(tiny_model.IMAGE_START + code for code in s)] for s in sequences])
    with torch.no_grad():
        logits = reference(tokens).logits[:, len(PROMPT) - 1 : -1, tiny_model.IMAGE_START :]
    steps = logits.log_softmax(-1).gather(-1, torch.tensor(sequences).unsqueeze(-1)).squeeze(-1)
    return dict(zip(sequences, steps.sum(-1).exp().double().tolist(), strict=True))


def p_value(run: Run, law: dict[tuple[int, ...], float]) -> float:
    counts = Counter(tuple(t - tiny_model.IMAGE_START for t in tokens[:LENGTH]) for tokens in run.tokens if tokens)
    total = sum(counts.values())
    common = [s for s, p in law.items() if p * total >= 5]
    rest_seen, rest_law = total - sum(counts[s] for s in common), 1 - sum(law[s] for s in common)
    observed = [counts[s] for s in common] + ([rest_seen] if rest_law > 0 else [])
    expected = [law[s] * total for s in common] + ([rest_law * total] if rest_law > 0 else [])
    return float(chisquare(observed, expected, sum_check=False).pvalue)


@pytest.fixture(scope="module")
def draw(model: Path) -> Callable[[int], Run]:
    llm = build_engine(model, OPTIONS, max_num_seqs=128, max_model_len=64, max_num_batched_tokens=4096)

    def run(seed: int) -> Run:
        params = [{"temperature": 1.0, "seed": seed + i, "max_tokens": LENGTH} for i in range(SEQUENCES)]
        return run_requests(llm, [Request(PROMPT, p) for p in params])

    return run


def test_the_law_is_exact(draw: Callable[[int], Run], exact_law: dict[tuple[int, ...], float]) -> None:
    run = draw(0)
    assert p_value(run, exact_law) > ALPHA
    assert sum(map(sum, run.accepted)) > SEQUENCES, "drafts were hardly ever accepted: the test shows nothing"


@pytest.mark.parametrize("broken", ["attention mask", "positions"])
def test_a_broken_tree_changes_the_law(
    draw: Callable[[int], Run],
    exact_law: dict[tuple[int, ...], float],
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
) -> None:
    from vllm_sjd_pac.engine import runner
    from vllm_sjd_pac.engine.attention import interface

    if broken == "attention mask":
        empty = interface.TreeStep()
        monkeypatch.setattr(runner, "set_tree_step", lambda builders, step: interface.set_tree_step(builders, empty))
    else:
        monkeypatch.setattr(
            runner, "branch_nodes", lambda tree: np.stack([np.arange(tree.main_length + 1, tree.num_nodes)] * 2)
        )
    assert p_value(draw(100_000), exact_law) < ALPHA
