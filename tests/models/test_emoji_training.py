"""The training recipe runs end to end on synthetic pictures, resumes, and its checkpoint draws."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("examples.train_emoji.corpus", reason="needs the repository's examples")

from examples.train_emoji import corpus as corpora
from examples.train_emoji import export, inference, train_lm, train_vq
from examples.train_emoji.language_model import LanguageModel, ModelShape
from examples.train_emoji.muon import orthogonalise
from examples.train_emoji.scenes import SceneMaker
from examples.train_emoji.sources import SPRITE_FILES
from vllm_sjd_pac.decoding import DraftTree, TreeBatch
from vllm_sjd_pac.models.emoji import PixelDecoder
from vllm_sjd_pac.models.emoji.vocabulary import GROUNDS

SHAPE = ModelShape(hidden=32, layers=2, heads=2, feed_forward=64)
SCHEDULE = train_lm.LMSchedule(steps=4, decay_start=2, batch=2)


@pytest.fixture(scope="module")
def maker() -> SceneMaker:
    rng = np.random.default_rng(0)
    sprites = {
        name: Image.fromarray(np.full((256, 256, 4), (*rng.integers(256, size=3), 255), np.uint8))
        for name in SPRITE_FILES
    }
    return SceneMaker(sprites, {name: [rng.integers(256, size=(160, 160, 3)).astype(np.uint8)] for name in GROUNDS})


@pytest.fixture(scope="module")
def work(maker: SceneMaker, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("emoji")
    rng = np.random.default_rng(1)
    pictures = np.stack([maker.make(rng).pixels for _ in range(8)])
    schedule = train_vq.VQSchedule(warm_up=2, crops=4, full=2, crop_batch=2, full_batch=1, codebook_size=1024)
    train_vq.train(pictures, schedule, folder / "vq.pt", log_every=1)
    corpus = corpora.encode(maker, train_vq.load(folder / "vq.pt"), 16, seed=2)
    corpora.save(corpus, folder / "corpus.npz")
    return folder


def train(work: Path, schedule: train_lm.LMSchedule, name: str) -> LanguageModel:
    training = train_lm.Training(SHAPE, schedule, work / name)
    corpus = corpora.load(work / "corpus.npz")
    train_lm.train(corpus, corpus, training, compiled=False, save_every=2)
    return training.model


def test_recipe_ends_in_a_checkpoint_that_draws(work: Path, tmp_path: Path) -> None:
    train(work, SCHEDULE, "lm.pt")
    export.export(work, tmp_path)
    codes, entropies = inference.sample(tmp_path, ["a red apple on grass", "a zebra"], [1, 2])
    assert codes.shape == (2, 16, 16)
    assert 0 <= int(codes.min()) <= int(codes.max()) < 1024
    assert entropies.shape == (2, 256)
    assert PixelDecoder.from_checkpoint(tmp_path).decode(codes).shape == (2, 128, 128, 3)


def test_a_resumed_run_equals_an_uninterrupted_one(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(work, SCHEDULE, "whole.pt")
    original = train_lm.Training.update

    def interrupt(self: train_lm.Training, *arguments: object) -> float:
        if self.step == 3:
            raise KeyboardInterrupt
        return original(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(train_lm.Training, "update", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(work, SCHEDULE, "resumed.pt")
    resumed = train(work, SCHEDULE, "resumed.pt")
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_loss_counts_image_tokens_only(work: Path) -> None:
    corpus = corpora.load(work / "corpus.npz")
    tokens, targets = corpus.batch(8, np.random.default_rng(3))
    assert ((targets != corpora.NO_LOSS).sum(1) == 273).all()
    kept = targets[:, :-1] != corpora.NO_LOSS
    assert torch.equal(tokens[:, 1:][kept], targets[:, :-1][kept])


def test_orthogonalise_brings_singular_values_near_one() -> None:
    matrices = torch.randn(2, 48, 16, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert 0.6 < float(values.min()) < float(values.max()) < 1.3


def test_cached_tree_laws_equal_a_full_forward(work: Path, tmp_path: Path) -> None:
    train(work, SCHEDULE, "lm.pt")
    export.export(work, tmp_path)
    target = inference.GuidedTarget(tmp_path, ["red apple grass"], guidance=3.0)
    tree = DraftTree.comb(6, (1, 1))
    generator = torch.Generator().manual_seed(4)
    path = torch.randint(1, 513, (1, inference.LENGTH), generator=generator)
    nodes = torch.randint(1, 513, (1, 6), generator=generator)
    trees = TreeBatch.stack([tree])
    for start in (0, 3, 4):
        if start:
            nodes[0, 0] = path[0, start - 1]
        rows = target(path, torch.tensor([start]), trees, nodes)
        for node in range(6):
            ancestors = [v for v in range(1, node + 1) if tree.ancestor_mask[node, v]]
            tokens = torch.cat([path[0, :start], nodes[0, ancestors]])
            expected = full_law(target, tokens)
            assert torch.allclose(rows[0, node], expected, atol=1e-4), (start, node)


def full_law(target: inference.GuidedTarget, compact: torch.Tensor) -> torch.Tensor:
    """Guided, masked logits after a prefix of compact tokens, computed without any cache."""
    both = []
    for row, length in enumerate(target.lengths.tolist()):
        tokens = torch.cat([target.prompts[row, -length:], compact - 1 + 256])
        both.append(target.model.logits(tokens[None])[0, -1])
    logits = both[1] + target.guidance * (both[0] - both[1])
    logits = torch.cat([logits[3:4], logits[256:]])
    return logits.masked_fill(~target.legal(torch.zeros(1), torch.tensor([[len(compact)]]))[0, 0], float("-inf"))
