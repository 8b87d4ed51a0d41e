"""The Emu3 decoder on vLLM's layers: a Llama whose configuration and weights are nested in a multimodal checkpoint.

vLLM 0.32 would run it through its Transformers backend as a multimodal model; this one is a plain causal decoder.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.utils import WeightsMapper

from vllm_sjd_pac.models.weights import load_strictly

RENAMES = WeightsMapper(
    orig_to_new_prefix={
        "text_model.model.": "model.",
        "text_model.lm_head.": "lm_head.",
        "model.text_model.": "model.",
    }
)
"""From the published ``-hf`` names, and from those of ``transformers`` 5, to Llama's."""

SKIPPED = ("vqmodel.", "model.vqmodel.")
"""The image tokenizer inside the checkpoint; pixels are decoded outside the engine's model."""


class Emu3ForImageGeneration(LlamaForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        text_config = vllm_config.model_config.hf_config.get_text_config()
        nested = vllm_config.with_hf_config(text_config, architectures=["LlamaForCausalLM"])
        super().__init__(vllm_config=nested, prefix=prefix)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return load_strictly(self, weights, renames=RENAMES, skipped_prefixes=SKIPPED)
