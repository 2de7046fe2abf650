"""The local backend: the same blocks on a `torch.nn.Module` in this process.

It is the reference that the engine's backend is tested against, and enough for small models. Values have the module's
own shapes (a transformers model keeps its batch dimension, ``[1, n, hidden]``).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from msgspec import structs

from ..envoy import active
from ..envoy.address import LOGITS, SAMPLES, port_at
from ..envoy.envoy import Envoy, RootEnvoy
from ..envoy.errors import InternalError, InvivoError, MisuseError, PortNotReachedError, PortPassedError
from ..tracer.backend import Reply
from ..tracer.block import Payload
from ..tracer.outer import OuterTrace
from ..tracer.trace import Trace
from .generation import (
    SAMPLING,
    Decoder,
    Generation,
    LocalSampling,
    end_tokens,
    generates,
    generation,
    is_prompt,
    sampling_of,
    vocabulary,
)
from .group import Groups
from .hub import Hub
from .launch import Launched, launch, line_in
from .limits import limits
from .outcome import reply_of
from .windows import Share

_REQUEST = "local"

_OUT_OF_ORDER = (PortPassedError.__qualname__, PortNotReachedError.__qualname__)
_DOUBT = (
    "the order is that of an earlier trace. If it depends on what the model is called with, run this trace again: it "
    "is learned anew."
)

_ONE_AT_A_TIME = threading.RLock()
"""Held while a trace runs: blocks change torch's state (`modes`), which the threads of a process share."""


@dataclass(frozen=True)
class LocalOutput:
    """The finished output of a local run.

    Attributes:
        prompt_token_ids: the prompt.
        token_ids: what was generated; empty for a module that is only called.
        text: the generated text, if there is a tokenizer.
        finish_reason: ``"length"``, ``"stop"``, or None for a call.
        value: what the module returned, for a call.
    """

    prompt_token_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    text: str | None = None
    finish_reason: str | None = None
    value: object = None


class _Call(NamedTuple):
    args: tuple[object, ...]
    kwargs: dict[str, object]


