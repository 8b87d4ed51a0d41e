"""Janus draws images in a vocabulary of their own; the engine sees one, in which code c follows the text at c."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig

MERGED = "image_code_start"
"""Attribute of the text configuration that holds the merged id of code 0, once the vocabularies are merged."""


def code_start(hf_config: Any) -> int:
    """Merged id of code 0, whether or not the configuration's vocabularies are merged yet."""
    text = hf_config.get_text_config()
    return int(getattr(text, MERGED, text.vocab_size))


def merge_vocabularies(hf_config: Any) -> None:
    """Let the text configuration's ``vocab_size`` cover the image codes too; a second call changes nothing."""
    text = hf_config.get_text_config()
    if not hasattr(text, MERGED):
        setattr(text, MERGED, text.vocab_size)
        text.vocab_size += hf_config.vq_config.num_embeddings


class JanusModelConfig:
    """What vLLM asks per architecture when it has read a model's configuration (its ``VerifyAndUpdateConfig``)."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        return None

    @staticmethod
    def verify_and_update_model_config(model_config: ModelConfig) -> None:
        merge_vocabularies(model_config.hf_config)
        model_config.model_arch_config = model_config.get_model_arch_config()
