"""Tokens per forward pass of every rule, mode and tree at the same node budget (independent of the machine).

    python -m benchmarks.step_compression --target grid --images 24
    python -m benchmarks.step_compression --target bundled --images 12 --guidance 3
    python -m benchmarks.step_compression --target grid --only race --json results.json

``grid`` is the synthetic model of `grid_model.py`; ``bundled`` the model that the package ships, with guidance. All
settings decode the same images (same class or prompt, same seed), so that settings are compared in pairs. Prints a
Markdown table: mean and standard error, ratio to plain SJD, share of forward passes that commit one token, tokens
that came from branch nodes.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.grid_model import SIDE, VOCAB, GridModel
from vllm_sjd_pac.decoding import (
    AcceptanceRule,
    CounterNoise,
    DraftTree,
    RaceRule,
    RejectionRule,
    Simulation,
    simulate,
)

PROMPTS = (
    "a small flat owl by the sea",
    "a red heart on a plain ground",
    "a large cat in a forest",
    "a rocket over a city at night",
    "an apple",
    "a fish under water",
    "a yellow star",
    "a house on a hill",
    "a dog",
    "a green tree",
    "a smiling face",
    "a blue car",
)

Setting = tuple[Callable[[int], AcceptanceRule], DraftTree]


def settings(nodes: int) -> dict[str, Setting]:
    """Name -> (rule for a vocabulary size, tree)."""
    chain = DraftTree.chain(nodes)
    paper = DraftTree.full(nodes, 3, 3) if nodes >= 16 else chain
    result: dict[str, Setting] = {
        f"rejection, {mode}, chain": (lambda vocab, mode=mode: RejectionRule(mode), chain) for mode in ("sjd", "ac")
    }
    for mode in ("pd", "pac"):
        result[f"rejection, {mode}, full 3.3"] = (lambda vocab, mode=mode: RejectionRule(mode), paper)
    if nodes >= 32:
        result["rejection, pac, full 4.4"] = (lambda vocab: RejectionRule("pac"), DraftTree.full(nodes, 4, 3))
    result["rejection, pac, full 3.3, residual draw"] = (
        lambda vocab: RejectionRule("pac", candidates="residual"),
        paper,
    )
    result["rejection, pac, full 3.3, λ=.25"] = (lambda vocab: RejectionRule("pac", smoothing=0.25), paper)

    def race(**options: float) -> Callable[[int], AcceptanceRule]:
        return lambda vocab: RaceRule(CounterNoise(vocab), **options)  # type: ignore[arg-type]

    bare = race(smoothing=0.0, memory=0)
    result["race, chain"] = (bare, chain)
    if nodes >= 48:
        wide, thin = DraftTree.comb(nodes, (8, 4, 4, 2)), DraftTree.comb(nodes, (4, 2, 2))
        result["rejection, pac, comb 8.4.4.2"] = (lambda vocab: RejectionRule("pac"), wide)
        result["rejection, pac, comb 4.2.2"] = (lambda vocab: RejectionRule("pac"), thin)
        for smoothing in (0.0, 0.25):
            note = f", λ={smoothing}" if smoothing else ""
            result[f"race, comb 8.4.4.2 + memory{note}"] = (race(smoothing=smoothing), wide)
            result[f"race, comb 4.2.2 + memory{note}"] = (race(smoothing=smoothing), thin)
            result[f"race, full 3.3 + memory{note}"] = (race(smoothing=smoothing), paper)
        result["race, comb 4.2.2t1 + memory"] = (race(smoothing=0.0), DraftTree.comb(nodes, (4, 2, 2), tail=1))
    return result


def decode_grid(setting: Setting, images: int, model: GridModel) -> Simulation:
    rule, tree = setting
    return simulate(model, images, SIDE * SIDE, rule(VOCAB), tree, vocab_size=VOCAB)


def decode_bundled(setting: Setting, images: int, guidance: float, checkpoint: Path) -> Simulation:
    """One image after the other; see `examples.train_emoji.inference.GuidedTarget`."""
    from examples.train_emoji.inference import LENGTH, GuidedTarget  # needs transformers

    rule, tree = setting
    runs = []
    for image in range(images):
        target = GuidedTarget(checkpoint, [PROMPTS[image % len(PROMPTS)]], guidance)
        runs.append(
            simulate(
                target,
                1,
                LENGTH,
                rule(target.vocabulary),
                tree,
                vocab_size=target.vocabulary,
                keys=torch.tensor([1000 + image]),
                legal=target.legal,
            )
        )
    longest = max(len(run.accepted) for run in runs)

    def pad(values: Tensor) -> Tensor:
        return torch.cat([values, values.new_zeros(longest - len(values), 1)])

    return Simulation(
        torch.cat([run.tokens for run in runs]),
        torch.cat([pad(run.accepted) for run in runs], 1),
        torch.cat([pad(run.branched) for run in runs], 1),
    )


def summary(run: Simulation) -> dict[str, object]:
    speeds, steps = run.tokens_per_forward, run.accepted[run.accepted > 0]
    return {
        "tokens_per_forward": float(speeds.mean()),
        "standard_error": float(speeds.std() / len(speeds) ** 0.5) if len(speeds) > 1 else 0.0,
        "per_image": speeds.tolist(),
        "ones": float((steps == 1).double().mean()),
        "branched": float(run.branched.sum() / run.accepted.sum()),
        "histogram": torch.bincount(steps).tolist(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=("grid", "bundled"), default="grid")
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0, help="of the grid model")
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=Path(__file__).parents[1] / "vllm_sjd_pac" / "models" / "emoji" / "checkpoint",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model, results, plain = GridModel(options.seed), {}, None
    print("| setting | tokens per forward | × SJD | one-token passes | from branches | CPU s |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, setting in settings(options.nodes).items():
        if options.only not in name:
            continue
        start = time.process_time()
        if options.target == "grid":
            run = decode_grid(setting, options.images, model)
        else:
            run = decode_bundled(setting, options.images, options.guidance, options.checkpoint)
        result = summary(run)
        results[name] = result
        speed = run.tokens_per_forward.mean()
        plain = plain if plain is not None else speed
        print(
            f"| {name} | {speed:.2f} ± {result['standard_error']:.2f} | {speed / plain:.2f} | {result['ones']:.2f} | "
            f"{result['branched']:.2f} | {time.process_time() - start:.0f} |",
            flush=True,
        )
        if options.json:
            about = {"torch": torch.__version__, "machine": platform.machine(), "options": vars(options)}
            options.json.write_text(json.dumps({"about": about, "results": results}, default=str))


if __name__ == "__main__":
    main()
