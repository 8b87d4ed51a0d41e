"""What one request may ask for: guidance and its checks, on top of vLLM's sampling parameters.

Extra arguments (``SamplingParams.extra_args`` offline, ``vllm_xargs`` over HTTP):

* ``guidance_scale`` (number, 0–20; default 1 = off): classifier-free guidance, ``l_u + s · (l_c − l_u)`` on the logits.
* ``text_top_k`` (whole number, 1 or more): top-k of tokens outside images; ``top_k`` itself then holds for images.
* ``negative_token_ids`` (list of token ids): the twin's prompt; default: the family's unconditional prompt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

MAX_GUIDANCE = 20.0
OWNER_KEY = "sjd_pac_owner"
"""Extra argument that marks a hidden twin and names its owner; clients may not set it."""
TWIN_SUFFIX = "#unconditional"


def twin_id(request_id: str) -> str:
    return request_id + TWIN_SUFFIX


@dataclass(frozen=True)
class Guidance:
    scale: float = 1.0
    negative_token_ids: tuple[int, ...] | None = None

    @property
    def is_on(self) -> bool:
        return self.scale != 1.0


def guidance_of(params: Any) -> Guidance:
    """Guidance of checked sampling parameters."""
    extra = (params.extra_args or {}) if params is not None else {}
    negative = extra.get("negative_token_ids")
    return Guidance(float(extra.get("guidance_scale", 1.0)), None if negative is None else tuple(negative))


def check_sampling_params(params: Any, model_config: Any) -> None:
    """Refuse what the engine would not do exactly as asked.

    Raises:
        VLLMValidationError: (HTTP status 400) the message names the parameter, its value and what is allowed.
    """
    from vllm.exceptions import VLLMValidationError

    extra = params.extra_args or {}

    def refuse(name: str, value: Any, allowed: str) -> None:
        raise VLLMValidationError(f"{name}={value!r} is not allowed; allowed: {allowed}", parameter=name, value=value)

    if OWNER_KEY in extra:
        refuse(OWNER_KEY, extra[OWNER_KEY], "nothing; it is the engine's own mark")
    scale = extra.get("guidance_scale", 1.0)
    if (
        isinstance(scale, bool)
        or not isinstance(scale, int | float)
        or not math.isfinite(scale)
        or not 0 <= scale <= MAX_GUIDANCE
    ):
        refuse("guidance_scale", scale, f"a number from 0 to {MAX_GUIDANCE:g}")
    negative = extra.get("negative_token_ids")
    if negative is not None:
        vocabulary = model_config.get_vocab_size()
        if not isinstance(negative, list | tuple) or not negative:
            refuse("negative_token_ids", negative, "a non-empty list of token ids")
        for token in negative:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
                refuse("negative_token_ids", token, f"token ids from 0 to {vocabulary - 1}")
        if scale == 1.0:
            refuse("negative_token_ids", list(negative), "only together with a guidance_scale other than 1")
    if scale != 1.0 and params.prompt_logprobs is not None:
        refuse("prompt_logprobs", params.prompt_logprobs, "nothing, when guidance_scale is not 1")
    text_top_k = extra.get("text_top_k", 1)
    if isinstance(text_top_k, bool) or not isinstance(text_top_k, int) or text_top_k < 1:
        refuse("text_top_k", text_top_k, "a whole number of at least 1")
    if params.trace_decode_token_ids is not None:
        refuse("trace_decode_token_ids", params.trace_decode_token_ids, "nothing, with speculative decoding")
    if params.structured_outputs is not None and scale != 1.0:
        refuse("structured_outputs", "set", "nothing, when guidance_scale is not 1")


def image_sampling_params(
    family: Any,
    encoded: Any,
    *,
    seed: int | None = None,
    guidance_scale: float | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    **more: Any,
) -> Any:
    """vLLM ``SamplingParams`` that draw one picture after an `EncodedPrompt`.

    Args:
        family: an `ImageModelFamily`; what is None takes its defaults.
        more: further fields of ``SamplingParams``.

    Raises:
        ValueError: vLLM's own checks of the parameters.
    """
    from vllm import SamplingParams

    defaults = family.defaults
    scale = defaults.guidance_scale if guidance_scale is None else guidance_scale
    extra: dict[str, Any] = {"guidance_scale": scale}
    if scale != 1.0:
        extra["negative_token_ids"] = list(encoded.negative_token_ids)
    return SamplingParams(
        seed=seed,
        temperature=defaults.temperature if temperature is None else temperature,
        top_k=defaults.top_k if top_k is None else top_k,
        top_p=defaults.top_p if top_p is None else top_p,
        max_tokens=family.layout(encoded.prompt_token_ids).length,
        detokenize=False,
        extra_args=extra,
        **more,
    )
