"""vLLM's scheduler with draft-tree accounting and hidden guidance twins."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.request import Request, RequestStatus

from vllm_sjd_pac.engine import report as step_report
from vllm_sjd_pac.engine.adaptive import WindowController
from vllm_sjd_pac.engine.arguments import options_of
from vllm_sjd_pac.engine.requests import guidance_of
from vllm_sjd_pac.engine.twins import TWINS_STATISTIC, TwinBook, make_twin
from vllm_sjd_pac.models.family import find_family

logger = init_logger("vllm.sjd_pac.scheduler")  # below vLLM's own logger, so that its level and format hold


class GuidedScheduler(Scheduler):
    """`Scheduler` that runs draft trees and pairs of conditional and unconditional requests.

    * **Draft accounting.** vLLM takes the first accepted drafts as computed. With trees only the root and the *kept*
      main-chain nodes lie where the walk put them; committed tokens whose keys and values stand in a branch node's slot
      are computed again as catch-up in the next step, so no cache entry is ever moved.
    * **Guidance.** A guided request gets a hidden twin behind it in the queue. A pair commits only in a step where both
      produced rows; anything else is undone and repeated. Twins are admitted, preempted and finished with their owners,
      and never show in outputs or statistics.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sjd_pac_options = options_of(self.vllm_config)
        model = self.vllm_config.model_config
        self.family = find_family(model.hf_config, model.model)
        self.twins = TwinBook()
        self._refused: list[tuple[int, str, str]] = []
        self.window = WindowController(self.num_spec_tokens) if self._adapts() else None
        self._scheduled_at = 0.0
        self._unlearnt: tuple[int, int, list[int]] | None = None
        self._set_window(self.num_spec_tokens)

    def _adapts(self) -> bool:
        return self.sjd_pac_options.adaptive_window and self.sjd_pac_options.mode != "ar"

    def _set_window(self, drafts: int) -> None:
        """Drafted nodes per request from now on, through vLLM's own channel for dynamic speculation.

        The lookup also keeps vLLM from padding one-token prefills with placeholder drafts, which no tree describes.
        """
        self.dynamic_sd_lookup = [drafts] * (self.scheduler_config.max_num_seqs + 2)

    # ---- requests come and go -------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        is_new = request.request_id not in self.requests
        super().add_request(request)
        guidance = guidance_of(request.sampling_params)
        if not is_new or not guidance.is_on:
            return
        twin = make_twin(request, guidance, self.family)
        reason = self._why_a_pair_never_fits(request, twin)
        if reason is not None:
            # Raising here would take the engine down; the request ends with an error instead.
            logger.error("Request %s refused: %s", request.request_id, reason)
            self.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
            self._refused.append((request.client_index, request.request_id, reason))
            return
        request.max_tokens = min(request.max_tokens, self._longest_output(request, twin))
        self.twins.add(request.request_id, twin.request_id)
        super().add_request(twin)

    def _longest_output(self, request: Request, twin: Request) -> int:
        return self.max_model_len - max(request.num_prompt_tokens, twin.num_prompt_tokens)

    def _why_a_pair_never_fits(self, request: Request, twin: Request) -> str | None:
        if self.max_num_running_reqs < 2:
            return "guidance needs two sequences at once; start the server with --max-num-seqs 2 or more"
        if self._longest_output(request, twin) < 1:
            length = twin.num_prompt_tokens
            return f"the negative prompt ({length} tokens) leaves no room within max_model_len {self.max_model_len}"
        output = min(request.max_tokens, self._longest_output(request, twin))
        needed = sum(self._blocks_for(r.num_prompt_tokens + output) for r in (request, twin))
        usable = self.kv_cache_manager.block_pool.num_gpu_blocks - 1
        if needed > usable:
            return f"the pair of guided sequences needs {needed} KV-cache blocks, the cache has {usable}"
        return None

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        if request_ids is None:
            finished = super().finish_requests(None, finished_status)
            self.twins.clear()
            return [request for request in finished if not self.twins.is_twin_id(request.request_id)]
        owners = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        mates = [twin for owner in owners if (twin := self.twins.remove(owner)) is not None]
        finished = super().finish_requests([*owners, *mates], finished_status)
        return [request for request in finished if not self.twins.is_twin_id(request.request_id)]

    # ---- a step ---------------------------------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        held = self._hold_back_pairs() if self.twins else []
        now = time.perf_counter()
        if self.window is not None and (self.running or self.waiting):
            if self._unlearnt is not None and self.running:
                # From one scheduling to the next: handing out tokens takes its time, too, and more of a short step.
                tokens, sequences, accepted = self._unlearnt
                self.window.observe(tokens, sequences, now - self._scheduled_at, accepted)
            load = min(len(self.running) + len(self.waiting), self.max_num_running_reqs)
            self._set_window(self.window.choose(load))
        self._unlearnt, self._scheduled_at = None, now
        try:
            return super().schedule(*args, **kwargs)
        finally:
            for request in held:
                self.waiting.add_request(request)

    def _hold_back_pairs(self) -> list[Request]:
        """Keep pairs whole: preempt the mate of a preempted half, and admit a pair only when both halves fit.

        Returns:
            Waiting requests taken out of the queue for this step, in order.
        """
        for owner_id, twin_id in self.twins.pairs():
            owner, twin = self.requests[owner_id], self.requests[twin_id]
            for half, other in ((owner, twin), (twin, owner)):
                if half.status == RequestStatus.PREEMPTED and other.status == RequestStatus.RUNNING:
                    self.running.remove(other)
                    self._preempt_request(other, time.monotonic())
        free_seats = self.max_num_running_reqs - len(self.running)
        free_blocks = self.kv_cache_manager.block_pool.get_num_free_blocks()
        held: list[Request] = []
        seen: set[str] = set()
        for request in list(self.waiting):
            if request.request_id in seen:
                continue
            mate_id = self.twins.mate_of(request.request_id)
            mate = self.requests.get(mate_id) if mate_id is not None else None
            if mate is not None and mate.status == RequestStatus.RUNNING:
                continue  # its running mate waits for it
            unit = [request] if mate is None else [request, mate]
            seen.update(half.request_id for half in unit)
            blocks = sum(self._blocks_for(half.num_tokens + self.num_spec_tokens + 1) for half in unit)
            # A lone pair is always let in: its blocks may be shared with cached ones, and nothing else could free any.
            fits = mate is None or (free_seats >= 2 and (free_blocks >= blocks or not self.running))
            # Once one pair waits, later requests wait behind it: first come, first served.
            if held or not fits:
                held += unit
            free_seats -= len(unit)
            free_blocks -= blocks
        if held:
            self.waiting.remove_requests(held)
        return held

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        report = step_report.read(model_runner_output)
        before = {
            request_id: self.requests[request_id].num_tokens
            for request_id in scheduler_output.num_scheduled_tokens
            if request_id in self.requests
        }
        for request_id in report.kept.keys() - scheduler_output.scheduled_spec_decode_tokens.keys():
            # vLLM observes steps with drafts only; a request's forwards are all its steps.
            metrics = self.requests[request_id].spec_decode_metrics if request_id in self.requests else None
            if metrics is not None:
                metrics.observe(0, 0, detailed=True)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for request_id, tokens_before in before.items():
            request = self.requests.get(request_id)
            if request is None or request.status != RequestStatus.RUNNING:
                continue
            if request_id in report.undone:
                request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
            elif request_id in report.kept:
                # The root's keys and values are final, and those of the main-chain nodes that the walk kept.
                request.num_computed_tokens = tokens_before + report.kept[request_id]
        if scheduler_output.total_num_scheduled_tokens:
            sequences = len(scheduler_output.num_scheduled_tokens)
            self._unlearnt = scheduler_output.total_num_scheduled_tokens, sequences, report.accepted
        return self._client_view(outputs)

    def _client_view(self, outputs: dict[int, EngineCoreOutputs]) -> dict[int, EngineCoreOutputs]:
        """Outputs without twins; finishes twins whose owner has finished; reports refused requests."""
        if not self.twins and not self._refused:
            return outputs
        orphans = [
            owner for owner, _ in self.twins.pairs() if owner not in self.requests or self.requests[owner].is_finished()
        ]
        for owner in orphans:
            twin = self.twins.remove(owner)
            if twin is not None:
                super().finish_requests(twin, RequestStatus.FINISHED_ABORTED)
        for per_client in outputs.values():
            per_client.outputs = [o for o in per_client.outputs if not self.twins.is_twin_id(o.request_id)]
            if per_client.finished_requests:
                per_client.finished_requests = {r for r in per_client.finished_requests if not self.twins.is_twin_id(r)}
        self._refused = [refusal for refusal in self._refused if not self._tell_client(outputs, refusal)]
        return outputs

    @staticmethod
    def _tell_client(outputs: dict[int, EngineCoreOutputs], refusal: tuple[int, str, str]) -> bool:
        from vllm.v1.engine import EngineCoreOutput

        client, request_id, reason = refusal
        output = EngineCoreOutput(
            request_id=request_id, new_token_ids=[], finish_reason=FinishReason.ERROR, stop_reason=reason
        )
        outputs.setdefault(client, EngineCoreOutputs()).outputs.append(output)
        return True

    def make_spec_decoding_stats(self, spec_decoding_stats: Any, *args: Any, **kwargs: Any) -> Any:
        if self.twins.is_twin_id(kwargs["request_id"]):
            return spec_decoding_stats  # a pair is one request in every statistic
        return super().make_spec_decoding_stats(spec_decoding_stats, *args, **kwargs)

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None and self.twins:
            running = sum(self.twins.is_twin_id(request.request_id) for request in self.running)
            stats.num_running_reqs -= running
            stats.num_waiting_reqs -= min(len(self.twins) - running, stats.num_waiting_reqs)
            # The twin of a request that finished in this step still runs, but its owner is gone.
            stats.num_kv_fetch_reqs_by_stage[TWINS_STATISTIC] = sum(
                self.twins.is_twin_id(r.request_id) and self.twins.mate_of(r.request_id) in self.requests
                for r in self.running
            )
        return stats
