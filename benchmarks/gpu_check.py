"""Everything about this project that only a GPU can show, in one script of less than six minutes.

    python benchmarks/gpu_check.py                # kernels, algorithm, step times; and vLLM where it is installed
    python benchmarks/gpu_check.py --size 7b      # step times of a 7B model instead of a 1B model
    python benchmarks/gpu_check.py --cpu-smoke    # the same control flow with tiny sizes, under Triton's interpreter

Needs PyTorch, Triton and transformers; uses vLLM and xformers where they import. Prints tables, writes
``gpu_check.json`` and ends with 1 if a check failed. All weights are random.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

SMOKE = "--cpu-smoke" in sys.argv
if SMOKE:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "attention")]

import torch  # noqa: E402
from gpu_attention import flash_attention, kernel_attention, virtual_result, xformers_result  # noqa: E402
from gpu_model import PagedLlama, TreeTarget, random_llama  # noqa: E402
from gpu_vllm import check_vllm  # noqa: E402
from roofline import GPUS, Gpu, Model, Setting, step_time  # noqa: E402
from scenes import Request, scene  # noqa: E402

from vllm_sjd_pac.decoding import DraftTree, jacobi_decode  # noqa: E402
from vllm_sjd_pac.engine.attention import triton_ops  # noqa: E402

DEVICE = "cpu" if SMOKE else "cuda"
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
STARTED = time.monotonic()


def check_attention() -> list[dict[str, Any]]:
    """Every attention choice against float64, over types, head sizes, head groups, block sizes; mixed batches."""
    tree = DraftTree.comb(17, (2, 2, 1), 1).parents
    cases = [
        (torch.float32, 64, 4, 2, 16), (torch.float16, 128, 8, 2, 16), (torch.bfloat16, 128, 8, 8, 64),
        (torch.bfloat16, 64, 14, 2, 32), (torch.bfloat16, 256, 8, 4, 128), (torch.float16, 64, 4, 4, 128),
    ]  # fmt: skip
    requests = [Request(1000, 1, tree), Request(5, 200, None), Request(333, 1, None), Request(64, 3, tree)]
    if SMOKE:
        cases, requests = [(torch.float32, 32, 4, 2, 16)], [Request(40, 1, tree), Request(5, 4, None)]
    rows = []
    for dtype, head_size, heads, kv_heads, block_size in cases:
        step = scene(requests, heads, kv_heads, head_size, block_size, dtype, device=DEVICE)
        expected, _ = step.expected()
        longest = max(step.prefix_lens)
        arguments = (
            step.query, step.key, step.value, step.key_cache, step.value_cache, step.block_table, step.prefix_tensor(),
            step.layout(),
        )  # fmt: skip
        results: dict[str, torch.Tensor | None] = {
            "triton": kernel_attention(longest, 1)(*arguments),
            "triton, split prefix": kernel_attention(longest, 4)(*arguments),
            "virtual requests": virtual_result(step),
            "xformers": xformers_result(step),
        }
        flash = flash_attention(longest) if dtype != torch.float32 and DEVICE == "cuda" else None
        results["flash + triton"] = flash(*arguments) if flash else None
        for name, result in results.items():
            if result is None:
                continue
            difference = (result.double().cpu() - expected).abs()
            worst = float(difference[~difference.isnan()].max())
            rows.append({
                "check": f"attention: {name}", "what": f"{str(dtype)[6:]}, head {head_size}, {heads}/{kv_heads} heads, "
                f"block {block_size}", "result": f"max abs error {worst:.1e}", "ok": worst <= TOLERANCES[dtype],
            })  # fmt: skip
    return rows


def check_algorithm() -> list[dict[str, Any]]:
    """Same seed with speculation on and off, over our attention; float32, so that near-ties do not decide."""
    changes = {} if SMOKE else {"num_hidden_layers": 4, "vocab_size": 2048}
    model = random_llama("smoke" if SMOKE else "1b", torch.float32, DEVICE, **changes)
    vocabulary, tokens = model.config.vocab_size, 12 if SMOKE else 200
    tree = DraftTree.comb(17, (2, 2, 1), 1) if SMOKE else DraftTree.comb(64, (8, 4, 4, 2))
    decoded, forwards = {}, {}
    for mode in ("ar", "pac"):
        llama = PagedLlama(model, kernel_attention(256, 1 if SMOKE else None), 1, tokens + tree.num_nodes + 16)
        result = jacobi_decode(
            TreeTarget(llama), [1, 2, 3], tokens, vocab_size=vocabulary, rule="race", mode=mode, tree=tree,
            generator=torch.Generator().manual_seed(7),
        )  # fmt: skip
        decoded[mode], forwards[mode] = result.tokens, result.forwards
    # And the paged tree forward against transformers' own: the last path of a tree, as an ordinary sequence.
    target = TreeTarget(PagedLlama(model, kernel_attention(256, 1), 1, 64 + tree.num_nodes))
    nodes = torch.arange(tree.num_nodes) % vocabulary
    rows = target(torch.tensor([5, 6, 7]), nodes, torch.tensor(tree.parents))
    path, node = [], tree.num_nodes - 1
    while node >= 0:
        path.insert(0, node)
        node = tree.parents[node]
    with torch.inference_mode():
        plain = model(torch.tensor([[5, 6, 7, *nodes[path].tolist()]], device=DEVICE)).logits[0, -1].float().cpu()
    off = float((rows[-1] - plain).abs().max())
    equal = decoded["ar"] == decoded["pac"]
    return [
        {
            "check": "same seed, on = off",
            "what": f"race, {tokens} tokens, {forwards['pac']} steps",
            "result": "equal" if equal else "DIFFERENT",
            "ok": equal and forwards["pac"] < tokens,
        },
        {
            "check": "tree forward = transformers",
            "what": "logits of the last branch",
            "result": f"max abs error {off:.1e}",
            "ok": off <= (1e-4 if SMOKE else 2e-3),
        },
    ]


def measure(call: Any, repeat: int) -> float:
    """Median seconds of ``call``: a CUDA graph where it can be captured, so that launches do not count."""
    call()
    if DEVICE == "cpu":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    torch.cuda.synchronize()
    replay = call
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        replay = graph.replay
    except RuntimeError as error:
        print(f"not captured ({error}); eager times", file=sys.stderr)
    times = []
    for _ in range(repeat):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        replay()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) / 1e3)
    return sorted(times)[len(times) // 2]


def step_times(size: str, budget: float) -> list[dict[str, Any]]:
    """Step time of a random model by nodes and batch, beside the roofline's prediction without overhead."""
    dtype = torch.float32 if SMOKE else torch.bfloat16
    model = random_llama("smoke" if SMOKE else size, dtype, DEVICE)
    config = model.config
    shape = Model(
        config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.num_key_value_heads,
        config.hidden_size // config.num_attention_heads, config.intermediate_size, config.vocab_size, 0,
    )  # fmt: skip
    name = "" if DEVICE == "cpu" else torch.cuda.get_device_name()
    gpu = next((known for known in GPUS if known.name.split()[0] in name), Gpu(f"{name} as H100", 3.35e12, 989e12))
    context, nodes, batches = (30, (1, 8), (1, 2)) if SMOKE else (1300, (1, 8, 16, 32, 64, 128), (1, 2, 4, 8, 16, 32))
    choices = {"triton": kernel_attention(context), "flash + triton": None if SMOKE else flash_attention(context)}
    rows = []
    for batch in batches:
        for choice, attention in choices.items():
            if attention is None:
                continue
            llama = PagedLlama(model, attention, batch, context + max(nodes))
            for count in nodes:
                if time.monotonic() - STARTED > budget:
                    print(f"out of time at batch {batch}, {count} nodes", file=sys.stderr)
                    return rows
                tree = DraftTree.chain(count) if count < 16 else DraftTree.comb(count, (2, 2, 1), 1)
                if count >= 64:
                    tree = DraftTree.comb(count, (8, 4, 4, 2))
                lens, total = [count] * batch, count * batch
                depths = torch.tensor(tree.depths, device=DEVICE).repeat(batch) + context
                tokens = torch.randint(config.vocab_size, (total,), device=DEVICE)
                slots = llama.slots([context] * batch, lens)
                prefix = torch.full((batch,), context, dtype=torch.int32, device=DEVICE)
                layout = llama.layout(lens, [0] * batch, [tree.parents] * batch)
                every = torch.arange(total, device=DEVICE)

                def step(llama=llama, arguments=(tokens, depths, slots, prefix, layout, every)) -> torch.Tensor:
                    return llama.forward(*arguments)

                seconds = measure(step, 20)
                ideal = Setting(context, 1, 0.0, 0.0, 1.0, 1.0, 1.0, 0)
                rows.append({
                    "attention": choice, "batch": batch, "nodes": count, "ms": 1e3 * seconds,
                    "roofline_ms": 1e3 * step_time(shape, gpu, batch, count, ideal),
                })  # fmt: skip
            del llama
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "(nothing)"
    head = list(rows[0])
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in rows:
        lines.append("| " + " | ".join(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="What only a GPU can show, in one script.")
    parser.add_argument("--cpu-smoke", action="store_true", help="tiny sizes on the CPU, under Triton's interpreter")
    parser.add_argument("--size", choices=("1b", "7b"), default="1b", help="model of the step times")
    parser.add_argument("--budget-s", type=float, default=340.0, help="start nothing new after this many seconds")
    parser.add_argument("--vllm", action=argparse.BooleanOptionalAction, default=not SMOKE, help="the vLLM part")
    parser.add_argument("--json", default="gpu_check.json", help="where to write the results")
    options = parser.parse_args()
    if DEVICE == "cuda" and not torch.cuda.is_available():
        print("no GPU here; try --cpu-smoke", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False
    report: dict[str, Any] = {
        "device": "CPU, Triton's interpreter" if SMOKE else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton_ops.triton.__version__,
    }
    report["checks"] = check_attention() + check_algorithm()
    print(markdown(report["checks"]) + "\n")
    report["step_times"] = step_times(options.size, options.budget_s * (0.45 if options.vllm else 1.0))
    print(markdown(report["step_times"]) + "\n")
    if options.vllm:
        if not SMOKE:
            torch.cuda.empty_cache()
        report["vllm"] = check_vllm(SMOKE, STARTED + options.budget_s)
        print(markdown(report["vllm"]) + "\n")
    report["seconds"] = time.monotonic() - STARTED
    Path(options.json).write_text(json.dumps(report, indent=1))
    failed = [row for row in report["checks"] + report.get("vllm", []) if not row["ok"]]
    print(f"{report['device']}: {len(failed)} failed, {report['seconds']:.0f} s, details in {options.json}")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
