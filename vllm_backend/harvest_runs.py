"""What a harvest runs its prompts on: an engine, or a module in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol
from uuid import uuid4

from ..envoy.envoy import RootEnvoy
from ..envoy.errors import EngineDiedError, UnsupportedError
from ..interleaver.generation import generates, vocabulary
from ..interleaver.harvest import sink
from ..interleaver.local import Local, _LocalBackend
from ..tracer.backend import Reply
from ..tracer.block import FORMAT, Block, Payload
from ..tracer.codec import encode
from ..tracer.failure import rebuild
from ..tracer.prompt import Prompt
from ..tracer.trace import raise_from_block

_SOURCE = "with model.trace(prompt) as tracer:\n    found = {call}\n"
_FILE = "<invivo.harvest>"

TAKE = Block(
    _SOURCE.format(call="take(run, number, prompt)"),
    _FILE,
    1,
    0,
    "harvest",
    "function",
    "tracer",
    ("take", "run", "number", "prompt"),
)
LOOK = Block(
    _SOURCE.format(call="look(choices, rows).save()"),
    _FILE,
    1,
    0,
    "harvest",
    "function",
    "tracer",
    ("look", "choices", "rows"),
)


class Job(NamedTuple):
    """One prompt.

    Attributes:
        number: of the prompt.
        token_ids: its tokens.
        payload: its block.
        size: bytes that it adds to the harvest.
    """

    number: int
    token_ids: list[int]
    payload: Payload
    size: int


class Runs(Protocol):
    """Runs prompts with their blocks.

    Attributes:
        name: of the model.
        longest: tokens that a prompt may have; None if that is not known.
        advice: how to have more of them.
    """

    name: str
    longest: int | None
    advice: str

    def begin(self, plan: bytes) -> str:
        """As `sink.begin`, in the model's process."""
        ...

    def end(self, run: str) -> str:
        """As `sink.end`, in the model's process."""
        ...

    def run(self, payload: Payload, token_ids: list[int]) -> Reply:
        """Run one prompt with a block."""
        ...

    def run_each(self, jobs: Iterator[Job], room: int, done: Callable[[Job], None]) -> None:
        """Run many, of which those that run at once have no more than `room` bytes."""
        ...


def payload(block: Block, model: RootEnvoy, **values: object) -> Payload:
    """A payload of one of the blocks above."""
    encoded = encode({"local": values, "global": {}}, model)
    return Payload(FORMAT, uuid4().hex, block, encoded.data, encoded.tensors, 0, ())


def check(reply: Reply) -> None:
    """Raise the exception of the block, if one ended it."""
    if reply.failure is not None:
        raise_from_block(rebuild(reply.failure), {})


def runs_of(model: object, generate: int, sampling: dict[str, Any]) -> Runs:
    """What runs the prompts of a harvest of this model.

    Raises:
        UnsupportedError: a model that cannot be harvested.
        SamplingError: a sampling argument that the model does not take.
    """
    if isinstance(model, Local):
        return LocalRuns(model, generate, sampling)
    from .model import VLLM

    if not isinstance(model, VLLM):
        raise UnsupportedError(f"a harvest is of an `invivo.VLLM` or `invivo.Local`; this is {type(model).__name__}.")
    return EngineRuns(model, generate, sampling)


class EngineRuns:
    """On the engine of a `VLLM`; see `Runs`."""

    def __init__(self, model: Any, generate: int, sampling: dict[str, Any]) -> None:
        from .engine import Engine
        from .sampling import sampling_params
        from .sync import SyncBackend

        engine = model._engine
        if not isinstance(engine, Engine):
            raise UnsupportedError(
                '`invivo.harvest` waits, and this model was made with `mode="async"`, where nothing does. Leave `mode` '
                "out for a harvest."
            )
        engine.check_open()
        self._engine = engine
        self._backend = SyncBackend(engine)
        self._params = sampling_params({"temperature": 0.0, **sampling, "max_tokens": generate + 1})
        self.name = str(model._model_config.model)
        self.longest: int | None = min(model._budget, int(model._model_config.max_model_len) - 1 - generate)
        self.advice = (
            f"A harvested prompt is computed whole in one step (`max_num_batched_tokens={model._budget}`), and has to "
            f"fit with what is generated (`max_model_len={model._model_config.max_model_len}`): raise these"
        )

    def begin(self, plan: bytes) -> str:
        """See `Runs`."""
        return str(self._engine.call("invivo_harvest_begin", plan))

    def end(self, run: str) -> str:
        """See `Runs`."""
        return str(self._engine.call("invivo_harvest_end", run))

    def run(self, payload: Payload, token_ids: list[int]) -> Reply:
        """See `Runs`."""
        from .sync import Request

        reply, _ = self._backend.run(payload, Request(Prompt(token_ids, None), self._params))
        return reply

    def run_each(self, jobs: Iterator[Job], room: int, done: Callable[[Job], None]) -> None:
        """See `Runs`."""
        from .engine import Call, Sent
        from .sync import Request, reply_in, with_payload

        running: dict[str, Job] = {}

        def sent() -> Iterator[Sent]:
            for job in jobs:
                running[job.payload.trace] = job
                params = with_payload(Request(Prompt(job.token_ids, None), self._params), job.payload)
                yield Sent(job.payload.trace, {"prompt_token_ids": job.token_ids}, params, job.size)

        def ended(trace: str, output: Any, call: Call) -> None:
            reply = reply_in(output, trace, call)
            job = running.pop(trace)
            check(reply)
            done(job)

        try:
            self._engine.generate_each(sent(), room, ended)
        except EngineDiedError:
            raise
        except BaseException:
            for trace in running:
                self._engine.call("invivo_discard", trace)
            raise


class LocalRuns:
    """On a module in this process, one prompt after the other; see `Runs`."""

    advice = ""
    longest: int | None = None

    def __init__(self, model: Local, generate: int, sampling: dict[str, Any]) -> None:
        if not generates(model._module):
            raise UnsupportedError("a harvest runs prompts, and this module is no causal language model.")
        self._model = model
        self._backend = _LocalBackend(model, vocabulary(model._module))
        self._sampling = {"temperature": 0.0, **sampling, "max_tokens": generate + 1}
        module: Any = model._module
        self.name = str(getattr(module.config, "name_or_path", "") or type(module).__name__)
        self.begin, self.end = sink.begin, sink.end

    def run(self, payload: Payload, token_ids: list[int]) -> Reply:
        """See `Runs`."""
        reply, _ = self._backend.run(payload, self._model._request((token_ids,), self._sampling)[0])
        return reply

    def run_each(self, jobs: Iterator[Job], room: int, done: Callable[[Job], None]) -> None:
        """See `Runs`."""
        for job in jobs:
            check(self.run(job.payload, job.token_ids))
            done(job)
