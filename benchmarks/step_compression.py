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
from typing import Any

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
    default_tree,
    simulate,
)

Setting = tuple[Callable[[int], AcceptanceRule], DraftTree]


def settings(nodes: int) -> dict[str, Setting]:
    """Name -> (rule for a vocabulary size, tree). "published": the leaf's token is drawn afresh."""
    chain = DraftTree.chain(nodes)

    def rejection(mode: str, **options: Any) -> Callable[[int], AcceptanceRule]:
        return lambda vocab: RejectionRule(mode, **options)

    def race(**options: Any) -> Callable[[int], AcceptanceRule]:
        return lambda vocab: RaceRule(CounterNoise(vocab), **options)

    result: dict[str, Setting] = {"SJD published: rejection, chain": (rejection("sjd"), chain)}
    result["AC: rejection, chain"] = (rejection("ac"), chain)
    if nodes >= 16:
        paper = DraftTree.full(nodes, 3, 3)
        result["PD: rejection, full 3.3"] = (rejection("pd"), paper)
        result["PAC published: rejection, full 3.3"] = (rejection("pac", keep_at_leaf=False), paper)
        result["PAC, leaf kept: rejection, full 3.3"] = (rejection("pac"), paper)
        result["PAC, residual draw: rejection, full 3.3"] = (rejection("pac", candidates="residual"), paper)
        result["PAC, λ=.25: rejection, full 3.3"] = (rejection("pac", smoothing=0.25), paper)
    if nodes >= 32:
        four = DraftTree.full(nodes, 4, 3)
        result["PAC published: rejection, full 4.4"] = (rejection("pac", keep_at_leaf=False), four)
        result["PAC, leaf kept: rejection, comb 4.2.2"] = (rejection("pac"), DraftTree.comb(nodes, (4, 2, 2)))
    result["race without memory, chain"] = (race(memory=0), chain)
    result["race, chain"] = (race(), chain)
    result["race, default tree"] = (race(), default_tree(nodes))
    if nodes >= 32:
        thin = DraftTree.comb(nodes, (4, 2, 2))
        result["race without memory, comb 4.2.2"] = (race(memory=0), thin)
        result["race, λ=.25, comb 4.2.2"] = (race(smoothing=0.25), thin)
        result["race, full 3.3"] = (race(), DraftTree.full(nodes, 3, 3))
        result["race, comb 4.2.2t1"] = (race(), DraftTree.comb(nodes, (4, 2, 2), tail=1))
        result["race, comb 4.2.2"] = (race(), thin)
        result["race, comb 6.3.2.1.1"] = (race(), DraftTree.comb(nodes, (6, 3, 2, 1, 1)))
    if nodes >= 48:
        result["race, comb 8.4.4.2"] = (race(), DraftTree.comb(nodes, (8, 4, 4, 2)))
    if nodes >= 96:
        result["race, comb 8.8.8"] = (race(), DraftTree.comb(nodes, (8, 8, 8)))
        result["race, comb 16.8.8.4.4.2.2"] = (race(), DraftTree.comb(nodes, (16, 8, 8, 4, 4, 2, 2)))
    return result


def decode_grid(setting: Setting, images: int, model: GridModel) -> Simulation:
    rule, tree = setting
    return simulate(model, images, SIDE * SIDE, rule(VOCAB), tree, vocab_size=VOCAB)


def decode_bundled(setting: Setting, images: int, guidance: float, checkpoint: Path) -> Simulation:
    """One image after the other; see `examples.train_emoji.inference.GuidedTarget`."""
    from examples.train_emoji.inference import LENGTH, GuidedTarget  # needs transformers
    from vllm_sjd_pac.models.emoji import README_PROMPTS

    rule, tree = setting
    runs = []
    for image in range(images):
        target = GuidedTarget(checkpoint, [README_PROMPTS[image % len(README_PROMPTS)]], guidance, nodes=tree.num_nodes)
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
    parser.add_argument("--only", nargs="*", default=[""], help="settings whose name contains one of these")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=Path(__file__).parents[1] / "vllm_sjd_pac" / "models" / "emoji" / "checkpoint",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, results, plain = GridModel(options.seed), {}, None
    print("| setting | tokens per forward | × SJD | one-token passes | from branches | CPU s |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, setting in settings(options.nodes).items():
        if not any(part in name for part in options.only):
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
