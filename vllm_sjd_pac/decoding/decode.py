"""Drivers of the batched rules: one sequence with any target (`jacobi_decode`), many at once (`simulate`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vllm_sjd_pac.decoding.acceptance import MODES, AcceptanceRule, Legal, check_rows
from vllm_sjd_pac.decoding.drafting import Proposal
from vllm_sjd_pac.decoding.race import DEFAULT_MEMORY, RaceRule
from vllm_sjd_pac.decoding.randomness import CounterNoise
from vllm_sjd_pac.decoding.rejection import RejectionRule
from vllm_sjd_pac.decoding.state import WindowPool
from vllm_sjd_pac.decoding.tree import DraftTree, TreeBatch, default_tree

Target = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(prefix long [P], tokens long [T], parents long [T]) -> logits [T, V]; tokens[0] is the root."""

RULES = ("race", "rejection")


@dataclass
class DecodeResult:
    """``tokens``: the decoded tokens; ``accepted``: tokens committed by each forward pass; ``forwards``: how many."""

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def forwards(self) -> int:
        return len(self.accepted)


def jacobi_decode(
    target: Target,
    prompt: Sequence[int] | Tensor,
    num_tokens: int,
    *,
    vocab_size: int,
    rule: str = "race",
    mode: str = "pac",
    tree: DraftTree | None = None,
    proposal: str | Proposal = "uniform",
    memory: bool = True,
    smoothing: float = 0.25,
    generator: torch.Generator | None = None,
) -> DecodeResult:
    """Decode ``num_tokens`` tokens after ``prompt`` (not empty) with few calls of ``target``.

    ``target(prefix, tokens, parents)`` gives logits [T, V] of the token after the path to each node; ``prefix`` is
    everything before the root ``tokens[0]``. -inf forbids a token.
    ``rule``: "race" (same tokens as ``mode="ar"`` from the same generator state, whatever the tree) or "rejection"
    (same law). ``mode``: "pac", "pd" (trees), "ac", "sjd" (as many nodes in a chain), "ar" (one token a call).
    ``proposal``: law of the drafts that enter the window: "uniform", or positions long [n] -> weights [n, V] or [V].
    ``memory``, ``smoothing``: drafting of `race`; `rejection` ignores them. ``tree``: default `default_tree(64, rule)`.
    Raises ValueError naming the argument where an argument, or what ``target`` returns, cannot be used.
    """
    prefix = torch.as_tensor(prompt, dtype=torch.long).flatten()
    _check(prefix, num_tokens, vocab_size, rule, mode, tree, proposal, smoothing)
    tree = tree or default_tree(64, rule)
    if mode in ("ac", "sjd", "ar"):
        tree = DraftTree.chain(1 if mode == "ar" else tree.num_nodes)
    tree = tree.limit_depth(num_tokens - 1)
    law = None if isinstance(proposal, str) else proposal
    rule_mode = "ac" if mode == "ar" else mode
    decoder: AcceptanceRule
    if rule == "race":
        noise = CounterNoise(vocab_size)
        decoder = RaceRule(noise, rule_mode, smoothing=smoothing, memory=DEFAULT_MEMORY if memory else 0, proposal=law)
    else:
        decoder = RejectionRule(rule_mode, proposal=law)
    pool = WindowPool(decoder, vocab_size, tree.main_length)
    key = int(torch.randint(1 << 62, (1,), generator=generator))
    state = pool.gather(torch.tensor([pool.allocate(key)]))

    result = DecodeResult()
    trees = TreeBatch.stack([tree])
    tokens = decoder.draft(trees, state, None)
    tokens[0, 0] = prefix[-1]
    prefix = prefix[:-1]
    while True:
        rows = target(prefix, tokens[0].clone(), trees.parents[0].clone())
        rows = _rows(rows, trees.nodes, vocab_size)
        check_rows(trees, tokens, rows, state)
        verdict = decoder.verify(trees, tokens, rows, state)
        count = int(verdict.counts)
        committed = verdict.tokens[0, :count]
        result.tokens += committed.tolist()
        result.accepted.append(count)
        left = num_tokens - len(result.tokens)
        if left == 0:
            return result
        prefix = torch.cat([prefix, tokens[0, :1], committed[:-1]])
        trees = TreeBatch.stack([tree.limit_depth(left - 1)])
        tokens = decoder.draft(trees, state, verdict)


BatchTarget = Callable[[Tensor, Tensor, TreeBatch, Tensor, Tensor], Tensor]
"""(committed long [B, L], position long [B], trees, node tokens long [B, N], sequences long [B]) -> logits float32
[B, N, V]. ``sequences``: numbers of the sequences that are still decoding; the root of row b is its token number
position[b] - 1; committed[b, :position[b]] are its tokens so far, -1 beyond."""


