"""The subcommands of ``sjd-pac bench``."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from vllm_sjd_pac.bench import settings as named
from vllm_sjd_pac.offline import set_environment


def add_parser(commands: Any) -> None:
    """Add ``bench`` and its measurements to the command line."""
    bench = commands.add_parser(
        "bench",
        help="measure speed, load and memory",
        description="Measure on this machine, with nothing else running. Tables go to standard output; with --output "
        "also JSON files and plots.",
    )
    kinds = bench.add_subparsers(required=True, metavar="MEASUREMENT")

    kind = _kind(kinds, "compression", compression, "tokens per forward pass by rule and tree (any machine)")
    kind.add_argument("--pictures", type=_positive, default=64)
    kind.add_argument("--only", nargs="*", default=[], help="settings whose name contains one of these")

    kind = _kind(kinds, "picture", picture, "seconds for one picture, speculation off and on in turns")
    kind.add_argument("--turns", type=_positive, default=7)
    kind.add_argument("--windows", type=_positive, nargs="*", default=[], help="further fixed windows (drafted nodes)")
    kind.add_argument(
        "--trees", nargs="*", default=[], help="further draft trees, as --sjd-pac-tree, of the full window"
    )
    kind.add_argument(
        "--peers", action="store_true", help="without guidance, against plain vLLM, its n-gram speculation, SJD and PAC"
    )

    kind = _kind(kinds, "load", load, "throughput by pictures in flight: off, adaptive window, fixed windows")
    kind.add_argument("--concurrency", type=_positive, nargs="+", default=[1, 2, 4, 8, 16, 32])
    kind.add_argument("--windows", type=_positive, nargs="*", default=[3, 15, 63], help="fixed windows to compare")
    kind.add_argument("--turns", type=_positive, default=5)
    kind.add_argument("--rounds", type=_positive, default=2, help="pictures of a turn for each picture in flight")

    kind = _kind(kinds, "overhead", overhead, "time of a step outside the network's forward pass")
    kind.add_argument("--batches", type=_positive, nargs="+", default=[1, 8, 16])
    kind.add_argument("--pictures", type=_positive, default=2, help="pictures for each picture of a batch")

    kind = _kind(kinds, "memory", memory, "bytes per request by rule, and resident memory over many requests")
    kind.add_argument("--requests", type=_positive, default=500)
    kind.add_argument("--batch", type=_positive, default=16)

    kind = kinds.add_parser("inflate", help="write a copy of the bundled model that costs what a 1B model costs")
    kind.add_argument("target", type=Path, help="folder to write (4.2 GB in float32)")
    kind.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    kind.set_defaults(run=write_inflated)


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _kind(kinds: Any, name: str, run: Any, text: str) -> Any:
    kind = kinds.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    kind.add_argument("--model", default=None, help="model folder or hub name (default: the bundled model)")
    kind.add_argument("--guidance", type=float, default=None, help="guidance scale; 1 is off (default: 3)")
    kind.add_argument("--drafts", type=_positive, default=63, help="drafted nodes per step (default: 63)")
    kind.add_argument("--dtype", default=None, help="as vLLM's --dtype (default: float32 on CPUs)")
    kind.add_argument("--prompts", nargs="+", default=list(named.PROMPTS), help="what to draw, in turns")
    kind.add_argument("--output", type=Path, default=None, metavar="FOLDER", help="also write JSON and PNG here")
    kind.set_defaults(run=run, load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0)
    return kind


def _engine_args(given: argparse.Namespace) -> dict[str, Any]:
    return {} if given.dtype is None else {"dtype": given.dtype}


def _guidance(given: argparse.Namespace) -> float:
    return 3.0 if given.guidance is None else given.guidance


def _publish(given: argparse.Namespace, name: str, rows: Any, kind: str | None = None) -> int:
    from vllm_sjd_pac.bench import report

    options = {key: str(value) for key, value in vars(given).items() if key not in ("run", "rest", "output", "load")}
    # A folder's name is enough: results are published, and paths of the machine are nobody's business.
    options["guidance"] = "1.0" if getattr(given, "peers", False) else str(_guidance(given))
    options["model"] = Path(given.model).name if given.model else "bundled"
    about = {**named.machine(given.load), "options": options}
    print(report.markdown(rows))
    device = about["gpu"] or f"{about['processor']}, {about['cores']} cores, {about['instructions']}"
    print(f"\n{device}; vLLM {about['vllm']}")
    if given.output is not None:
        print(report.save(given.output, name, about, rows), file=sys.stderr)
        path = report.plot(given.output, name, kind or name, rows)
        print(path or "no plot: pip install matplotlib", file=sys.stderr)
    return 0


def compression(given: argparse.Namespace) -> int:
    """``bench compression``."""
    set_environment()
    from vllm_sjd_pac.bench.compression import table

    rows = table(
        given.drafts, given.model, given.pictures, _guidance(given), _engine_args(given), given.only, given.prompts
    )
    return _publish(given, "compression", rows)


def picture(given: argparse.Namespace) -> int:
    """``bench picture``."""
    set_environment()
    from vllm_sjd_pac.bench.picture import apart, drawing, in_turns, stock

    if given.peers and given.guidance not in (None, 1.0):
        raise ValueError(f"--guidance {given.guidance:g} with --peers: plain vLLM has no guidance; leave it out, or 1")
    arguments, guidance = _engine_args(given), 1.0 if given.peers else _guidance(given)
    chosen = [named.OFF, *(named.window(drafts) for drafts in dict.fromkeys([given.drafts, *given.windows]))]
    chosen += [named.shaped(tree, given.drafts) for tree in dict.fromkeys(given.trees)]
    published: list[named.Setting] = []
    if given.peers:
        nodes = {"num_speculative_tokens": given.drafts, "acceptance": "rejection"}
        published = [
            named.Setting("SJD (rejection, chain)", {**nodes, "mode": "sjd", "tree": "chain"}),
            named.Setting("PAC (rejection, full 3.3)", {**nodes, "tree": "full:3.3"}),
        ]
    engines = len(chosen) + (len(published) + 2 if given.peers else 0)
    with ExitStack() as stack:
        start = partial(apart, stack)
        draws = {s.name: start(drawing, s, given.model, guidance, arguments, engines) for s in [*chosen, *published]}
        if given.peers:
            ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
            draws = {"plain vLLM": start(stock, given.model, arguments, None, engines), **draws}
            draws["vLLM, n-gram speculation"] = start(stock, given.model, arguments, ngram, engines)
        timings = in_turns(draws, given.turns, _tokens(given.model, given.prompts[0]), given.prompts)
    rows = [timing.summary(timings[0]) for timing in timings]
    return _publish(given, "peers" if given.peers else "picture", rows, "picture")


def _tokens(model: str | None, prompt: str) -> int:
    """Tokens of a picture of the model's usual size."""
    from transformers import AutoConfig, AutoTokenizer

    from vllm_sjd_pac.models.emoji import checkpoint_path
    from vllm_sjd_pac.models.family import find_family

    path = model or str(checkpoint_path())
    family = find_family(AutoConfig.from_pretrained(path), path)
    encoded = family.encode_prompt(AutoTokenizer.from_pretrained(path), prompt)
    return family.layout(encoded.prompt_token_ids).length


