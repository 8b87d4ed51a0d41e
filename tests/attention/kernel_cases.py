"""The Triton kernels against float64: run by `test_triton_interpreter.py` under the interpreter, in its own process.

On a machine with a GPU the same file runs compiled: ``pytest tests/attention/kernel_cases.py``.
"""

from __future__ import annotations

import random

import pytest
import torch
from scenes import Request, Scene, random_tree, scene

from vllm_sjd_pac.decoding import DraftTree
from vllm_sjd_pac.engine.attention import triton_ops
from vllm_sjd_pac.engine.attention.reference import merge_states_reference
from vllm_sjd_pac.engine.attention.window import WindowLayout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 1e-4
SMALL_COMB = DraftTree.comb(17, (2, 2, 1), 1).parents


def attend(step: Scene, splits: int = 1, layout: WindowLayout | None = None) -> torch.Tensor:
    return triton_ops.tree_attention(
        step.query, step.key, step.value, step.key_cache, step.value_cache, step.block_table, step.prefix_tensor(),
        layout or step.layout(), step.scale, splits,
    )  # fmt: skip


def error(got: torch.Tensor, step: Scene) -> float:
    return float((got.double().cpu() - step.expected()[0]).abs().max())


@pytest.mark.parametrize("seed", range(6))
def test_random_trees_prefixes_and_mixed_batches(seed):
    rng = random.Random(seed)
    requests = [
        Request(rng.choice((1, 15, 16, 17, 83)), rng.randrange(4), random_tree(rng.randrange(1, 40), rng)),
        Request(rng.randrange(0, 40), rng.randrange(1, 25), None),  # a prompt chunk
        Request(rng.randrange(1, 70), 1, None),  # a one-token decode
        Request(rng.randrange(1, 60), 0, random_tree(rng.randrange(2, 20), rng)),
    ]
    rng.shuffle(requests)
    step = scene(requests, seed=seed)
    assert error(attend(step), step) <= TOLERANCE


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (7, 1), (6, 2)])
def test_grouped_query_heads(heads, kv_heads):
    step = scene([Request(33, 1, SMALL_COMB), Request(20, 1, None)], heads, kv_heads, seed=heads)
    assert error(attend(step), step) <= TOLERANCE


@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
def test_head_sizes(head_size):
    step = scene([Request(21, 2, SMALL_COMB)], 2, 1, head_size, seed=head_size)
    assert error(attend(step), step) <= TOLERANCE


@pytest.mark.parametrize("block_size", [16, 32, 48, 128])
def test_block_sizes(block_size):
    step = scene([Request(130, 0, SMALL_COMB), Request(block_size, 1, SMALL_COMB)], 2, 1, block_size=block_size)
    assert error(attend(step), step) <= TOLERANCE


@pytest.mark.parametrize("splits", [2, 4, 16])
def test_a_prefix_cut_into_parts_gives_the_same(splits):
    step = scene([Request(300, 1, SMALL_COMB), Request(3, 0, SMALL_COMB)], 2, 1)
    assert error(attend(step, splits), step) <= TOLERANCE


def test_masks_of_many_words():
    tree = random_tree(200, random.Random(3))
    step = scene([Request(18, 3, tree)], 1, 1, 16)
    assert step.layout().ancestors.shape[1] == 4
    assert error(attend(step), step) <= TOLERANCE


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
def test_half_precision(dtype, tolerance):
    if DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bit patterns of bfloat16 as integers; compiled code does not")
    step = scene([Request(40, 1, SMALL_COMB), Request(7, 5, None)], dtype=dtype)
    assert error(attend(step), step) <= tolerance


def test_log_sum_exp_of_the_whole_step():
    step = scene([Request(40, 1, SMALL_COMB), Request(0, 5, None)])
    layout = step.layout()
    prefix = triton_ops.paged_prefix_attention(
        step.query, step.key_cache, step.value_cache, step.block_table, step.prefix_tensor(), layout, step.scale
    )
    lse = torch.empty(step.query.shape[1], step.query.shape[0], device=DEVICE)
    triton_ops.window_attention(step.query, step.key, step.value, layout, *prefix, step.scale, lse=lse)
    assert float((lse.double().cpu() - step.expected()[1]).abs().max()) <= TOLERANCE


