"""Pictures without a server: one engine in this process, one call per batch of prompts."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_sjd_pac.config import METHOD

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class GeneratedImage:
    """One picture and how it came about.

    Attributes:
        image: the picture; token_ids: its tokens, structural ones included.
        forwards: forward passes that its tokens took; accepted: drafts accepted in each of them.
        unknown_words: words of the prompt that the model does not know.
    """

    prompt: str
    seed: int
    image: Image
    token_ids: list[int]
    forwards: int
    accepted: list[int] = field(repr=False)
    unknown_words: tuple[str, ...] = ()

    @property
    def tokens_per_forward(self) -> float:
        return len(self.token_ids) / self.forwards


def set_environment() -> None:
    """Engines in this process, quiet, with a small key-value cache each; what the user has set stays.

    To be called before vLLM is imported.
    """
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }.items():
        os.environ.setdefault(name, value)


def default_engine_args() -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` for pictures in this process, by platform."""
    from vllm.platforms import current_platform

    arguments: dict[str, Any] = {"seed": 0, "disable_log_stats": True}
    if current_platform.is_cpu():
        # float32: exact, and many CPUs emulate bf16 at a small fraction of its speed.
        arguments |= {"dtype": "float32", "enforce_eager": True, "block_size": 32}
    return arguments


class ImageGenerator:
    """An in-process vLLM engine that draws.

    Args:
        model: folder or hub name; default: the bundled model.
        speculation: False runs the same engine, guidance and layout without drafts.
        options: SJD-PAC options, see `vllm_sjd_pac.config.SJDPACConfig`.
        engine_args: further arguments of ``vllm.LLM``.

    Raises:
        ValueError: an unknown option or value, or a model that no image-token family knows.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        speculation: bool = True,
        options: Mapping[str, Any] | None = None,
        **engine_args: Any,
    ) -> None:
        from vllm import LLM

        from vllm_sjd_pac.models.emoji import checkpoint_path
        from vllm_sjd_pac.models.family import find_family

        # One picture at a time has no load to adapt to; a fixed window makes forward passes reproducible, too.
        chosen = {"model": METHOD, "adaptive_window": False, **(options or {})}
        if not speculation:
            chosen["mode"] = "ar"
        arguments = {**default_engine_args(), "max_num_seqs": 16, **engine_args}
        self.llm = LLM(model or str(checkpoint_path()), speculative_config=chosen, **arguments)
        config = self.llm.llm_engine.vllm_config.model_config
        self.family = find_family(config.hf_config, config.model)
        self.decoder = self.family.load_pixel_decoder()

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        seeds: int | Sequence[int] = 0,
        guidance_scale: float | None = None,
        negative_prompt: str | None = None,
        size: tuple[int, int] | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        progress: bool = False,
    ) -> list[GeneratedImage]:
        """Draw one picture per prompt.

        Args:
            prompts: one or several prompts; seeds: one for all, or one each.
            guidance_scale, temperature, top_k, top_p: default to the model family's own.
            progress: show a bar of tokens while drawing.

        Raises:
            ValueError: an empty prompt, an unsupported size, or a parameter out of range.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        seeds = [seeds] * len(prompts) if isinstance(seeds, int) else list(seeds)
        if len(seeds) != len(prompts):
            raise ValueError(f"seeds: {len(seeds)} given for {len(prompts)} prompts")
        tokenizer = self.llm.get_tokenizer()
        encoded = [
            self.family.encode_prompt(tokenizer, prompt, size=size, negative_prompt=negative_prompt)
            for prompt in prompts
        ]
        from vllm_sjd_pac.engine.requests import image_sampling_params

        params = [
            image_sampling_params(
                self.family,
                prompt,
                seed=seed,
                guidance_scale=guidance_scale,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
            )
            for prompt, seed in zip(encoded, seeds, strict=True)
        ]
        outputs = self._run(encoded, params, progress)
        return [
            self._picture(prompt, seed, words, output)
            for prompt, seed, words, output in zip(prompts, seeds, encoded, outputs, strict=True)
        ]

    def _run(self, encoded: list[Any], params: list[Any], progress: bool) -> list[Any]:
        from tqdm import tqdm
        from vllm import TokensPrompt

        engine = self.llm.llm_engine
        mark = f"{time.monotonic_ns()}"
        order = {}
        for index, (prompt, sampling) in enumerate(zip(encoded, params, strict=True)):
            request = engine.add_request(
                f"{mark}-{index}", TokensPrompt(prompt_token_ids=prompt.prompt_token_ids), sampling
            )
            order[request if isinstance(request, str) else f"{mark}-{index}"] = index
        outputs: list[Any] = [None] * len(encoded)
        drawn = [0] * len(encoded)
        total = sum(sampling.max_tokens for sampling in params)
        with tqdm(total=total, unit="token", desc="drawing", disable=not progress) as bar:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    completions: Any = output.outputs
                    index = int(output.request_id.split("-")[1])
                    count = len(completions[0].token_ids)
                    bar.update(count - drawn[index])
                    drawn[index] = count
                    if output.finished:
                        outputs[index] = output
        return outputs

    def _picture(self, prompt: str, seed: int, encoded: Any, output: Any) -> GeneratedImage:
        from PIL import Image

        completion: Any = output.outputs[0]
        if completion.finish_reason == "error":
            raise RuntimeError(f"the engine refused the request: {completion.stop_reason}")
        tokens = list(completion.token_ids)
        layout = self.family.layout(encoded.prompt_token_ids)
        pixels: np.ndarray = self.decoder.decode(layout.grid(tokens).unsqueeze(0))[0].numpy()
        accepted = completion.spec_decode_metrics.per_step_accepted
        return GeneratedImage(
            prompt, seed, Image.fromarray(pixels), tokens, len(accepted), list(accepted), encoded.unknown_words
        )
