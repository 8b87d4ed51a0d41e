"""Class-conditional LlamaGen: a checkpoint in LlamaGen's own names, converted, against a plain PyTorch forward."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import family_harness as harness
import pytest
import torch
import torch.nn.functional as F
from tiny_llamagen import (
    CLASSES,
    CODES,
    GRID,
    Tensors,
    plain_logits,
    random_checkpoint,
    random_tokenizer,
    write_checkpoint,
)

from vllm_sjd_pac.models.llamagen.convert import convert_tensors
from vllm_sjd_pac.models.llamagen.family import LlamaGenFamily


def plain_pixels(t: Tensors, codes: torch.Tensor) -> torch.Tensor:
    """LlamaGen's decoder: [B, rows, columns] → [B, 3, height, width]."""

    def group(x: torch.Tensor, name: str) -> torch.Tensor:
        parts = x.unflatten(1, (32, -1))
        mean = parts.mean((2, 3, 4), keepdim=True)
        spread = (parts - mean).pow(2).mean((2, 3, 4), keepdim=True)
        normed = ((parts - mean) / (spread + 1e-6).sqrt()).flatten(1, 2)
        return normed * t[f"{name}.weight"][:, None, None] + t[f"{name}.bias"][:, None, None]

    def conv(x: torch.Tensor, name: str) -> torch.Tensor:
        weight = t[f"{name}.weight"]
        return F.conv2d(x, weight, t[f"{name}.bias"], padding=weight.shape[-1] // 2)

    def swish(x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)

    def residual(x: torch.Tensor, name: str) -> torch.Tensor:
        y = conv(swish(group(x, f"{name}.norm1")), f"{name}.conv1")
        y = conv(swish(group(y, f"{name}.norm2")), f"{name}.conv2")
        return y + (conv(x, f"{name}.nin_shortcut") if f"{name}.nin_shortcut.weight" in t else x)

    def attention(x: torch.Tensor, name: str) -> torch.Tensor:
        y = group(x, f"{name}.norm")
        q, k, v = (conv(y, f"{name}.{part}").flatten(2) for part in "qkv")
        weights = (torch.einsum("bcq,bck->bqk", q, k) / x.shape[1] ** 0.5).softmax(-1)
        return x + conv(torch.einsum("bqk,bck->bcq", weights, v).view(x.shape), f"{name}.proj_out")

    book = t["quantize.embedding.weight"]
    book = book / book.pow(2).sum(-1, keepdim=True).sqrt()
    x = conv(conv(book[codes].movedim(-1, 1), "post_quant_conv"), "decoder.conv_in")
    x = residual(attention(residual(x, "decoder.mid.0"), "decoder.mid.1"), "decoder.mid.2")
    for stage in range(5):
        for block in range(2):
            x = residual(x, f"decoder.conv_blocks.{stage}.res.{block}")
            if f"decoder.conv_blocks.{stage}.attn.{block}.norm.weight" in t:
                x = attention(x, f"decoder.conv_blocks.{stage}.attn.{block}")
        if stage < 4:
            x = conv(x.repeat_interleave(2, -1).repeat_interleave(2, -2), f"decoder.conv_blocks.{stage}.upsample.conv")
    return conv(swish(group(x, "decoder.norm_out")), "decoder.conv_out")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llamagen")
    write_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Any]:
    with harness.engine(model, max_model_len=1 + GRID * GRID) as llm:
        yield llm


def family_of(folder: Path) -> LlamaGenFamily:
    from transformers import AutoConfig

    return LlamaGenFamily(AutoConfig.from_pretrained(folder), str(folder))


def test_logits_equal_a_plain_forward(model: Path, engine: Any) -> None:
    family = family_of(model)
    encoded = family.encode_prompt(engine.get_tokenizer(), "7")
    for prompt, label in ((encoded.prompt_token_ids, 7), (encoded.negative_token_ids, CLASSES)):
        tokens = harness.whole_image(family, prompt)[:-1]
        ours, theirs = harness.engine_logits(engine, tokens), plain_logits(random_checkpoint(), label, tokens[1:])
        assert ours.shape == (GRID * GRID, CODES + CLASSES + 1)
        assert (ours[:, :CODES] - theirs).abs().max() <= harness.TOLERANCE
        assert theirs.std() > 0.5, "the reference says next to nothing; the comparison would be empty"
        assert (ours[:, CODES:] == torch.finfo(ours.dtype).min).all(), "classes are never drawn"


@torch.no_grad()
def test_pixels_equal_a_plain_forward(model: Path) -> None:
    codes = torch.randint(CODES, (2, 3, 5), generator=torch.Generator().manual_seed(0))
    pixels = plain_pixels(random_tokenizer(), codes)
    decoder = family_of(model).load_pixel_decoder()
    assert (decoder(codes) - pixels).abs().max() <= 1e-4
    expected = (((pixels + 1) / 2).clamp(0, 1) * 255 + 0.5).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
    assert (decoder.decode(codes).int() - expected.int()).abs().max() <= 1
    assert decoder.decode(codes).shape == (2, 48, 80, 3)
    assert expected.float().std() > 5


def test_prompt_and_layout(model: Path, engine: Any) -> None:
    family = family_of(model)
    encoded = family.encode_prompt(engine.get_tokenizer(), " 7 ", size=(GRID * 16, GRID * 16))
    assert (encoded.prompt_token_ids, encoded.negative_token_ids) == ([CODES + 7], [CODES + CLASSES])
    assert family.encode_prompt(engine.get_tokenizer(), "7", negative_prompt="3").negative_token_ids == [CODES + 3]
    assert engine.get_tokenizer().encode("7") == encoded.prompt_token_ids
    layout = family.layout(encoded.prompt_token_ids)
    assert (layout.rows, layout.columns, layout.length) == (GRID, GRID, GRID * GRID)
    assert layout.vocabulary.tolist() == list(range(CODES))
    image = harness.whole_image(family, encoded.prompt_token_ids)
    assert {family.segment_start(image[:end]) for end in range(1, len(image))} == {1}
    assert family.segment_start(image) is None


def test_prompts_that_are_no_class_and_other_sizes_are_refused() -> None:
    config = SimpleNamespace(codebook_size=16384, num_classes=1000, grid_size=24)
    family = LlamaGenFamily(config, "llamagen")
    for prompt in ("a boat", "1000", "", "-1"):
        with pytest.raises(ValueError, match="this model draws classes; give the number of one, 0 to 999"):
            family.encode_prompt(None, prompt)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="size 256x256 is not supported by this model; supported: 384x384"):
        family.encode_prompt(None, "7", size=(256, 256))  # type: ignore[arg-type]
    assert family.layout(()).length == 576
    layout = family.layout([16384 + 207])
    assert (layout.length, layout.image_token_start, layout.image_token_count) == (576, 0, 16384)


def test_converter_names_what_is_wrong() -> None:
    good = random_checkpoint()
    with pytest.raises(ValueError, match=r"lacks layers\.1\.ffn_norm\.weight"):
        convert_tensors({name: tensor for name, tensor in good.items() if name != "layers.1.ffn_norm.weight"})
    with pytest.raises(ValueError, match="unexpected tensors in the LlamaGen checkpoint: surprise"):
        convert_tensors(good | {"surprise": torch.zeros(1)})
    with pytest.raises(ValueError, match="text-conditional"):
        convert_tensors(good | {"cls_embedding.uncond_embedding": torch.zeros(120, 2048)})
