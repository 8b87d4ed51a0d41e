"""From image tokens to encoded pictures, on a thread of its own."""

from __future__ import annotations

import asyncio
import base64
import io
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from vllm_sjd_pac.engine import metrics

if TYPE_CHECKING:
    from vllm_sjd_pac.models.family import PixelDecoder
    from vllm_sjd_pac.models.layout import ImageLayout


class PictureEncoder:
    """Decodes tokens and encodes pictures, one at a time, so that the event loop and the engine keep their cores."""

    def __init__(self, decoder: PixelDecoder) -> None:
        self.decoder = decoder
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sjd-pac-pixels")

    async def base64(self, layout: ImageLayout, tokens: list[int], output_format: str, compression: int) -> str:
        """The picture of a (possibly unfinished) segment as base64 text.

        Args:
            layout: the segment's layout; tokens: its tokens from position 0 on.
            output_format: png, jpeg or webp; compression: quality 0–100 of the last two.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._encode, layout, tokens, output_format, compression)

    def _encode(self, layout: ImageLayout, tokens: list[int], output_format: str, compression: int) -> str:
        from PIL import Image

        started = time.perf_counter()
        pixels = self.decoder.decode(layout.grid(tokens).unsqueeze(0))[0].numpy()
        buffer = io.BytesIO()
        options: dict[str, Any] = {} if output_format == "png" else {"quality": compression}
        Image.fromarray(pixels).save(buffer, output_format.upper(), **options)
        metrics.serving().decode_seconds.observe(time.perf_counter() - started)
        return base64.b64encode(buffer.getvalue()).decode("ascii")
