"""Predicted speed-up of speculative Jacobi decoding on data-centre GPUs, from bytes and FLOPs. No GPU, no vLLM.

    python benchmarks/roofline.py                                  # Markdown tables on stdout
    python benchmarks/roofline.py --png roofline.png --tokens-per-forward 32=4.1,64=4.8

A step takes, component by component, the longer of moving its bytes and doing its FLOPs, plus a fixed overhead. What it
rests on is a field of `Gpu`, `Model` or `Setting` below; tokens per forward are an input, not a result.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """``bandwidth`` in B/s and ``flops`` in dense bf16 FLOP/s from the data sheet."""

    name: str
    bandwidth: float
    flops: float


GPUS = (Gpu("A100 80 GB", 2.04e12, 312e12), Gpu("H100 SXM", 3.35e12, 989e12), Gpu("H200", 4.8e12, 989e12))


@dataclass(frozen=True)
class Model:
    """A Llama-shaped decoder in bf16; default: Chameleon 7B, the body of Lumina-mGPT."""

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 32
    head_size: int = 128
    mlp: int = 11008
    vocabulary: int = 65536
    image_vocabulary: int = 8192

    @property
    def layer_parameters(self) -> int:
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.mlp

    @property
    def head_parameters(self) -> int:
        return self.hidden * self.vocabulary

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in one layer."""
        return 2 * 2 * self.kv_heads * self.head_size


@dataclass(frozen=True)
class Setting:
    """What a step is like, and how far from the data sheet real kernels stay.

    ``context``: mean number of cached tokens; 1300 is half of a 48 × 48 grid and a prompt. ``sequences_per_image``: 2
    with guidance. ``overhead``: seconds per step outside the GPU's work or not hidden by it: scheduler, launches.
    ``row_passes``: how often the sampler touches a float32 row over the image vocabulary. ``query_tile``: pairs of
    token and query head that share one read of a key head's cache.
    """

    context: int = 1300
    sequences_per_image: int = 2
    overhead: float = 1.5e-3
    overhead_per_image: float = 0.05e-3
    bandwidth_share: float = 0.8
    flops_share: float = 0.6
    attention_flops_share: float = 0.4
    row_passes: int = 8
    query_tile: int = 64


def components(model: Model, gpu: Gpu, images: int, nodes: int, setting: Setting) -> dict[str, float]:
    """Seconds of one step by component.

    Args:
        images: images decoded at once.
        nodes: tokens per sequence and step: 1 is plain decoding, N the root and N - 1 drafts.
    """
    sequences = images * setting.sequences_per_image
    tokens = sequences * nodes
    bandwidth = gpu.bandwidth * setting.bandwidth_share

    def longer(moved: float, done: float, share: float) -> float:
        return max(moved / bandwidth, done / (gpu.flops * share))

    weights = model.layers * model.layer_parameters
    # Read and written per token and layer: the residual stream and its norms, q, k, v, attention's result, the MLP's
    # inner rows (gate and up written, read, their product written, read).
    width = model.head_size * (2 * model.heads + 2 * model.kv_heads)
    activations = 2 * tokens * model.layers * (6 * model.hidden + 2 * width + 5 * model.mlp)
    pairs = nodes * (model.heads // model.kv_heads)
    reads = math.ceil(pairs / setting.query_tile)
    cache = sequences * model.layers * model.kv_bytes_per_token * (setting.context * reads + nodes)
    # Prefix output and log-sum-exp written and read once more for the merge with the window.
    merge = 0 if nodes == 1 else 2 * tokens * model.layers * model.heads * (2 * model.head_size + 4)
    scores = 4 * tokens * (setting.context + nodes / 2) * model.heads * model.head_size * model.layers
    return {
        "linear layers": longer(2 * weights, 2 * weights * tokens, setting.flops_share),
        "activations": activations / bandwidth,
        "attention": longer(cache + merge, scores, setting.attention_flops_share),
        "logits": longer(
            2 * model.head_parameters + 2 * tokens * model.vocabulary,
            2 * model.head_parameters * tokens,
            setting.flops_share,
        ),
        "sampler rows": 4 * setting.row_passes * tokens * model.image_vocabulary / bandwidth,
        "overhead": setting.overhead + setting.overhead_per_image * images,
    }


def step_time(model: Model, gpu: Gpu, images: int, nodes: int, setting: Setting) -> float:
    """Seconds of one step: the sum of its `components`."""
    return sum(components(model, gpu, images, nodes, setting).values())


def speed_up(model: Model, gpu: Gpu, images: int, nodes: int, tokens_per_forward: float, setting: Setting) -> float:
    """How many times faster than one token per step."""
    plain = step_time(model, gpu, images, 1, setting)
    return tokens_per_forward * plain / step_time(model, gpu, images, nodes, setting)


def table(gpu: Gpu, model: Model, windows: dict[int, float], batches: list[int], setting: Setting) -> str:
    """One GPU as a Markdown table: plain step time, then step time and speed-up by window."""
    head = ["images at once", "plain step"] + [f"{nodes} nodes (× {rate:g})" for nodes, rate in windows.items()]
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join(["---:"] * len(head)) + " |"]
    for images in batches:
        cells = [str(images), f"{1e3 * step_time(model, gpu, images, 1, setting):.1f} ms"]
        for nodes, rate in windows.items():
            time = step_time(model, gpu, images, nodes, setting)
            cells.append(f"{1e3 * time:.1f} ms → **{speed_up(model, gpu, images, nodes, rate, setting):.2f}**")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def breakdown(gpu: Gpu, model: Model, images: int, nodes: list[int], setting: Setting) -> str:
    """Where the time of a step goes, in milliseconds, as a Markdown table."""
    steps = [components(model, gpu, images, count, setting) for count in nodes]
    lines = ["| component | " + " | ".join(f"{count} nodes" for count in nodes) + " |"]
    lines.append("| --- |" + " ---: |" * len(nodes))
    lines += [f"| {name} | " + " | ".join(f"{1e3 * step[name]:.2f}" for step in steps) + " |" for name in steps[0]]
    return "\n".join([*lines, "| **sum** | " + " | ".join(f"{1e3 * sum(step.values()):.2f}" for step in steps) + " |"])


