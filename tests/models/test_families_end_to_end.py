"""Every family through the whole engine: guidance twins, layout, drafts, pixels; SJD-PAC on draws what off draws."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import family_harness as harness
import pytest
import tiny_chameleon
import tiny_emu3
import tiny_janus
import tiny_llamagen

from vllm_sjd_pac.models.layout import FREE


class Case(NamedTuple):
    write: Callable[[Path], Any]
    prompt: str
    size: tuple[int, int]
    top_k: int = 0


CASES = {
    "lumina_mgpt": Case(tiny_chameleon.write_lumina, "a red boat", (96, 32), top_k=500),
    "anole": Case(tiny_chameleon.write_anole, "a red boat", (64, 64)),
    "emu3": Case(tiny_emu3.write_reference, "a red boat", (10, 6)),
    "janus": Case(tiny_janus.write_reference, "a red boat", (20, 20)),
    "llamagen": Case(tiny_llamagen.write_checkpoint, "7", (96, 96), top_k=40),
}
GUIDANCE = 3.0


def draw(folder: Path, case: Case, *, speculation: bool) -> tuple[list[Any], Any]:
    """Pictures of two seeds and one without guidance, and the engine's family."""
    from vllm_sjd_pac.offline import ImageGenerator

    options = {"num_speculative_tokens": 12, "tree": "comb:2.1"}
    length = None if case.write is tiny_llamagen.write_checkpoint else 96
    generator = ImageGenerator(
        str(folder), speculation=speculation, options=options, max_model_len=length, max_num_seqs=6
    )
    try:
        settings = {"size": case.size, "top_k": case.top_k}
        guided = generator.generate([case.prompt] * 2, seeds=[1, 2], guidance_scale=GUIDANCE, **settings)
        plain = generator.generate(case.prompt, seeds=1, guidance_scale=1.0, **settings)
        with pytest.raises(ValueError, match="size 40x40 is not supported by this model; supported: "):
            generator.generate(case.prompt, size=(40, 40))
        return guided + plain, generator.family
    finally:
        harness.shut_down(generator.llm)


@pytest.mark.parametrize("name", CASES)
def test_speculation_draws_the_same_whole_image(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    case.write(tmp_path)
    fast, family = draw(tmp_path, case, speculation=True)
    slow, _ = draw(tmp_path, case, speculation=False)
    layout = family.layout_of(case.size[1] // family.code_pixels, case.size[0] // family.code_pixels)
    codes = range(layout.image_token_start, layout.image_token_start + layout.image_token_count)
    for picture in fast:
        assert picture.image.size == case.size
        assert len(picture.token_ids) == layout.length
        for token, forced in zip(picture.token_ids, layout.forced_table.tolist(), strict=True):
            assert token == forced if forced != FREE else token in codes
    assert [picture.token_ids for picture in fast] == [picture.token_ids for picture in slow]
    first, second, plain = (picture.token_ids for picture in fast)
    assert first != second, "two seeds draw two pictures"
    assert first != plain, "guidance changes the picture"
    assert sum(picture.forwards for picture in fast) < sum(picture.forwards for picture in slow), (
        "no draft was accepted"
    )
