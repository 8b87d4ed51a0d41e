"""Reading single parts (a pixel decoder, a token id) of a model's folder."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

INDEX = "model.safetensors.index.json"


def model_folder(model_path: str) -> Path:
    """The local folder of a model: the path itself, or the hub's snapshot that vLLM has downloaded already.

    Raises:
        FileNotFoundError: neither a folder nor a name that the local hub cache knows.
    """
    folder = Path(model_path)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download  # only for models given by hub name

    try:
        return Path(snapshot_download(model_path, local_files_only=True))
    except Exception as error:
        raise FileNotFoundError(f"no model folder {model_path!r}, and it is not in the local hub cache") from error


def read_json(model_path: str, name: str) -> dict[str, Any]:
    """A JSON file of the model's folder; empty when there is none."""
    try:
        file = model_folder(model_path) / name
    except FileNotFoundError:
        return {}
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def read_tensors(model_path: str, prefixes: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors checkpoint whose names start with one of `prefixes`, without that prefix.

    Raises:
        FileNotFoundError: the folder has no such tensors.
    """
    folder = model_folder(model_path)
    index = read_json(model_path, INDEX).get("weight_map")
    if index is None:
        files = sorted(folder.glob("*.safetensors"))
    else:
        files = sorted({folder / file for name, file in index.items() if name.startswith(prefixes)})
    found: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(str(file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                prefix = next((p for p in prefixes if name.startswith(p)), None)
                if prefix is not None:
                    found[name.removeprefix(prefix)] = tensors.get_tensor(name)
    if not found:
        raise FileNotFoundError(f"{folder} has no tensors named {' or '.join(p + '*' for p in prefixes)}")
    return found


def read_pickle(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a ``.pt``/``.ckpt`` file, out of whichever wrapper training left around them (no code is run)."""
    content = torch.load(file, map_location="cpu", weights_only=True)
    for wrapper in ("model", "module", "state_dict"):
        if isinstance(content.get(wrapper), dict):
            return content[wrapper]
    return content


@cache
def _vocabulary(model_path: str) -> dict[str, int]:
    """``tokenizer.json`` of the folder: text to id, special tokens included."""
    content = read_json(model_path, "tokenizer.json")
    words = content.get("model", {}).get("vocab", {})
    added = {token["content"]: token["id"] for token in content.get("added_tokens", [])}
    return (words if isinstance(words, dict) else {}) | added


def token_id(model_path: str, text: str) -> int | None:
    """The id that the folder's tokenizer gives to one whole token, if it has it."""
    return _vocabulary(model_path).get(text)
