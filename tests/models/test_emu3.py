"""Emu3-Gen on a small random checkpoint in transformers' format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import family_harness as harness
import pytest
import torch
from tiny_emu3 import CODES, reference_logits, write_reference

from vllm_sjd_pac.models.emu3.family import NEGATIVE, QUALITY, Emu3Family


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("emu3")
    return folder, write_reference(folder)


@pytest.fixture(scope="module")
def engine(model: tuple[Path, Any]) -> Iterator[Any]:
    with harness.engine(model[0]) as llm:
        yield llm


def family_of(folder: Path) -> Emu3Family:
    from transformers import AutoConfig

    return Emu3Family(AutoConfig.from_pretrained(folder), str(folder))


def test_logits_equal_transformers(model: tuple[Path, Any], engine: Any) -> None:
    folder, reference = model
    family = family_of(folder)
    encoded = family.encode_prompt(engine.get_tokenizer(), "a red boat", size=(10, 6))
    for prompt in (encoded.prompt_token_ids, encoded.negative_token_ids):
        tokens = harness.whole_image(family, prompt)
        ours, theirs = harness.engine_logits(engine, tokens), reference_logits(reference, tokens)
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= harness.TOLERANCE
        assert theirs.std() > 0.5, "the reference says next to nothing; the comparison would be empty"


@torch.no_grad()
def test_pixels_equal_transformers(model: tuple[Path, Any]) -> None:
    folder, reference = model
    codes = torch.randint(CODES, (2, 3, 5), generator=torch.Generator().manual_seed(0))
    pixels = reference.model.vqmodel.decode(codes)
    expected = ((pixels.clamp(-1, 1) + 1) / 2 * 255).to(torch.uint8).permute(0, 2, 3, 1)
    decoder = family_of(folder).load_pixel_decoder()
    assert decoder.decode(codes).shape == (2, 6, 10, 3)
    assert (decoder.decode(codes).int() - expected.int()).abs().max() <= 1
    assert expected.float().std() > 5
    unfinished = torch.where(torch.arange(15).view(3, 5) < 7, codes, -1)
    assert (decoder.decode(unfinished)[:, 4:] == 128).all()


class LetterTokenizer:
    """One token per word, ids from 200 on; no begin-of-text, as Emu3's tokenizer."""

    def encode(self, text: str) -> list[int]:
        return [200 + len(word) for word in text.split()]


def published() -> Emu3Family:
    """With the published checkpoint's ids, which stand in the code for configurations without a vocabulary."""
    text = SimpleNamespace(bos_token_id=151849)
    vq = SimpleNamespace(channel_multiplier=[1, 2, 2, 4], codebook_size=32768)
    return Emu3Family(SimpleNamespace(get_text_config=lambda: text, vq_config=vq), "emu3")


def test_prompt_and_layout_at_720() -> None:
    family = published()
    encoded = family.encode_prompt(LetterTokenizer(), "a red boat", size=(720, 720))
    header = [151852, 24, 15, 9, 24, 15, 151851]  # "90*90"
    assert encoded.prompt_token_ids == [151849, *LetterTokenizer().encode("a red boat" + QUALITY), *header]
    assert encoded.negative_token_ids == [151849, *LetterTokenizer().encode(NEGATIVE), *header]
    layout = family.layout(encoded.prompt_token_ids)
    assert (layout.rows, layout.columns, layout.length) == (90, 90, 90 * 91 + 2)
    forced = layout.forced_table
    assert (forced[90 : 90 * 91 : 91] == 151846).all()
    assert forced[-2:].tolist() == [151847, 151853]
    assert (forced >= 0).sum() == 92
    assert layout.vocabulary.tolist() == [151846, 151847, 151853, *range(151854, 151854 + 32768)]


def test_rows_are_written_before_columns() -> None:
    family = published()
    tokens = family.encode_prompt(LetterTokenizer(), "a boat", size=(960, 544)).prompt_token_ids
    assert tokens[-8:] == [151852, 15 + 6, 15 + 8, 9, 15 + 1, 15 + 2, 15 + 0, 151851]  # "68*120"
    layout = family.layout(tokens)
    assert (layout.rows, layout.columns) == (68, 120)


def test_unsupported_sizes_are_refused_with_the_supported_ones() -> None:
    with pytest.raises(ValueError, match=r"size 512x512 is not supported.*720x720, 832x624, 624x832, .*960x544"):
        published().encode_prompt(LetterTokenizer(), "a boat", size=(512, 512))


def test_segment_is_open_from_the_image_token_to_the_end_of_the_image(model: tuple[Path, Any]) -> None:
    family = family_of(model[0])
    prompt = family.encode_prompt(LetterTokenizer(), "a boat").prompt_token_ids
    image = harness.whole_image(family, prompt)
    assert family.segment_start(prompt[:-1]) is None
    assert {family.segment_start(image[:end]) for end in range(len(prompt), len(image))} == {len(prompt)}
    assert family.segment_start(image) is None
    assert family.begins_segment(prompt[-1])
    nonsense = [*prompt[:-4], *prompt[-1:]]
    assert published().layout(()).length == 90 * 91 + 2
    assert family.segment_start(nonsense) is None, "no size before the image token"


def test_the_unconditional_prompt_has_the_size_of_the_prompt(model: tuple[Path, Any], engine: Any) -> None:
    family = family_of(model[0])
    encoded = family.encode_prompt(engine.get_tokenizer(), "a red boat", size=(10, 6))
    assert family.unconditional(encoded.prompt_token_ids) == encoded.negative_token_ids
