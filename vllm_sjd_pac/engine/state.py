"""What the runner remembers of each request between steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm_sjd_pac.decoding import DraftTree
from vllm_sjd_pac.engine.requests import OWNER_KEY, Guidance, guidance_of, twin_id
from vllm_sjd_pac.models.family import ImageModelFamily
from vllm_sjd_pac.models.layout import ImageLayout

ROOT_ONLY = DraftTree.chain(1)


@dataclass
class RequestState:
    """One request as the runner sees it.

    Attributes:
        layout, segment_start: the open image segment, and the index of its position 0 among all tokens; None outside.
        draftable: whether the request's sampling parameters are ones that the tree sampler applies itself.
        text_top_k: top-k of tokens outside image segments, or None.
        slot: window slot in the pool, or None before the first step in a segment; key: its stream of random integers.
        tree: the tree whose node tokens the scheduler holds for the next step.
    """

    request_id: str
    prompt_length: int
    params: Any
    guidance: Guidance
    owner_id: str | None = None
    layout: ImageLayout | None = None
    segment_start: int = 0
    draftable: bool = False
    text_top_k: int | None = None
    slot: int | None = None
    key: int | None = None
    tree: DraftTree = field(default=ROOT_ONLY)

    @classmethod
    def new(cls, data: Any, family: ImageModelFamily) -> RequestState:
        """State of a request that the scheduler sends for the first time (``NewRequestData``)."""
        params = data.sampling_params
        prompt = data.prompt_token_ids or []
        state = cls(
            request_id=data.req_id,
            prompt_length=len(prompt),
            params=params,
            guidance=guidance_of(params),
            owner_id=((params.extra_args or {}).get(OWNER_KEY) if params is not None else None),
            draftable=is_draftable(params),
            text_top_k=(params.extra_args or {}).get("text_top_k") if params is not None else None,
        )
        if state.owner_id is None:
            state.open_segment(prompt, family)
        return state

    @property
    def twin_id(self) -> str:
        return twin_id(self.request_id)

    def open_segment(self, tokens: list[int], family: ImageModelFamily) -> None:
        """Enter the image segment that `tokens` (prompt and output) leave open, if any."""
        start = family.segment_start(tokens)
        if start is not None:
            self.layout, self.segment_start = family.layout(tokens), start

    def follow(self, num_tokens_before: int, committed: list[int], all_tokens: Any, family: ImageModelFamily) -> None:
        """Keep up with committed tokens: leave a finished segment, or enter one that the model began.

        Args:
            num_tokens_before: tokens of the request before `committed`.
            all_tokens: callable that returns all tokens, `committed` included (needed only when a segment may begin).
        """
        if self.layout is not None:
            if num_tokens_before + len(committed) - self.segment_start >= self.layout.length:
                self.layout = None
        elif any(family.begins_segment(token) for token in committed):
            self.open_segment(all_tokens(), family)


def is_draftable(params: Any) -> bool:
    """Whether the tree sampler applies these sampling parameters itself, row by row and by depth.

    Others (penalties, bad words, log-probabilities, min_tokens, …) depend on the tokens of the path or need the stock
    sampler's output; such requests run without drafts, exactly as in plain vLLM.
    """
    if params is None:
        return False
    return not (
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.bad_words
        or params.logprobs is not None
        or params.prompt_logprobs is not None
        or params.min_tokens
        or params.structured_outputs is not None
        or getattr(params, "logprob_token_ids", None)
        or getattr(params, "thinking_token_budget", None) is not None
    )