@dataclass(frozen=True)
class Simulation:
    """``tokens`` long [B, L]: decoded sequences; ``accepted`` long [S, B]: tokens committed in each step, 0 after a
    sequence has ended; ``branched`` long [S, B]: tokens committed from branch nodes."""

    tokens: Tensor
    accepted: Tensor
    branched: Tensor

    @property
    def forwards(self) -> Tensor:
        """Forward passes of each sequence, long [B]."""
        return (self.accepted > 0).sum(0)

    @property
    def tokens_per_forward(self) -> Tensor:
        """Step compression of each sequence, float64 [B]."""
        return self.tokens.shape[1] / self.forwards.double()


def simulate(
    target: BatchTarget,
    batch: int,
    num_tokens: int,
    rule: AcceptanceRule,
    tree: DraftTree | Callable[[int], DraftTree],
    *,
    vocab_size: int,
    keys: Tensor | None = None,
    legal: Callable[[Tensor, Tensor], Tensor] | None = None,
    max_window: int | None = None,
) -> Simulation:
    """Decode ``batch`` sequences of ``num_tokens`` tokens at once with a batched rule.

    ``tree``: the draft tree, or a function of the step number. ``keys``: long [B], default 0..B-1.
    ``legal``: (keys [n], positions long [n, W]) -> bool [n, W, V].
    """
    pick = tree if callable(tree) else lambda step: tree
    window = max_window if max_window is not None else min(pick(0).main_length, num_tokens - 1)
    pool = WindowPool(rule, vocab_size, window, capacity=batch)
    keys = torch.arange(batch) if keys is None else keys
    active = pool.allocate_many(keys)
    who = torch.arange(batch)
    out = torch.full((batch, num_tokens), -1)
    accepted: list[Tensor] = []
    branched: list[Tensor] = []
    state = pool.gather(active)
    trees = TreeBatch.gather([pick(0).limit_depth(num_tokens - 1)], torch.zeros(batch, dtype=torch.long))
    tokens = rule.draft(trees, state, None, _bind(legal, state.keys))
    step = 0
    while True:
        rows = target(out[who], state.position, trees, tokens, who)
        verdict = rule.verify(trees, tokens, rows, state)
        begin = state.position - verdict.counts
        columns = begin.unsqueeze(1) + torch.arange(verdict.tokens.shape[1])
        real = verdict.tokens >= 0
        out[who.unsqueeze(1).expand_as(real)[real], columns[real]] = verdict.tokens[real]
        for record, values in ((accepted, verdict.counts), (branched, verdict.counts - 1 - verdict.kept)):
            record.append(torch.zeros(batch, dtype=torch.long).index_copy_(0, who, values))
        left = num_tokens - state.position
        if not bool((left > 0).any()):
            return Simulation(out, torch.stack(accepted), torch.stack(branched))
        going = (left > 0).nonzero(as_tuple=True)[0]
        who, left = who[going], left[going]
        step += 1
        verdict = verdict.select(going)
        state = pool.gather(active[who])
        full = pick(step)
        depths, index = torch.unique(left.clamp(max=full.max_depth + 1) - 1, return_inverse=True)
        trees = TreeBatch.gather([full.limit_depth(d) for d in depths.tolist()], index)
        tokens = rule.draft(trees, state, verdict, _bind(legal, state.keys))


def _bind(legal: Callable[[Tensor, Tensor], Tensor] | None, keys: Tensor) -> Legal | None:
    return None if legal is None else lambda positions: legal(keys, positions)


def _rows(rows: Tensor, nodes: int, vocab_size: int) -> Tensor:
    if not isinstance(rows, Tensor) or rows.shape != (nodes, vocab_size) or not rows.is_floating_point():
        got = f"{rows.dtype} {tuple(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
        raise ValueError(f"target: expected floating-point logits of shape {(nodes, vocab_size)}, got {got}")
    return rows.to(torch.float32).unsqueeze(0)


def _check(
    prefix: Tensor,
    num_tokens: int,
    vocab_size: int,
    rule: str,
    mode: str,
    tree: DraftTree | None,
    proposal: str | Proposal,
    smoothing: float,
) -> None:
    if not prefix.numel():
        raise ValueError("prompt: expected at least one token (the first root)")
    for name, value in (("num_tokens", num_tokens), ("vocab_size", vocab_size)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: expected an integer of at least 1, got {value!r}")
    if rule not in RULES:
        raise ValueError(f"rule: expected one of {', '.join(RULES)}, got {rule!r}")
    if mode not in (*MODES, "ar"):
        raise ValueError(f"mode: expected one of {', '.join((*MODES, 'ar'))}, got {mode!r}")
    if tree is not None and not isinstance(tree, DraftTree):
        raise ValueError(f"tree: expected a DraftTree, got {type(tree).__name__}")
    if proposal != "uniform" and not callable(proposal):
        raise ValueError(f"proposal: expected 'uniform' or a callable of positions, got {proposal!r}")
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing: expected a number in [0, 1), got {smoothing!r}")
