"""The life of an engine, of whatever kind: started when first needed, closed for good."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from time import monotonic
from typing import Any, Generic, TypeVar

from rich.console import Console

from ..envoy.errors import EngineClosedError, EngineDiedError
from .compat import EngineDeadError
from .interrupt import interruptible_start
from .shared_files import processes, remove, shared_files

T = TypeVar("T")

SHUTDOWN_SECONDS = 60.0
"""How long an engine's processes have to end before they are killed; a killed one leaves shared memory behind."""


class Lifecycle(ABC, Generic[T]):
    """An engine of vLLM's class `T` that starts at its first use; the process's exit closes it.

    Args:
        model: name or path of the model.
        arguments: engine arguments.
    """

    def __init__(self, model: str, arguments: dict[str, Any]) -> None:
        self._model = model
        self._arguments = arguments
        self._llm: T | None = None
        self._closed = False
        self._shared: frozenset[Path] = frozenset()
        self._lock = threading.RLock()
        self._process = os.getpid()
        reference: weakref.ref[Lifecycle[T]] = weakref.ref(self)
        atexit.register(_close_at_exit, reference)

    @abstractmethod
    def _make(self) -> T:
        """Start the engine."""

    @abstractmethod
    def _shutdown(self, llm: T) -> None:
        """End the engine's processes."""

    @abstractmethod
    def call(self, method: str, *args: object) -> Any:
        """Call a method of all workers; gives the answer of the one that has one.

        Raises:
            EngineDiedError: the engine's process is gone.
        """

    def settle(self) -> None:
        """Have the worker take note of requests that have just ended; most engines do so by themselves."""

    @property
    def running(self) -> bool:
        """Whether the engine is up."""
        return self._llm is not None

    def check_open(self) -> None:
        """Raise `EngineClosedError` if the engine was closed."""
        if self._closed:
            raise self._closed_error()
        if self._process != os.getpid():
            raise EngineClosedError(
                f"the engine of {self._model} belongs to process {self._process}, which this one was forked from, and "
                "answers to that one only. Make a new `VLLM(...)` in this process, or start it with `spawn`."
            )

    def start(self) -> T:
        """The running engine, started if need be (with a line on stderr, since it takes its time).

        Raises:
            EngineClosedError: it was closed.
        """
        with self._lock:
            self.check_open()
            if self._llm is None:
                # vLLM forks on GPUs, and a fork has the threads and locks of this process as they happen to be.
                os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
                console = Console(stderr=True, force_jupyter=False)
                began, others = monotonic(), processes()
                with (
                    _shown(console, f"invivo: starting a vLLM engine for {self._model} ..."),
                    _main_not_imported(),
                    _sets_in_one_order(),
                    interruptible_start(),
                ):
                    self._llm = self._make()
                    self._shared = shared_files(others)
                console.print(
                    f"invivo: engine for {self._model} ready after {monotonic() - began:.0f} s", highlight=False
                )
            assert self._llm is not None, "an interrupted start raises"
            return self._llm

    def close(self) -> None:
        """Shut the engine down; no process stays behind. In a process that was forked off, it is left as it is."""
        if self._process != os.getpid():
            return
        with self._lock:
            self._closed = True
            llm, self._llm = self._llm, None
            if llm is not None:
                self._shutdown(llm)
                remove(self._shared)

    def _closed_error(self) -> EngineClosedError:
        return EngineClosedError(
            f"the engine of {self._model} was closed. Make a new `VLLM(...)` to start another one."
        )


def answer(answers: Sequence[Any]) -> Any:
    """What the workers say that were all called: one has an answer, if any."""
    return next(filter(None, answers), answers[0])


@contextmanager
def alive() -> Iterator[None]:
    """Around calls of an engine: vLLM's word for one that has died becomes invivo's."""
    try:
        yield
    except EngineDeadError as error:
        raise EngineDiedError(
            "the engine's process has died; its own log says why. Make a new `VLLM(...)` to start another one."
        ) from error


def _shown(console: Console, text: str) -> AbstractContextManager[object]:
    """Show that something goes on: turning in a terminal, as one line elsewhere (a notebook keeps every turn)."""
    if sys.stderr.isatty():
        return console.status(text)
    console.print(text, highlight=False)
    return nullcontext()


@contextmanager
def _main_not_imported() -> Iterator[None]:
    """Start processes without having them import the caller's main script again.

    `multiprocessing` re-imports ``__main__`` in spawned processes by its file or spec. vLLM's processes need nothing
    of it, and a plain script with a trace at its top level would start engines without end.
    """
    main = sys.modules["__main__"]
    kept: dict[str, Any] = {name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__}
    main.__spec__ = None
    try:
        yield
    finally:
        del main.__spec__  # pdb's main module has none
        main.__dict__.update(kept)


@contextmanager
def _sets_in_one_order() -> Iterator[None]:
    """Start processes in which a set of texts has the same order in each: blocks run in several, and must do alike."""
    name = "PYTHONHASHSEED"
    given = os.environ.get(name)
    if given is None:
        os.environ[name] = "0"
    try:
        yield
    finally:
        if given is None:
            del os.environ[name]


def _close_at_exit(reference: weakref.ref[Lifecycle[Any]]) -> None:
    engine = reference()
    if engine is not None:
        engine.close()