class Local(RootEnvoy):
    """A module in this process, traced like a model in an engine.

    Args:
        module: any module; with a transformers causal language model, prompts are generated from. Modules in it may be
            replaced between traces.
        tokenizer: its tokenizer, for prompts that are text or chat messages.
        time_limit: seconds that a block may take between two ports; None for as long as it likes.
        memory_limit: bytes that it may add to the process between two ports, or below 1 a share of what is available.
        save_limit: bytes that a block may save, of a trace of several each one.

    Raises:
        MisuseError: what is given is no module, or a limit is no positive number.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        tokenizer: Any = None,
        *,
        time_limit: float | None = None,
        memory_limit: float | None = None,
        save_limit: int | None = None,
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            raise MisuseError(
                f"`Local` takes a torch.nn.Module, and got {type(module).__name__}. For a model by its name, load it "
                "with transformers first, or use `VLLM(name)`."
            )
        self._limits = limits(time_limit, memory_limit, save_limit)
        self._hub = Hub(module)
        super().__init__(self._hub.tree, "")
        self._module = module
        self._modules = dict(module.named_modules(remove_duplicate=False))
        self._doubted = False
        self._tokenizer = tokenizer

    def trace(self, *args: object, **kwargs: Any) -> Trace | OuterTrace:
        """Trace one generation, one call of the module, or several of these.

        With a causal language model and a prompt (text, token ids, chat messages), the keywords are sampling
        arguments (`LocalSampling`). Token ids may be a tensor ``[n]``; one ``[1, n]`` is a prompt if there are
        sampling arguments. Otherwise the module is called with the arguments as they are. Without a prompt or
        argument, the prompts or arguments are those of ``with tracer.invoke(...):`` in the body.

        Raises:
            SamplingError: an unknown sampling argument.
            PromptError: a prompt that the model cannot take, or has no room to go on from.
            UnsupportedError: a prompt for a model that does not generate from one alone.
        """
        self._see_modules()
        backend = _LocalBackend(self, vocabulary(self._module))
        if not args and (not kwargs or (generates(self._module) and set(kwargs) <= set(SAMPLING))):
            sampling_of(kwargs)
            return OuterTrace(self, backend, self._request, kwargs)
        return Trace(self, backend, *self._request(args, kwargs))

    def _see_modules(self) -> None:
        """Take in modules that were put in, replaced or taken out (by PEFT, say) since the last trace.

        What was known of the order goes, too, after a trace that it refused a port: it may depend on the data.
        """
        modules = dict(self._module.named_modules(remove_duplicate=False))
        if modules == self._modules and not self._doubted:
            return
        with _ONE_AT_A_TIME:
            if self._hub.mediators:
                return  # a trace in the middle of another one, which is refused when it runs
            hub = Hub(self._module)
            self._tree.renew(hub.tree.modules)
            hub.tree = self._tree  # all Envoys have it
            self._hub, self._modules, self._doubted = hub, modules, False
            self._known.clear()

    def _request(self, args: tuple[object, ...], kwargs: dict[str, Any]) -> tuple[object, int]:
        """What the backend runs for these arguments, and the seed of its block."""
        if not is_prompt(self._module, args, kwargs):
            return _Call(args, kwargs), 0
        sampling = sampling_of(kwargs)
        return generation(self._module, args[0], sampling, self._tokenizer), sampling.seed or 0

    def check_integrity(self) -> None:
        """Assert that no hook, block or other trace of earlier traces is left. Raises `InternalError`."""
        self._hub.check_integrity()


class _Run:
    """One request with its block, step by step."""

    def __init__(self, key: str, payload: Payload, request: object) -> None:
        self.key = key
        self.payload = payload
        self.request = request
        self.launched: Launched | None = None
        self.fresh = False
        self.after = [index for _, index in payload.group.takes] if payload.group is not None else []
        self.steps: Iterator[LocalOutput | None] = iter(())
        self.tokens: list[int] = []
        self.outcome: tuple[Reply, object] | None = None


class _LocalBackend:
    """Runs requests on the thread of the caller, one after the other."""

    def __init__(self, model: Local, vocabulary: int | None) -> None:
        self._model = model
        self._vocabulary = vocabulary

    @property
    def _hub(self) -> Hub:
        return self._model._hub

    def run(self, payload: Payload, request: object) -> tuple[Reply, object]:
        """See `tracer.backend.Backend`."""
        return self._run_all([_Run(_REQUEST, payload, request)])[0]

    def run_group(self, payloads: Sequence[Payload], requests: Sequence[object]) -> list[tuple[Reply, object]]:
        """See `tracer.backend.Backend`. The next request begins when the one before has ended, or waits at a barrier
        after one of its steps."""
        pairs = zip(payloads, requests, strict=True)
        return self._run_all([_Run(f"{_REQUEST} {index}", *pair) for index, pair in enumerate(pairs)])

    def _run_all(self, runs: list[_Run]) -> list[tuple[Reply, object]]:
        with _ONE_AT_A_TIME:
            if self._hub.mediators:
                running = active.current()
                if running is not None and running.tree is self._model._tree:
                    raise MisuseError(
                        "a block began a trace of its own model, in a function that it calls. The model stands still "
                        "while a block has its turn: make that trace before or after this one."
                    )
                raise MisuseError(
                    "a trace of this model was begun in the middle of another one (by a hook, a signal handler or "
                    "`__del__`). The model can compute one at a time: begin it when the other `with` has ended."
                )
            groups = Groups()
            try:
                while unfinished := [run for run in runs if run.outcome is None]:
                    held = self._hub.held
                    able = (run for run in unfinished if run.key not in held)
                    ready = next((run for run in able if all(runs[at].outcome for at in run.after)), None)
                    if ready is None:
                        raise InternalError("all blocks of a trace wait at barriers, and none was told.")
                    self._go_on(ready, groups)
            finally:
                self._hub.abandon_step()
                for run in runs:
                    self._hub.remove(run.key)
            return [run.outcome for run in runs if run.outcome is not None]

    def _go_on(self, run: _Run, groups: Groups) -> None:
        """Start a request, or run its next step; at its end, take its reply."""
        hub, model = self._hub, self._model
        with torch.no_grad():  # the block's mode too, as in an engine
            if run.launched is None:
                device = next((parameter.device for parameter in model._module.parameters()), None)
                run.launched = launch(
                    run.payload,
                    model._tree,
                    self._envoy,
                    device,
                    capture_output=False,
                    groups=groups,
                    limits=model._limits,
                )
                run.fresh = hub.learned is None
                hub.add(run.key, run.launched.mediator, self._vocabulary)
                run.steps = self._generate(run) if isinstance(run.request, Generation) else self._call(run)
            try:
                result = next(run.steps)
            except Exception as error:  # blocks raise nothing here
                self._failed(run, run.launched, error)
                return
            if result is not None:
                hub.end(run.key, result)
                reply = reply_of(run.launched, hub.learned if run.fresh else None)
                run.outcome = reply if run.fresh else self._doubting(reply), result
                hub.remove(run.key)

    def _doubting(self, reply: Reply) -> Reply:
        """A reply; if the block was refused a port because of the order of an earlier trace, that is not relied on."""
        if reply.failure is None or reply.failure.qualname not in _OUT_OF_ORDER:
            return reply
        self._model._doubted = True
        notes = (*reply.failure.notes, _DOUBT)
        return structs.replace(reply, failure=structs.replace(reply.failure, notes=notes))

    def _failed(self, run: _Run, launched: Launched, error: Exception) -> None:
        """The model itself has failed: so has the block, which keeps what it has saved."""
        hub, mediator = self._hub, launched.mediator
        line = line_in(launched.block, mediator.frame)
        waited = f", while the block waited in line {line}" if line else ""
        if not isinstance(error, InvivoError):
            error.add_note(f"raised by the model itself{waited}; an edit at the block's last port may be why")
        if mediator.failure is None:
            mediator.failed_at = mediator.place.port
        hub.abandon_step()
        mediator.drop(error)
        given = tuple(run.request.token_ids) if isinstance(run.request, Generation) else ()
        reply = reply_of(launched, None, in_model=mediator.failure is error)
        run.outcome = reply, LocalOutput(given, tuple(run.tokens))
        hub.remove(run.key)

    def _envoy(self, address: str) -> Envoy:
        self._model._tree.at(address)
        return Envoy(self._model._tree, address, self._model) if address else self._model

    def _call(self, run: _Run) -> Iterator[LocalOutput | None]:
        request = run.request
        assert isinstance(request, _Call), "Local.trace makes the request"
        self._hub.begin({run.key: Share(None, None, 0)})
        value = self._model._module(*request.args, **request.kwargs)
        self._hub.finish_step()
        if run.key in self._hub.held:
            yield None
        yield LocalOutput(value=value)

    def _generate(self, run: _Run) -> Iterator[LocalOutput | None]:
        """Decode with a key-value cache; yields after each step, and the output at the end."""
        request = run.request
        assert isinstance(request, Generation), "Local.trace makes the request"
        module: Any = self._model._module
        sampling, device = request.sampling, next(module.parameters()).device
        generator = torch.Generator(device).manual_seed(request.draw)
        decoder, stops = Decoder(module), end_tokens(module, sampling)
        tokens = run.tokens
        given, reason = request.token_ids, "length"
        while len(tokens) < sampling.max_tokens:
            self._hub.begin({run.key: Share(None, None, len(tokens))})
            logits = decoder.logits(given)
            self._hub.forward_done()
            token = self._sample(logits, sampling, generator)
            self._hub.finish_step()
            tokens.append(token)
            given = [token]
            while run.key in self._hub.held:
                yield None
            if run.key in self._hub.ended or token in stops:
                reason = "stop"
                break
            if len(tokens) < sampling.max_tokens:
                yield None
        tokenizer = self._model._tokenizer
        text = tokenizer.decode(tokens, skip_special_tokens=True) if tokenizer is not None else None
        yield LocalOutput(tuple(request.token_ids), tuple(tokens), text, reason)

    def _sample(self, logits: torch.Tensor, sampling: LocalSampling, generator: torch.Generator) -> int:
        replaced = self._hub.fire(port_at("", LOGITS), logits)
        logits = logits if replaced is None else replaced  # type: ignore[assignment]
        if sampling.temperature == 0:
            sample = logits.argmax(-1)
        else:
            chances = torch.softmax(logits.float() / sampling.temperature, -1)
            sample = torch.multinomial(chances, 1, generator=generator)[:, 0]
        replaced = self._hub.fire(port_at("", SAMPLES), sample)
        return int((sample if replaced is None else replaced).item())  # type: ignore[attr-defined]
