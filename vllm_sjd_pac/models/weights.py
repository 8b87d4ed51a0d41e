"""Loading weights so that nothing is missed: an unexpected, missing or misshapen tensor is an error that names it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, MergedColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, is_pp_missing_parameter

Shape = tuple[int, ...]

_RECOMPUTED = "rotary_emb.inv_freq"
"""Old checkpoints store the RoPE frequencies; they follow from the configuration."""

CHECKS_SHAPE = "checks_shape"
"""Attribute of a parameter whose own loader decides which shapes it takes."""


def expected_tensors(module: nn.Module) -> dict[str, Shape | None]:
    """Names and whole shapes of the tensors that a checkpoint must have for `module`.

    Fused projections are taken apart, and shapes are those before tensor parallelism splits them; None where the
    parameter's own loader checks.
    """
    expected: dict[str, Shape | None] = {}
    for prefix, layer in module.named_modules():
        outputs = _outputs(prefix, layer)
        for name, parameter in layer.named_parameters(recurse=False):
            if getattr(parameter, CHECKS_SHAPE, False):
                expected[f"{prefix}.{name}"] = None
            elif outputs is None:
                expected[f"{prefix}.{name}"] = tuple(parameter.shape)
            else:
                inner = () if name == "bias" else (_inputs(layer),)
                expected |= {f"{part}.{name}": (rows, *inner) for part, rows in outputs.items()}
    return expected


def _outputs(prefix: str, layer: nn.Module) -> dict[str, int] | None:
    """Checkpoint names of a layer's projections and the rows of each; None for layers that are no projections."""
    if isinstance(layer, QKVParallelLinear):
        fused = prefix.removesuffix("qkv_proj")
        keys = layer.total_num_kv_heads * layer.head_size
        return {
            f"{fused}q_proj": layer.total_num_heads * layer.head_size,
            f"{fused}k_proj": keys,
            f"{fused}v_proj": keys,
        }
    if isinstance(layer, MergedColumnParallelLinear):
        fused = prefix.removesuffix("gate_up_proj")
        return dict(zip((f"{fused}gate_proj", f"{fused}up_proj"), layer.output_sizes, strict=True))
    if isinstance(layer, LinearBase):
        return {prefix: layer.output_size}
    if isinstance(layer, VocabParallelEmbedding):
        return {prefix: layer.org_vocab_size}
    return None


def _inputs(layer: nn.Module) -> int:
    if isinstance(layer, VocabParallelEmbedding):
        return layer.embedding_dim
    assert isinstance(layer, LinearBase)
    return layer.input_size


def load_strictly(
    module: nn.Module,
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    renames: WeightsMapper | None = None,
    skipped_prefixes: tuple[str, ...] = (),
) -> set[str]:
    """Load a checkpoint into a model whose backbone is vLLM's `LlamaModel`.

    A quantised model keeps vLLM's own, laxer checks, because its checkpoint holds tensors that only the quantisation
    method knows.

    Args:
        module: the whole model; its ``load_weights`` calls this.
        weights: pairs of checkpoint name and tensor.
        renames: from checkpoint names to module names (fused projections still apart).
        skipped_prefixes: checkpoint names that are known and not needed.

    Raises:
        ValueError: a tensor that the model has no place for, one that is missing, or one of the wrong shape.
    """
    kind = type(module).__name__
    renames = renames or WeightsMapper()
    lax = getattr(getattr(module, "model", None), "quant_config", None) is not None
    expected = {} if lax else expected_tensors(module)
    tied = {name for name, _ in module.named_parameters(remove_duplicate=False)} - {
        n for n, _ in module.named_parameters()
    }
    seen: set[str] = set()

    def checked() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            renamed = None if name.startswith(skipped_prefixes) or _RECOMPUTED in name else renames.map_name(name)
            if renamed is None:
                continue
            if not lax and not is_pp_missing_parameter(renamed, module):
                if renamed not in expected:
                    raise ValueError(f"unexpected tensor {name!r} {tuple(tensor.shape)} in the checkpoint of {kind}")
                shape = expected[renamed]
                if shape is not None and shape != tuple(tensor.shape):
                    raise ValueError(f"tensor {name!r} {tuple(tensor.shape)} does not fit {kind}, which needs {shape}")
            seen.add(renamed)
            yield renamed, tensor

    loaded = AutoWeightsLoader(module).load_weights(checked())
    missing = [_published_name(name, renames) for name in sorted(set(expected) - tied - seen)]
    if missing:
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise ValueError(f"the checkpoint of {kind} lacks {shown}")
    return loaded


def _published_name(name: str, renames: WeightsMapper) -> str:
    """The checkpoint's name of a tensor (the first one listed, if `renames` knows several)."""
    matches = [(old, new) for old, new in renames.orig_to_new_prefix.items() if new and name.startswith(new)]
    if not matches:
        return name
    old, new = max(matches, key=lambda match: len(match[1]))
    return old + name.removeprefix(new)
