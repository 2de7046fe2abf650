"""The scheduler of an engine that serves traces.

It is vLLM's own, but a request that its block has ended (`tracer.stop()`, an exception) finishes with the token of
that engine step, whatever its sampling parameters say (`ignore_eos`, `min_tokens`), and what the worker sends home
goes onto the outputs of its request (`in_band`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .compat import ModelRunnerOutput, Request, RequestStatus, Scheduler, SchedulerOutput
from .in_band import Transit
from .orphan import follow_parent
from .settings import ENDED, SAVES

STOP_REASON = "invivo"


class TraceScheduler(Scheduler):
    """See the module."""

    _ended: frozenset[str] = frozenset()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._transit = Transit()
        follow_parent()

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, Any]:
        """As in `Scheduler`, with the requests that ended themselves known, and their saves on the outputs."""
        self._ended = getattr(model_runner_output, ENDED, frozenset())
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

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        new_token_ids, stopped = super()._update_request_with_output(request, new_token_ids, is_stale)
        if not stopped and request.request_id in self._ended:
            request.status = RequestStatus.FINISHED_STOPPED
            request.stop_reason = STOP_REASON
            stopped = True
        return new_token_ids, stopped