def test_the_window_may_overwrite_the_prefix_part():
    """As the FlashAttention back end does: one buffer for both."""
    step = scene([Request(40, 1, SMALL_COMB), Request(9, 1, SMALL_COMB)])
    layout = step.layout()
    out, lse = triton_ops.paged_prefix_attention(
        step.query, step.key_cache, step.value_cache, step.block_table, step.prefix_tensor(), layout, step.scale
    )
    triton_ops.window_attention(step.query, step.key, step.value, layout, out[0], lse[0], step.scale, out=out[0])
    assert error(out[0], step) <= TOLERANCE


def test_infinite_log_sum_exp_means_no_prefix():
    """FlashAttention 2 says +inf for a request without keys, and what it leaves in the output does not matter."""
    step = scene([Request(0, 0, SMALL_COMB)])
    prefix_out = torch.full_like(step.query, float("nan"))
    lse = torch.full((step.query.shape[1], step.query.shape[0]), float("inf"), device=DEVICE)
    got = triton_ops.window_attention(step.query, step.key, step.value, step.layout(), prefix_out, lse, step.scale)
    assert error(got, step) <= TOLERANCE


@pytest.mark.parametrize("bit", ["ancestor hidden", "sibling visible", "root hidden"])
def test_one_wrong_mask_bit_shows(bit):
    """The negative control: the comparison above notices every kind of wrong mask."""
    tree = (-1, 0, 1, 2, 0, 4, 0)  # main chain 1, 2, 3; branch 4 → 5; branch 6
    step = scene([Request(12, 1, tree)], 2, 1)
    layout = step.layout()
    row, flip = {"ancestor hidden": (5, 4), "sibling visible": (6, 4), "root hidden": (6, 0)}[bit]
    layout.ancestors[row, 0] ^= 1 << flip
    assert error(attend(step, layout=layout), step) > 100 * TOLERANCE


def test_causal_instead_of_tree_shows():
    step = scene([Request(12, 1, SMALL_COMB)], 2, 1)
    chain = tuple(range(-1, len(SMALL_COMB) - 1))
    assert error(attend(step, layout=step.layout([chain])), step) > 100 * TOLERANCE


def test_wrong_prefix_length_shows():
    step = scene([Request(12, 1, SMALL_COMB)], 2, 1)
    step_short = scene([Request(12, 1, SMALL_COMB)], 2, 1)
    step_short.requests = [Request(11, 1, SMALL_COMB)]
    assert error(attend(step_short), step) > 100 * TOLERANCE


def test_merge_equals_attention_over_both_parts():
    made = torch.Generator().manual_seed(5)
    query, keys, values = (torch.randn(n, 3, 48, generator=made) for n in (6, 20, 20))

    def part(chosen: slice) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.einsum("qhd,khd->hqk", query, keys[chosen])
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values[chosen]), scores.logsumexp(-1)

    whole_out, whole_lse = part(slice(0, 20))
    moved = [tensor.to(DEVICE) for tensor in (*part(slice(0, 7)), *part(slice(7, 20)))]
    out, lse = triton_ops.merge_states(*moved)
    assert float((out.cpu() - whole_out).abs().max()) <= TOLERANCE
    assert float((lse.cpu() - whole_lse).abs().max()) <= TOLERANCE
    reference_out, reference_lse = merge_states_reference(*(tensor.cpu() for tensor in moved))
    assert float((out.double().cpu() - reference_out).abs().max()) <= TOLERANCE
    assert float((lse.double().cpu() - reference_lse).abs().max()) <= TOLERANCE


def test_merge_with_empty_parts():
    out = torch.randn(4, 2, 16, device=DEVICE)
    lse = torch.randn(2, 4, device=DEVICE)
    nothing = torch.full_like(lse, float("-inf"))
    merged, merged_lse = triton_ops.merge_states(out, lse, torch.full_like(out, float("nan")), nothing)
    torch.testing.assert_close(merged, out)
    torch.testing.assert_close(merged_lse, lse)
    merged, merged_lse = triton_ops.merge_states(out, nothing, out, nothing)
    assert not merged.any()
    assert torch.isinf(merged_lse).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3, "kv_heads": 2}, "do not divide"),
        ({"head_size": 12}, "head size"),
        ({"dtype": torch.float64}, "float type"),
    ],
)
def test_what_the_kernels_cannot_do_is_said(change, message):
    step = scene([Request(4, 1, SMALL_COMB)], **{"heads": 2, "kv_heads": 1, "head_size": 16} | change)
    with pytest.raises(ValueError, match=message):
        attend(step)
