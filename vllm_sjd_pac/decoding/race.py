"""The `race` rule: one fixed noise vector per position (Gumbel race), as plain sampling uses it.

The token after node u is argmax(row_u + noise of its position): the very token that plain sampling with the same
noise would produce there. Candidates are guesses of it and can come from anywhere, so the output is that of plain
sampling whatever the drafts, the tree or the window are. Coupling by shared noise: So et al., MC-SJD, 2510.24211.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from vllm_sjd_pac.decoding.acceptance import AcceptanceRule, Legal, Verdict, check_rows, freshest_line
from vllm_sjd_pac.decoding.drafting import (
    Proposal,
    WindowPlan,
    counting,
    node_tokens,
    plan_window,
    sibling_rows,
    window_rows,
)
from vllm_sjd_pac.decoding.randomness import NoiseSource, first_argmax
from vllm_sjd_pac.decoding.scores import WindowScores
from vllm_sjd_pac.decoding.state import WindowState
from vllm_sjd_pac.decoding.tree import TreeBatch

DEFAULT_MEMORY = 7
_MATCHED = 16
"""Window offsets whose draft is looked up by context: later ones will have a fresher row before their turn comes."""
_NONE, _ENTERED = -2, -1
"""Draft and context of an empty place, and context of a draft that entered the window without a row."""
_PREFERENCE = 1e6
"""Above every score: remembered drafts come before runners-up."""


class RaceRule(AcceptanceRule):
    """Exact for one seed: the same tokens with speculation on, off, or changed halfway.

    ``smoothing``: λ in [0, 1): estimates are (1 - λ)·row + λ·previous estimate, of logits; 0 keeps no estimate rows.
    ``memory``: how many earlier drafts of a position are remembered, each with the token that stood before it (0 =
    none). They come back as siblings, and as main drafts where that token has come back.
    ``keep_noise``: hold the window's noise rows in the pool; else the source is asked again in every step.
    Modes: adaptive continuation is inherent, so ``sjd`` = ``ac`` (chains) and ``pd`` = ``pac`` (trees).
    """

    name = "race"

    def __init__(
        self,
        noise: NoiseSource,
        mode: str = "pac",
        *,
        smoothing: float = 0.0,
        memory: int = DEFAULT_MEMORY,
        keep_noise: bool = True,
        proposal: Proposal | None = None,
    ) -> None:
        if not 0 <= smoothing < 1:
            raise ValueError(f"smoothing: expected a number in [0, 1), got {smoothing!r}")
        if memory < 0:
            raise ValueError(f"memory: expected a number of tokens, at least 0, got {memory!r}")
        self.mode = self.check_mode(mode)
        self.noise, self.smoothing, self.memory, self.proposal = noise, smoothing, int(memory), proposal
        self.keeps_estimates, self.keeps_noise = smoothing > 0, keep_noise

    # -- verify ---------------------------------------------------------------------------------------------

    def verify(self, trees: TreeBatch, tokens: Tensor, rows: Tensor, state: WindowState) -> Verdict:
        check_rows(trees, tokens, rows, state, values=False)
        batch, depth, vocab = trees.batch_size, trees.max_main, rows.shape[2]
        state.prepare_noise(self.noise, trees)
        steps = counting(depth + 1, tokens.device)
        grid = state.ring_grid(depth + 1)
        race = state.noise_rows(self.noise, grid.flatten(), None, steps).view(batch, depth + 1, vocab)
        winners = first_argmax(race.add_(rows[:, : depth + 1]))
        walk = self._walk_one if state.single is not None else self._walk
        committed, path, kept, node, counts = walk(trees, tokens, rows, winners, grid, state)
        state.commit(counts)
        line = freshest_line(trees, node)
        return Verdict(committed, counts, kept, path, rows, line, tokens, winners if line is trees.main_line else None)

    def _walk(
        self, trees: TreeBatch, tokens: Tensor, rows: Tensor, winners: Tensor, grid: Tensor, state: WindowState
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Follow the winners long [B, M+1] through the trees: ``tokens``, ``path`` and ``kept`` of the `Verdict`, the
        node long [B] where each walk ended, and ``counts``; ``grid`` long [B, M+1] as `ring_grid`."""
        batch, depth = trees.batch_size, trees.max_main
        steps = counting(depth + 1, tokens.device)
        # Along the main chain: how many drafts won their race?
        won = (tokens[:, 1 : depth + 1] == winners[:, :-1]) & trees.on_main
        kept = won.cumprod(1).sum(1)
        walked = steps <= kept.unsqueeze(1)
        committed = winners.masked_fill(~walked, -1)
        path = steps[1:].expand(batch, depth).masked_fill(~walked[:, 1:], -1)
        node = kept

        # Off it: does a sibling carry the winner? Then go on from there.
        if trees.branch_height:
            each = torch.arange(batch, device=tokens.device)
            token = winners[each, kept]
            path = path.clone()
        for _ in range(trees.branch_height):
            child = (trees.parents == node.unsqueeze(1)) & (tokens == token.unsqueeze(1))
            found = child.any(1)
            if not found.any():
                break
            node = torch.where(found, child.view(torch.uint8).argmax(1), node)
            at = trees.depths[each, node]
            noise = state.noise_rows(self.noise, grid[each, at], each, at)
            token = torch.where(found, first_argmax(noise.add_(rows[each, node])), token)
            committed[each, at] = token
            path[each, at - 1] = torch.where(found, node, path[each, at - 1])
        counts = trees.depths.gather(1, node.unsqueeze(1)).squeeze(1) + 1
        return committed, path, kept, node, counts

    def _walk_one(
        self, trees: TreeBatch, tokens: Tensor, rows: Tensor, winners: Tensor, grid: Tensor, state: WindowState
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """`_walk` for one request, in plain integers: some forty tiny tensor operations would take longer."""
        drafted, committed = tokens[0].tolist(), winners[0].tolist()
        depth, kept = trees.max_main, 0
        while kept < depth and drafted[kept + 1] == committed[kept]:
            kept += 1
        del committed[kept + 1 :]
        path, node = list(range(1, kept + 1)), kept
        for _ in range(trees.branch_height):
            child = next((c for c in trees.children_of_one[node] if drafted[c] == committed[-1]), None)
            if child is None:
                break
            node, at = child, len(committed)
            noise = state.noise_rows(self.noise, grid[0, at : at + 1], counting(1, rows.device), torch.tensor([at]))
            committed.append(int(first_argmax(noise.add_(rows[0, node : node + 1]))))
            path.append(node)
        count = len(committed)
        padding = [-1] * (depth + 1 - count)
        # One tensor, cut: making one takes several times as long as a view of it.
        flat = torch.tensor([[*committed, *padding, *path, *padding, kept, node, count]])
        tokens, path_of, *numbers = flat.split([depth + 1, depth, 1, 1, 1], 1)
        kept_of, node_of, count_of = (number[0] for number in numbers)
        return tokens, path_of, kept_of, node_of, count_of

    # -- draft ----------------------------------------------------------------------------------------------

    def draft(
        self, trees: TreeBatch, state: WindowState, verdict: Verdict | None, legal: Legal | None = None
    ) -> Tensor:
        root = verdict.last if verdict is not None else torch.full_like(state.slots, -1)
        state.prepare_noise(self.noise, trees)
        plan = plan_window(trees, state, verdict)
        if not plan.total:
            return node_tokens(trees, root, plan, plan.offsets, None)
        race = WindowScores(self, plan, state, verdict, legal)
        drafts = race.winners()
        if plan.known > plan.continued and not self.keeps_estimates:
            held = state.flat("memory")[:, 0] if self.memory else state.flat("drafts")
            drafts[plan.continued : plan.known] = held[plan.ring[plan.continued : plan.known], 0]
        if not self.memory:
            state.flat("drafts").index_copy_(0, plan.ring, drafts.unsqueeze(1))
            siblings = self._siblings(trees, plan, race, drafts, drafts.unsqueeze(1))
        elif state.single is not None:
            first = self._remember_one(plan, state, verdict, drafts)[: max(_MATCHED, trees.sibling_depth)].tolist()
            self._match_one(root, first[:_MATCHED], drafts)
            siblings = self._siblings_one(trees, race, drafts, first)
        else:
            memory = self._remember(plan, state, verdict, drafts)
            drafts = self._match(trees, plan, root, memory, drafts)
            siblings = self._siblings(trees, plan, race, drafts, memory[:, 0])
        state.note_window(trees.main_length, plan.fresh_length)
        return node_tokens(trees, root, plan, drafts, siblings)

    def _remember(self, plan: WindowPlan, state: WindowState, verdict: Verdict | None, drafts: Tensor) -> Tensor:
        """Memory long [T, 2, 1+H] of each position, newest first, brought up to date: drafts, and their contexts.

        A context, the token before the position in the pass that gave the row, is there once, with its newest draft.
        """
        stored = state.flat("memory")
        memory = stored.index_select(0, plan.ring)
        # The row after the old window's end is the first thing known of its position.
        memory.masked_fill_(state.is_new(plan.rows, plan.offsets).view(-1, 1, 1), _NONE)
        if verdict is not None and plan.continued:
            past = memory[: plan.continued]
            context = verdict.nodes.flatten().index_select(0, plan.source)
            # The older entry of this context gives way; without one, the oldest of all.
            known = (past[:, 1] == context.unsqueeze(1)) | (past[:, 1] == _ENTERED)
            known[:, -1] = True
            gone = known.view(torch.uint8).argmax(1).view(-1, 1, 1)
            fresh = torch.stack([drafts[: plan.continued], context], 1).unsqueeze(2)
            moved = torch.cat([fresh, past[:, :, :-1]], 2)
            memory[: plan.continued] = torch.where(counting(1 + self.memory, memory.device) <= gone, moved, past)
        if plan.total > plan.known:
            entered = memory[plan.known :]
            entered[:, 0, 0] = drafts[plan.known :]
            entered[:, 1, 0] = _ENTERED
        stored.index_copy_(0, plan.ring, memory)
        return memory

    def _remember_one(
        self, plan: WindowPlan, state: WindowState, verdict: Verdict | None, drafts: Tensor
    ) -> np.ndarray:
        """`_remember` for one request, in NumPy, whose small operations take a fifth of the time of torch's."""
        assert state.single is not None
        stored, ring, chosen = state.flat("memory").numpy(), plan.ring.numpy(), drafts.numpy()
        memory: np.ndarray = stored[ring]
        memory[max(0, state.single[2] - state.single[1]) :] = _NONE
        if verdict is not None and plan.continued:
            past = memory[: plan.continued]
            context = verdict.nodes.numpy()[0, plan.source.numpy()]
            known = (past[:, 1] == context[:, None]) | (past[:, 1] == _ENTERED)
            known[:, -1] = True
            moved = np.empty_like(past)
            moved[:, 0, 0], moved[:, 1, 0], moved[:, :, 1:] = chosen[: plan.continued], context, past[:, :, :-1]
            shifted = np.arange(1 + self.memory) <= known.argmax(1)[:, None]
            np.copyto(past, moved, where=shifted[:, None])
        if plan.total > plan.known:
            memory[plan.known :, 0, 0], memory[plan.known :, 1, 0] = chosen[plan.known :], _ENTERED
        stored[ring] = memory
        return memory

    @staticmethod
    def _match_one(root: Tensor, memory: list[list[list[int]]], drafts: Tensor) -> None:
        """`_match` for one request, in plain integers and in place; ``memory`` [W, 2, 1+H] of the first offsets."""
        token, followed = int(root), []
        for row_drafts, contexts in memory:
            token = row_drafts[contexts.index(token) if token in contexts else 0]
            followed.append(token)
        drafts[: len(followed)] = torch.tensor(followed)

    def _match(self, trees: TreeBatch, plan: WindowPlan, root: Tensor, memory: Tensor, drafts: Tensor) -> Tensor:
        """Main drafts long [T], from ``drafts`` long [T] of the newest rows and ``memory`` long [T, 2, 1+H].

        Where the token before a position is not the one that its newest row saw: the draft of the newest row that did
        see it, if one is remembered.
        """
        width = min(_MATCHED, trees.max_main)
        place = window_rows(trees, plan, width)
        guesses, before = memory[place].unbind(2)
        # step[k][j]: which row to follow at offset k after row j was followed at offset k-1; 0, the newest, if none
        # saw that token. All chains of such steps at once, by doubling: the token before a position is itself chosen.
        first = (before[:, :1] == root.view(-1, 1, 1)).view(torch.uint8).argmax(-1, keepdim=True)
        step = (before[:, 1:].unsqueeze(2) == guesses[:, :-1].unsqueeze(3)).view(torch.uint8).argmax(-1)
        step = torch.cat([first.expand(-1, -1, guesses.shape[2]), step], 1)
        reach = 1
        while reach < width:
            step = torch.cat([step[:, :reach], step[:, reach:].gather(2, step[:, :-reach])], 1)
            reach *= 2
        chosen = guesses.gather(2, step[:, :, :1]).squeeze(2)
        # Offsets outside a window write to a place beyond the end: a mask as index would wait for the GPU.
        inside = torch.arange(width, device=root.device) < trees.main_length.unsqueeze(1)
        end = drafts.shape[0]
        main = torch.cat([drafts, drafts.new_zeros(1)])
        main.index_copy_(0, torch.where(inside, place, end).flatten(), chosen.flatten())
        return main[:end]

    def _siblings(
        self, trees: TreeBatch, plan: WindowPlan, race: WindowScores, drafts: Tensor, history: Tensor
    ) -> Tensor | None:
        """Tokens long [B, S, K-1]: remembered drafts of each position, newest first, then runners-up of its race."""
        if trees.width == 1:
            return None
        place = sibling_rows(trees, plan)
        ranking, history = race.scores(place), history.index_select(0, place)
        own = drafts[place].unsqueeze(1)
        if self.memory:
            known = torch.where(history >= 0, history, own)
            ranking.scatter_reduce_(1, known, _bonus(known.shape[1], own.device).expand(known.shape), "amax")
        ranking.scatter_(1, own, float("-inf"))
        best, siblings = ranking.topk(min(trees.width - 1, ranking.shape[1]), dim=1)
        siblings = torch.where(best > float("-inf"), siblings, own)
        if siblings.shape[1] < trees.width - 1:
            siblings = torch.cat([siblings, own.expand(-1, trees.width - 1 - siblings.shape[1])], 1)
        return siblings.view(trees.batch_size, trees.sibling_depth, trees.width - 1)

    @staticmethod
    def _siblings_one(
        trees: TreeBatch, race: WindowScores, drafts: Tensor, memory: list[list[list[int]]]
    ) -> Tensor | None:
        """`_siblings` for one request, in plain integers; ``memory`` [W, 2, 1+H] of the first offsets. A race is run
        only where too few drafts are remembered."""
        if trees.width == 1:
            return None
        rows = []
        for offset, own in enumerate(drafts[: trees.sibling_depth].tolist()):
            tokens = dict.fromkeys(token for token in memory[offset][0] if token >= 0 and token != own)
            chosen = list(tokens)[: trees.width - 1]
            if len(chosen) < trees.width - 1:
                scores = race.scores_of_one(offset)
                scores[[own, *chosen]] = -np.inf
                while len(chosen) < trees.width - 1:
                    best = int(scores.argmax())
                    if scores[best] == -np.inf:
                        break
                    scores[best] = -np.inf
                    chosen.append(best)
            rows.append(chosen + [own] * (trees.width - 1 - len(chosen)))
        return torch.tensor([rows])


@lru_cache(maxsize=16)
def _bonus(number: int, device: torch.device) -> Tensor:
    """float32 [number]: what ranks remembered drafts before all others, the newest first."""
    return (_PREFERENCE - counting(number, device)).float()
