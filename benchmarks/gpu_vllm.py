"""Every attention choice inside vLLM, each engine in a process of its own; part of `gpu_check`, and its worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

RUNS = (
    ("float32", None),
    ("float32", "virtual"),
    ("float32", "triton"),
    ("bfloat16", None),
    ("bfloat16", "triton"),
    ("bfloat16", "virtual"),
    ("bfloat16", "xformers"),
)
"""(model type, attention): None is speculation off, the standard that the others of the same type are held to."""


def write_checkpoint(folder: str, smoke: bool) -> int:
    """A random image-token Llama; returns the number of tokens of an image."""
    import torch
    from gpu_model import random_llama

    changes = {} if smoke else {"num_hidden_layers": 4, "vocab_size": 16 + 1024}
    model = random_llama("smoke" if smoke else "1b", torch.float32, "cpu" if smoke else "cuda", **changes)
    model.save_pretrained(folder)
    path, side = Path(folder, "config.json"), 4 if smoke else 16
    config = json.loads(path.read_text())
    config |= {"bos_token_id": 0, "eos_token_id": 3}
    config["image_token_layout"] = {
        "begin_token_id": 1,
        "end_token_id": 3,
        "end_of_line_token_id": 2,
        "image_token_start": 16,
        "image_token_count": model.config.vocab_size - 16,
        "grid_rows": side,
        "grid_columns": side,
        "pixels_per_token": 8,
        "constrained": True,
    }
    path.write_text(json.dumps(config))
    return side * (side + 1)


def worker(arguments: dict[str, Any]) -> None:
    """Decode two seeded images twice (the first time warms up) and print tokens and seconds."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        arguments["model"],
        dtype=arguments["dtype"],
        speculative_config=arguments["speculation"],
        seed=0,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=8,
        block_size=64,
        disable_log_stats=True,
        **arguments["engine"],
    )
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=arguments["tokens"], ignore_eos=True, detokenize=False)
        for seed in (1, 2)
    ]
    prompts = [{"prompt_token_ids": [0, 1]} for _ in params]
    llm.generate(prompts, params, use_tqdm=False)
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    print("RESULT" + json.dumps({"tokens": tokens, "seconds": seconds}))


def run_worker(arguments: dict[str, Any], timeout: float) -> tuple[dict[str, Any] | None, str]:
    """What the worker found, or None and why."""
    command = [sys.executable, __file__, json.dumps(arguments)]
    # One process per engine starts in a third of the time; Triton's interpreter is for the smoke run's kernels only.
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    env.pop("TRITON_INTERPRET", None)
    try:
        run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return None, "out of time"
    found = [line.removeprefix("RESULT") for line in run.stdout.splitlines() if line.startswith("RESULT")]
    return (json.loads(found[0]) if found else None), (run.stderr.strip().splitlines() or ["no output"])[-1]


def check_vllm(smoke: bool, deadline: float) -> list[dict[str, Any]]:
    """Same seed, speculation on = off, for every attention choice.

    Args:
        smoke: the CPU, tiny sizes, virtual requests only.
        deadline: `time.monotonic` after which no engine is started.
    """
    if find_spec("vllm") is None:
        return [{"check": "vLLM", "what": "", "result": "not installed", "ok": True}]
    rows: list[dict[str, Any]] = []
    plain: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        tokens = write_checkpoint(folder, smoke)
        for dtype, attention in RUNS[:2] if smoke else RUNS:
            row: dict[str, Any] = {"check": f"vLLM, {attention or 'speculation off'}", "what": dtype}
            rows.append(row)
            left = deadline - time.monotonic()
            if left < 30:
                row |= {"result": "out of time, not run", "ok": True}
                continue
            chosen = {"model": "sjd_pac", **({"attention": attention} if attention else {"mode": "ar"})}
            engine = {} if smoke else {"gpu_memory_utilization": 0.5}
            arguments = {"model": folder, "dtype": dtype, "speculation": chosen, "tokens": tokens, "engine": engine}
            result, trouble = run_worker(arguments, left)
            if result is None:
                row |= {"result": trouble[:150], "ok": False}
                continue
            first = plain.setdefault(dtype, result)
            mine, other = ([token for image in run["tokens"] for token in image] for run in (result, first))
            same = sum(a == b for a, b in zip(mine, other, strict=False))
            # In half precision a near-tie may fall the other way, and all after it differs; in float32 it must not.
            row |= {
                "result": f"{same} of {len(other)} tokens equal, {first['seconds'] / result['seconds']:.2f} × as fast",
                "ok": mine == other or dtype != "float32",
            }
    return rows


if __name__ == "__main__":
    worker(json.loads(sys.argv[1]))
