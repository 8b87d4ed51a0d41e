"""A Llama backbone whose head draws image codes only, over one merged vocabulary of text (or classes) and codes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.interfaces import SupportsPP
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaModel
from vllm.model_executor.models.utils import PPMissingLayer, maybe_prefix
from vllm.sequence import IntermediateTensors


class MergedVocabularyModel(nn.Module, SupportsPP):
    """Text and image codes share one vocabulary; logits exist for the codes alone.

    Columns of other tokens hold the dtype's lowest finite number, not −inf: guidance subtracts the columns of two
    requests, and −inf − (−inf) would be NaN.
    """

    def __init__(
        self,
        *,
        vllm_config: VllmConfig,
        config: Any,
        code_start: int,
        code_count: int,
        head_width: int,
        head_bias: bool = False,
        layer_type: type[nn.Module] = LlamaDecoderLayer,
        prefix: str = "",
    ) -> None:
        """
        Args:
            vllm_config: configuration whose ``model_config.hf_config`` is `config`.
            config: the backbone's Llama-like configuration; ``vocab_size`` is the merged one.
            code_start: merged id of code 0.
            code_count: size of the codebook.
            head_width: width of the vectors that enter the head's last layer.
        """
        super().__init__()
        self.config = config
        self.vocabulary = config.vocab_size
        self.code_start, self.code_count = code_start, code_count
        self.model = LlamaModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"), layer_type=layer_type)
        if get_pp_group().is_last_rank:
            self.lm_head: nn.Module = ParallelLMHead(
                code_count, head_width, bias=head_bias, prefix=maybe_prefix(prefix, "lm_head")
            )
            self.logits_processor = LogitsProcessor(code_count)
        else:
            self.lm_head = PPMissingLayer()
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def before_head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """What stands between the backbone and the head's last layer."""
        return hidden_states

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """[N, hidden] → [N, merged vocabulary]."""
        bias = getattr(self.lm_head, "bias", None)
        codes = self.logits_processor(self.lm_head, self.before_head(hidden_states), bias)
        if codes is None:  # this rank gathers no logits
            return None
        logits = codes.new_full((codes.shape[0], self.vocabulary), torch.finfo(codes.dtype).min)
        logits[:, self.code_start : self.code_start + self.code_count] = codes
        return logits
