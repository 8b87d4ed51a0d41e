"""Drawing the pictures of one request: prompt to engine requests, engine outputs to pictures and numbers."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from vllm_sjd_pac.engine import metrics
from vllm_sjd_pac.engine.requests import image_sampling_params
from vllm_sjd_pac.models.family import EncodedPrompt, find_family
from vllm_sjd_pac.serving.answers import understood_caption
from vllm_sjd_pac.serving.errors import APIError, engine_error
from vllm_sjd_pac.serving.pixels import PictureEncoder
from vllm_sjd_pac.serving.protocol import MAX_SEED, ImageRequest

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient
    from vllm.sampling_params import RequestOutputKind

    from vllm_sjd_pac.models.layout import ImageLayout


@dataclass(frozen=True)
class Job:
    """A checked request together with what the model makes of it.

    Attributes:
        seeds: one per picture: seed, seed + 1, …; drawn at random when the request has none.
        caption: the words that the model understood, where its family can tell, else None.
    """

    request: ImageRequest
    encoded: EncodedPrompt
    layout: ImageLayout
    size: tuple[int, int]
    seeds: tuple[int, ...]
    guidance_scale: float
    caption: str | None
    created: int


@dataclass(frozen=True)
class Progress:
    """Picture `index` has `tokens` so far; ``accepted`` (drafts accepted per forward) comes with the last progress."""

    index: int
    tokens: list[int]
    finished: bool
    accepted: list[int] | None = None


class ImageService:
    """Everything that the routes need; one per server.

    Args:
        engine_client: vLLM's asynchronous engine.
        model_names: names under which the model is served, the first one the default.
    """

    def __init__(self, engine_client: EngineClient, model_names: list[str]) -> None:
        self.engine = engine_client
        self.model_names = model_names
        config = engine_client.model_config
        self.max_model_len = config.max_model_len
        self.family = find_family(config.hf_config, config.model)
        self.pictures = PictureEncoder(self.family.load_pixel_decoder())
        # A copy: vLLM's own threads use the original, and the fast tokenizers are not safe to share.
        self.tokenizer = copy.deepcopy(engine_client.renderer.get_tokenizer())

    # ---- before drawing -------------------------------------------------------------------------------------------

    def prepare(self, request: ImageRequest) -> Job:
        """Check what depends on the model.

        Raises:
            APIError: 404 for another model's name, 400 for a value that this model cannot do.
        """
        if request.model is not None and request.model not in self.model_names:
            shown = request.model if len(request.model) <= 80 else request.model[:80] + "…"
            raise APIError(
                f"the model {shown!r} does not exist; this server has: {', '.join(self.model_names)}",
                status=HTTPStatus.NOT_FOUND,
                param="model",
                code="model_not_found",
            )
        size = self._size(request)
        scale = self.family.defaults.guidance_scale if request.guidance_scale is None else request.guidance_scale
        if request.negative_prompt is not None and scale == 1.0:
            raise APIError(
                "negative_prompt has no effect when guidance_scale is 1 (off); raise guidance_scale or leave it out",
                param="negative_prompt",
                code="unsupported_value",
            )
        try:
            encoded = self.family.encode_prompt(
                self.tokenizer, request.prompt, size=size, negative_prompt=request.negative_prompt
            )
        except ValueError as error:
            raise APIError(str(error), param="prompt", code="invalid_value") from None
        layout = self.family.layout(encoded.prompt_token_ids)
        self._check_length(encoded, layout, guided=scale != 1.0)
        first = secrets.randbelow(MAX_SEED >> 32) if request.seed is None else request.seed
        return Job(
            request=request,
            encoded=encoded,
            layout=layout,
            size=size,
            seeds=tuple(range(first, first + request.count)),
            guidance_scale=scale,
            caption=understood_caption(self.family, request.prompt),
            created=int(time.time()),
        )

    def _size(self, request: ImageRequest) -> tuple[int, int]:
        try:
            return self.family.check_size(request.requested_size())
        except ValueError as error:
            raise APIError(str(error), param="size", code="unsupported_value") from None

    def _check_length(self, encoded: EncodedPrompt, layout: ImageLayout, *, guided: bool) -> None:
        room = self.max_model_len - layout.length
        prompts = {"prompt": encoded.prompt_token_ids}
        if guided:
            prompts["negative_prompt"] = encoded.negative_token_ids
        for param, tokens in prompts.items():
            if len(tokens) > room:
                raise APIError(
                    f"{param} has {len(tokens)} tokens; at most {max(room, 0)} fit beside a picture of {layout.length} "
                    f"tokens within the server's --max-model-len {self.max_model_len}",
                    param=param,
                    code="string_above_max_length",
                )

    # ---- drawing --------------------------------------------------------------------------------------------------

    async def draw(self, job: Job, index: int, output_kind: RequestOutputKind) -> AsyncGenerator[Progress]:
        """Draw picture `index`, reporting its tokens whenever the engine does; the last progress is finished.

        Closing or cancelling it aborts the engine's request and, with it, its hidden twin.

        Raises:
            APIError: the engine refused the request or failed.
        """
        from vllm.inputs.engine import tokens_input

        request = job.request
        started = time.perf_counter()
        tokens: list[int] = []
        outcome = "aborted"
        try:
            params = image_sampling_params(
                self.family,
                job.encoded,
                seed=job.seeds[index],
                guidance_scale=job.guidance_scale,
                temperature=request.temperature,
                top_k=request.top_k,
                top_p=request.top_p,
                output_kind=output_kind,
            )
            outputs = self.engine.generate(
                tokens_input(list(job.encoded.prompt_token_ids)), params, f"img-{secrets.token_hex(12)}"
            )
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    completion = output.outputs[0]
                    tokens.extend(completion.token_ids)
                    if not output.finished:
                        yield Progress(index, list(tokens), finished=False)
            self._check_end(job, completion, tokens)
            statistics = completion.spec_decode_metrics
            accepted = list(statistics.per_step_accepted) if statistics is not None else None
            outcome = "finished"
            metrics.serving().image_finished(time.perf_counter() - started, len(tokens), accepted)
            yield Progress(index, tokens, finished=True, accepted=accepted)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except Exception as error:
            failure = engine_error(error)
            outcome = "refused" if failure.status < HTTPStatus.INTERNAL_SERVER_ERROR else "failed"
            raise failure from error
        finally:
            metrics.serving().images.labels(outcome).inc()

    @staticmethod
    def _check_end(job: Job, completion: Any, tokens: list[int]) -> None:
        if completion.finish_reason == "error":
            reason = completion.stop_reason
            if isinstance(reason, str):  # the scheduler's own sentence: a pair that can never run
                raise APIError(reason, code="unsupported_value")
            raise APIError("the engine failed", status=HTTPStatus.INTERNAL_SERVER_ERROR, code="generation_error")
        if completion.finish_reason == "abort":
            raise APIError(
                "the server is stopping or paused", status=HTTPStatus.SERVICE_UNAVAILABLE, code="server_stopping"
            )
        if job.layout.constrained and len(tokens) < job.layout.length:
            raise APIError(
                f"the picture ended after {len(tokens)} of {job.layout.length} tokens",
                status=HTTPStatus.INTERNAL_SERVER_ERROR,
                code="incomplete_picture",
            )

    async def draw_all(self, job: Job) -> list[Progress]:
        """Draw all pictures of a request at the same time; when one fails, the others are aborted.

        Raises:
            APIError: the first failure.
        """
        from vllm.sampling_params import RequestOutputKind

        async def one(index: int) -> Progress:
            async for progress in self.draw(job, index, RequestOutputKind.FINAL_ONLY):
                last = progress
            return last

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(index)) for index in range(job.request.count)]
        except* APIError as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def encode(self, job: Job, tokens: list[int]) -> str:
        """The picture as base64 text in the request's format."""
        return await self.pictures.base64(job.layout, tokens, job.request.format, job.request.compression)
