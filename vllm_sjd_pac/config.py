"""Every option of SJD-PAC, once: name, meaning, default, what is allowed, and the error when it is not.

The same options are taken on the command line (``--sjd-pac-acceptance race``), in ``--speculative-config
'{"model": "sjd_pac", "acceptance": "race"}'`` and in ``LLM(..., speculative_config={...})``.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

METHOD = "sjd_pac"
"""The name that selects this plugin: ``--speculative-model sjd_pac``."""

DEFAULT_SPECULATIVE_TOKENS = 63
"""Drafted nodes per step; 63 and the root make the 64 nodes of the paper's window L."""

_TREE = re.compile(r"chain|comb(:\d+(\.\d+)*(t\d+)?)?|full(:\d+\.\d+)?")


def _option(default: Any, help: str, *, choices: tuple[str, ...] | None = None, allowed: str = "") -> Any:
    return field(default=default, metadata={"help": help, "choices": choices, "allowed": allowed})


@dataclass(frozen=True)
class SJDPACConfig:
    """Options of the method; immutable and JSON-serialisable, so that it reaches every worker process.

    Raises:
        ValueError: a value is not allowed; the message names the option, the value and what is allowed.
    """

    acceptance: str = _option(
        "race",
        "acceptance rule: 'race' (same seed, same picture as plain sampling) or 'rejection' (the paper's)",
        choices=("race", "rejection"),
    )
    mode: str = _option(
        "pac",
        "what is drafted: 'pac' (both), 'ac', 'pd', 'sjd' (the baseline), 'ar' (nothing: guidance and layout only)",
        choices=("pac", "ac", "pd", "sjd", "ar"),
    )
    tree: str = _option(
        "comb",
        "draft tree: 'comb', 'comb:8.4.4.2' (siblings per depth), 'comb:8.4t1' (with tails), 'full:3.3' (width.depth) "
        "or 'chain'",
        allowed="chain, comb, comb:S.S...[tT], full, full:W.D",
    )
    num_speculative_tokens: int = _option(
        DEFAULT_SPECULATIVE_TOKENS, "drafted nodes per step; the root comes on top", allowed="1 to 512"
    )
    window: int | None = _option(
        None,
        "most positions that the main chain covers after the root; default: all nodes that the tree leaves",
        allowed="1 to num_speculative_tokens",
    )
    proposal: str = _option(
        "uniform",
        "what enters the window: 'uniform' over the legal tokens",
        choices=("uniform",),
    )
    memory: bool = _option(
        True, "race only: earlier drafts of a position come back, as siblings and where the token before them has"
    )
    smoothing: float = _option(0.0, "race only: share of the older estimate that drafts keep", allowed="0 to 0.95")
    adaptive_window: bool = _option(True, "shrink the window under load, from measured step times")
    attention: str = _option(
        "auto",
        "attention for draft trees: 'virtual' (branches as virtual requests on the stock kernels), 'triton', "
        "'xformers' (both on GPUs), or 'auto' (virtual)",
        choices=("auto", "virtual", "triton", "xformers"),
    )
    ray_wait: float = _option(
        120.0, "Ray: seconds to wait until the cluster has enough CPUs or GPUs", allowed="1 to 86400"
    )
    verify_ranks: bool = _option(False, "debugging: compare the drafts of all tensor-parallel ranks in every step")

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            self._check_type(option.name, getattr(self, option.name), option.metadata["choices"])
        self._require(1 <= self.num_speculative_tokens <= 512, "num_speculative_tokens")
        self._require(0.0 <= self.smoothing <= 0.95, "smoothing")
        self._require(1.0 <= self.ray_wait <= 86400.0, "ray_wait")
        self._require(_TREE.fullmatch(self.tree) is not None, "tree")
        if self.window is not None:
            self._require(1 <= self.window <= self.num_speculative_tokens, "window")

    def _check_type(self, name: str, value: Any, choices: tuple[str, ...] | None) -> None:
        default = type(self).__dataclass_fields__[name].default
        if choices is not None:
            if value not in choices:
                raise ValueError(f"sjd_pac: {name}={value!r} is not allowed; choose one of {', '.join(choices)}")
        elif isinstance(default, bool):
            if not isinstance(value, bool):
                raise ValueError(f"sjd_pac: {name}={value!r} is not allowed; choose true or false")
        elif isinstance(default, float):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"sjd_pac: {name}={value!r} is not a number; allowed: {self.allowed(name)}")
        elif name == "window" and value is None:
            return
        elif isinstance(default, str):
            if not isinstance(value, str):
                raise ValueError(f"sjd_pac: {name}={value!r} is not a string; allowed: {self.allowed(name)}")
        elif isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"sjd_pac: {name}={value!r} is not a whole number; allowed: {self.allowed(name)}")

    def _require(self, holds: bool, name: str) -> None:
        if not holds:
            raise ValueError(f"sjd_pac: {name}={getattr(self, name)!r} is not allowed; allowed: {self.allowed(name)}")

    @classmethod
    def allowed(cls, name: str) -> str:
        """What the option ``name`` may be, in words."""
        metadata = cls.__dataclass_fields__[name].metadata
        return metadata["allowed"] or ", ".join(metadata["choices"] or ("true", "false"))

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        return tuple(option.name for option in dataclasses.fields(cls))

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> SJDPACConfig:
        """Build the options from a user's mapping; keys may use dashes.

        Raises:
            ValueError: an unknown key (with the nearest known one) or a value that is not allowed.
        """
        known = cls.option_names()
        chosen: dict[str, Any] = {}
        for key, value in options.items():
            name = key.replace("-", "_")
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"sjd_pac: unknown option {key!r}{hint} (known: {', '.join(known)})")
            chosen[name] = value
        return cls(**chosen)

    def to_mapping(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