def load(given: argparse.Namespace) -> int:
    """``bench load``."""
    set_environment()
    from vllm_sjd_pac.bench.load import compare

    chosen = [named.OFF, named.adaptive(given.drafts), *(named.window(drafts) for drafts in given.windows)]
    rows = compare(
        chosen,
        given.model,
        given.concurrency,
        turns=given.turns,
        rounds=given.rounds,
        guidance=_guidance(given),
        engine_args=_engine_args(given),
        prompts=given.prompts,
    )
    return _publish(given, "load", rows)


def overhead(given: argparse.Namespace) -> int:
    """``bench overhead``."""
    set_environment()
    from vllm_sjd_pac.bench.overhead import profile

    generator = named.window(given.drafts).start(given.model, 2 * max(given.batches), _engine_args(given))
    return _publish(
        given, "overhead", profile(generator, given.batches, given.pictures, _guidance(given), given.prompts)
    )


def memory(given: argparse.Namespace) -> int:
    """``bench memory``."""
    set_environment()
    from vllm_sjd_pac.bench import memory as measured
    from vllm_sjd_pac.bench import report

    rules = {"race": ("race", False), "race, smoothing": ("race", True), "rejection": ("rejection", False)}
    sizes = [
        {
            "image_vocabulary": vocabulary,
            "drafts": drafts,
            **{
                f"{name}, KiB": round(measured.window_bytes(vocabulary, drafts, rule, smoothing) / 1024)
                for name, (rule, smoothing) in rules.items()
            },
        }
        for vocabulary in (1024, 8192, 16384, 32768)
        for drafts in (15, 63)
    ]
    print(report.markdown(sizes) + "\n")
    # A cache of just the blocks that a full batch needs: a larger one grows into memory as its blocks are first used.
    tokens = _tokens(given.model, given.prompts[0]) + given.drafts + 64
    blocks = {"num_gpu_blocks_override": 2 * given.batch * (tokens // 32 + 2)}
    generator = named.window(given.drafts).start(given.model, 2 * given.batch, {**_engine_args(given), **blocks})
    trace = measured.growth(generator, given.requests, given.batch, _guidance(given), given.prompts)
    held = measured.state_of(generator)
    print(f"still held by the engine afterwards: {held}\n")
    return _publish(given, "memory", [{"requests": count, "resident_mib": round(size, 1)} for count, size in trace])


def write_inflated(given: argparse.Namespace) -> int:
    """``bench inflate``."""
    import torch

    from vllm_sjd_pac.bench.inflate import inflate
    from vllm_sjd_pac.models.emoji import checkpoint_path

    parameters = inflate(Path(checkpoint_path()), given.target, dtype=getattr(torch, given.dtype))
    print(f"{given.target}: {parameters / 1e9:.2f} billion parameters, {given.dtype}")
    return 0
