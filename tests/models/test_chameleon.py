"""Lumina-mGPT and Anole on small random checkpoints in their published formats."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import family_harness as harness
import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_sjd_pac.models.chameleon import tokens as ids
from vllm_sjd_pac.models.chameleon.family import AnoleFamily, LuminaMGPTFamily, chameleon_family

VOCABULARY = 8960
HEADS, HEAD_SIZE = 2, 32
WORDS = ("a", "red", "boat", "Generate", "an", "image", "of", "64x64", "according", "to", "the", "following", "prompt:")


def vocabulary_map() -> dict[str, int]:
    names = {
        "<s>": 0,
        "<pad>": 1,
        "</s>": 2,
        "<unk>": 3,
        "<eoss>": ids.END_OF_IMAGE,
        "<racm3:break>": ids.BEGIN_OF_IMAGE,
    }
    for code in range(ids.IMAGE_COUNT):
        letters = "".join("ABCDEFGHIJ"[int(digit)] for digit in str(code))
        names[f"IMGIMG{letters}Z"] = ids.IMAGE_START + code
    names |= {f"<reserved{number:05d}>": number + 4 for number in range(8706, VOCABULARY - 4)}
    names["<image>"] = 8711
    return names | {word: 8200 + index for index, word in enumerate(WORDS)}


def write_reference(folder: Path, *, rows: int, seed: int) -> Any:
    """A random ``ChameleonForConditionalGeneration``, saved; its qk-norm has `rows` different rows."""
    from transformers import ChameleonConfig, ChameleonForConditionalGeneration

    torch.manual_seed(seed)
    config = ChameleonConfig(
        vocab_size=VOCABULARY,
        hidden_size=HEADS * HEAD_SIZE,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=512,
        vocabulary_map=vocabulary_map(),
        bos_token_id=0,
        eos_token_id=8710,
        pad_token_id=1,
        vq_config={
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "latent_channels": 32,
            "embed_dim": 32,
            "resolution": 32,
        },
    )
    reference = harness.shake(ChameleonForConditionalGeneration(config), seed)
    with torch.no_grad():
        for layer in reference.model.layers:
            for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                for parameter in (norm.weight, norm.bias):
                    parameter.copy_(parameter[:rows].repeat_interleave(HEADS // rows, dim=0))
    reference.save_pretrained(folder)
    harness.write_tokenizer(folder, vocabulary_map(), unknown="<unk>")
    return reference


@torch.no_grad()
def reference_logits(reference: Any, tokens: list[int]) -> torch.Tensor:
    """Unmasked logits: `forward` of transformers hides image tokens, which these models draw."""
    return reference.lm_head(reference.model(torch.tensor([tokens])).last_hidden_state[0])


def make_lumina(folder: Path) -> Any:
    """Lumina-mGPT's own format: one qk-norm row for all heads, no image tokenizer, its trainer's architecture name."""
    reference = write_reference(folder, rows=1, seed=1)
    tensors = {
        name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if "vqmodel" not in name
    }
    for name in tensors:
        if "self_attn.q_norm." in name or "self_attn.k_norm." in name:
            tensors[name] = tensors[name][:1].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    harness.update_config(folder, architectures=["ChameleonXLLMXForConditionalGeneration"], target_size=64)
    return reference


def make_anole(folder: Path) -> Any:
    """The format of transformers: one qk-norm row per head, the image encoder in the checkpoint."""
    reference = write_reference(folder, rows=HEADS, seed=2)
    harness.update_config(folder, image_grid_size=4)
    return reference


@pytest.fixture(scope="module", params=[make_lumina, make_anole], ids=["lumina_mgpt", "anole"])
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
