# mypy: disallow-untyped-defs=False
# Kernel arguments are pointers and scalars of the compiled language, which Python's types cannot say.
"""Three small Triton kernels for attention over draft trees; `triton_ops` launches them and says what they take.

All log-sum-exps are natural logarithms, float32 ``[heads, tokens]`` as FlashAttention returns them; a part that saw no
key has the value -inf (FlashAttention 2 says +inf: read as -inf). Inner products are accumulated in float32, and
float32 inputs are multiplied as float32, not as TF32.

Triton is imported directly: `vllm.triton_utils` hides it on machines without a GPU, where the interpreter
(``TRITON_INTERPRET=1``) can still run these kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _absorb(scores, value, peak, total, acc):
    """Online softmax: take one tile of scores (base-2 logarithms, -inf where masked) and its values."""
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(peak - shift)
    total = total * decay + tl.sum(weights, axis=1)
    acc = acc * decay[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return new_peak, total, acc


@triton.jit
def _prefix_kernel(
    query, key_cache, value_cache, out, lse, block_table, prefix_lens, query_start, tiles,
    scale,
    query_token, query_head, key_block, key_slot, key_head, value_block, value_slot, value_head,
    out_split, out_token, out_head, lse_split, lse_head, lse_token, table_row,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One program: one tile of queries, one key head, one of SPLITS equal parts of the prefix."""
    request = tl.load(tiles + 2 * tl.program_id(0))
    first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    start = tl.load(query_start + request)
    length = tl.load(query_start + request + 1) - start
    prefix = tl.load(prefix_lens + request)

    pair = tl.arange(0, BLOCK_M)
    row = first + pair // GROUP
    head = kv_head * GROUP + pair % GROUP
    row_ok = (pair < TILE_ROWS * GROUP) & (row < length)
    token = (start + row).to(tl.int64)
    dim = tl.arange(0, HEAD_PAD)
    dim_ok = dim < HEAD_SIZE
    query_ok = row_ok[:, None] & dim_ok[None, :]
    query_at = token[:, None] * query_token + head[:, None] * query_head + dim[None, :]
    q = tl.load(query + query_at, mask=query_ok, other=0.0)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    part = tl.cdiv(tl.cdiv(prefix, BLOCK_N), SPLITS) * BLOCK_N
    for begin in range(split * part, tl.minimum(split * part + part, prefix), BLOCK_N):
        place = begin + tl.arange(0, BLOCK_N)
        place_ok = place < prefix
        block = tl.load(block_table + request.to(tl.int64) * table_row + place // BLOCK_SIZE, mask=place_ok, other=0)
        slot = place % BLOCK_SIZE
        key_at = block.to(tl.int64) * key_block + slot * key_slot + kv_head * key_head
        key = tl.load(key_cache + key_at[None, :] + dim[:, None], mask=dim_ok[:, None] & place_ok[None, :], other=0.0)
        scores = tl.dot(q, key, input_precision="ieee") * (scale * LOG2E)
        scores = tl.where(place_ok[None, :], scores, float("-inf"))
        value_at = block.to(tl.int64) * value_block + slot * value_slot + kv_head * value_head
        value = tl.load(
            value_cache + value_at[:, None] + dim[None, :], mask=place_ok[:, None] & dim_ok[None, :], other=0.0
        )
        peak, total, acc = _absorb(scores, value, peak, total, acc)

    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    result = tl.where(empty, float("-inf"), (peak + tl.log2(tl.where(empty, 1.0, total))) * LN2)
    out_at = split.to(tl.int64) * out_split + token[:, None] * out_token + head[:, None] * out_head + dim[None, :]
    tl.store(out + out_at, acc.to(out.dtype.element_ty), mask=query_ok)
    tl.store(lse + split * lse_split + head * lse_head + token * lse_token, result, mask=row_ok)


@triton.jit
def _window_kernel(
    query, key, value, prefix_out, prefix_lse, out, lse, query_start, roots, node_start, ancestors, tiles,
    scale, words,
    query_token, query_head, key_token, key_head, value_token, value_head,
    prefix_split, prefix_token, prefix_head, prefix_lse_split, prefix_lse_head, prefix_lse_token,
    out_token, out_head, lse_head, lse_token,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr, TILE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, WORD: tl.constexpr, WRITE_LSE: tl.constexpr,
):  # fmt: skip
    """One program: one tile of queries, one key head; all the keys of the window that the tile may see."""
    request = tl.load(tiles + 2 * tl.program_id(0))
    first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    kv_head = tl.program_id(1)
    start = tl.load(query_start + request)
    length = tl.load(query_start + request + 1) - start
    root = tl.load(roots + request)
    nodes = tl.load(node_start + request)

    pair = tl.arange(0, BLOCK_M)
    row = first + pair // GROUP
    head = kv_head * GROUP + pair % GROUP
    row_ok = (pair < TILE_ROWS * GROUP) & (row < length)
    is_node = row_ok & (row >= root)
    token = (start + row).to(tl.int64)
    dim = tl.arange(0, HEAD_PAD)
    dim_ok = dim < HEAD_SIZE
    query_ok = row_ok[:, None] & dim_ok[None, :]
    query_at = token[:, None] * query_token + head[:, None] * query_head + dim[None, :]
    q = tl.load(query + query_at, mask=query_ok, other=0.0)

    # The prefix part is where the online softmax starts from.
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    lse_at = prefix_lse + head * prefix_lse_head + token * prefix_lse_token
    part_at = prefix_out + token[:, None] * prefix_token + head[:, None] * prefix_head + dim[None, :]
    for _ in range(SPLITS):
        part_peak = tl.load(lse_at, mask=row_ok, other=float("-inf")) * LOG2E
        part_peak = tl.where(part_peak == float("inf"), float("-inf"), part_peak)
        part = tl.load(part_at, mask=query_ok, other=0.0).to(tl.float32)
        part = tl.where(part_peak[:, None] == float("-inf"), 0.0, part)
        new_peak = tl.maximum(peak, part_peak)
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        decay = tl.exp2(peak - shift)
        weight = tl.exp2(part_peak - shift)
        total = total * decay + weight
        acc = acc * decay[:, None] + part * weight[:, None]
        peak = new_peak
        lse_at += prefix_lse_split
        part_at += prefix_split

    # Key tiles are laid so that one begins at the root: from there on a tile's bits lie in one word per row.
    for begin in range(root - tl.cdiv(root, BLOCK_N) * BLOCK_N, tl.minimum(first + TILE_ROWS, length), BLOCK_N):
        place = begin + tl.arange(0, BLOCK_N)
        place_ok = (place >= 0) & (place < length)
        at = (start + place).to(tl.int64)
        k = tl.load(
            key + at[None, :] * key_token + kv_head * key_head + dim[:, None],
            mask=dim_ok[:, None] & place_ok[None, :], other=0.0,
        )  # fmt: skip
        scores = tl.dot(q, k, input_precision="ieee") * (scale * LOG2E)
        visible = place_ok[None, :] & (place[None, :] <= row[:, None])
        if begin >= root:
            word = (begin - root) // WORD
            bits = tl.load(ancestors + (nodes + row - root).to(tl.int64) * words + word, mask=is_node, other=0)
            shift_by = ((place - root) % WORD).to(tl.int64)
            visible = visible & (((bits[:, None] >> shift_by[None, :]) & 1) != 0)
        scores = tl.where(visible, scores, float("-inf"))
        v = tl.load(
            value + at[:, None] * value_token + kv_head * value_head + dim[None, :],
            mask=place_ok[:, None] & dim_ok[None, :], other=0.0,
        )  # fmt: skip
        peak, total, acc = _absorb(scores, v, peak, total, acc)

    total_ok = tl.where(total == 0.0, 1.0, total)
    out_at = token[:, None] * out_token + head[:, None] * out_head + dim[None, :]
    tl.store(out + out_at, (acc / total_ok[:, None]).to(out.dtype.element_ty), mask=query_ok)
    if WRITE_LSE:
        result = tl.where(total == 0.0, float("-inf"), (peak + tl.log2(total_ok)) * LN2)
        tl.store(lse + head * lse_head + token * lse_token, result, mask=row_ok)


@triton.jit
def _merge_kernel(
    out_a, lse_a, out_b, lse_b, out, lse,
    a_token, a_head, b_token, b_head, out_token, out_head,
    lse_a_head, lse_a_token, lse_b_head, lse_b_token, lse_head, lse_token,
    HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr,
):  # fmt: skip
    """One program: one token and head."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = tl.arange(0, HEAD_PAD)
    dim_ok = dim < HEAD_SIZE
    a = tl.load(lse_a + head * lse_a_head + token * lse_a_token)
    b = tl.load(lse_b + head * lse_b_head + token * lse_b_token)
    a = tl.where(a == float("inf"), float("-inf"), a)
    b = tl.where(b == float("inf"), float("-inf"), b)
    peak = tl.maximum(a, b)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    weight_a = tl.exp(a - shift)
    weight_b = tl.exp(b - shift)
    total = weight_a + weight_b
    total_ok = tl.where(total == 0.0, 1.0, total)
    part_a = tl.load(out_a + token * a_token + head * a_head + dim, mask=dim_ok, other=0.0).to(tl.float32)
    part_b = tl.load(out_b + token * b_token + head * b_head + dim, mask=dim_ok, other=0.0).to(tl.float32)
    part_a = tl.where(weight_a > 0.0, part_a * weight_a, 0.0)
    part_b = tl.where(weight_b > 0.0, part_b * weight_b, 0.0)
    merged = (part_a + part_b) / total_ok
    tl.store(out + token * out_token + head * out_head + dim, merged.to(out.dtype.element_ty), mask=dim_ok)
    tl.store(lse + head * lse_head + token * lse_token, tl.where(total == 0.0, peak, shift + tl.log(total_ok)))
