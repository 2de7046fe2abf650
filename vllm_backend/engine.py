"""The engine of ``mode="sync"``: whoever asks waits for the answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm import LLM, RequestOutput, SamplingParams

from ..envoy.errors import MisuseError
from .compat import EngineDeadError
from .lifecycle import SHUTDOWN_SECONDS, Lifecycle, alive
from .sampling import refusals
from .watch import watch


class Engine(Lifecycle[LLM]):
    """A `vllm.LLM`. Calls are serialized: vLLM's offline engine is not made for several threads."""

    def __init__(self, model: str, arguments: dict[str, Any]) -> None:
        super().__init__(model, arguments)
        self._in_use = False

    def _make(self) -> LLM:
        llm = LLM(self._model, **self._arguments)
        watch(llm.llm_engine.engine_core)
        return llm

    def _shutdown(self, llm: LLM) -> None:
        llm.llm_engine.engine_core.shutdown(timeout=SHUTDOWN_SECONDS)

    def generate(
        self, prompts: list[Any], params: list[SamplingParams], *, use_tqdm: bool = False
    ) -> list[RequestOutput]:
        """Run requests to their end; they are aborted if the wait for them is interrupted.

        Args:
            prompts: prompts as vLLM takes them.
            params: sampling parameters of each.
            use_tqdm: show vLLM's progress bars.

        Returns:
            The outputs, in the order of the prompts.

        Raises:
            SamplingError: vLLM refuses the parameters.
            EngineDiedError: the engine's process is gone.
        """
        with self._used(), alive():
            llm = self.start()
            if llm.llm_engine.has_unfinished_requests():
                raise MisuseError(
                    "the engine has requests that were enqueued and not waited for; they would finish during the "
                    "trace, and their outputs be lost. Call `model.engine.wait_for_completion()` before the trace."
                )
            with refusals():
                ids = llm.enqueue(prompts, params, use_tqdm=use_tqdm)
            try:
                return llm.wait_for_completion(RequestOutput, use_tqdm=use_tqdm)
            except EngineDeadError:
                raise
            except BaseException:
                llm.llm_engine.abort_request(ids, internal=True)
                raise

    def call(self, method: str, *args: object) -> Any:
        """See `Lifecycle`."""
        with self._used(), alive():
            return self.start().collective_rpc(method, args=args)[0]

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
