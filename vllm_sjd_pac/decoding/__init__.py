"""Speculative Jacobi decoding with draft trees: the algorithm, in pure PyTorch (no vLLM)."""

from vllm_sjd_pac.decoding.acceptance import MODES, AcceptanceRule, Verdict
from vllm_sjd_pac.decoding.decode import DecodeResult, Simulation, jacobi_decode, simulate
from vllm_sjd_pac.decoding.race import RaceRule
from vllm_sjd_pac.decoding.randomness import (
    CounterNoise,
    CounterRandomness,
    GeneratorRandomness,
    NoiseSource,
    Randomness,
    TableNoise,
)
from vllm_sjd_pac.decoding.rejection import RejectionRule
from vllm_sjd_pac.decoding.state import WindowPool, WindowState
from vllm_sjd_pac.decoding.tree import DraftTree, TreeBatch, default_tree

__all__ = [
    "MODES",
    "AcceptanceRule",
    "CounterNoise",
    "CounterRandomness",
    "DecodeResult",
    "DraftTree",
    "GeneratorRandomness",
    "NoiseSource",
    "RaceRule",
    "Randomness",
    "RejectionRule",
    "Simulation",
    "TableNoise",
    "TreeBatch",
    "Verdict",
    "WindowPool",
    "WindowState",
    "default_tree",
    "jacobi_decode",
    "simulate",
]
