"""The command ``sjd-pac``: generate, serve, bench, doctor, model-path."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_sjd_pac import __version__
from vllm_sjd_pac.bench.command import add_parser as add_bench
from vllm_sjd_pac.config import SJDPACConfig


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status (2 for bad input, with one line on standard error)."""
    parser = build_parser()
    words, rest = split_serve(sys.argv[1:] if arguments is None else list(arguments))
    given = parser.parse_args(words)
    given.rest = rest
    try:
        return given.run(given)
    except Exception as error:
        # vLLM's error for bad parameters is no ValueError; its class is named, since importing vLLM takes seconds.
        if not isinstance(error, ValueError | FileNotFoundError) and type(error).__name__ != "VLLMValidationError":
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sjd-pac", description="Pictures from image-token models, fast and lossless, on vLLM."
    )
    parser.add_argument("--version", action="version", version=f"sjd-pac {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("generate", help="draw a picture", description="Draw a picture in this process.")
    command.add_argument("prompt", help='what to draw, e.g. "a red apple on grass"')
    command.add_argument(
        "-o", "--output", type=Path, default=Path("picture.png"), help="file to write (.png, .jpg, .webp)"
    )
    command.add_argument("--model", default=None, help="model folder or hub name (default: the bundled model)")
    command.add_argument("--seed", type=int, default=0, help="same seed, same picture (default: 0)")
    command.add_argument(
        "--guidance", type=float, default=None, help="guidance scale, 0 to 20; 1 is off (default: the model's)"
    )
    command.add_argument(
        "--negative-prompt", default=None, help="what not to draw (default: the model's unconditional prompt)"
    )
    command.add_argument(
        "--size", type=parse_size, default=None, metavar="WxH", help="picture size (default: the model's)"
    )
    command.add_argument("--temperature", type=float, default=None)
    command.add_argument("--top-k", type=int, default=None)
    command.add_argument("--top-p", type=float, default=None)
    command.add_argument(
        "--speculation", choices=("on", "off"), default="on", help="off: the same picture, token by token"
    )
    command.add_argument("--json", action="store_true", help="the last line on standard output is one JSON object")
    for name in ("acceptance", "mode", "tree", "num_speculative_tokens"):
        option = SJDPACConfig.__dataclass_fields__[name]
        kind: Any = int if isinstance(option.default, int) else str
        command.add_argument(f"--{name.replace('_', '-')}", type=kind, default=None, help=option.metadata["help"])
    command.set_defaults(run=generate)

    command = commands.add_parser(
        "serve",
        help="serve the OpenAI-compatible API",
        description="Runs `vllm serve MODEL --speculative-model sjd_pac`; further arguments go to vLLM as they are.",
    )
    command.add_argument("model", nargs="?", default=None, help="model folder or hub name (default: the bundled model)")
    command.set_defaults(run=serve)

    add_bench(commands)

    command = commands.add_parser("doctor", help="check the installation", description="Check the installation.")
    command.set_defaults(run=doctor)

    command = commands.add_parser("model-path", help="print where the bundled model is")
    command.set_defaults(run=model_path)
    return parser


def parse_size(text: str) -> tuple[int, int]:
    """``"128x128"`` → (128, 128)."""
    width, cross, height = text.lower().partition("x")
    if not (cross and width.isdigit() and height.isdigit() and int(width) and int(height)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write WIDTHxHEIGHT, e.g. 128x128")
    return int(width), int(height)


def generate(given: argparse.Namespace) -> int:
    """``sjd-pac generate``: one picture into a file, a summary (or JSON) on standard output."""
    options = {
        name: getattr(given, name)
        for name in ("acceptance", "mode", "tree", "num_speculative_tokens")
        if getattr(given, name) is not None
    }
    SJDPACConfig(**options)
    if given.guidance is not None and not 0 <= given.guidance <= 20:
        raise ValueError(f"--guidance {given.guidance:g} is not allowed; allowed: 0 to 20 (1 is off)")
    if not given.prompt.strip():
        raise ValueError("prompt is empty; describe the picture in a few words")
    if given.output.suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
        raise ValueError(f"--output {given.output}: the name must end in .png, .jpg, .jpeg or .webp")
    if not given.output.resolve().parent.is_dir():
        raise ValueError(f"--output {given.output}: there is no folder {given.output.resolve().parent}")
    print("loading the model …", file=sys.stderr, flush=True)
    from vllm_sjd_pac.offline import ImageGenerator, set_environment

    set_environment()
    generator = ImageGenerator(given.model, speculation=given.speculation == "on", options=options)
    started = time.perf_counter()
    picture = generator.generate(
        given.prompt,
        seeds=given.seed,
        guidance_scale=given.guidance,
        negative_prompt=given.negative_prompt,
        size=given.size,
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        progress=True,
    )[0]
    seconds = time.perf_counter() - started
    picture.image.save(given.output)
    if picture.unknown_words:
        from vllm_sjd_pac.models.emoji import known_words

        print(
            f"warning: the model does not know {', '.join(picture.unknown_words)} and ignores it; "
            f"it knows: {', '.join(known_words())}",
            file=sys.stderr,
        )
    print(
        f"{given.output}: {len(picture.token_ids)} tokens in {picture.forwards} forward passes "
        f"({picture.tokens_per_forward:.2f} tokens per forward), {seconds:.1f} s",
        file=sys.stderr if given.json else sys.stdout,
    )
    if given.json:
        result = {
            "prompt": given.prompt,
            "seed": given.seed,
            "output": str(given.output),
            "forwards": picture.forwards,
            "tokens": len(picture.token_ids),
            "tokens_per_forward": round(picture.tokens_per_forward, 4),
            "token_ids": picture.token_ids,
            "seconds": round(seconds, 3),
            "unknown_words": list(picture.unknown_words),
        }
        print(json.dumps(result), flush=True)
    return 0


def split_serve(words: list[str]) -> tuple[list[str], list[str]]:
    """``serve [MODEL] …`` and the arguments for vLLM; argparse would take a value of an unknown flag for MODEL."""
    if words[:1] != ["serve"]:
        return words, []
    cut = 2 if len(words) > 1 and not words[1].startswith("-") else 1
    if words[cut : cut + 1] in (["-h"], ["--help"]):
        return words, []
    return words[:cut], words[cut:]


def serve(given: argparse.Namespace) -> int:
    """``sjd-pac serve``: become ``vllm serve`` with the method switched on."""
    from vllm_sjd_pac.models.emoji import checkpoint_path

    bundled = given.model is None
    command = ["vllm", "serve", given.model or str(checkpoint_path())]
    if not any(argument.split("=")[0] in ("--speculative-model", "--spec-model") for argument in given.rest):
        command += ["--speculative-model", "sjd_pac"]
    if bundled:
        defaults = {
            "--served-model-name": "emoji",
            "--dtype": "float32",
            "--block-size": "32",
            "--max-num-seqs": "32",
            "--chat-template": "<bos>{{ messages[-1]['content'] }}<boi>",
        }
        for flag, value in defaults.items():
            if not any(argument.split("=")[0] == flag for argument in given.rest):
                command += [flag, value]
        if not {"--enforce-eager", "--no-enforce-eager"} & set(given.rest):
            command.append("--enforce-eager")  # as `generate` does: the same picture for the same seed
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    executable = Path(sys.executable).with_name("vllm")
    os.execv(executable, [*command, *given.rest])


def doctor(given: argparse.Namespace) -> int:
    """``sjd-pac doctor``: what is installed, what is broken, and the remedy; exit status 1 when something is."""
    from vllm_sjd_pac.doctor import examine

    findings = examine()
    for finding in findings:
        print(f"{'ok  ' if finding.ok else 'FAIL'} {finding.what}: {finding.detail}")
    return 0 if all(finding.ok for finding in findings) else 1


def model_path(given: argparse.Namespace) -> int:
    """``sjd-pac model-path``: the folder of the bundled checkpoint."""
    from vllm_sjd_pac.models.emoji import checkpoint_path

    print(checkpoint_path())
    return 0


if __name__ == "__main__":
    sys.exit(main())
