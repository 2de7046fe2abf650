"""The scheduler of an engine that serves traces: vLLM's own, with a few rules for traced requests.

- A traced prompt is computed in one engine step; others are cut around it (`room`).
- When memory is short, untraced requests are preempted first.
- A traced request leaves nothing in the prefix cache: its keys and values may be those of an edited run.
- A request waits for those of its trace that it meets at a barrier (`members`).
- Requests whose blocks share something are not under way in several engine steps at once, as there are where a model
  has pipeline stages: each stage must see the turns of these blocks in the same order.
- A request whose block runs is computed again when the outcome of its last engine step is known, also where vLLM
  prepares steps ahead of that: its token may be the last one, and its block may have come to a barrier. Where it can
  do without, it runs ahead like any other (`ahead`).
- A request that its block has ended (`tracer.stop()`, an exception) finishes with the token of that engine step,
  whatever its sampling parameters say (`ignore_eos`, `min_tokens`).
- What the worker sends home goes onto the outputs of its request (`in_band`).

vLLM has no hooks for these. `_handle_blocked_waiting_request` is asked before a waiting request is scheduled, which is
where a request is made to wait; the order of `running` decides who is preempted; what is taken out of `running` for the
time of one `schedule` is left out of that engine step; the two calls by which blocks get into the prefix cache are
wrapped as long as there is a traced request, and the one that takes the new token of a request where blocks have ended
theirs.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ..tracer.block import Group
from .ahead import runs_ahead
from .compat import (
    AsyncScheduler,
    ModelRunnerOutput,
    PauseState,
    Request,
    RequestStatus,
    Scheduler,
    SchedulerOutput,
    SchedulingPolicy,
)
from .in_band import Transit
from .members import Members
from .orphan import follow_parent
from .room import left_out
from .settings import DONE, ENDED, HELD, KEY, NOW, SAVES, TOLD
from .stuck import Stuck

STOP_REASON = "invivo"


class _Head(msgspec.Struct, array_like=True):
    """The parts of an encoded `Payload` that the scheduler needs; the rest is not looked at."""

    version: int
    trace: str
    block: msgspec.Raw
    values: msgspec.Raw
    tensors: msgspec.Raw
    seed: int
    uses: msgspec.Raw
    group: Group | None = None
    streams: bool = False
    no_module: bool = False


_heads = msgspec.msgpack.Decoder(_Head)


def trace_scheduler(*args: Any, **kwargs: Any) -> Scheduler:
    """The scheduler that vLLM would pick for these arguments, with the rules for traces (see `settings.SCHEDULER`)."""
    asynchronous = kwargs["vllm_config"].scheduler_config.async_scheduling
    return (AsyncTraceScheduler if asynchronous else TraceScheduler)(*args, **kwargs)


if TYPE_CHECKING:
    from .compat import Scheduler as _Scheduler
else:
    _Scheduler = object


class _TraceRules(_Scheduler):
    """Mixin in front of one of vLLM's schedulers; see the module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.running: list[Request]
        self.max_num_active_reqs: int
        self._members = Members()
        self._traced: set[str] = set()
        self._to_begin: dict[str, Request] = {}  # traced ones of which nothing was computed yet, as they came
        self._blocks: set[str] = set()  # traced ones whose blocks need more steps,
        self._in_time: set[str] = set()  # and those of them that are not computed before their last token is known
        self._ended: frozenset[str] = frozenset()
        self._held: frozenset[str] = frozenset()
        self._taken: dict[str, int] = {}
        self._told: dict[str, bytes] = {}  # what the last stage of a pipeline tells the others, by request,
        self._told_of_sharing: dict[str, bytes] = {}  # and what others than that request may need
        self._under_way: set[str] = set()
        self._stages = self.vllm_config.parallel_config.pipeline_parallel_size > 1
        self._favoured: Request | None = None
        self._passed_over: str | None = None
        self._yielded = False
        self._stuck = Stuck()
        self._several = self.vllm_config.parallel_config.world_size > 1
        self._transit = Transit()
        follow_parent()

    def add_request(self, request: Request) -> None:
        """As in `Scheduler`, with the places of traced requests in their traces noted."""
        super().add_request(request)
        extra = (request.sampling_params.extra_args or {}) if request.sampling_params is not None else {}
        if KEY in extra:
            if not self._traced:
                self._watch_blocks()
            self._traced.add(request.request_id)
            self._blocks.add(request.request_id)
            self._to_begin[request.request_id] = request
            head = _heads.decode(extra[KEY])
            group = head.group
            if request.sampling_params is None or not runs_ahead(
                request.sampling_params, group, no_module=head.no_module
            ):
                self._in_time.add(request.request_id)
            if group is not None:
                self._members.add(request.request_id, group)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """As in `Scheduler`, with the rules for traced requests."""
        output = self._schedule(throttle_prefills)
        if self._several:
            vars(output)[NOW] = monotonic()
        return output

    def _schedule(self, throttle_prefills: bool) -> SchedulerOutput:
        if not self._traced:
            self._told_of_sharing.clear()
            return super().schedule(throttle_prefills)
        if self._usual:
            if self.policy == SchedulingPolicy.FCFS and len(self._traced) < len(self.requests):
                self.running.sort(key=self._untraced)
            self._passed_over, self._yielded = None, False
            output = super().schedule(throttle_prefills)
            self._end_stuck(output)
            return output
        self._taken.clear()
        self._under_way.clear()
        if self._stages:
            self._see_under_way()
        first = self._next_to_begin()
        out = {request.request_id for request in self.running if self._pauses(request)}
        places = self._places_taken()
        if first is not None and first.request_id == self._passed_over and not self._yielded:
            if places < self.max_num_active_reqs and self._fits(first):
                self._favoured = first
                out |= self._left_out(first, out)
        order = sorted(self.running, key=self._untraced) if self.policy == SchedulingPolicy.FCFS else [*self.running]
        going = [request for request in order if request.request_id not in out]
        out.update(request.request_id for request in going[self.max_num_running_reqs :])
        self.running = going[: self.max_num_running_reqs]
        limit = self.max_num_active_reqs
        self.max_num_active_reqs = limit - places + len(self.running)
        output = super().schedule(throttle_prefills)
        self.max_num_active_reqs = limit
        told = {request: self._told.pop(request) for request in output.num_scheduled_tokens if request in self._told}
        told |= self._told_of_sharing
        self._told_of_sharing.clear()
        if told:
            vars(output)[TOLD] = told
        if out:
            kept = {request.request_id for request in self.running}
            kept.update(out)
            known = {request.request_id for request in order}
            self.running = [request for request in order if request.request_id in kept] + [
                request for request in self.running if request.request_id not in known
            ]
        self._yielded = self._favoured is not None
        self._passed_over = first.request_id if first is not None and first.request_id not in self._taken else None
        self._favoured = None
        self._end_stuck(output)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, Any]:
        """As in `Scheduler`, with what the blocks did in this engine step known, and their saves on the outputs."""
        if not self._traced and not len(self._transit):
            found: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)
            return found
        news = vars(model_runner_output)
        self._ended = news.get(ENDED, frozenset())
        if self._traced and (scheduler_output.total_num_scheduled_tokens > 0 or HELD in news):
            self._held = news.get(HELD, frozenset())
            for request in news.get(DONE, ()):
                self._blocks.discard(request)
                self._in_time.discard(request)
                self._members.block_ended(request)
        for request, told in news.get(TOLD, {}).items():
            (self._told_of_sharing if self._members.shares(request) else self._told)[request] = told
        self._transit.add(news.get(SAVES, {}))
        own: dict[str, Any] = cast("Any", vars(self))
        if self._ended:  # only then: vLLM's call comes by here for each request in each engine step
            own["_update_request_with_output"] = self._update_ended
        clients: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)
        own.pop("_update_request_with_output", None)
        if len(self._transit):
            for client in clients.values():
                self._transit.attach(client.outputs)
            self._transit.keep(self.requests.keys())
        return clients

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """As in `Scheduler`; what aborted requests were sending home is lost."""
        finished: list[Request] = super().finish_requests(request_ids, finished_status)
        if finished_status == RequestStatus.FINISHED_ABORTED:
            self._transit.keep(self.requests.keys())
        return finished

    # --- inside; the signatures are vLLM's

    def _update_ended(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        new_token_ids, stopped = super()._update_request_with_output(request, new_token_ids, is_stale)
        if not stopped and request.request_id in self._ended:
            request.status = RequestStatus.FINISHED_STOPPED
            request.stop_reason = STOP_REASON
            stopped = True
        return new_token_ids, stopped

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        if request.request_id in self._traced:
            self._traced.discard(request.request_id)
            if not self._traced:
                self._leave_blocks()
        self._blocks.discard(request.request_id)
        self._in_time.discard(request.request_id)
        self._to_begin.pop(request.request_id, None)
        self._members.remove(request.request_id)
        self._told.pop(request.request_id, None)
        return super()._free_request(request, delay_free_blocks=delay_free_blocks)

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        self._taken.pop(request.request_id, None)
        drop = drop_stale_output and request.request_id not in self._traced  # its block has seen the token on its way
        super()._preempt_request(request, timestamp, drop)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        if not super()._handle_blocked_waiting_request(request):
            return False
        favoured = self._favoured
        if favoured is not None and request is not favoured and favoured.request_id not in self._taken:
            return False
        if self._follows(request):
            return False
        if request.request_id not in self._to_begin:
            return True  # what is computed once more may come in pieces
        if self._members.waits(request.request_id, self._held):
            return False
        return bool(request.num_tokens <= self.max_num_scheduled_tokens - sum(self._taken.values()))

    @property
    def _usual(self) -> bool:
        """Whether the rules have nothing to decide in this engine step but who is preempted first."""
        waits = self._to_begin or self._held or self._in_time or self._stages
        return not waits and len(self.running) <= self.max_num_running_reqs

    def _next_to_begin(self) -> Request | None:
        """The first waiting request that can begin, and has to with its whole prompt."""
        waiting = self._to_begin.values()
        for request in waiting if self.policy == SchedulingPolicy.FCFS else sorted(waiting):
            waits = self._members.waits(request.request_id, self._held) or self._follows(request)
            if request.status == RequestStatus.WAITING and not waits:
                return request
        return None

    def _pauses(self, request: Request) -> bool:
        """Whether a running request must not be computed now."""
        in_time = request.request_id in self._in_time and request.num_in_flight_tokens > 0
        return in_time or request.request_id in self._held or self._follows(request)

    def _follows(self, request: Request) -> bool:
        """Whether a request whose block shares something with its own is under way in the stages."""
        return bool(self._under_way) and self._members.shared(request.request_id) in self._under_way

    def _see_under_way(self) -> None:
        """See which traces have blocks that share something, and are on their way through the stages."""
        for name in self._blocks:
            trace = self._members.shared(name)
            if trace is not None and self.requests[name].num_in_flight_tokens > 0:
                self._under_way.add(trace)

    def _untraced(self, request: Request) -> bool:
        return request.request_id not in self._traced

    def _places_taken(self) -> int:
        """How many of the places for running requests are taken.

        Runner V1 has a place for requests that are computed only, so those at a barrier need none.
        """
        held = 0 if self.use_v2_model_runner else sum(request.request_id in self._held for request in self.running)
        return len(self.running) - held

    def _fits(self, request: Request) -> bool:
        """Whether there is memory for a request."""
        free = self.kv_cache_manager.block_pool.get_num_free_blocks() * self.block_size
        return bool(request.num_tokens <= free)

    def _left_out(self, favoured: Request, held: set[str]) -> set[str]:
        """Running requests that get no tokens in this engine step, so that there are enough for one that waits."""
        running = [
            (
                request.request_id,
                request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens,
            )
            for request in self.running
            if request.request_id not in held
        ]
        return left_out(favoured.num_tokens, self.max_num_scheduled_tokens, running)

    def _end_stuck(self, output: SchedulerOutput) -> None:
        """End requests that wait at a barrier for others that can never be scheduled beside them."""
        held = self._held & self._traced
        moving = bool(output.num_scheduled_tokens) or (bool(held) and self._will_move())
        self.grammar_compile_error_reqs.update(self._stuck.see(held, moving))  # vLLM ends these with an error

    def _will_move(self) -> bool:
        """Whether something is being computed, or waits for what is not: a grammar, a transfer, a paused engine."""
        return (
            self.pause_state != PauseState.UNPAUSED
            or any(request.num_in_flight_tokens for request in self.requests.values())
            or any(self._is_blocked_waiting_status(request.status) for request in self.requests.values())
        )

    def _watch_blocks(self) -> None:
        """Keep traced requests out of the prefix cache, and count the tokens that each gets where some have to begin.

        As long as there are traced ones: each call of vLLM's comes by here, for each request in each engine step.
        """
        manager = self.kv_cache_manager
        allocate, cache = manager.allocate_slots, manager.cache_blocks

        def allocate_slots(request: Request, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
            if request.request_id in self._traced:
                kwargs["delay_cache_blocks"] = True
            blocks = allocate(request, num_new_tokens, *args, **kwargs)
            if self._to_begin and blocks is not None:
                self._taken[request.request_id] = num_new_tokens
                self._to_begin.pop(request.request_id, None)
            return blocks

        def cache_blocks(request: Request, num_computed_tokens: int) -> None:
            if request.request_id not in self._traced:
                cache(request, num_computed_tokens)

        manager.allocate_slots, manager.cache_blocks = allocate_slots, cache_blocks
        self._unwrapped = allocate, cache

    def _leave_blocks(self) -> None:
        """No traced request is left."""
        self.kv_cache_manager.allocate_slots, self.kv_cache_manager.cache_blocks = self._unwrapped


class TraceScheduler(_TraceRules, Scheduler):
    """Over the scheduler of engines that wait for each step's tokens."""


class AsyncTraceScheduler(_TraceRules, AsyncScheduler):
    """Over the scheduler of engines that prepare a step before the tokens of the last one are there."""
