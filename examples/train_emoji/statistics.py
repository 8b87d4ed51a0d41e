"""Statistics of the shipped weights: entropy by guidance and top-k, tokens per forward by decoding method.

Temperature 1; tokens per forward count 272 positions, end-of-line included, one picture at a time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from examples.train_emoji.inference import LENGTH, GuidedTarget, sample
from vllm_sjd_pac.decoding import (
    AcceptanceRule,
    CounterNoise,
    DraftTree,
    RaceRule,
    RejectionRule,
    default_tree,
    simulate,
)
from vllm_sjd_pac.models.emoji import README_PROMPTS, checkpoint_path

METHODS: dict[str, tuple[Callable[[int], AcceptanceRule], DraftTree]] = {
    "SJD (rejection), chain 32": (lambda size: RejectionRule("sjd"), DraftTree.chain(32)),
    "AC (rejection), chain 32": (lambda size: RejectionRule("ac"), DraftTree.chain(32)),
    "PAC (rejection), full 3.3, 64": (lambda size: RejectionRule("pac", keep_at_leaf=False), DraftTree.full(64, 3, 3)),
    "PAC (rejection), full 3.3, leaf kept, 64": (lambda size: RejectionRule("pac"), DraftTree.full(64, 3, 3)),
    "race, comb 8.4.4.2, 64": (lambda size: RaceRule(CounterNoise(size)), DraftTree.comb(64, (8, 4, 4, 2))),
    "race, default tree, 64": (lambda size: RaceRule(CounterNoise(size)), default_tree(64)),
}


def mean_and_error(values: Tensor) -> dict[str, float]:
    """Mean over pictures and its standard error."""
    values = values.double()
    return {"mean": float(values.mean()), "standard_error": float(values.std() / len(values) ** 0.5)}


def entropy(path: Path, guidance: float, top_k: int, pictures: int) -> dict[str, Any]:
    """Mean entropy of the sampled laws over the code positions."""
    prompts = list(itertools.islice(itertools.cycle(README_PROMPTS), pictures))
    _, entropies = sample(path, prompts, range(pictures), guidance, top_k)
    return {"guidance": guidance, "top_k": top_k, "nats": mean_and_error(entropies.mean(1))}


def speed(path: Path, method: str, guidance: float, pictures: int) -> dict[str, Any]:
    """Tokens per forward of one method over ``pictures`` pictures, and how often just one token is committed."""
    make_rule, tree = METHODS[method]
    per_forward, forwards, single = [], 0, 0
    for index in range(pictures):
        target = GuidedTarget(path, [README_PROMPTS[index % len(README_PROMPTS)]], guidance)
        size, key = target.vocabulary, torch.tensor([1000 + index])
        run = simulate(target, 1, LENGTH, make_rule(size), tree, vocab_size=size, keys=key, legal=target.legal)
        per_forward.append(float(run.tokens_per_forward))
        forwards += int(run.forwards)
        single += int((run.accepted == 1).sum())
    return {
        "method": method,
        "guidance": guidance,
        "pictures": pictures,
        "tokens_per_forward": mean_and_error(torch.tensor(per_forward)),
        "all_tokens_by_all_forwards": pictures * LENGTH / forwards,
        "forwards_with_one_token": single / forwards,
        "tokens_per_forward_by_prompt": {
            prompt: round(float(np.mean(per_forward[index :: len(README_PROMPTS)])), 2)
            for index, prompt in enumerate(README_PROMPTS[:pictures])
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=checkpoint_path())
    parser.add_argument("--output", type=Path, default=Path("docs/emoji/statistics.json"))
    parser.add_argument("--pictures", type=int, default=64)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--entropy-pictures", type=int, default=64)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = itertools.product((1.0, 3.0), (0, 128))
    entropies = []
    for guidance, top_k in settings:
        entropies.append(entropy(arguments.checkpoint, guidance, top_k, arguments.entropy_pictures))
        print(entropies[-1], flush=True)
    speeds = []
    for method in arguments.methods:
        began = time.time()
        speeds.append(speed(arguments.checkpoint, method, arguments.guidance, arguments.pictures))
        print(speeds[-1], f"{time.time() - began:.0f} s", flush=True)
        arguments.output.write_text(json.dumps({"entropy": entropies, "speed": speeds}, indent=2) + "\n")


if __name__ == "__main__":
    main()
