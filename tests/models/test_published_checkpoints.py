"""All tensor names and shapes of the published checkpoints load; others are errors that name them.

``published/*.json`` are written out from the public configurations: the configuration, the tensors (``{layer}`` stands
for every layer) and samples of tensors that are skipped on purpose. No weights: everything is on the meta device.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import family_harness as harness
import pytest
import torch

from vllm_sjd_pac.models.llamagen.convert import build_config, convert_tensors

FOLDER = Path(__file__).parent / "published"
CHECKPOINTS = sorted(file.stem for file in FOLDER.glob("*.json"))


def read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def is_llamagen(name: str) -> bool:
    return name.startswith("llamagen")


@pytest.fixture(scope="module", params=CHECKPOINTS)
def shallow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any]]:
    """A published configuration cut to one layer: its network on the meta device, and its tensors."""
    folder = tmp_path_factory.mktemp(request.param)
    content = read(request.param)
    if is_llamagen(request.param):
        raw = {name: torch.empty(shape, device="meta") for name, shape in harness.expand(content["tensors"], 1).items()}
        converted = convert_tensors(raw)
        config = build_config(converted, content["image_size"])
        tensors = {name: tuple(tensor.shape) for name, tensor in converted.items()}
    else:
        config = content["config"]
        config.get("text_config", config)["num_hidden_layers"] = 1
        tensors = harness.expand(content["tensors"], 1)
    return harness.network_on_meta(harness.published_config(folder, config)), tensors


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_all_published_tensors_load(name: str, tmp_path: Path) -> None:
    content = read(name)
    tensors = harness.expand(content["tensors"], content["layers"])
    if is_llamagen(name):
        converted = convert_tensors({key: torch.empty(shape, device="meta") for key, shape in tensors.items()})
        config = build_config(converted, content["image_size"])
        assert (config["num_hidden_layers"], config["num_attention_heads"], config["num_classes"]) == (24, 16, 1000)
        tensors = {key: tuple(tensor.shape) for key, tensor in converted.items()}
    else:
        config = content["config"]
        tensors |= {key: tuple(shape) for key, shape in content["skipped"].items()}
    network = harness.network_on_meta(harness.published_config(tmp_path, config))
    loaded = harness.load_on_meta(network, tensors)
    assert loaded == {key for key, _ in network.named_parameters()}


def test_a_missing_tensor_is_named(shallow: tuple[Any, dict[str, Any]]) -> None:
    network, tensors = shallow
    for name in tensors:
        with pytest.raises(ValueError, match="lacks") as error:
            harness.load_on_meta(network, {key: shape for key, shape in tensors.items() if key != name})
        assert name in str(error.value)


@pytest.mark.parametrize(
    "extra", ["model.layers.0.self_attn.q_proj.bias", "model.layers.1.mlp.up_proj.weight", "surprise"]
)
def test_an_unexpected_tensor_is_named(shallow: tuple[Any, dict[str, Any]], extra: str) -> None:
    network, tensors = shallow
    with pytest.raises(ValueError, match=f"unexpected tensor '{extra}'"):
        harness.load_on_meta(network, tensors | {extra: (4, 4)})


def test_a_misshapen_tensor_is_named(shallow: tuple[Any, dict[str, Any]]) -> None:
    network, tensors = shallow
    for name, shape in tensors.items():
        for wrong in ((*shape[:-1], shape[-1] + 3), (shape[0] + 3, *shape[1:])):
            if "_norm." in name and wrong[-1] == shape[-1]:
                continue  # any divisor of the number of heads will do
            with pytest.raises(ValueError, match=r"does not fit|rows; the configuration") as error:
                harness.load_on_meta(network, tensors | {name: wrong})
            assert "generation_" in name or "_norm." in name or name in str(error.value)
