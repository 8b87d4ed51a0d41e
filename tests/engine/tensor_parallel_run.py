"""Run requests over two tensor-parallel ranks in their own processes; started by test_tensor_parallel.py.

Arguments: model folder, file for the tokens (JSON), executor ("mp" or "ray").
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(model: str, output: str, executor: str) -> None:
    from vllm import LLM, SamplingParams, TokensPrompt

    from tests.engine.conftest import tensor_parallel_requests

    requests = tensor_parallel_requests()
    llm = LLM(
        model, dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=16, block_size=32, seed=0,
        tensor_parallel_size=2, distributed_executor_backend=executor,
        speculative_config={"model": "sjd_pac", "verify_ranks": True, "adaptive_window": False},
    )  # fmt: skip
    prompts = [TokensPrompt(prompt_token_ids=request.prompt) for request in requests]
    outputs = llm.generate(prompts, [SamplingParams(**request.params) for request in requests], use_tqdm=False)
    accepted = sum(sum(o.outputs[0].spec_decode_metrics.per_step_accepted) for o in outputs)
    Path(output).write_text(
        json.dumps({"tokens": [list(o.outputs[0].token_ids) for o in outputs], "accepted": accepted})
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
