"""What a client is told beside the pictures: usage, the ``sjd_pac`` object, and what the model can do."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_sjd_pac.models.family import ImageModelFamily
    from vllm_sjd_pac.serving.images import Job, Progress


def usage(job: Job, pictures: list[Progress]) -> dict[str, Any]:
    """Tokens in and out; a hidden twin's are not counted."""
    prompt = len(job.encoded.prompt_token_ids) * len(pictures)
    drawn = sum(len(picture.tokens) for picture in pictures)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"image_tokens": 0, "text_tokens": prompt},
        "output_tokens": drawn,
        "output_tokens_details": {"image_tokens": drawn, "text_tokens": 0},
        "total_tokens": prompt + drawn,
    }


def statistics(job: Job, pictures: list[Progress]) -> dict[str, Any]:
    """The response's ``sjd_pac`` object: totals, and per picture the seed and the drafts accepted per forward."""
    images = [
        {"index": picture.index, "seed": job.seeds[picture.index], **_speed(len(picture.tokens), picture.accepted)}
        for picture in pictures
    ]
    forwards = [image["forwards"] for image in images if image["forwards"] is not None]
    tokens = sum(len(picture.tokens) for picture in pictures)
    warnings = []
    if job.encoded.unknown_words:
        warnings.append(f"the model does not know {', '.join(job.encoded.unknown_words)} and ignores it")
    return {
        "forwards": sum(forwards) if forwards else None,
        "tokens": tokens,
        "tokens_per_forward": round(tokens / sum(forwards), 4) if forwards else None,
        "guidance_scale": job.guidance_scale,
        "rows": job.layout.rows,
        "columns": job.layout.columns,
        "row_length": job.layout.row_length,
        "unknown_words": list(job.encoded.unknown_words),
        "warnings": warnings,
        "images": images,
    }


def about(family: ImageModelFamily, model_names: list[str]) -> dict[str, Any]:
    """What the demo page and other clients want to know of the model."""
    about: dict[str, Any] = {
        "models": model_names,
        "family": family.name,
        "sizes": [f"{width}x{height}" for width, height in family.sizes],
        "defaults": dataclasses.asdict(family.defaults),
        "known_words": [],
        "examples": [],
    }
    if _is_bundled(family):
        from vllm_sjd_pac.models.emoji import README_PROMPTS, known_words

        about |= {"known_words": list(known_words()), "examples": list(README_PROMPTS)}
    return about


def _speed(tokens: int, accepted: list[int] | None) -> dict[str, Any]:
    if not accepted:
        return {"tokens": tokens, "forwards": None, "tokens_per_forward": None, "accepted": None}
    forwards = len(accepted)
    return {
        "tokens": tokens,
        "forwards": forwards,
        "tokens_per_forward": round(tokens / forwards, 4),
        "accepted": accepted,
    }


def _is_bundled(family: ImageModelFamily) -> bool:
    return getattr(family, "decoder_name", None) == "emoji_vq"


def understood_caption(family: ImageModelFamily, prompt: str) -> str | None:
    """The words of `prompt` that the bundled model understood, in its normal form; None for other families."""
    if not _is_bundled(family):
        return None
    from vllm_sjd_pac.models.emoji import check_prompt

    caption, unknown = check_prompt(prompt)
    return " ".join(word for word in caption.split() if word not in unknown)
