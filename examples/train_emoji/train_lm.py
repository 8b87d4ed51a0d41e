"""Train the language model on the encoded corpus.

The schedule counts steps: a short warm-up, a flat part, a linear decay to zero. Every checkpoint carries
the optimizer's state, and batches depend on the step alone, so a run that was interrupted goes on as if
nothing had happened. To finish early, start again with smaller ``--steps`` and ``--decay-start``: the
learning rate decays from the last checkpoint on.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from examples.train_emoji import corpus as corpora
from examples.train_emoji.language_model import LanguageModel, ModelShape
from examples.train_emoji.muon import Muon


@dataclass(frozen=True)
class LMSchedule:
    """How long, how fast."""

    steps: int = 5000
    decay_start: int = 3800
    warm_up: int = 30
    batch: int = 16
    matrix_rate: float = 0.02
    other_rate: float = 3e-3

    def factor(self, step: int) -> float:
        """Share of the full learning rate at a step."""
        rise = (step + 1) / self.warm_up
        fall = (self.steps - step) / max(1, self.steps - self.decay_start)
        return min(1.0, rise, fall)


class Training:
    """Model, optimizers and step counter; saves and resumes."""

    def __init__(self, shape: ModelShape, schedule: LMSchedule, path: Path, bfloat16: bool = False):
        torch.manual_seed(5)
        self.schedule, self.path, self.step, self.bfloat16 = schedule, path, 0, bfloat16
        self.model = LanguageModel(shape)
        matrices = [p for n, p in self.model.named_parameters() if p.ndim == 2 and "embed" not in n]
        others = [p for n, p in self.model.named_parameters() if p.ndim != 2 or "embed" in n]
        self.optimizers = [
            Muon(matrices, lr=schedule.matrix_rate),
            torch.optim.AdamW(others, lr=schedule.other_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.base_rates = [schedule.matrix_rate, schedule.other_rate]
        if path.exists():
            state = torch.load(path)
            self.model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.step = state["step"]

    def save(self) -> None:
        """Write the checkpoint beside the old one, then swap."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "shape": asdict(self.model.shape),
        }
        partial = self.path.with_suffix(".new")
        torch.save(state, partial)
        partial.rename(self.path)

    def update(self, forward, corpus: corpora.Corpus) -> float:
        """One step; returns the loss in nats per token."""
        factor = self.schedule.factor(self.step)
        for optimizer, rate in zip(self.optimizers, self.base_rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        tokens, targets = corpus.batch(self.schedule.batch, np.random.default_rng((17, self.step)))
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16):
            loss = forward(tokens, targets)
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.item()


@torch.no_grad()
def held_out_loss(model: LanguageModel, held_out: corpora.Corpus, batches: int = 4) -> float:
    """Loss in nats per trained-on token on scenes that the model never saw."""
    rng = np.random.default_rng(99)
    return float(np.mean([model(*held_out.batch(16, rng)).item() for _ in range(batches)]))


def train(
    corpus: corpora.Corpus,
    held_out: corpora.Corpus,
    training: Training,
    compiled: bool = False,
    log_every: int = 50,
    save_every: int = 100,
) -> None:
    """Run until the schedule ends; the last step always saves."""
    forward = torch.compile(training.model) if compiled else training.model
    began, losses = time.time(), []
    while training.step < training.schedule.steps:
        losses.append(training.update(forward, corpus))
        if training.step % log_every == 0:
            print(
                f"lm step {training.step} loss {np.mean(losses):.4f} seconds {time.time() - began:.0f}",
                flush=True,
            )
            losses = []
        if training.step % save_every == 0 or training.step == training.schedule.steps:
            training.save()
            print(f"lm step {training.step} held-out {held_out_loss(training.model, held_out):.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for data and checkpoints")
    parser.add_argument("--steps", type=int, default=LMSchedule.steps)
    parser.add_argument("--decay-start", type=int, default=LMSchedule.decay_start)
    parser.add_argument("--compile", action="store_true", help="use torch.compile (faster in float32 only)")
    parser.add_argument(
        "--bfloat16",
        action="store_true",
        help="autocast: faster on CPUs with AVX-512 bf16 or AMX, far slower on others",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    schedule = LMSchedule(steps=arguments.steps, decay_start=arguments.decay_start)
    training = Training(ModelShape(), schedule, arguments.work / "lm.pt", arguments.bfloat16)
    train(
        corpora.load(arguments.work / "corpus.npz"),
        corpora.load(arguments.work / "held_out.npz"),
        training,
        compiled=arguments.compile,
    )


if __name__ == "__main__":
    main()
