"""The engine of ``mode="async"``: many requests at once, for callers on any event loop."""

from __future__ import annotations

import asyncio
import uuid
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from vllm import RequestOutput, SamplingParams
from vllm.inputs import tokens_input

from ..tracer.prompt import Prompt
from .compat import AsyncEngineArgs, AsyncLLM, EngineDeadError
from .inbox import Inbox
from .lifecycle import SHUTDOWN_SECONDS, Lifecycle, alive
from .loop_thread import LoopThread
from .request_output import encode_output
from .sampling import refusals
from .watch import dies, watch


class TracingLLM(AsyncLLM):
    """An `AsyncLLM` that puts the outputs of a request into a given inbox."""

    async def begin(self, inbox: Inbox, prompt: Prompt, params: SamplingParams) -> None:
        """Start a request.

        Raises:
            EngineDeadError: the engine's process is gone.
            vllm.exceptions.VLLMValidationError: vLLM refuses the request.
        """
        tasks = await self.get_supported_tasks()
        tokens = tokens_input(prompt.token_ids, prompt=prompt.text)
        request = self.input_processor.process_inputs(inbox.request_id, tokens, params, supported_tasks=tasks)
        request.external_req_id = inbox.request_id
        self._run_output_handler()
        if self.errored:
            raise EngineDeadError
        await self._add_request(request, prompt.text, None, 0, inbox)

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a method of every worker.

        Raises:
            EngineDeadError: the engine's process is gone, or goes now.
        """
        try:
            return await super().collective_rpc(method, timeout, args, kwargs)
        except EngineDeadError:
            raise
        except Exception as error:
            if await asyncio.to_thread(dies, self.engine_core):
                raise EngineDeadError from error
            raise


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

    def begin(self, prompt: Prompt, trace: str, params: SamplingParams) -> Inbox:
        """Start a request without waiting, and give where its outputs arrive.

        Raises:
            EngineClosedError: the engine was closed.
        """
        with self._lock:
            llm = self.start()
            assert self._thread is not None, "made with the engine"
            inbox = Inbox(f"{trace}-{uuid.uuid4().hex[:8]}", _collector(llm, trace))
            self._inboxes.add(inbox)
            inbox.begun = self._thread.submit(_begin, llm, inbox, prompt, params)
        return inbox

    def abandon(self, inbox: Inbox, trace: str) -> Future[None] | None:
        """Abort a request whose caller has gone, and free what the worker holds of it; does not wait.

        Returns:
            When it is done; None if there is nothing to do, since the engine is not there any more.
        """
        inbox.end()
        llm, thread = self._llm, self._thread
        if llm is None or thread is None:
            return None
        try:
            return thread.submit(_abandon, llm, inbox, trace)
        except RuntimeError:
            return None  # closed in the meantime

    def call(self, method: str, *args: object) -> Any:
        """See `Lifecycle`."""
        with alive():
            llm = self.start()
            assert self._thread is not None, "made with the engine"
            return self._thread.submit(llm.collective_rpc, method, None, args).result()[0]


def _collector(llm: TracingLLM, trace: str) -> Callable[[RequestOutput], Awaitable[bytes]]:
    async def collect(output: RequestOutput) -> bytes:
        reply: bytes = (await llm.collective_rpc("invivo_collect", None, (trace, encode_output(output))))[0]
        return reply

    return collect


async def _begin(llm: TracingLLM, inbox: Inbox, prompt: Prompt, params: SamplingParams) -> None:
    if inbox.over:
        return
    try:
        with refusals():
            await llm.begin(inbox, prompt, params)
    except Exception as error:
        inbox.end(error)


async def _abandon(llm: TracingLLM, inbox: Inbox, trace: str) -> None:
    if inbox.begun is not None:
        await asyncio.wrap_future(inbox.begun)
    with suppress(EngineDeadError):  # which has freed everything
        await llm.abort(inbox.request_id, internal=True)
        await llm.collective_rpc("invivo_discard", None, (trace,))
