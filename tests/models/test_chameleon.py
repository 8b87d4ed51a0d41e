"""Lumina-mGPT and Anole on small random checkpoints in their published formats."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import family_harness as harness
import pytest
import torch
from tiny_chameleon import random_vqgan, reference_logits, vocabulary_map, write_anole, write_lumina

from vllm_sjd_pac.models.chameleon import tokens as ids
from vllm_sjd_pac.models.chameleon.family import AnoleFamily, LuminaMGPTFamily, chameleon_family


@pytest.fixture(scope="module", params=[write_lumina, write_anole], ids=["lumina_mgpt", "anole"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("model")
    return folder, request.param(folder)


@pytest.fixture(scope="module")
def engine(model: tuple[Path, Any]) -> Iterator[Any]:
    with harness.engine(model[0]) as llm:
        yield llm


def family_of(folder: Path) -> Any:
    from transformers import AutoConfig

    return chameleon_family(AutoConfig.from_pretrained(folder), str(folder))


def test_logits_equal_transformers(model: tuple[Path, Any], engine: Any) -> None:
    folder, reference = model
    family = family_of(folder)
    encoded = family.encode_prompt(engine.get_tokenizer(), "a red boat")
    for prompt in (encoded.prompt_token_ids, encoded.negative_token_ids):
        tokens = harness.whole_image(family, prompt)
        ours, theirs = harness.engine_logits(engine, tokens), reference_logits(reference, tokens)
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= harness.TOLERANCE
        assert theirs.std() > 0.5, "the reference says next to nothing; the comparison would be empty"


class WordTokenizer:
    """Every word is token 8200 + its length; begins with ``<s>`` as Chameleon's tokenizer does."""

    def encode(self, text: str) -> list[int]:
        return [ids.BEGIN_OF_TEXT, *(8200 + len(word) for word in text.split())]


def lumina(**fields: Any) -> LuminaMGPTFamily:
    return LuminaMGPTFamily(SimpleNamespace(**fields), "Lumina-mGPT-7B-768")


def test_lumina_prompt_and_layout_at_768() -> None:
    family = lumina()
    encoded = family.encode_prompt(WordTokenizer(), "a red boat", size=(768, 768))
    begin = [8197, 8804 + 24, 8804 + 24]
    words = [
        "Generate",
        "an",
        "image",
        "of",
        "768x768",
        "according",
        "to",
        "the",
        "following",
        "prompt:",
        "a",
        "red",
        "boat",
    ]
    assert encoded.prompt_token_ids == [0, *(8200 + len(word) for word in words), 8710, *begin]
    assert encoded.negative_token_ids == begin == family.unconditional(encoded.prompt_token_ids)
    layout = family.layout(encoded.prompt_token_ids)
    assert (layout.rows, layout.columns, layout.row_length, layout.length) == (48, 48, 49, 48 * 49 + 1)
    forced = layout.forced_table
    assert (forced[48 : 48 * 49 : 49] == 8803).all()
    assert forced[-1] == 8196
    assert (forced >= 0).sum() == 49
    assert layout.vocabulary.tolist() == [*range(4, 8197), 8803]


def test_tokens_that_open_no_image_have_the_layout_of_the_default_size() -> None:
    assert lumina().layout(()).length == 48 * 49 + 1
    assert AnoleFamily(SimpleNamespace(), "anole").layout(()).length == 1025


def test_lumina_writes_height_before_width() -> None:
    family = lumina()
    encoded = family.encode_prompt(WordTokenizer(), "a boat", size=(1024, 576))
    assert encoded.prompt_token_ids[-3:] == [8197, 8804 + 18, 8804 + 32]
    layout = family.layout(encoded.prompt_token_ids)
    assert (layout.rows, layout.columns) == (36, 64)


