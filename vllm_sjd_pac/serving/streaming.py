"""``stream=true``: server-sent events in OpenAI's shape, one sequence of pictures interleaved as they progress."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator
from http import HTTPStatus
from typing import Any

from vllm.logger import init_logger

from vllm_sjd_pac.serving import answers
from vllm_sjd_pac.serving.errors import engine_error
from vllm_sjd_pac.serving.images import ImageService, Job, Progress

MEDIA_TYPE = "text/event-stream"

logger = init_logger("vllm.sjd_pac.serving")  # below "vllm", whose handlers it then uses


async def events(service: ImageService, job: Job) -> AsyncGenerator[str]:
    """The event stream of a request.

    Per picture: up to ``partial_images`` events ``image_generation.partial_image`` (whole rows of the real picture over
    neutral grey, evenly spaced; or one for every new row when ``sjd_pac.every_row`` is set), then one
    ``image_generation.completed``. With n > 1 the pictures are drawn at the same time and their events interleave;
    ``sjd_pac.index`` tells them apart. A failure after the start is an ``error`` event, the last one.
    """
    queue: asyncio.Queue[Progress | Exception] = asyncio.Queue(maxsize=job.request.count * 2)
    producers = [asyncio.create_task(_produce(service, job, index, queue)) for index in range(job.request.count)]
    shown = [0] * job.request.count
    sent = [0] * job.request.count
    try:
        running = len(producers)
        while running:
            progress = await queue.get()
            if isinstance(progress, Exception):
                raise progress
            if progress.finished:
                running -= 1
                yield await _completed(service, job, progress)
                continue
            for rows in _due_rows(job, progress, shown[progress.index]):
                yield await _partial(service, job, progress, rows, sent[progress.index])
                sent[progress.index] += 1
                shown[progress.index] = rows
    except Exception as error:
        failure = engine_error(error)
        if failure.status == HTTPStatus.INTERNAL_SERVER_ERROR:
            logger.exception("image stream failed")
        yield _event("error", {"type": "error", **failure.body})
    finally:
        for producer in producers:
            producer.cancel()
        await asyncio.gather(*producers, return_exceptions=True)


async def _produce(service: ImageService, job: Job, index: int, queue: asyncio.Queue[Progress | Exception]) -> None:
    from vllm.sampling_params import RequestOutputKind

    try:
        async with contextlib.aclosing(service.draw(job, index, RequestOutputKind.DELTA)) as drawing:
            async for progress in drawing:
                await queue.put(progress)
    except Exception as error:
        await queue.put(error)


def milestones(job: Job) -> list[int]:
    """Numbers of rows after which a partial picture is due."""
    rows = job.layout.rows
    if job.request.every_row:
        return list(range(1, rows))
    parts = job.request.partial_images or 0
    return sorted({max(1, round(rows * part / (parts + 1))) for part in range(1, parts + 1)} - {rows})


def _due_rows(job: Job, progress: Progress, shown: int) -> list[int]:
    complete = len(progress.tokens) // job.layout.row_length
    due = [rows for rows in milestones(job) if shown < rows <= complete]
    # A step may finish several rows: the newest says it all, unless each was asked for by number.
    return due[-1:] if job.request.every_row else due


async def _partial(service: ImageService, job: Job, progress: Progress, rows: int, number: int) -> str:
    tokens = progress.tokens[: rows * job.layout.row_length]
    content = {
        "type": "image_generation.partial_image",
        "b64_json": await service.encode(job, tokens),
        "partial_image_index": number,
        **_common(job),
        "sjd_pac": {"index": progress.index, "rows": rows, "tokens": len(progress.tokens)},
    }
    return _event("image_generation.partial_image", content)


async def _completed(service: ImageService, job: Job, progress: Progress) -> str:
    content = {
        "type": "image_generation.completed",
        "b64_json": await service.encode(job, progress.tokens),
        **_common(job),
        "revised_prompt": job.caption,
        "usage": answers.usage(job, [progress]),
        "sjd_pac": {"index": progress.index, **answers.statistics(job, [progress])},
    }
    return _event("image_generation.completed", content)


def _common(job: Job) -> dict[str, Any]:
    width, height = job.size
    return {
        "created_at": int(time.time()),
        "size": f"{width}x{height}",
        "quality": "high",
        "background": "opaque",
        "output_format": job.request.format,
    }


def _event(name: str, content: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(content)}\n\n"
