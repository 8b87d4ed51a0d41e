"""From nothing to the shipped files: fetch, tokenizer, corpus, language model, export, reports.

Every stage skips what is already there and goes on where it was interrupted; run the same command again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch

from examples.train_emoji import sources
from vllm_sjd_pac.models.emoji import checkpoint_path


def stage(name: str, *arguments: str) -> None:
    """Run one module of this folder in its own process."""
    print(f"== {name} {' '.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", f"examples.train_emoji.{name}", *arguments], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for data and checkpoints")
    parser.add_argument("--output", type=Path, default=checkpoint_path(), help="where the checkpoint goes")
    parser.add_argument("--reports", type=Path, default=Path("docs/emoji"), help="contact sheet and statistics")
    arguments = parser.parse_args()
    work, output, reports = str(arguments.work), str(arguments.output), arguments.reports
    sources.download(arguments.work / "data")
    stage("train_vq", "--work", work)
    stage("corpus", "--work", work)
    has_bfloat16 = torch.cpu._is_avx512_bf16_supported()
    stage("train_lm", "--work", work, *(["--bfloat16"] if has_bfloat16 else []))
    stage("export", "--work", work, "--output", output)
    reports.mkdir(parents=True, exist_ok=True)
    stage("contact_sheet", "--checkpoint", output, "--output", str(reports / "contact-sheet.png"))
    stage("guidance_check", "--work", work, "--checkpoint", output, "--output", str(reports / "guidance.json"))
    stage("statistics", "--checkpoint", output, "--output", str(reports / "statistics.json"))


if __name__ == "__main__":
    main()
