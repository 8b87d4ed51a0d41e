"""The out-of-tree architectures and their families, registered by name: nothing is imported before it is used."""

from __future__ import annotations

from vllm_sjd_pac.models.family import register_family

_PACKAGE = "vllm_sjd_pac.models"

NETWORKS = {
    "ChameleonForConditionalGeneration": f"{_PACKAGE}.chameleon.network:ChameleonForImageGeneration",
    "ChameleonXLLMXForConditionalGeneration": f"{_PACKAGE}.chameleon.network:ChameleonForImageGeneration",
    "Emu3ForConditionalGeneration": f"{_PACKAGE}.emu3.network:Emu3ForImageGeneration",
    "JanusForConditionalGeneration": f"{_PACKAGE}.janus.network:JanusForImageGeneration",
    "LlamaGenForImageGeneration": f"{_PACKAGE}.llamagen.network:LlamaGenForImageGeneration",
}
"""Architecture of ``config.json`` → vLLM model class."""

FAMILIES = {
    "ChameleonForConditionalGeneration": f"{_PACKAGE}.chameleon.family:chameleon_family",
    "ChameleonXLLMXForConditionalGeneration": f"{_PACKAGE}.chameleon.family:chameleon_family",
    "Emu3ForConditionalGeneration": f"{_PACKAGE}.emu3.family:Emu3Family",
    "JanusForConditionalGeneration": f"{_PACKAGE}.janus.family:JanusFamily",
    "LlamaGenForImageGeneration": f"{_PACKAGE}.llamagen.family:LlamaGenFamily",
}
"""Architecture of ``config.json`` → `ImageModelFamily`."""


def register_models() -> None:
    """Tell vLLM the networks and this package the families; called in every process by the general plugin."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from vllm_sjd_pac.models.janus.vocabulary import JanusModelConfig

    for architecture, network in NETWORKS.items():
        ModelRegistry.register_model(architecture, network)
    for architecture, family in FAMILIES.items():
        register_family(architecture, family)
    # The one place where vLLM lets an architecture change what it read from config.json: Janus's merged vocabulary.
    MODELS_CONFIG_MAP["JanusForConditionalGeneration"] = JanusModelConfig  # type: ignore[assignment]
