"""The kernels compile to machine code for Hopper here, without a GPU: Triton brings its own assembler.

What this shows: valid Triton in compiled mode (the interpreter forgives more); shared memory and registers fit.
What it does not show: that the code runs, or how fast.
"""

from __future__ import annotations

import re
import subprocess

import pytest
import torch

pytest.importorskip("triton.backends.nvidia", reason="Triton's NVIDIA compiler is not installed")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_sjd_pac.engine.attention import triton_kernels
from vllm_sjd_pac.engine.attention.triton_ops import tile_shape

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 227 * 1024
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
POINTERS = {
    "query": "*{t}", "key": "*{t}", "value": "*{t}", "key_cache": "*{t}", "value_cache": "*{t}", "out": "*{t}",
    "prefix_out": "*{t}", "out_a": "*{t}", "out_b": "*{t}", "lse": "*fp32", "prefix_lse": "*fp32", "lse_a": "*fp32",
    "lse_b": "*fp32", "block_table": "*i32", "prefix_lens": "*i32", "query_start": "*i32", "roots": "*i32",
    "node_start": "*i32", "tiles": "*i32", "ancestors": "*i64", "scale": "fp32",
}  # fmt: skip


def compile_for_hopper(name: str, dtype: str, num_warps: int, **constants: int):
    kernel = getattr(triton_kernels, name)
    signature = {
        argument: "constexpr" if argument in constants else POINTERS.get(argument, "i32").format(t=dtype)
        for argument in kernel.arg_names
    }
    # Addresses and strides are multiples of 16 in practice; say so, as a launch would.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, argument in enumerate(kernel.arg_names)
        if argument not in constants and argument not in ("scale", "words")
    }
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(k),): v for k, v in constants.items()}, aligned)
    return triton.compile(source, target=HOPPER, options={"num_warps": num_warps})


def check(compiled, tmp_path) -> None:
    assert compiled.metadata.shared <= SHARED_MEMORY
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    cuobjdump = triton.knobs.nvidia.cuobjdump.path
    usage = subprocess.run([cuobjdump, "-res-usage", str(binary)], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(number) for number in re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    print(f"{compiled.metadata.name}: {compiled.metadata.shared} B shared, {registers} registers, {stack} B stack")
    assert stack <= 1024, "registers spill"


@pytest.mark.parametrize(
    ("dtype", "head_size", "group"),
    [("bf16", 128, 1), ("bf16", 256, 4), ("fp32", 64, 4)],
)
def test_prefix_and_window_kernels_fit_a_hopper_multiprocessor(dtype, head_size, group, tmp_path):
    shape = tile_shape(64 // group, group, head_size, TYPES[dtype])
    check(compile_for_hopper("_prefix_kernel", dtype, **shape, BLOCK_SIZE=16, SPLITS=4), tmp_path)
    check(compile_for_hopper("_window_kernel", dtype, **shape, SPLITS=1, WORD=64, WRITE_LSE=0), tmp_path)


def test_merge_kernel_compiles(tmp_path):
    check(compile_for_hopper("_merge_kernel", "bf16", num_warps=1, HEAD_SIZE=128, HEAD_PAD=128), tmp_path)