def plot(path: str, model: Model, windows: dict[int, float], setting: Setting) -> None:
    """Speed-up by images at once, one panel per GPU, one line per window."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    batches = [2 ** (power / 2) for power in range(13)]
    figure, panels = pyplot.subplots(1, len(GPUS), figsize=(4 * len(GPUS), 3.6), sharey=True)
    for gpu, panel in zip(GPUS, panels, strict=True):
        for nodes, rate in windows.items():
            ups = [speed_up(model, gpu, images, nodes, rate, setting) for images in batches]
            panel.plot(batches, ups, label=f"{nodes} nodes, {rate:g} tokens a step")
        panel.axhline(1, color="grey", linewidth=0.8, linestyle=":")
        panel.set(xscale="log", xlabel="images at once", title=gpu.name)
        panel.set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])
        panel.minorticks_off()
    panels[0].set(ylabel="predicted speed-up", ylim=(0, None))
    panels[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def parse_windows(text: str) -> dict[int, float]:
    """``"32=4.2,64=4.8"`` → ``{32: 4.2, 64: 4.8}``. Raises ValueError where a part is not ``nodes=tokens``."""
    return {int(nodes): float(rate) for nodes, _, rate in (part.partition("=") for part in text.split(","))}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Predicted speed-up by batch and window, from bytes and FLOPs.")
    parser.add_argument("--tokens-per-forward", type=parse_windows, default="32=4.2,64=4.8,128=5.15", metavar="N=T,...")
    parser.add_argument("--images", default="1,2,4,8,16,32,64", help="batch sizes, in images")
    parser.add_argument("--context", type=int, default=Setting.context, help="mean number of cached tokens")
    parser.add_argument("--overhead-ms", type=float, default=1e3 * Setting.overhead, help="fixed overhead of a step")
    parser.add_argument("--no-guidance", action="store_true", help="one sequence per image instead of two")
    parser.add_argument("--kv-heads", type=int, default=Model.kv_heads)
    parser.add_argument("--png", help="write the plot here")
    options = parser.parse_args(arguments)
    model = Model(kv_heads=options.kv_heads)
    setting = Setting(
        context=options.context,
        sequences_per_image=1 if options.no_guidance else 2,
        overhead=options.overhead_ms / 1e3,
    )
    windows = options.tokens_per_forward
    batches = [int(part) for part in options.images.split(",")]
    for gpu in GPUS:
        print(f"### {gpu.name}\n\n{table(gpu, model, windows, batches, setting)}\n")
    print(f"### One image on {GPUS[1].name}, milliseconds\n\n{breakdown(GPUS[1], model, 1, [1, *windows], setting)}")
    if options.png:
        plot(options.png, model, windows, setting)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
