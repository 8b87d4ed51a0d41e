"""Seconds for one picture at a time: settings in turns, medians of ratios to the first setting."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm_sjd_pac.bench.apart import Apart
from vllm_sjd_pac.bench.settings import PROMPTS, Setting, memory_share, rotated

Draw = Callable[[str, int], int | None]
"""(prompt, seed) -> forward passes that the picture took, None = not known."""


@dataclass(frozen=True)
class Timing:
    """Of one setting: ``seconds`` and ``forwards`` of each turn; ``tokens`` of a picture."""

    name: str
    seconds: list[float]
    forwards: list[int | None]
    tokens: int

    def summary(self, base: Timing) -> dict[str, Any]:
        """Medians; ``speed_up``: median over turns of base time / time, with its quartiles; ``of_compression``: median
        over turns of the part of the tokens a forward pass that became speed-up."""
        each = [b / s for b, s in zip(base.seconds, self.seconds, strict=True)]
        ratios = sorted(each)
        steps = [count for count in self.forwards if count is not None]
        parts = [r * count / self.tokens for r, count in zip(each, self.forwards, strict=True) if count is not None]
        return {
            "setting": self.name,
            "seconds": round(statistics.median(self.seconds), 4),
            "speed_up": round(statistics.median(ratios), 3),
            "speed_up_quartiles": [round(ratios[len(ratios) // 4], 3), round(ratios[(3 * len(ratios)) // 4], 3)],
            "tokens_per_forward": round(self.tokens * len(steps) / sum(steps), 3) if steps else None,
            "of_compression": round(statistics.median(parts), 3) if parts else None,
            "turns": len(self.seconds),
        }


def drawing(
    setting: Setting, model: str | None, guidance: float, engine_args: Mapping[str, Any], engines: int = 1
) -> Draw:
    """A function that draws one picture with an engine of this setting, one of `engines` on this machine."""
    generator = setting.start(model, 2, engine_args, engines)

    def draw(prompt: str, seed: int) -> int:
        return generator.generate(prompt, seeds=seed, guidance_scale=guidance)[0].forwards

    return draw


def stock(
    model: str | None,
    engine_args: Mapping[str, Any],
    speculative_config: Mapping[str, Any] | None = None,
    engines: int = 1,
) -> Draw:
    """A function that draws with vLLM as it comes, without guidance: plain, or with a speculation of its own."""
    from vllm import LLM, SamplingParams, TokensPrompt

    from vllm_sjd_pac.models.emoji import checkpoint_path
    from vllm_sjd_pac.models.family import find_family
    from vllm_sjd_pac.offline import default_engine_args

    arguments: dict[str, Any] = {**default_engine_args(), "max_num_seqs": 2, **memory_share(engines)}
    if speculative_config is not None:
        arguments["speculative_config"] = dict(speculative_config)
    llm = LLM(model or str(checkpoint_path()), **{**arguments, **engine_args})
    config = llm.llm_engine.vllm_config.model_config
    family = find_family(config.hf_config, config.model)
    tokenizer = llm.get_tokenizer()

    def draw(prompt: str, seed: int) -> None:
        encoded = family.encode_prompt(tokenizer, prompt)
        length = family.layout(encoded.prompt_token_ids).length
        params = SamplingParams(seed=seed, max_tokens=length, ignore_eos=True, detokenize=False)
        llm.generate(TokensPrompt(prompt_token_ids=encoded.prompt_token_ids), params, use_tqdm=False)

    return draw


def apart(stack: ExitStack, build: Callable[..., Draw], *arguments: Any) -> Draw:
    """What `drawing` or `stock` return, with the engine in a process of its own until `stack` closes."""
    return partial(stack.enter_context(Apart(build, *arguments)).run, _draw)


def _draw(draw: Draw, prompt: str, seed: int) -> int | None:
    return draw(prompt, seed)


def in_turns(draws: Mapping[str, Draw], turns: int, tokens: int, prompts: Sequence[str] = PROMPTS) -> list[Timing]:
    """Draw `turns` pictures with each; every turn has its own prompt and seed, the same for all settings."""
    timings = {name: Timing(name, [], [], tokens) for name in draws}
    for turn in range(-1, turns):  # turn -1 warms up
        for name in rotated(list(draws), turn):
            started = time.perf_counter()
            forwards = draws[name](prompts[turn % len(prompts)], 100 + turn)
            if turn >= 0:
                timings[name].seconds.append(time.perf_counter() - started)
                timings[name].forwards.append(forwards)
    return list(timings.values())
