"""The vLLM back ends of `triton.py`: their metadata and their dispatch, with a substitute for FlashAttention.

Run by `test_triton_interpreter.py`. The substitute keeps FlashAttention's contract (bottom-right causal mask, zeros and
+inf where a request has no keys) and is plain PyTorch; the window kernel runs under Triton's interpreter.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import DEVICE, SMALL_COMB, TOLERANCE, error
from scenes import Request, Scene, scene
from xformers_substitutes import substitute_operators

pytest.importorskip("vllm")
if DEVICE != "cpu":
    pytest.skip("stands in for FlashAttention on the CPU", allow_module_level=True)

from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from vllm_sjd_pac.decoding import DraftTree
from vllm_sjd_pac.engine.attention import triton as backend
from vllm_sjd_pac.engine.attention.interface import RequestTree, TreeAttentionBuilder, TreeStep

MIXED = [Request(37, 2, SMALL_COMB), Request(5, 9, None), Request(20, 1, None), Request(16, 0, SMALL_COMB)]


class FlashSubstitute:
    """``flash_attn_varlen_func`` over a paged cache; remembers how it was called."""

    def __init__(self) -> None:
        self.calls: list[dict] = []

    def __call__(self, **arguments):
        self.calls.append(arguments)
        query, out, starts = arguments["q"], arguments["out"], arguments["cu_seqlens_q"].tolist()
        lse = torch.full((query.shape[1], query.shape[0]), float("inf"))
        out.zero_()
        for request, keys in enumerate(arguments["seqused_k"].tolist()):
            rows = slice(starts[request], starts[request + 1])
            if not keys:
                continue
            assert keys <= arguments["max_seqlen_k"]
            places = torch.arange(keys)
            block_size = arguments["k"].shape[1]
            blocks = arguments["block_table"][request].long()[places // block_size]
            group = query.shape[1] // arguments["k"].shape[2]
            k = arguments["k"][blocks, places % block_size].repeat_interleave(group, 1)
            v = arguments["v"][blocks, places % block_size].repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", query[rows], k) * arguments["softmax_scale"]
            if arguments["causal"]:
                length = rows.stop - rows.start
                hidden = places > keys - length + torch.arange(length)[:, None]
                scores = scores.masked_fill(hidden, float("-inf"))
            out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
            lse[:, rows] = scores.logsumexp(-1)
        return out, lse


def tree_step(step: Scene) -> TreeStep:
    return TreeStep(
        tuple(
            RequestTree(index, request.before, request.prefix + request.before, DraftTree(request.tree, 6))
            for index, request in enumerate(step.requests)
            if request.tree
        )
    )


def common_metadata(step: Scene) -> CommonAttentionMetadata:
    lens = torch.tensor(step.query_lens, dtype=torch.int32)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), lens.cumsum(0).int()])
    seq_lens = step.prefix_tensor() + lens
    return CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=seq_lens, num_reqs=len(lens),
        num_actual_tokens=int(starts[-1]), max_query_len=int(lens.max()), max_seq_len=int(seq_lens.max()),
        block_table_tensor=step.block_table, slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
    )  # fmt: skip


def flash_builder(kind: type = backend.FlashTreeMetadataBuilder):
    """Without vLLM's configuration: only what the stock ``build`` reads."""
    builder = object.__new__(kind)
    vars(builder).update(
        aot_schedule=False, aot_sliding_window=(-1, -1), use_full_cuda_graph=False, max_cudagraph_size=None,
        dcp_world_size=1, mm_prefix_query_ranges_np=None, rswa_window=None, num_heads_q=4, num_heads_kv=2,
        tree_step=TreeStep(), block_size=64, kv_cache_spec=SimpleNamespace(dtype=torch.float32),
    )  # fmt: skip
    return builder


def triton_builder():
    builder = object.__new__(backend.TritonTreeMetadataBuilder)
    scratch = torch.zeros(1, 1, 1)
    vars(builder).update(
        seq_threshold_3D=1, num_par_softmax_segments=1, softmax_segm_output=scratch, softmax_segm_max=scratch,
        softmax_segm_expsum=scratch, max_seqs_64_segments=0, rswa_window=None, num_heads_q=4, num_heads_kv=2,
        tree_step=TreeStep(),
    )  # fmt: skip
    return builder


