"""The `rejection` rule: speculative sampling against the law each draft was drawn from (SJD-PAC, Algorithm 1).

Every window position remembers its draft x_j and q_j, the law x_j was drawn from. Verification is recursive
rejection without replacement (SpecInfer 2305.09781; Leviathan et al. 2211.17192 for one candidate); drafts that
were not reached are coupled to their newer law and usually kept (adaptive continuation).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_sjd_pac.decoding.acceptance import AcceptanceRule, Legal, Verdict, check_rows, freshest_line
from vllm_sjd_pac.decoding.drafting import (
    Proposal,
    WindowPlan,
    entering_weights,
    node_tokens,
    plan_window,
    sibling_rows,
)
from vllm_sjd_pac.decoding.randomness import CounterRandomness, Randomness, draw
from vllm_sjd_pac.decoding.state import WindowState
from vllm_sjd_pac.decoding.tree import TreeBatch

_VERIFY, _CONTINUE, _BRANCH = 0, 1, 2  # streams of random numbers


@dataclass(frozen=True)
class _Step:
    """What one verification works on: ``laws`` [B, N, V]; ``q_rows`` [slots * R, V] and ``ring`` [B, M+1] into it;
    ``uniforms`` [B, 1 + K, R]; ``drafts`` [B, M+1], the window's main drafts."""

    trees: TreeBatch
    tokens: Tensor
    valid: Tensor
    laws: Tensor
    q_rows: Tensor
    ring: Tensor
    uniforms: Tensor
    drafts: Tensor


