"""The image-generating half of Janus-Pro on vLLM's layers: Llama, an image embedding with aligner, a generation head.

The aligner's output depends on the image code alone, so the embeddings of all codes are computed once, at loading, and
stand behind the text's in one table; `forward` is then an ordinary causal Llama. The text head is not loaded: the model
draws images only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.utils import WeightsMapper

from vllm_sjd_pac.models.backbone import MergedVocabularyModel
from vllm_sjd_pac.models.janus.vocabulary import code_start
from vllm_sjd_pac.models.weights import load_strictly

RENAMES = WeightsMapper(
    orig_to_new_prefix={
        "model.language_model.": "model.",
        "model.generation_head.proj_out.": "proj_out.",
        "model.generation_head.vision_head.": "lm_head.",
    }
)
SKIPPED = ("model.vqmodel.", "model.vision_model.", "model.aligner.", "lm_head.")
"""The image tokenizer, the understanding tower with its aligner, and the text head."""

TEXT_EMBEDDING = "model.language_model.embed_tokens.weight"
IMAGE_EMBEDDING = "model.generation_embeddings.weight"
ALIGNER = "model.generation_aligner."


class JanusForImageGeneration(MergedVocabularyModel):
    """``generation_head(llama(embedding))``; the head is linear → GELU → linear over the codes."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        text, image = config.get_text_config(), config.vq_config
        if image.hidden_act != "gelu":
            raise ValueError(f"Janus: hidden_act {image.hidden_act!r} is not supported (gelu is)")
        super().__init__(
            vllm_config=vllm_config.with_hf_config(text, architectures=["LlamaForCausalLM"]),
            config=text,
            code_start=code_start(config),
            code_count=image.num_embeddings,
            head_width=image.projection_dim,
            head_bias=True,
            prefix=prefix,
        )
        self.aligner_layers = image.num_hidden_layers
        self.proj_out = ReplicatedLinear(image.image_token_embed_dim, image.projection_dim, prefix="proj_out")

    def before_head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        projected, _ = self.proj_out(hidden_states)
        return F.gelu(projected)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return load_strictly(self, self._with_merged_embedding(weights), renames=RENAMES, skipped_prefixes=SKIPPED)

    def _with_merged_embedding(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass tensors on; those that make up the merged embedding are held back and become one."""
        parts: dict[str, torch.Tensor] = {}
        for name, tensor in weights:
            if name in (TEXT_EMBEDDING, IMAGE_EMBEDDING) or name.startswith(ALIGNER):
                parts[name] = tensor
            else:
                yield name, tensor
        layers = [ALIGNER + "fc1", *(f"{ALIGNER}hidden_layers.{i}" for i in range(self.aligner_layers - 1))]
        wanted = [
            TEXT_EMBEDDING,
            IMAGE_EMBEDDING,
            *(f"{layer}.{part}" for layer in layers for part in ("weight", "bias")),
        ]
        for name in wanted:
            if name not in parts:
                raise ValueError(f"the checkpoint of {type(self).__name__} lacks {name}")
        for name in parts:
            if name not in wanted:
                raise ValueError(f"unexpected tensor {name!r} in the checkpoint of {type(self).__name__}")
        for name, rows in ((TEXT_EMBEDDING, self.code_start), (IMAGE_EMBEDDING, self.code_count)):
            if parts[name].shape[0] != rows:
                raise ValueError(f"tensor {name!r} has {parts[name].shape[0]} rows; the configuration says {rows}")
        text = parts[TEXT_EMBEDDING]
        if text.shape[1] != self.config.hidden_size:
            raise ValueError(
                f"tensor {TEXT_EMBEDDING!r} {tuple(text.shape)} does not fit width {self.config.hidden_size}"
            )
        aligned = align(
            parts[IMAGE_EMBEDDING], [(parts[f"{layer}.weight"], parts[f"{layer}.bias"]) for layer in layers]
        )
        yield TEXT_EMBEDDING, torch.cat([text, aligned.to(text.device, text.dtype)])


@torch.no_grad()
def align(embeddings: torch.Tensor, layers: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Embeddings of all codes as the backbone sees them, in float32.

    Args:
        embeddings: [codes, embed_dim].
        layers: weight and bias of the aligner's linear layers, GELU between them.

    Raises:
        ValueError: two layers do not fit each other.
    """
    values = embeddings.float()
    for depth, (weight, bias) in enumerate(layers):
        if weight.shape[1:] != values.shape[1:] or weight.shape[:1] != bias.shape:
            raise ValueError(
                f"aligner layer {depth} {tuple(weight.shape)}, {tuple(bias.shape)} does not fit {values.shape[1]} wide"
            )
        values = F.linear(F.gelu(values) if depth else values, weight.float(), bias.float())
    return values
