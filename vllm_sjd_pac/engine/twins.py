"""Pairs of conditional and unconditional requests (classifier-free guidance inside the engine)."""

from __future__ import annotations

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from vllm_sjd_pac.engine.requests import OWNER_KEY, TWIN_SUFFIX, Guidance, twin_id
from vllm_sjd_pac.models.family import ImageModelFamily

TWINS_STATISTIC = "sjd_pac:twins"
"""Key of the number of running twins in ``SchedulerStats.num_kv_fetch_reqs_by_stage``; vLLM reads its own keys only."""


class TwinBook:
    """Which request is whose twin."""

    def __init__(self) -> None:
        self._twin_of: dict[str, str] = {}
        self._owner_of: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._twin_of)

    def add(self, owner: str, twin: str) -> None:
        self._twin_of[owner] = twin
        self._owner_of[twin] = owner

    def remove(self, owner: str) -> str | None:
        """Forget a pair; returns the twin's id, or None when `owner` has none."""
        twin = self._twin_of.pop(owner, None)
        if twin is not None:
            del self._owner_of[twin]
        return twin

    def clear(self) -> None:
        self._twin_of.clear()
        self._owner_of.clear()

    def pairs(self) -> list[tuple[str, str]]:
        return list(self._twin_of.items())

    def mate_of(self, request_id: str) -> str | None:
        return self._twin_of.get(request_id) or self._owner_of.get(request_id)

    @staticmethod
    def is_twin_id(request_id: str) -> bool:
        return request_id.endswith(TWIN_SUFFIX)


def make_twin(owner: Request, guidance: Guidance, family: ImageModelFamily) -> Request:
    """The hidden unconditional request of a guided one.

    It never stops by itself (its owner's end is its end) and draws no random numbers: the runner gives it the owner's
    tokens. It shares the owner's cache salt and block hasher, so equal negative prompts hit the prefix cache.
    """
    assert owner.prompt_token_ids is not None
    negative = guidance.negative_token_ids
    prompt = list(negative) if negative is not None else family.unconditional(owner.prompt_token_ids)
    return Request(
        request_id=twin_id(owner.request_id),
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(
            temperature=0.0,
            max_tokens=1 << 30,
            ignore_eos=True,
            detokenize=False,
            extra_args={OWNER_KEY: owner.request_id},
        ),
        pooling_params=None,
        client_index=owner.client_index,
        arrival_time=owner.arrival_time,
        cache_salt=owner.cache_salt,
        priority=owner.priority,
        block_hasher=owner._block_hasher,
    )
