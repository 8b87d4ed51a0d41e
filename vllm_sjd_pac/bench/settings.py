"""What is compared: engine settings by name, and facts about the machine that measured them."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_sjd_pac.offline import ImageGenerator

PROMPTS = (
    "a red apple on grass",
    "a penguin in the snow",
    "an owl in the forest",
    "a blue fish in the sea",
    "a yellow star in space",
    "a green car against a brick wall",
    "a pumpkin on the beach",
    "a panda among pebbles",
)


@dataclass(frozen=True)
class Setting:
    """One way to decode.

    Attributes:
        name: for tables; options: of SJD-PAC; speculation: False = the same engine, guidance and layout, no drafts.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    speculation: bool = True

    def start(
        self, model: str | None, max_num_seqs: int, engine_args: Mapping[str, Any], engines: int = 1
    ) -> ImageGenerator:
        """An engine of this setting for up to `max_num_seqs` sequences (a guided picture is two).

        Args:
            engines: how many share the memory of the GPU.
        """
        from vllm_sjd_pac.offline import ImageGenerator

        arguments = {"max_num_seqs": max_num_seqs, **memory_share(engines), **engine_args}
        return ImageGenerator(model, speculation=self.speculation, options=self.options, **arguments)


OFF = Setting("off", speculation=False)


def window(drafts: int) -> Setting:
    """A fixed window of `drafts` drafted nodes."""
    return Setting(f"fixed {drafts}", {"num_speculative_tokens": drafts})


def shaped(tree: str, drafts: int) -> Setting:
    """A draft tree of `drafts` drafted nodes, given as its option's text."""
    return Setting(f"{tree} {drafts}", {"num_speculative_tokens": drafts, "tree": tree})


def adaptive(drafts: int) -> Setting:
    """The adaptive window, at most `drafts` drafted nodes."""
    return Setting("adaptive", {"num_speculative_tokens": drafts, "adaptive_window": True})


def rotated(names: list[str], turn: int) -> list[str]:
    """The order of a turn: each name in turn goes first, so that none always runs after the same one."""
    first = turn % len(names)
    return names[first:] + names[:first]


def memory_share(engines: int) -> dict[str, Any]:
    """Arguments that give each of `engines` engines on one GPU its share of the memory."""
    from vllm.platforms import current_platform

    return {} if current_platform.is_cpu() else {"gpu_memory_utilization": round(0.9 / engines, 3)}


def machine(load_average: float) -> dict[str, Any]:
    """Versions, processor, threads: what a number means nothing without; `load_average` of before the measurement."""
    import torch
    import vllm

    from vllm_sjd_pac import __version__

    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        processor = names[0] if names else processor
    return {
        "vllm_sjd_pac": __version__,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "processor": processor,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "load_average_before": round(load_average, 2),
    }
