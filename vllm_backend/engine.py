"""One vLLM engine: started when first needed, closed for good."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from time import monotonic
from typing import Any, TypeAlias, cast

from rich.console import Console
from vllm import LLM, RequestOutput, SamplingParams

from ..envoy.errors import EngineClosedError, EngineDiedError, InternalError, MisuseError
from .compat import EngineDeadError
from .interrupt import interruptible_start
from .watch import watch

_SHUTDOWN_SECONDS = 60.0
"""How long an engine's processes have to end before they are killed; a killed one leaves shared memory behind."""

Call: TypeAlias = "Callable[..., Any]"
"""Calls a method of the (one) worker: its name, then its arguments."""


class Engine:
    """A `vllm.LLM` that starts at its first use.

    Args:
        model: name or path of the model.
        arguments: engine arguments.

    The process's exit closes it. Calls are serialized: vLLM's offline engine is not made for several threads.
    """

    def __init__(self, model: str, arguments: dict[str, Any]) -> None:
        self._model = model
        self._arguments = arguments
        self._llm: LLM | None = None
        self._closed = False
        self._lock = threading.RLock()
        self._in_use = False
        self._process = os.getpid()
        reference: weakref.ref[Engine] = weakref.ref(self)
        atexit.register(_close_at_exit, reference)

    @property
    def running(self) -> bool:
        """Whether the engine is up."""
        return self._llm is not None

    def check_open(self) -> None:
        """Raise `EngineClosedError` if the engine was closed."""
        if self._closed:
            raise EngineClosedError(
                f"the engine of {self._model} was closed. Make a new `VLLM(...)` to start another one."
            )
        if self._process != os.getpid():
            raise EngineClosedError(
                f"the engine of {self._model} belongs to process {self._process}, which this one was forked from, and "
                "answers to that one only. Make a new `VLLM(...)` in this process, or start it with `spawn`."
            )

    def start(self) -> LLM:
        """The running engine, started if need be (with a line on stderr, since it takes its time).

        Raises:
            EngineClosedError: it was closed.
        """
        with self._lock:
            self.check_open()
            if self._llm is None:
                console = Console(stderr=True, force_jupyter=False)
                began = monotonic()
                with _shown(console, f"invivo: starting a vLLM engine for {self._model} ..."), main_not_imported():
                    self._llm = self._make()
                watch(self._llm.llm_engine.engine_core)
                console.print(
                    f"invivo: engine for {self._model} ready after {monotonic() - began:.0f} s", highlight=False
                )
            return self._llm

    def _make(self) -> LLM:
        with interruptible_start():
            return LLM(self._model, **self._arguments)

    def generate(self, prompt: Any, params: SamplingParams) -> RequestOutput:
        """Run one request to its end; it is aborted if the wait for it is interrupted.

        Raises:
            EngineDiedError: the engine's process is gone.
        """
        outputs: list[RequestOutput] = []

        def ended(index: int, output: RequestOutput, call: Call) -> Collection[int]:
            outputs.append(output)
            return [index]

        self.generate_all([prompt], [params], [()], ended)
        return outputs[-1]

    def generate_all(
        self,
        prompts: Sequence[Any],
        params: Sequence[SamplingParams],
        after: Sequence[Collection[int]],
        ended: Callable[[int, RequestOutput, Call], Collection[int]],
    ) -> None:
        """Run requests together, each to its end; all are aborted if the wait is interrupted.

        Args:
            prompts: one for each request.
            params: the same.
            after: for each request, the numbers of those that must be over before it is sent.
            ended: called for each request when it has ended, with its number, its output, and `call` for use in it;
                says which requests are over now.

        Raises:
            EngineDiedError: the engine's process is gone.
        """
        with self._used(), _alive():
            llm = self.start()
            if llm.llm_engine.has_unfinished_requests():
                raise MisuseError(
                    "the engine has requests that were enqueued and not waited for; they would finish during the "
                    "trace, and their outputs be lost. Call `model.engine.wait_for_completion()` before the trace."
                )
            ids: dict[str, int] = {}
            over: set[int] = set()
            waiting = list(range(len(prompts)))
            try:
                while waiting or llm.llm_engine.has_unfinished_requests():
                    ready = [index for index in waiting if over.issuperset(after[index])]
                    waiting = [index for index in waiting if index not in ready]
                    if ready:
                        new = llm.enqueue([prompts[i] for i in ready], [params[i] for i in ready], use_tqdm=False)
                        ids.update(zip(new, ready, strict=True))
                    if not llm.llm_engine.has_unfinished_requests():
                        raise InternalError(f"the requests {waiting} of a trace wait for each other.")
                    for output in llm.llm_engine.step():
                        if output.finished:
                            index = _number(ids, output.request_id)
                            over.update(ended(index, cast("RequestOutput", output), partial(_call, llm)))
            except EngineDeadError:
                raise
            except BaseException:
                llm.llm_engine.abort_request(list(ids), internal=True)
                raise

    def call(self, method: str, *args: object) -> Any:
        """Call a method of the (one) worker.

        Raises:
            EngineDiedError: the engine's process is gone.
        """
        with self._used(), _alive():
            return _call(self.start(), method, *args)

    @contextmanager
    def _used(self) -> Iterator[None]:
        """Keep the engine to this thread, and to one use: a signal handler may come in the middle of one."""
        with self._lock:
            if self._in_use:
                raise MisuseError(
                    "the engine was asked for something in the middle of a trace of the same thread (by a signal "
                    "handler or `__del__`). Ask when the `with` has ended."
                )
            self._in_use = True
            try:
                yield
            finally:
                self._in_use = False

    def close(self) -> None:
        """Shut the engine down; no process stays behind. In a process that was forked off, it is left as it is."""
        if self._process != os.getpid():
            return
        with self._lock:
            self._closed = True
            llm, self._llm = self._llm, None
            if llm is not None:
                llm.llm_engine.engine_core.shutdown(timeout=_SHUTDOWN_SECONDS)


def _call(llm: LLM, method: str, *args: object) -> Any:
    return llm.collective_rpc(method, args=args)[0]


def _number(ids: dict[str, int], request: str) -> int:
    """The number of the request that an output belongs to: the engine adds a random part to the ids."""
    return next(number for key, number in ids.items() if key == request or key.rpartition("-")[0] == request)


def _shown(console: Console, text: str) -> AbstractContextManager[object]:
    """Show that something goes on: turning in a terminal, as one line elsewhere (a notebook keeps every turn)."""
    if sys.stderr.isatty():
        return console.status(text)
    console.print(text, highlight=False)
    return nullcontext()


@contextmanager
def main_not_imported() -> Iterator[None]:
    """Start processes without having them import the caller's main script again.

    `multiprocessing` re-imports ``__main__`` in spawned processes by its file or spec. vLLM's processes need nothing
    of it, and a plain script with a trace at its top level would start engines without end.
    """
    main = sys.modules["__main__"]
    kept = {name: main.__dict__.pop(name) for name in ("__file__",) if name in main.__dict__}
    spec, main.__spec__ = main.__spec__, None
    try:
        yield
    finally:
        main.__spec__ = spec
        main.__dict__.update(kept)


@contextmanager
def _alive() -> Iterator[None]:
    try:
        yield
    except EngineDeadError as error:
        raise EngineDiedError(
            "the engine's process has died; its own log says why. Make a new `VLLM(...)` to start another one."
        ) from error


def _close_at_exit(reference: weakref.ref[Engine]) -> None:
    engine = reference()
    if engine is not None:
        engine.close()
