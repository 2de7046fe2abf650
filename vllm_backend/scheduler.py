"""The scheduler of an engine that serves traces: vLLM's own, with a few rules for traced requests.

- A traced prompt is computed in one engine step; others are cut around it (`room`).
- When memory is short, untraced requests are preempted first.
- A traced request leaves nothing in the prefix cache: its keys and values may be those of an edited run.
- A request waits for those of its trace that it takes values from, or meets at a barrier (`members`).
- A request that its block has ended (`tracer.stop()`, an exception) finishes with the token of that engine step,
  whatever its sampling parameters say (`ignore_eos`, `min_tokens`).
- What the worker sends home goes onto the outputs of its request (`in_band`).

vLLM has no hooks for these. `_handle_blocked_waiting_request` is asked before a waiting request is scheduled, which is
where a request is made to wait; the order of `running` decides who is preempted; what is taken out of `running` for the
time of one `schedule` is left out of that engine step; and the two calls by which blocks get into the prefix cache are
wrapped.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from ..tracer.block import Group
from .compat import (
    AsyncScheduler,
    ModelRunnerOutput,
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
from .settings import DONE, ENDED, HELD, KEY, SAVES

STOP_REASON = "invivo"

_PATIENCE = 3
"""Engine steps without any work after which requests that wait at a barrier will wait for ever."""


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
        self._members = Members()
        self._traced: set[str] = set()
        self._ended: frozenset[str] = frozenset()
        self._held: frozenset[str] = frozenset()
        self._taken: dict[str, int] = {}
        self._favoured: Request | None = None
        self._passed_over: str | None = None
        self._yielded = False
        self._idle = 0
        self._watch_blocks()
        self._transit = Transit()
        follow_parent()

    def add_request(self, request: Request) -> None:
        """As in `Scheduler`, with the places of traced requests in their traces noted."""
        super().add_request(request)
        extra = (request.sampling_params.extra_args or {}) if request.sampling_params is not None else {}
        if KEY in extra:
            self._traced.add(request.request_id)
            group = _heads.decode(extra[KEY]).group
            if group is not None:
                self._members.add(request.request_id, group)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """As in `Scheduler`, with the rules for traced requests."""
        if not self._traced:
            return super().schedule(throttle_prefills)
        self._taken.clear()
        first = next((request for request in self.waiting if self._must_be_whole(request)), None)
        out = {request.request_id for request in self.running if request.request_id in self._held}
        if first is not None and first.request_id == self._passed_over and not self._yielded and self._fits(first, out):
            self._favoured = first
            out |= self._left_out(first, out)
        order = sorted(self.running, key=self._untraced) if self.policy == SchedulingPolicy.FCFS else [*self.running]
        self.running = [request for request in order if request.request_id not in out]
        output = super().schedule(throttle_prefills)
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
        self._break_deadlock(output)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, Any]:
        """As in `Scheduler`, with what the blocks did in this engine step known, and their saves on the outputs."""
        self._ended = getattr(model_runner_output, ENDED, frozenset())
        if self._traced and scheduler_output.total_num_scheduled_tokens > 0:
            self._held = getattr(model_runner_output, HELD, frozenset())
            for request in getattr(model_runner_output, DONE, ()):
                self._members.block_ended(request)
        self._transit.add(getattr(model_runner_output, SAVES, {}))
        clients: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)
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

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        new_token_ids, stopped = super()._update_request_with_output(request, new_token_ids, is_stale)
        if not stopped and request.request_id in self._ended:
            request.status = RequestStatus.FINISHED_STOPPED
            request.stop_reason = STOP_REASON
            stopped = True
        return new_token_ids, stopped

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self._traced.discard(request.request_id)
        self._members.remove(request.request_id, aborted=request.status == RequestStatus.FINISHED_ABORTED)
        return super()._free_request(request, delay_free_blocks=delay_free_blocks)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self._taken.pop(request.request_id, None)
        super()._preempt_request(request, *args, **kwargs)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        if not super()._handle_blocked_waiting_request(request):
            return False
        favoured = self._favoured
        if favoured is not None and request is not favoured and favoured.request_id not in self._taken:
            return False
        if request.request_id not in self._traced or request.num_preemptions:
            return True  # what is computed once more may come in pieces
        if self._members.waits(request.request_id, self._held):
            return False
        return bool(request.num_tokens <= self.max_num_scheduled_tokens - sum(self._taken.values()))

    def _must_be_whole(self, request: Request) -> bool:
        """Whether a waiting request can begin, and has to with its whole prompt."""
        return (
            request.request_id in self._traced
            and not request.num_preemptions
            and not self._members.waits(request.request_id, self._held)
        )

    def _untraced(self, request: Request) -> bool:
        return request.request_id not in self._traced

    def _fits(self, request: Request, held: set[str]) -> bool:
        """Whether a request only waits for tokens: there is a place and memory for it."""
        free = self.kv_cache_manager.block_pool.get_num_free_blocks() * self.block_size
        return len(self.running) - len(held) < self.max_num_active_reqs and request.num_tokens <= free

    def _left_out(self, favoured: Request, held: set[str]) -> set[str]:
        """Running requests that get no tokens in this engine step, so that there are enough for one that waits."""
        running = [
            (request.request_id, request.num_tokens_with_spec - request.num_computed_tokens)
            for request in self.running
            if request.request_id not in held
        ]
        return left_out(favoured.num_tokens, self.max_num_scheduled_tokens, running)

    def _break_deadlock(self, output: SchedulerOutput) -> None:
        """End requests that wait at a barrier for others that can never be scheduled beside them."""
        idle = not output.num_scheduled_tokens
        stuck = {request for request in self._held & self._traced if idle and self._members.complete(request)}
        self._idle = self._idle + 1 if stuck else 0
        if self._idle > _PATIENCE:
            self.grammar_compile_error_reqs.update(stuck)  # vLLM ends these with an error

    def _watch_blocks(self) -> None:
        """Count the tokens that each request gets, and keep traced ones out of the prefix cache."""
        manager = self.kv_cache_manager
        allocate, cache = manager.allocate_slots, manager.cache_blocks

        def allocate_slots(request: Request, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
            if request.request_id in self._traced:
                kwargs["delay_cache_blocks"] = True
            blocks = allocate(request, num_new_tokens, *args, **kwargs)
            if blocks is not None:
                self._taken[request.request_id] = num_new_tokens
            return blocks

        def cache_blocks(request: Request, num_computed_tokens: int) -> None:
            if request.request_id not in self._traced:
                cache(request, num_computed_tokens)

        manager.allocate_slots = allocate_slots
        manager.cache_blocks = cache_blocks


class TraceScheduler(_TraceRules, Scheduler):
    """Over the scheduler of engines that wait for each step's tokens."""


class AsyncTraceScheduler(_TraceRules, AsyncScheduler):
    """Over the scheduler of engines that prepare a step before the tokens of the last one are there."""
