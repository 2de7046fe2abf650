"""The engine of ``mode="sync"``: whoever asks waits for the answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

from vllm import LLM, RequestOutput, SamplingParams

from ..envoy.errors import InternalError, InvivoError, MisuseError
from .compat import EngineDeadError
from .lifecycle import SHUTDOWN_SECONDS, Lifecycle, alive, answer
from .sampling import refusals
from .watch import dies, watch

Call: TypeAlias = "Callable[..., Any]"
"""Calls a method of all workers, and gives the answer of the one that has one: its name, then its arguments."""


_AT_ONCE = 256
"""Requests of `Engine.generate_each` that the engine has at once; those that it cannot run yet wait in it."""


class Sent(NamedTuple):
    """One of many requests.

    Attributes:
        name: what `ended` is told.
        prompt: as vLLM takes it.
        params: sampling parameters.
        size: of it, in whatever unit.
    """

    name: str
    prompt: Any
    params: SamplingParams
    size: int


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
        with self._requests() as (llm, ids):
            with refusals():
                ids += llm.enqueue(prompts, params, use_tqdm=use_tqdm)
            return llm.wait_for_completion(RequestOutput, use_tqdm=use_tqdm)

    def generate_all(
        self,
        prompts: Sequence[Any],
        params: Sequence[SamplingParams],
        after: Sequence[Collection[int]],
        ended: Callable[[Mapping[int, RequestOutput], Call], Collection[int]],
    ) -> None:
        """Run requests together, each to its end; all are aborted if the wait is interrupted.

        Args:
            prompts: one for each request.
            params: the same.
            after: for each request, the numbers of those that must be over before it is sent.
            ended: called when some have ended, with their outputs by their numbers, and `call` for use in it; says
                which requests are over now.

        Raises:
            SamplingError: vLLM refuses the parameters.
            EngineDiedError: the engine's process is gone.
        """
        with self._requests() as (llm, ids):
            waiting = [*range(len(prompts))]
            places: dict[str, int] = {}
            over: set[int] = set()
            while waiting or llm.llm_engine.has_unfinished_requests():
                ready = [i for i in waiting if over.issuperset(after[i])]
                if ready:
                    with refusals():
                        keys = llm.enqueue([prompts[i] for i in ready], [params[i] for i in ready], use_tqdm=False)
                    ids += keys
                    places.update((name, i) for key, i in zip(keys, ready, strict=True) for name in _names(key))
                    waiting = [i for i in waiting if not over.issuperset(after[i])]
                if not llm.llm_engine.has_unfinished_requests():
                    raise InternalError("the requests of a trace wait for each other.")
                outputs = [cast("RequestOutput", output) for output in llm.llm_engine.step() if output.finished]
                if outputs:
                    finished = {places[output.request_id]: output for output in outputs}
                    over.update(ended(finished, partial(_call, llm)))

    def generate_each(
        self, requests: Iterator[Sent], room: int, ended: Callable[[str, RequestOutput, Call], None]
    ) -> None:
        """Run any number of requests, of which the engine has some at a time; all are aborted if the wait is
        interrupted.

        Args:
            requests: taken as there is room for them.
            room: sizes that requests in the engine may have together; one alone may have more.
            ended: called for each request when it has ended, with its name, its output, and `call` for use in it.

        Raises:
            SamplingError: vLLM refuses the parameters.
            EngineDiedError: the engine's process is gone.
        """
        with self._requests() as (llm, ids):
            running: dict[str, Sent] = {}
            following, used = next(requests, None), 0
            while following is not None or running:
                new: list[Sent] = []
                while following is not None and len(running) + len(new) < _AT_ONCE:
                    if used and used + following.size > room:
                        break
                    new.append(following)
                    used += following.size
                    following = next(requests, None)
                if new:
                    with refusals():
                        keys = llm.enqueue([one.prompt for one in new], [one.params for one in new], use_tqdm=False)
                    ids += keys
                    running.update(zip(keys, new, strict=True))
                for output in llm.llm_engine.step():
                    if output.finished:
                        key = _key(output.request_id, running)
                        one = running.pop(key)
                        ids.remove(key)
                        used -= one.size
                        ended(one.name, cast("RequestOutput", output), partial(_call, llm))

    @contextmanager
    def _requests(self) -> Iterator[tuple[LLM, list[str]]]:
        """The engine, and a list for the ids of requests, which are aborted if the wait for them is interrupted."""
        with self._used(), alive():
            llm = self.start()
            if llm.llm_engine.has_unfinished_requests():
                raise MisuseError(
                    "the engine has requests that were enqueued and not waited for; they would finish during the "
                    "trace, and their outputs be lost. Call `model.engine.wait_for_completion()` before the trace."
                )
            ids: list[str] = []
            try:
                yield llm, ids
            except EngineDeadError:
                raise
            except BaseException:
                llm.llm_engine.abort_request(list(ids), internal=True)
                raise

    def call(self, method: str, *args: object) -> Any:
        """See `Lifecycle`."""
        with self._used(), alive():
            return _call(self.start(), method, *args)

    def settle(self) -> None:
        """See `Lifecycle`; an engine in this process makes a step only when it is asked to."""
        with self._used():
            engine = self.start().llm_engine
            if hasattr(engine.engine_core, "engine_core") and not engine.has_unfinished_requests():
                engine.step()

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


def _key(request_id: str, keys: Iterable[str]) -> str:
    """The key that vLLM gave a request which now says its id, without the suffix of the key."""
    return next(key for key in keys if request_id in _names(key))


def _names(key: str) -> tuple[str, str]:
    """What the output of a request may say of it: its key, or that without the suffix."""
    return key, key.rpartition("-")[0]


def _call(llm: LLM, method: str, *args: object) -> Any:
    try:
        return answer(llm.collective_rpc(method, args=args))
    except (EngineDeadError, InvivoError):
        raise
    except Exception as error:
        if dies(llm.llm_engine.engine_core):
            raise EngineDeadError from error
        raise InternalError(f"a worker failed in `{method}`: {error}") from error
