"""The engine of ``mode="async"``: many requests at once, for callers on any event loop."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from vllm import SamplingParams
from vllm.inputs import tokens_input

from ..envoy.errors import InternalError, InvivoError
from ..tracer.prompt import Prompt
from .compat import AsyncEngineArgs, AsyncLLM, EngineDeadError
from .course import Course, Sending
from .inbox import Collector, Inbox
from .lifecycle import SHUTDOWN_SECONDS, Lifecycle, alive, answer
from .loop_thread import LoopThread
from .watch import dies, watch


class TracingLLM(AsyncLLM):
    """An `AsyncLLM` that puts the outputs of a request into a given collector."""

    _last = -1
    """The number of the engine that was chosen last."""

    def least_busy(self) -> int | None:
        """The number of the engine with the fewest requests, in turn where these are as many; None if there is one."""
        core: Any = self.engine_core
        engines = getattr(core, "core_engines", ())
        if len(engines) < 2:
            return None
        numbers = [(self._last + 1 + number) % len(engines) for number in range(len(engines))]
        self._last = min(numbers, key=lambda number: core.engine_inflight[engines[number]])
        return self._last

    async def begin(
        self, collector: Collector, prompt: Prompt, params: SamplingParams, engine: int | None = None
    ) -> None:
        """Start a request.

        Args:
            collector: takes the outputs.
            prompt: its prompt.
            params: sampling parameters.
            engine: the number of the engine that it goes to, if there are several.

        Raises:
            EngineDeadError: the engine's process is gone.
            vllm.exceptions.VLLMValidationError: vLLM refuses the request.
        """
        tasks = await self.get_supported_tasks()
        tokens = tokens_input(prompt.token_ids, prompt=prompt.text)
        request = self.input_processor.process_inputs(
            collector.request_id, tokens, params, supported_tasks=tasks, data_parallel_rank=engine
        )
        request.external_req_id = collector.request_id
        self._run_output_handler()
        if self.errored:
            raise EngineDeadError
        await self._add_request(request, prompt.text, None, 0, collector)

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        engine: int | None = None,
    ) -> Any:
        """Call a method of every worker; of those of one engine if its number is given.

        Raises:
            EngineDeadError: the engine's process is gone, or goes now.
            InternalError: the call has failed in a worker that goes on.
        """
        try:
            core: Any = self.engine_core
            engines = getattr(core, "core_engines", ())
            if len(engines) < 2:
                return await super().collective_rpc(method, timeout, args, kwargs)
            call = partial(core._call_utility_async, "collective_rpc", method, timeout, args, kwargs)
            asked = engines if engine is None else [engines[engine]]
            return [one for answers in await asyncio.gather(*(call(engine=key) for key in asked)) for one in answers]
        except (EngineDeadError, InvivoError):
            raise
        except Exception as error:
            if await asyncio.to_thread(dies, self.engine_core):
                raise EngineDeadError from error
            raise InternalError(f"a worker failed in `{method}`: {error}") from error


class AsyncEngine(Lifecycle[TracingLLM]):
    """A `TracingLLM` on an event loop and thread of its own. Every method may be called from every thread."""

    def __init__(self, model: str, arguments: dict[str, Any]) -> None:
        super().__init__(model, arguments)
        self._thread: LoopThread | None = None
        self._inboxes: weakref.WeakSet[Inbox] = weakref.WeakSet()

    def _make(self) -> TracingLLM:
        arguments = AsyncEngineArgs(**{"model": self._model, "disable_log_stats": True, **self._arguments})
        thread = LoopThread("invivo-engine")

        async def make() -> TracingLLM:
            llm: Any = TracingLLM.from_engine_args(arguments)
            watch(llm.engine_core, thread.soon)
            return llm

        try:
            llm = thread.submit(make).result()
        except BaseException:
            thread.stop()
            raise
        self._thread = thread
        weakref.finalize(self, thread.stop).atexit = False  # closing does it too, but not everybody closes
        return llm

    def _shutdown(self, llm: TracingLLM) -> None:
        for inbox in list(self._inboxes):
            inbox.end(self._closed_error())
        assert self._thread is not None, "made with the engine"
        if llm.output_handler is not None:
            self._thread.soon(llm.output_handler.cancel)  # or it would log that the engine has died
        llm.shutdown(timeout=SHUTDOWN_SECONDS)
        self._thread.stop()

    def begin(self, requests: Sequence[Sending]) -> Course:
        """Start the requests of a trace without waiting.

        Raises:
            EngineClosedError: the engine was closed.
        """
        with self._lock:
            llm = self.start()
            assert self._thread is not None, "made with the engine"
            course = Course(llm, requests)
            self._inboxes.add(course.inbox)
            self._thread.submit(course.send)
        return course

    def abandon(self, course: Course) -> Future[None] | None:
        """Abort the requests of a trace whose caller has gone, and free what the worker holds of it; does not wait.

        Returns:
            When it is done; None if there is nothing to do, since the engine is not there any more.
        """
        course.inbox.end()
        thread = self._thread
        if self._llm is None or thread is None:
            return None
        try:
            return thread.submit(course.leave)
        except RuntimeError:
            return None  # closed in the meantime

    def call(self, method: str, *args: object) -> Any:
        """See `Lifecycle`."""
        with alive():
            llm = self.start()
            assert self._thread is not None, "made with the engine"
            return answer(self._thread.submit(llm.collective_rpc, method, None, args).result())
