"""How many tokens a step computes on a CPU."""

from __future__ import annotations


def padded_size(tokens: int) -> int:
    """Tokens of a step that a CPU computes where it has `tokens`: one of few sizes.

    oneDNN compiles every matrix product for its number of rows, in 10 to 50 ms, and vLLM keeps 128 of them for each
    weight. Windows shrink towards the end of a picture and loads change, so that steps would have hundreds of sizes.
    """
    for most, multiple in ((16, 1), (64, 8), (256, 16), (1024, 32)):
        if tokens <= most:
            return -(-tokens // multiple) * multiple
    return -(-tokens // 64) * 64
