"""The model-runner mixin: positions and attention of draft trees, sampling, drafts.

The worker turns vLLM's built V1 runner (CPU or GPU) into a subclass with this mixin. Written for vLLM 0.32. The CPU
runner is what the tests run; the GPU runner takes the same path and has not been run here.
"""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput

from vllm_sjd_pac.decoding import DraftTree, Verdict, WindowState
from vllm_sjd_pac.engine import compat
from vllm_sjd_pac.engine import report as step_report
from vllm_sjd_pac.engine.arguments import options_of
from vllm_sjd_pac.engine.attention.interface import RequestTree, TreeStep, set_tree_step
from vllm_sjd_pac.engine.attention.virtual import scratch_per_tree
from vllm_sjd_pac.engine.noise import derived_seed
from vllm_sjd_pac.engine.ranks import compare_ranks
from vllm_sjd_pac.engine.report import StepReport
from vllm_sjd_pac.engine.rows import Columns, combine_guidance
from vllm_sjd_pac.engine.sampler import TreeBatchInput, TreeRejectionSampler
from vllm_sjd_pac.engine.sizes import padded_size
from vllm_sjd_pac.engine.state import ROOT_ONLY, RequestState
from vllm_sjd_pac.engine.trees import TreeChooser, branch_nodes
from vllm_sjd_pac.models.family import find_family

_MISSING = -1


@dataclasses.dataclass
class _Step:
    """What one step carries from verification to drafting."""

    trees: dict[str, DraftTree] = dataclasses.field(default_factory=dict)
    report: StepReport = dataclasses.field(default_factory=StepReport)
    members: list[RequestState] = dataclasses.field(default_factory=list)
    verdict: Verdict | None = None
    window: WindowState | None = None
    sampled: dict[str, list[int]] = dataclasses.field(default_factory=dict)