def run(implementation: type, metadata, step: Scene) -> torch.Tensor:
    impl = object.__new__(implementation)
    vars(impl).update(head_size=64, scale=step.scale, num_kv_heads=2, vllm_flash_attn_version=3)
    # Padding behind the last token must stay as it is.
    output = torch.full((step.query.shape[0] + 3, *step.query.shape[1:]), 7.0)
    padded = [torch.cat([tensor, tensor[:3]]) for tensor in (step.query, step.key, step.value)]
    # Physically [blocks, slots, heads, K and V], the one layout that every back end takes.
    cache = torch.cat([step.key_cache, step.value_cache], dim=-1).contiguous().transpose(1, 2)
    impl.forward(None, *padded, cache, metadata, output)
    assert bool((output[-3:] == 7.0).all())
    return output[:-3]


@pytest.mark.parametrize("requests", [MIXED, MIXED[:1], [MIXED[0], MIXED[3]]], ids=["mixed", "one tree", "trees only"])
def test_flash_back_end(requests, monkeypatch):
    step = scene(requests)
    flash = FlashSubstitute()
    monkeypatch.setattr(backend, "flash_attn_varlen_func", flash)
    builder = flash_builder()
    builder.tree_step = tree_step(step)
    metadata = builder.build(0, common_metadata(step))
    assert isinstance(metadata, backend.FlashTreeMetadata)
    assert error(run(backend.FlashTreeImpl, metadata, step), step) <= TOLERANCE
    plain = any(request.tree is None for request in requests)
    assert [call["causal"] for call in flash.calls] == ([True, False] if plain else [False])


def test_triton_back_end():
    step = scene(MIXED)
    builder = triton_builder()
    builder.tree_step = tree_step(step)
    metadata = builder.build(0, common_metadata(step))
    assert error(run(backend.TritonTreeImpl, metadata, step), step) <= TOLERANCE


def test_xformers_back_end(monkeypatch):
    pytest.importorskip("xformers.ops.tree_attention")
    from vllm_sjd_pac.engine.attention import xformers_backend

    substitute_operators(monkeypatch)
    step = scene(MIXED, block_size=64)
    monkeypatch.setattr(backend, "flash_attn_varlen_func", FlashSubstitute())
    builder = flash_builder(xformers_backend.XformersTreeMetadataBuilder)
    builder.tree_step = tree_step(step)
    metadata = builder.build(0, common_metadata(step))
    assert [group.requests for group, _ in metadata.groups] == [(0,), (3,)]
    assert error(run(xformers_backend.XformersTreeImpl, metadata, step), step) <= TOLERANCE


def test_without_the_tree_the_result_is_wrong(monkeypatch):
    """Negative control: the same step described as a chain."""
    step = scene(MIXED)
    monkeypatch.setattr(backend, "flash_attn_varlen_func", FlashSubstitute())
    builder = flash_builder()
    trees = tree_step(step).requests
    chain = DraftTree.chain(len(SMALL_COMB))
    builder.tree_step = TreeStep(tuple(dataclasses.replace(tree, tree=chain) for tree in trees))
    metadata = builder.build(0, common_metadata(step))
    assert error(run(backend.FlashTreeImpl, metadata, step), step) > 100 * TOLERANCE


@pytest.mark.parametrize("builder", [flash_builder, triton_builder])
def test_steps_without_branches_keep_the_stock_metadata(builder):
    built = builder()
    assert isinstance(built, TreeAttentionBuilder)
    assert built.get_cudagraph_support(None, None) is AttentionCGSupport.NEVER
    metadata = built.build(0, common_metadata(scene(MIXED[1:3])))
    assert not hasattr(metadata, "plan")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alibi_slopes": [1.0]}, "ALiBi"),
        ({"sliding_window": (127, 0)}, "sliding window"),
        ({"kv_cache_dtype": "fp8"}, "fp8 KV cache"),
        ({"logits_soft_cap": 30.0}, "soft-capped"),
    ],
)
def test_layers_it_cannot_compute_are_refused_at_start(change, message):
    plain = {
        "alibi_slopes": None, "sliding_window": (-1, -1), "logits_soft_cap": 0, "sinks": None, "attn_type": "decoder",
        "kv_cache_dtype": "auto",
    }  # fmt: skip
    backend.check_supported(SimpleNamespace(**plain))
    with pytest.raises(ValueError, match=message):
        backend.check_supported(SimpleNamespace(**plain | change))