@pytest.mark.parametrize(
    ("path", "length", "side"),
    [
        ("x/Lumina-mGPT-7B-768", 4096, 768),
        ("x/Lumina-mGPT-7B-768-Omni", 4096, 768),
        ("x/Lumina-mGPT-7B-1024", 10240, 1024),
        ("x/Lumina-mGPT-7B-512", 4096, 512),
        ("cache/models--Alpha-VLLM--Lumina-mGPT-7B-1024/snapshots/f00d", 4096, 1024),
        ("renamed", 10240, 1024),
        ("renamed", 4096, 768),
    ],
)
def test_lumina_takes_the_size_from_name_or_context(path: str, length: int, side: int) -> None:
    family = LuminaMGPTFamily(SimpleNamespace(max_position_embeddings=length), path)
    assert family.sizes[0] == (side, side)
    assert all(w * h <= side * side and max(w, h) <= 4 * min(w, h) and w % 32 == h % 32 == 0 for w, h in family.sizes)
    assert (side // 2, side * 2) in family.sizes


def test_unsupported_sizes_are_refused_with_the_supported_ones() -> None:
    with pytest.raises(ValueError, match=r"size 700x700 is not supported.*768x768.*1024x576"):
        lumina().encode_prompt(WordTokenizer(), "a boat", size=(700, 700))
    with pytest.raises(ValueError, match="size 768x768 is not supported by this model; supported: 512x512"):
        AnoleFamily(SimpleNamespace(), "anole").encode_prompt(WordTokenizer(), "a boat", size=(768, 768))
    with pytest.raises(ValueError, match="prompt is empty"):
        lumina().encode_prompt(WordTokenizer(), "  ")


def test_lumina_segment_is_open_from_the_second_size_token_to_the_end_of_image() -> None:
    family = lumina(target_size=64)
    prompt = family.encode_prompt(WordTokenizer(), "a boat").prompt_token_ids
    image = harness.whole_image(family, prompt)
    assert [family.segment_start(prompt[:-back]) for back in (1, 2, 3)] == [None, None, None]
    assert {family.segment_start(image[:end]) for end in range(len(prompt), len(image))} == {len(prompt)}
    assert family.segment_start(image) is None
    assert family.begins_segment(prompt[-1])
    assert not family.begins_segment(ids.END_OF_LINE)
    assert family.segment_start([*prompt[:-2], 8804 + 31, 8804 + 31]) is None, "a size the model does not draw"


def test_anole_prompt_and_layout() -> None:
    family = AnoleFamily(SimpleNamespace(), "anole")
    encoded = family.encode_prompt(WordTokenizer(), "a boat")
    assert encoded.prompt_token_ids == [0, 8201, 8204, 8710, 8197]
    assert encoded.negative_token_ids == [0, 8197]
    layout = family.layout(encoded.prompt_token_ids)
    assert layout.length == 1025
    assert (layout.forced_table[:-1] < 0).all()
    assert layout.forced_table[-1] == 8196


XLLMX, PLAIN = "ChameleonXLLMXForConditionalGeneration", "ChameleonForConditionalGeneration"


@pytest.mark.parametrize(
    ("fields", "path", "expected"),
    [
        ({"architectures": [XLLMX]}, "m", LuminaMGPTFamily),
        ({"architectures": [PLAIN], "z_loss_weight": 1e-5}, "m", LuminaMGPTFamily),
        ({"architectures": [PLAIN]}, "x/lumina-768", LuminaMGPTFamily),
        ({"architectures": [PLAIN]}, "Anole-7b-v0.1-hf", AnoleFamily),
        ({"architectures": [XLLMX], "image_family": "anole"}, "m", AnoleFamily),
    ],
)
def test_which_family_a_chameleon_checkpoint_is(fields: dict[str, Any], path: str, expected: type) -> None:
    assert type(chameleon_family(SimpleNamespace(**fields), path)) is expected


def test_codes_follow_the_vocabulary_when_it_is_shuffled() -> None:
    names = vocabulary_map()
    assert ids.code_order(names) is None
    first, second = "IMGIMGAZ", "IMGIMGBZ"
    names[first], names[second] = names[second], names[first]
    order = ids.code_order(names)
    assert order is not None
    assert order[:3].tolist() == [1, 0, 2]


def plain_vqgan(t: dict[str, torch.Tensor], codes: torch.Tensor) -> torch.Tensor:
    """The decoder as its paper describes it: [B, rows, columns] → [B, 3, height, width]."""

    def group(x: torch.Tensor, name: str) -> torch.Tensor:
        parts = x.unflatten(1, (32, -1))
        mean = parts.mean((2, 3, 4), keepdim=True)
        spread = (parts - mean).pow(2).mean((2, 3, 4), keepdim=True)
        normed = ((parts - mean) / (spread + 1e-6).sqrt()).flatten(1, 2)
        return normed * t[f"{name}.weight"][:, None, None] + t[f"{name}.bias"][:, None, None]

    def conv(x: torch.Tensor, name: str) -> torch.Tensor:
        weight = t[f"{name}.weight"]
        return torch.nn.functional.conv2d(x, weight, t[f"{name}.bias"], padding=weight.shape[-1] // 2)

    def swish(x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)

    def residual(x: torch.Tensor, name: str) -> torch.Tensor:
        y = conv(swish(group(x, f"{name}.norm1")), f"{name}.conv1")
        y = conv(swish(group(y, f"{name}.norm2")), f"{name}.conv2")
        return y + (conv(x, f"{name}.nin_shortcut") if f"{name}.nin_shortcut.weight" in t else x)

    x = conv(conv(t["quantize.embedding.weight"][codes].movedim(-1, 1), "post_quant_conv"), "decoder.conv_in")
    x = residual(x, "decoder.mid.block_1")
    y = group(x, "decoder.mid.attn_1.norm")
    q, k, v = (conv(y, f"decoder.mid.attn_1.{part}").flatten(2) for part in "qkv")
    weights = (torch.einsum("bcq,bck->bqk", q, k) / x.shape[1] ** 0.5).softmax(-1)
    x = x + conv(torch.einsum("bqk,bck->bcq", weights, v).view(x.shape), "decoder.mid.attn_1.proj_out")
    x = residual(x, "decoder.mid.block_2")
    for stage in (4, 3, 2, 1, 0):
        for block in range(3):
            x = residual(x, f"decoder.up.{stage}.block.{block}")
        if stage:
            x = conv(x.repeat_interleave(2, -1).repeat_interleave(2, -2), f"decoder.up.{stage}.upsample.conv")
    return conv(swish(group(x, "decoder.norm_out")), "decoder.conv_out")


@torch.no_grad()
@pytest.mark.parametrize("place", ["vqgan.ckpt", "ckpts/chameleon/tokenizer/vqgan.ckpt"])
def test_pixels_equal_a_plain_forward(tmp_path: Path, place: str) -> None:
    file = tmp_path / place
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"state_dict": random_vqgan() | {"loss.logvar": torch.zeros(())}}, file)
    decoder = LuminaMGPTFamily(SimpleNamespace(target_size=64), str(tmp_path)).load_pixel_decoder()
    codes = torch.randint(ids.IMAGE_COUNT, (2, 2, 3), generator=torch.Generator().manual_seed(0))
    pixels = plain_vqgan(random_vqgan(), codes)
    assert (decoder.decoder(codes) - pixels).abs().max() <= 1e-4
    expected = ((pixels.clamp(-1, 1) + 1) / 2 * 255).to(torch.uint8).permute(0, 2, 3, 1)
    assert (decoder.decode(codes).int() - expected.int()).abs().max() <= 1
    assert decoder.decode(codes).shape == (2, 32, 48, 3)
    assert expected.float().std() > 5
    unfinished = torch.where(torch.arange(6).view(2, 3) < 3, codes, -1)
    assert (decoder.decode(unfinished)[:, 16:] == 128).all()


def test_a_missing_pixel_decoder_is_explained(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"vqgan\.ckpt \(from Meta's Chameleon release\) is missing"):
        LuminaMGPTFamily(SimpleNamespace(), str(tmp_path)).load_pixel_decoder()


def test_a_broken_pixel_decoder_names_the_tensor(tmp_path: Path) -> None:
    tensors = random_vqgan()
    del tensors["decoder.up.3.block.1.norm2.bias"]
    torch.save({"state_dict": tensors}, tmp_path / "vqgan.ckpt")
    with pytest.raises(ValueError, match=r"missing tensors \['decoder\.up\.1\.block\.1\.norm2\.bias'\]"):
        LuminaMGPTFamily(SimpleNamespace(), str(tmp_path)).load_pixel_decoder()
