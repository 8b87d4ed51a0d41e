"""One rank of `test_tensor_parallel`: load each checkpoint's share and run one teacher-forced sequence per model.

Attention is replaced by a plain causal one over this rank's heads, so that no cache and no engine is needed; layers,
weight loading and collectives are the real ones.

Usage: ``tensor_parallel_rank.py RANK WORLD FOLDER``; every sub-folder of FOLDER is a model with a ``tokens.json``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch


def causal_attention(self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[T, local heads · head size] → the same."""
    heads = [part.unflatten(-1, (-1, self.head_size)).transpose(0, 1) for part in (query, key, value)]
    repeated = [part.repeat_interleave(len(heads[0]) // len(part), dim=0) for part in heads]
    attended = torch.nn.functional.scaled_dot_product_attention(*repeated, is_causal=True)
    return attended.transpose(0, 1).flatten(1)


def main(rank: int, world: int, folder: Path) -> None:
    os.environ["VLLM_DIST_IDENT"] = f"rank{rank}"  # different names: gloo instead of spinning on shared memory
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

    from vllm_sjd_pac.models.registry import register_models

    register_models()
    Attention.forward = causal_attention
    for number, model in enumerate(sorted(path for path in folder.iterdir() if path.is_dir())):
        tokens = torch.tensor(json.loads((model / "tokens.json").read_text()))
        arguments = EngineArgs(
            str(model), dtype="float32", enforce_eager=True, tensor_parallel_size=world, skip_tokenizer_init=True
        )
        config = arguments.create_engine_config()
        with set_current_vllm_config(config), torch.inference_mode():
            if number == 0:
                init_distributed_environment(world, rank, f"file://{folder}/rendezvous", rank, backend="gloo")
                ensure_model_parallel_initialized(world, 1)
            network = initialize_model(vllm_config=config)
            get_model_loader(config.load_config).load_weights(network, config.model_config)
            process_weights_after_loading(network, config.model_config, torch.device("cpu"))
            logits = network.compute_logits(network(tokens, torch.arange(len(tokens))))
        torch.save(logits, model / f"logits{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