class JacobiRunnerMixin:
    """Overrides of ``GPUModelRunner`` / ``CPUModelRunner``; `start` runs once after the class was swapped."""

    def start(self: Any) -> None:
        config = self.vllm_config
        self.sjd_options = options_of(config)
        model = config.model_config
        self.sjd_family = find_family(model.hf_config, model.model)
        vocab_size = self.input_batch.vocab_size
        layout = self.sjd_family.layout(())
        tokens = layout.vocabulary if layout.constrained else torch.arange(vocab_size)
        self.sjd_chooser = TreeChooser(self.sjd_options)
        self.sjd_sampler = TreeRejectionSampler(
            self.sjd_options,
            Columns(tokens.to(self.device), vocab_size),
            max_window=self.sjd_chooser.max_nodes - 1,
            vocab_size=vocab_size,
            device=self.device,
            draws_integers=self.device.type == "cpu",
        )
        self.sjd_scratch_blocks = 0  # set by the worker when the cache is allocated
        self.sjd_requests: dict[str, RequestState] = {}
        self.sjd_step = _Step()
        self.sjd_builders: list[Any] = []  # set by the worker, too

    # ---- requests come and go -------------------------------------------------------------------------------------

    def _update_states(self: Any, scheduler_output: Any) -> Any:
        for request_id in scheduler_output.finished_req_ids:
            state = self.sjd_requests.pop(request_id, None)
            if state is not None:
                self.sjd_sampler.leave(state)
        for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            # Preempted: drafts are gone; the stream of random numbers is recomputed from its seed.
            state = self.sjd_requests[request_id]
            self.sjd_sampler.leave(state)
            state.tree = ROOT_ONLY
        result = super()._update_states(scheduler_output)  # type: ignore[misc]
        for data in scheduler_output.scheduled_new_reqs:
            if data.req_id not in self.sjd_requests:
                self.sjd_requests[data.req_id] = RequestState.new(data, self.sjd_family)
        return result

    def _seed_of(self: Any, state: RequestState) -> int:
        if state.params.seed is not None:
            return state.params.seed
        return derived_seed(self.model_config.seed or 0, state.request_id)

    # ---- inputs ---------------------------------------------------------------------------------------------------

    def _prepare_inputs(self: Any, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        indices, metadata, most = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)  # type: ignore[misc]
        if not compat.is_unneeded("draft_positions"):
            self.place_drafts(scheduler_output, num_scheduled_tokens)
        if self._pads() and metadata is not None:
            # Further rows behind those that are sampled from, so that the head's products have few sizes, too.
            indices = torch.nn.functional.pad(indices, (0, padded_size(len(indices)) - len(indices)))
        return indices, metadata, most

    def _pads(self: Any) -> bool:
        # Data-parallel ranks agree on their sizes themselves; adapters (LoRA) are mapped to tokens without padding.
        return self.device.type == "cpu" and self.parallel_config.data_parallel_size == 1 and not self.lora_config

    def _determine_batch_execution_and_padding(self: Any, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        mode, batch, *rest = super()._determine_batch_execution_and_padding(num_tokens, *args, **kwargs)  # type: ignore[misc]
        if self._pads():
            padded = min(padded_size(batch.num_tokens), self.max_num_tokens)
            batch = dataclasses.replace(batch, num_tokens=max(padded, batch.num_tokens))
        return mode, batch, *rest

    def place_drafts(self: Any, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> None:
        """Note the step's trees: positions by depth, and what attention must mask."""
        step = self.sjd_step = _Step()
        requests: list[RequestTree] = []
        branches: list[np.ndarray] = []
        for request_id, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
            state = self.sjd_requests[request_id]
            if drafts[0] == _MISSING:
                continue
            tree = state.tree.truncate(len(drafts) + 1)
            step.trees[request_id] = tree
            if tree.num_nodes == tree.main_length + 1:
                continue
            index = self.input_batch.req_id_to_index[request_id]
            scheduled = int(num_scheduled_tokens[index])
            root_offset = scheduled - tree.num_nodes
            root_position = int(self.input_batch.num_computed_tokens_cpu[index]) + root_offset
            requests.append(RequestTree(index, root_offset, root_position, tree))
            first = int(self.query_start_loc.np[index]) + root_offset
            # vLLM has numbered the nodes one by one; the network's position of a node is the root's plus its depth.
            branches.append(np.add(branch_nodes(tree), [[first], [root_position]]))
        if branches:
            tokens, positions = torch.from_numpy(np.concatenate(branches, 1)).to(self.device)
            self.positions.index_copy_(0, tokens, positions.to(self.positions.dtype))
        set_tree_step(self.sjd_builders, TreeStep(tuple(sorted(requests, key=lambda r: r.request_index))))

    def tree_builders(self: Any) -> list[Any]:
        """The attention metadata builder of every group of layers."""
        return [group.get_metadata_builder(0) for group in self._attn_group_iterator()]

    # ---- sampling -------------------------------------------------------------------------------------------------

    def _sample(self: Any, logits: torch.Tensor, spec_decode_metadata: Any) -> SamplerOutput:
        batch = self.input_batch
        counts = spec_decode_metadata.num_draft_tokens
        first_row = [0]
        for count in counts:
            first_row.append(first_row[-1] + count + 1)
        discarded = self.discard_request_mask.np
        step: _Step = self.sjd_step
        trees_in: list[RequestState] = []
        plain: list[int] = []
        for index, request_id in enumerate(batch.req_ids):
            state = self.sjd_requests[request_id]
            if discarded[index] or state.owner_id is not None:
                continue
            if state.guidance.is_on and not self._mate_is_ready(state, counts, index, discarded):
                step.report.undone |= {request_id, state.twin_id}
            elif state.layout is not None and state.draftable and self.sjd_options.mode != "ar":
                trees_in.append(state)
            else:
                plain.append(index)
        for index, request_id in enumerate(batch.req_ids):
            owner = self.sjd_requests[request_id].owner_id
            if owner is not None and not discarded[index]:
                owner_index = batch.req_id_to_index.get(owner)
                if owner_index is None or discarded[owner_index]:
                    step.report.undone.add(request_id)
        columns: list[list[int]] = [[] for _ in batch.req_ids]
        logprobs = self._sample_plain(logits, first_row, plain, columns) if plain else None
        if trees_in:
            self._sample_trees(logits, first_row, trees_in, columns)
        self._copy_to_twins(columns)
        output = self._to_sampler_output(columns, logprobs)
        return output

    def _mate_is_ready(self: Any, state: RequestState, counts: list[int], index: int, discarded: np.ndarray) -> bool:
        mate = self.input_batch.req_id_to_index.get(state.twin_id)
        return mate is not None and not discarded[mate]

    def _sample_trees(
        self: Any, logits: torch.Tensor, first_row: list[int], states: list[RequestState], columns: list[list[int]]
    ) -> None:
        batch, step = self.input_batch, self.sjd_step
        indices = [batch.req_id_to_index[state.request_id] for state in states]
        trees, twin_first = [], []
        for state, index in zip(states, indices, strict=True):
            tree = step.trees.get(state.request_id, ROOT_ONLY)
            if state.guidance.is_on:
                mate = batch.req_id_to_index[state.twin_id]
                tree = tree.truncate(step.trees.get(state.twin_id, ROOT_ONLY).num_nodes)
                twin_first.append(first_row[mate])
            else:
                twin_first.append(first_row[index])
            trees.append(tree)
        num_tokens = [int(batch.num_tokens_no_spec[index]) for index in indices]
        for state, count in zip(states, num_tokens, strict=True):
            self.sjd_sampler.enter(state, self._seed_of(state), count - state.prompt_length)
        tokens = np.full((len(trees), max(tree.num_nodes for tree in trees)), _MISSING, dtype=np.int64)
        for row, (index, count, tree) in enumerate(zip(indices, num_tokens, trees, strict=True)):
            tokens[row, : tree.num_nodes] = batch.token_ids_cpu[index, count - 1 : count - 1 + tree.num_nodes]
        nodes = torch.from_numpy(tokens).to(logits.device)
        own_first = [first_row[index] for index in indices]
        given = TreeBatchInput(states, trees, own_first, twin_first, nodes, num_tokens)
        step.verdict, step.window = self.sjd_sampler.verify(logits, given)
        step.members = states
        committed = self.sjd_sampler.committed(step.verdict).tolist()
        kept = step.verdict.kept.tolist()
        for state, index, walked, main in zip(states, indices, committed, kept, strict=True):
            columns[index] = [token for token in walked if token >= 0]
            step.report.kept[state.request_id] = main
            if state.request_id in step.trees:
                step.report.accepted.append(len(columns[index]) - 1)
            self._advance_stock_generator(index, len(columns[index]))

    def _advance_stock_generator(self: Any, index: int, count: int) -> None:
        """Keep the stock generator where plain sampling would have it: text after an image uses it again."""
        generator = self.input_batch.generators.get(index)
        if generator is None:
            return
        if self.device.type == "cpu":
            torch.randint(0, 2**31, (count,), generator=generator)
        else:
            row = torch.empty(self.input_batch.vocab_size, device=self.device)
            for _ in range(count):
                row.exponential_(generator=generator)

    def _sample_plain(
        self: Any, logits: torch.Tensor, first_row: list[int], plain: list[int], columns: list[list[int]]
    ) -> LogprobsTensors | None:
        """The stock sampler for text, and for image requests that run without drafts (then guided and masked)."""
        batch = self.input_batch
        rows = logits[torch.tensor(first_row[:-1], device=logits.device)].float()
        for index in plain:
            state = self.sjd_requests[batch.req_ids[index]]
            if state.guidance.is_on:
                mate = batch.req_id_to_index[state.twin_id]
                scale = torch.tensor([state.guidance.scale], device=rows.device)
                rows[index] = combine_guidance(rows[index : index + 1], rows[mate : mate + 1], scale)[0]
            if state.layout is not None:
                position = int(batch.num_tokens_no_spec[index]) - state.segment_start
                rows[index] = self.sjd_sampler.mask_row(rows[index], state.layout, position)
            elif state.text_top_k is not None:
                least = rows[index].topk(min(state.text_top_k, rows.shape[1])).values[-1]
                rows[index] = rows[index].masked_fill(rows[index] < least, float("-inf"))
        members = set(plain)
        metadata = dataclasses.replace(
            batch.sampling_metadata, generators={i: g for i, g in batch.generators.items() if i in members}
        )
        output = self.sampler(logits=rows, sampling_metadata=metadata)
        sampled = output.sampled_token_ids[:, 0].tolist()
        for index in plain:
            columns[index] = [sampled[index]]
            self.sjd_step.report.kept[batch.req_ids[index]] = 0
        return output.logprobs_tensors

    def _copy_to_twins(self: Any, columns: list[list[int]]) -> None:
        batch, report = self.input_batch, self.sjd_step.report
        for index, request_id in enumerate(batch.req_ids):
            state = self.sjd_requests[request_id]
            if state.guidance.is_on and columns[index]:
                columns[batch.req_id_to_index[state.twin_id]] = list(columns[index])
                report.kept[state.twin_id] = report.kept[request_id]

    def _to_sampler_output(self: Any, columns: list[list[int]], logprobs: LogprobsTensors | None) -> SamplerOutput:
        # Two columns at least: with one, vLLM would take the padding for tokens.
        width = max(2, *map(len, columns))
        padded = torch.tensor([tokens + [_MISSING] * (width - len(tokens)) for tokens in columns], dtype=torch.int32)
        if logprobs is not None:
            # vLLM filters log-probabilities by a flat [requests × width] mask; each request's one row stands first.
            def spread(values: torch.Tensor) -> torch.Tensor:
                wide = values.new_zeros(len(columns) * width, *values.shape[1:])
                wide[::width] = values
                return wide

            ids, values, ranks = logprobs[:3]
            logprobs = LogprobsTensors(spread(ids), spread(values), spread(ranks))
        return SamplerOutput(sampled_token_ids=padded, logprobs_tensors=logprobs)

    @contextmanager
    def _without_discarded_generators(self: Any) -> Any:
        """vLLM rewinds the generators of discarded rows, which CPU generators cannot; ours did not draw for them."""
        if compat.is_unneeded("discarded_generators"):
            yield
            return
        generators = self.input_batch.generators
        discarded = self.discard_request_mask.np
        hidden = {index: generators.pop(index) for index in list(generators) if discarded[index]}
        try:
            yield
        finally:
            generators.update(hidden)

    def _bookkeeping_sync(self: Any, scheduler_output: Any, sampler_output: Any, *args: Any, **kwargs: Any) -> Any:
        with self._without_discarded_generators():
            result = super()._bookkeeping_sync(scheduler_output, sampler_output, *args, **kwargs)  # type: ignore[misc]
        batch = self.input_batch
        for index, request_id in enumerate(batch.req_ids):
            state = self.sjd_requests[request_id]
            committed = sampler_output.sampled_token_ids[index].tolist()
            committed = [token for token in committed if token != _MISSING]
            if not committed or state.owner_id is not None:
                continue
            self.sjd_step.sampled[request_id] = committed
            total = int(batch.num_tokens_no_spec[index])
            state.follow(
                total - len(committed),
                committed,
                lambda index=index, total=total: batch.token_ids_cpu[index, :total].tolist(),
                self.sjd_family,
            )
        return result

    # ---- drafts ---------------------------------------------------------------------------------------------------

    def _input_fits_in_drafter(self: Any, common_attn_metadata: Any) -> bool:
        """Drafts are limited per request in `_room`; vLLM's own rule would switch off the whole batch at once."""
        return common_attn_metadata is not None

    def _room(self: Any, state: RequestState, index: int) -> int:
        """Tokens that the next step may commit: the segment, max_tokens or the context ends first."""
        total = int(self.input_batch.num_tokens_no_spec[index])
        room = self.max_model_len - total
        if state.params.max_tokens is not None:
            room = min(room, state.params.max_tokens - (total - state.prompt_length))
        if state.layout is not None:
            room = min(room, state.layout.length - (total - state.segment_start))
        return room

    def propose_draft_token_ids(
        self: Any, scheduler_output: Any, sampled_token_ids: Any, *args: Any, **kwargs: Any
    ) -> Any:
        batch, step = self.input_batch, self.sjd_step
        drafts: list[list[int]] = [[] for _ in batch.req_ids]
        for request_id in batch.req_ids:
            # Requests that the step left out keep their tree: the scheduler still holds its drafts.
            self.sjd_requests[request_id].tree = ROOT_ONLY
        if step.verdict is not None:
            trees = self._choose_trees(step.members, scheduler_output.num_spec_tokens_to_schedule + 1)
            tokens = self._draft(step, trees)
            for state, tree, nodes in zip(step.members, trees, tokens, strict=True):
                if tree.num_nodes == 1:
                    continue
                state.tree = tree
                drafts[batch.req_id_to_index[state.request_id]] = nodes[1 : tree.num_nodes]
                if state.guidance.is_on:
                    drafts[batch.req_id_to_index[state.twin_id]] = nodes[1 : tree.num_nodes]
                    self.sjd_requests[state.twin_id].tree = tree
            for state in step.members:
                if state.layout is None:
                    self.sjd_sampler.leave(state)  # the segment has ended; a later one starts with a fresh window
        if self.sjd_options.verify_ranks:
            compare_ranks(drafts)
        return drafts

    def _choose_trees(self: Any, states: list[RequestState], nodes: int) -> list[DraftTree]:
        """The next trees; requests for whose branches no scratch blocks are left get the main chain alone."""
        scratch, block_size = self.sjd_scratch_blocks, self.cache_config.block_size
        trees = []
        for state in states:
            # A segment that has ended, or a request that will, keeps its place in the batch with a root-only tree.
            room = (
                self._room(state, self.input_batch.req_id_to_index[state.request_id]) if state.layout is not None else 0
            )
            tree = self.sjd_chooser.choose(room, nodes)
            needed = scratch_per_tree(tree, block_size) * (2 if state.guidance.is_on else 1)
            if needed > scratch:
                tree, needed = tree.truncate(tree.main_length + 1), 0
            scratch -= needed
            trees.append(tree)
        return trees

    def _draft(self: Any, step: _Step, trees: list[DraftTree]) -> list[list[int]]:
        assert step.window is not None
        assert step.verdict is not None
        layouts = [state.layout for state in step.members]
        default = self.sjd_family.layout(())
        for state in step.members:
            state.layout = state.layout or default  # a finished segment drafts nothing, any layout will do
        tokens = self.sjd_sampler.draft(step.members, trees, step.window, step.verdict).tolist()
        for state, layout in zip(step.members, layouts, strict=True):
            state.layout = layout
        return tokens

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        return step_report.attach(output, self.sjd_step.report)
