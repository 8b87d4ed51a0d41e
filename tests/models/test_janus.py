"""Janus-Pro on a small random checkpoint in transformers' format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import family_harness as harness
import pytest
import torch
from tiny_janus import CODES, GRID, NAMES, TEXT, reference_logits, write_reference

from vllm_sjd_pac.models.janus.family import BEGIN_OF_IMAGE, PAD, JanusFamily
from vllm_sjd_pac.models.janus.vocabulary import merge_vocabularies


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("janus")
    return folder, write_reference(folder)


@pytest.fixture(scope="module")
def engine(model: tuple[Path, Any]) -> Iterator[Any]:
    with harness.engine(model[0]) as llm:
        yield llm


def family_of(folder: Path) -> JanusFamily:
    from transformers import AutoConfig

    return JanusFamily(AutoConfig.from_pretrained(folder), str(folder))


def test_logits_equal_transformers(model: tuple[Path, Any], engine: Any) -> None:
    folder, reference = model
    family = family_of(folder)
    encoded = family.encode_prompt(engine.get_tokenizer(), "a red boat")
    for prompt in (encoded.prompt_token_ids, encoded.negative_token_ids):
        tokens = harness.whole_image(family, prompt)
        ours, theirs = harness.engine_logits(engine, tokens), reference_logits(reference, tokens)
        assert ours.shape == (len(tokens), TEXT + CODES)
        assert (ours[:, TEXT:] - theirs).abs().max() <= harness.TOLERANCE
        assert theirs.std() > 0.5, "the reference says next to nothing; the comparison would be empty"
        assert (ours[:, :TEXT] == torch.finfo(ours.dtype).min).all(), "text is never drawn"


@torch.no_grad()
def test_pixels_equal_transformers(model: tuple[Path, Any]) -> None:
    folder, reference = model
    codes = torch.randint(CODES, (2, GRID, GRID), generator=torch.Generator().manual_seed(0))
    pixels = reference.model.vqmodel.decode(codes.flatten(1))
    decoder = family_of(folder).load_pixel_decoder()
    assert (decoder(codes) - pixels).abs().max() <= 1e-4
    expected = ((pixels + 1) / 2 * 255).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
    assert (decoder.decode(codes).int() - expected.int()).abs().max() <= 1
    assert decoder.decode(codes).shape == (2, GRID * 4, GRID * 4, 3)
    assert expected.float().std() > 5


def test_prompt_and_layout(model: tuple[Path, Any], engine: Any) -> None:
    family = family_of(model[0])
    encoded = family.encode_prompt(engine.get_tokenizer(), "a red boat")
    words = [NAMES[word] for word in ("<|User|>:", "a", "red", "boat", "<|Assistant|>:")]
    assert encoded.prompt_token_ids == [*words, NAMES[BEGIN_OF_IMAGE]]
    assert encoded.negative_token_ids == [words[0], *[NAMES[PAD]] * 4, NAMES[BEGIN_OF_IMAGE]]
    layout = family.layout(encoded.prompt_token_ids)
    assert (layout.rows, layout.columns, layout.length) == (GRID, GRID, GRID * GRID)
    assert layout.vocabulary.tolist() == list(range(TEXT, TEXT + CODES))
    assert family.layout(()) is layout
    image = harness.whole_image(family, encoded.prompt_token_ids)
    start = len(encoded.prompt_token_ids)
    assert {family.segment_start(image[:end]) for end in range(start, len(image))} == {start}
    assert family.segment_start(image) is None
    with pytest.raises(ValueError, match="size 64x64 is not supported by this model; supported: 20x20"):
        family.encode_prompt(engine.get_tokenizer(), "a boat", size=(64, 64))


def test_the_published_model_draws_576_codes_behind_its_text_vocabulary(tmp_path: Path) -> None:
    from transformers import JanusConfig

    config = JanusConfig(text_config={"model_type": "llama", "vocab_size": 102400}, vision_config={"image_size": 384})
    (tmp_path / "generation_config.json").write_text(
        '{"pad_token_id": 100002, "boi_token_id": 100016}', encoding="utf-8"
    )
    layout = JanusFamily(config, str(tmp_path)).layout([100000, 100016])
    assert (layout.rows, layout.columns, layout.image_token_start, layout.image_token_count) == (24, 24, 102400, 16384)


def test_merging_vocabularies_twice_is_merging_once() -> None:
    from transformers import JanusConfig

    config = JanusConfig(text_config={"model_type": "llama", "vocab_size": 100}, vq_config={"num_embeddings": 11})
    merge_vocabularies(config)
    merge_vocabularies(config)
    assert config.text_config.vocab_size == 111