class RejectionRule(AcceptanceRule):
    """Exact in law. ``mode``: ``sjd`` (independent redraws, no siblings), ``ac``, ``pd``, ``pac``.

    ``candidates``: ``recursive`` = siblings are tried one after the other (the paper); ``residual`` = one draw from
    the residual, accepted if it happens to be a sibling's token.
    ``smoothing``: λ in [0, 1): drafts follow (1 - λ)·row + λ·previous law, and q_j is that mixed row.
    ``keep_at_leaf``: the token after a leaf of the tree may be the window's own draft (docs/decoding.md); False draws
    it afresh, as the paper does. Both are exact.
    """

    name = "rejection"
    memory = 0
    keeps_estimates = True
    keeps_noise = False

    def __init__(
        self,
        mode: str = "pac",
        *,
        candidates: str = "recursive",
        smoothing: float = 0.0,
        keep_at_leaf: bool = True,
        randomness: Randomness | None = None,
        proposal: Proposal | None = None,
    ) -> None:
        if candidates not in ("recursive", "residual"):
            raise ValueError(f"candidates: expected 'recursive' or 'residual', got {candidates!r}")
        if not 0 <= smoothing < 1:
            raise ValueError(f"smoothing: expected a number in [0, 1), got {smoothing!r}")
        self.mode = self.check_mode(mode)
        self.candidates, self.smoothing, self.proposal = candidates, smoothing, proposal
        self.keep_at_leaf = keep_at_leaf
        self.randomness: Randomness = randomness or CounterRandomness()

    # -- verify ---------------------------------------------------------------------------------------------

    def verify(self, trees: TreeBatch, tokens: Tensor, rows: Tensor, state: WindowState) -> Verdict:
        check_rows(trees, tokens, rows, state, values=False)
        batch, nodes, vocab = rows.shape
        depth = trees.max_main
        each = torch.arange(batch, device=tokens.device)
        # Candidates without a law (window longer than the state's) cannot be tested: such nodes do not exist.
        valid = trees.valid & (trees.depths <= state.length.unsqueeze(1))
        laws = rows.softmax(-1)
        uniforms = self._uniforms(state, _VERIFY, trees.width + 1)  # the last draw, then one test per rank
        q_rows, ring = state.flat("estimates"), state.ring_grid(depth + 1)
        step = _Step(trees, tokens, valid, laws, q_rows, ring, uniforms, self._held_drafts(state, ring))

        # First candidates everywhere at once: does node v follow its parent?
        column = tokens.clamp(min=0)
        at = (trees.depths - 1).clamp(min=0)
        p_x = laws.flatten().take((each.unsqueeze(1) * nodes + trees.parents.clamp(min=0)) * vocab + column)
        q_x = q_rows.flatten().take(ring.gather(1, at) * vocab + column)
        u_x = uniforms[:, 1].gather(1, at)
        follows = (u_x * q_x < p_x) & valid
        first = trees.first_children
        child = first.clamp(min=0)
        here = torch.arange(nodes, device=tokens.device).expand(batch, nodes)
        end = torch.where((first >= 0) & follows.gather(1, child), child, here)
        for _ in range(max(depth, 1).bit_length()):  # pointer doubling: the end of each run of followed nodes
            end = end.gather(1, end)

        node = kept = end[:, 0]
        walking = torch.ones_like(node, dtype=torch.bool)
        token = torch.zeros_like(node)
        for level in range(trees.branch_levels + 1):
            width = trees.width if level < trees.branch_levels else 1  # no siblings hang below the last level
            child, drawn = self._choose(step, node, width)
            token = torch.where(walking & (child < 0), drawn, token)
            walking = walking & (child >= 0)
            node = torch.where(walking, end[each, child], node)
            if _nobody(walking):
                break

        counts = trees.depths[each, node] + 1
        on_path = trees.ancestors[each, node] & (trees.depths > 0)
        target = torch.where(on_path, trees.depths, 0)
        blank = torch.full((batch, depth + 2), -1, dtype=torch.long, device=tokens.device)
        path = blank.scatter(1, target, here)[:, 1 : depth + 1]
        committed = blank.scatter(1, target, tokens)[:, 1:]
        committed[each, counts - 1] = token
        state.commit(counts)
        return Verdict(committed, counts, kept, path, laws, freshest_line(trees, node), tokens)

    def _choose(self, step: _Step, node: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """At ``node`` [B], whose first candidate (if any) was rejected: the accepted sibling's node [B], -1 = none,
        and the token [B] drawn where there is none."""
        trees = step.trees
        each = torch.arange(node.shape[0], device=node.device)
        depth = trees.depths[each, node]
        here = torch.arange(trees.nodes, device=node.device).expand_as(step.tokens)
        mine = (trees.parents == node.unsqueeze(1)) & step.valid
        children = torch.full((node.shape[0], width + 1), -1, dtype=torch.long, device=node.device)
        children = children.scatter_(1, torch.where(mine, trees.ranks, width).clamp_(max=width), here)[:, :width]
        candidates = torch.where(children >= 0, step.tokens.gather(1, children.clamp(min=0)), 0)
        p, q, u = step.laws[each, node], step.q_rows[step.ring[each, depth]], step.uniforms[each, :, depth]

        # A leaf has no candidate, but the window has a draft for its position: keep it if the test lets us (adaptive
        # continuation). It is committed either way, and a kept draft spoils none of the drafts behind it.
        draft = step.drafts[each, depth]
        leaf = (children[:, 0] < 0) & (draft >= 0)
        candidates[:, 0] = torch.where(leaf, draft, candidates[:, 0])
        kept_draft = leaf
        chosen = torch.full_like(node, -1)
        for k in range(width if self.candidates == "recursive" else 1):
            candidate = candidates[:, k : k + 1]
            q_x, p_x = q.gather(1, candidate).squeeze(1), p.gather(1, candidate).squeeze(1)
            tested = (children[:, k] >= 0) & (chosen < 0) & (q_x > 0)  # q(x) = 0: fewer candidates exist than planned
            passed = u[:, k + 1] * q_x < p_x
            if k:
                chosen = torch.where(tested & passed, children[:, k], chosen)
                tested = tested & ~passed
            else:
                kept_draft = leaf & passed
                tested = tested | (leaf & ~passed)
            if _nobody(tested):
                continue
            tested = tested.unsqueeze(1)
            p = torch.where(tested, residual(p, q), p)
            q = torch.where(tested, without(q, candidate), q)
        drawn = torch.where(kept_draft, draft, draw(p, u[:, 0]))
        if self.candidates == "residual" and width > 1:
            equal = (candidates[:, 1:] == drawn.unsqueeze(1)) & (children[:, 1:] >= 0)
            chosen = torch.where(equal.any(1), children[each, 1 + equal.long().argmax(1)], chosen)
        return chosen, drawn

    def _held_drafts(self, state: WindowState, ring: Tensor) -> Tensor:
        """Main drafts long [B, M+1] of the window, -1 where there is none or none may be kept at a leaf."""
        if self.mode not in ("ac", "pac") or not self.keep_at_leaf:
            return torch.full_like(ring, -1)
        offsets = torch.arange(ring.shape[1], device=ring.device)
        drafts = state.flat("drafts")[ring, 0]
        return drafts.masked_fill_(offsets >= state.length.unsqueeze(1), -1)

    def _uniforms(self, state: WindowState, stream: int, kinds: int) -> Tensor:
        """float64 [B, kinds, R]: a number of each kind for each depth, the same whatever the rest of the batch is."""
        ring = state.pool.ring
        return self.randomness.uniform(state.keys, state.position, stream, kinds * ring).view(-1, kinds, ring)

    # -- draft ----------------------------------------------------------------------------------------------

    def draft(
        self, trees: TreeBatch, state: WindowState, verdict: Verdict | None, legal: Legal | None = None
    ) -> Tensor:
        root = verdict.last if verdict is not None else torch.full_like(state.slots, -1)
        plan = plan_window(trees, state, verdict)
        if not plan.total:
            return node_tokens(trees, root, plan, plan.offsets, None)
        uniforms = self._uniforms(state, _CONTINUE, 2)[plan.rows, :, plan.offsets]
        drafts = state.flat("drafts").index_select(0, plan.ring).squeeze(1)
        if verdict is not None and plan.continued:
            self._continue(plan, state, verdict, drafts, uniforms)
        if plan.total > plan.known:
            weights = entering_weights(plan, state, legal, self.proposal)
            weights /= weights.sum(-1, keepdim=True)
            drafts[plan.known :] = draw(weights, uniforms[plan.known :, 0])
            state.flat("estimates").index_copy_(0, plan.ring[plan.known :], weights)
        state.flat("drafts").index_copy_(0, plan.ring, drafts.unsqueeze(1))
        state.note_window(trees.main_length, trees.main_length)
        return node_tokens(trees, root, plan, drafts, self._branch(trees, plan, state, drafts))

    def _continue(
        self, plan: WindowPlan, state: WindowState, verdict: Verdict, drafts: Tensor, uniforms: Tensor
    ) -> None:
        """Couple each later draft to its fresh law p_j (adaptive continuation), in place; then q_j := p_j."""
        index, known, q_rows = plan.ring[: plan.continued], plan.refined, state.flat("estimates")
        fresh = verdict.rows.flatten(0, 1).index_select(0, plan.source)
        previous = q_rows.index_select(0, index[:known])
        if self.smoothing:
            fresh[:known].mul_(1 - self.smoothing).add_(previous, alpha=self.smoothing)
        law = fresh
        if self.mode in ("ac", "pac"):
            x = drafts[:known].unsqueeze(1)
            q_x, p_x = previous.gather(1, x).squeeze(1), fresh.gather(1, x).squeeze(1)
            stays = uniforms[:known, 0] * q_x < p_x
            redrawn = (~stays).nonzero().squeeze(1)
            coupled = residual(fresh[redrawn], previous[redrawn])
            redrawn = torch.cat([redrawn, torch.arange(known, plan.continued, device=redrawn.device)])
            law = torch.cat([coupled, fresh[known:]])
            drafts[redrawn] = draw(law, uniforms[redrawn, 1])
        else:
            drafts[: plan.continued] = draw(law, uniforms[: plan.continued, 1])
        q_rows.index_copy_(0, index, fresh)

    def _branch(self, trees: TreeBatch, plan: WindowPlan, state: WindowState, drafts: Tensor) -> Tensor | None:
        """Siblings long [B, S, K-1]: drawn from q_j without replacement, x_j removed first (proactive drafting)."""
        if trees.width == 1:
            return None
        place = sibling_rows(trees, plan)
        own = drafts[place].unsqueeze(1)
        q = self._sibling_laws(plan, state, place).scatter_(1, own, 0.0)
        shape = (trees.batch_size, trees.sibling_depth * q.shape[1])
        uniforms = self.randomness.uniform(state.keys, state.position, _BRANCH, shape[1]).view(q.shape)
        clocks = uniforms.neg_().log1p_().neg_().clamp_(min=1e-300)
        arrivals, siblings = (q / clocks).topk(min(trees.width - 1, q.shape[1]), dim=1)
        # Fewer tokens of positive probability than siblings: repeat the main draft, which verification skips.
        siblings = torch.where(arrivals > 0, siblings, own)
        if siblings.shape[1] < trees.width - 1:
            siblings = torch.cat([siblings, own.expand(-1, trees.width - 1 - siblings.shape[1])], 1)
        return siblings.view(trees.batch_size, trees.sibling_depth, trees.width - 1)

    def _sibling_laws(self, plan: WindowPlan, state: WindowState, place: Tensor) -> Tensor:
        """The laws q_j [n, V] that siblings of the plan's entries ``place`` long [n] are drawn from."""
        return state.flat("estimates").index_select(0, plan.ring[place])


def _nobody(mask: Tensor) -> bool:
    """Whether ``mask`` is false everywhere, where looking costs no synchronisation."""
    return mask.device.type == "cpu" and not bool(mask.any())


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm((p - q)+) of laws [n, V]; p where nothing is left (p = q up to rounding)."""
    rest = (p - q).clamp_(min=0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total, p)


def without(q: Tensor, token: Tensor) -> Tensor:
    """Law q [n, V] without ``token`` long [n, 1], renormalised; 0 where nothing is left."""
    rest = q.scatter(1, token, 0.0)
    return rest / rest.sum(-1, keepdim=True).clamp_(min=torch.finfo(q.dtype).tiny)
