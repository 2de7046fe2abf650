"""The local backend: the same blocks on a `torch.nn.Module` in this process.

It is the reference that the engine's backend is tested against, and enough for small models. Values have the module's
own shapes (a transformers model keeps its batch dimension, ``[1, n, hidden]``).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..envoy.address import LOGITS, SAMPLES, port_at, suggestion
from ..envoy.envoy import Envoy, RootEnvoy
from ..envoy.errors import MisuseError, SamplingError
from ..tracer.backend import Reply
from ..tracer.block import Payload
from ..tracer.prompt import tokenize
from ..tracer.trace import Trace
from .hub import Hub
from .launch import launch
from .limits import limits
from .outcome import reply_of
from .windows import Share

_REQUEST = "local"

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


@dataclass(frozen=True)
class LocalSampling:
    """Sampling arguments of the local backend.

    Attributes:
        max_tokens: number of tokens at most, at least 1.
        temperature: 0 takes the most likely token; else logits are divided by it.
        seed: seed of sampling and of the block's random numbers.
        ignore_eos: go on after the end-of-sequence token.
        stop_token_ids: further tokens that end the generation.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()


class _Generation(NamedTuple):
    token_ids: list[int]
    sampling: LocalSampling


class _Call(NamedTuple):
    args: tuple[object, ...]
    kwargs: dict[str, object]


class Local(RootEnvoy):
    """A module in this process, traced like a model in an engine.

    Args:
        module: any module; with a transformers causal language model, prompts are generated from.
        tokenizer: its tokenizer, for prompts that are text or chat messages.
        time_limit: seconds that a block may take between two ports; None for as long as it likes.
        memory_limit: bytes that it may add to the process between two ports, or below 1 a share of what is available.
        save_limit: bytes that one trace may save.

    Raises:
        MisuseError: a limit that is no positive number.
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
        self._limits = limits(time_limit, memory_limit, save_limit)
        self._hub = Hub(module)
        super().__init__(self._hub.tree, "")
        self._module = module
        self._tokenizer = tokenizer

    def trace(self, *args: object, **kwargs: Any) -> Trace:
        """Trace one generation, or one call of the module.

        With a causal language model and a prompt (text, token ids, chat messages), the keywords are sampling
        arguments (`LocalSampling`). Otherwise the module is called with the arguments as they are.

        Raises:
            SamplingError: an unknown sampling argument.
            PromptError: a prompt that the model cannot take.
        """
        if hasattr(self._module, "generation_config") and len(args) == 1 and not isinstance(args[0], torch.Tensor):
            sampling = _sampling(kwargs)
            vocabulary = int(self._module.config.vocab_size)  # type: ignore[union-attr,arg-type]
            request: object = _Generation(tokenize(args[0], self._tokenizer, vocabulary).token_ids, sampling)
            return Trace(self, _LocalBackend(self, vocabulary), request, sampling.seed or 0)
        return Trace(self, _LocalBackend(self, None), _Call(args, kwargs), 0)

    def check_integrity(self) -> None:
        """Assert that no hook, block or other trace of earlier traces is left. Raises `InternalError`."""
        self._hub.check_integrity()


def _sampling(given: dict[str, Any]) -> LocalSampling:
    known = list(LocalSampling.__dataclass_fields__)
    for name in given:
        if name not in known:
            raise SamplingError(f"unknown sampling argument `{name}`.{suggestion(name, known)}")
    sampling = LocalSampling(**given)
    if sampling.max_tokens < 1 or sampling.temperature < 0:
        raise SamplingError(f"`max_tokens` is at least 1 and `temperature` at least 0; got {sampling}.")
    return sampling


class _LocalBackend:
    """Runs one request on the thread of the caller."""

    def __init__(self, model: Local, vocabulary: int | None) -> None:
        self._model = model
        self._hub = model._hub
        self._vocabulary = vocabulary

    def run(self, payload: Payload, request: object) -> tuple[Reply, object]:
        """See `tracer.backend.Backend`."""
        with _ONE_AT_A_TIME:
            if self._hub.mediators:
                raise MisuseError(
                    "a trace of this model was begun in the middle of another one (by a hook, a signal handler or "
                    "`__del__`). The model can compute one at a time: begin it when the other `with` has ended."
                )
            return self._run(payload, request)

    def _run(self, payload: Payload, request: object) -> tuple[Reply, object]:
        hub, model = self._hub, self._model
        device = next((parameter.device for parameter in model._module.parameters()), None)
        fresh = hub.learned is None
        with torch.no_grad():  # the block's mode too, as in an engine
            launched = launch(payload, model._tree, self._envoy, device, capture_output=False, limits=model._limits)
        hub.add(_REQUEST, launched.mediator, self._vocabulary)
        try:
            with torch.no_grad():
                if isinstance(request, _Generation):
                    result = self._generate(request)
                else:
                    assert isinstance(request, _Call), "Local.trace makes the request"
                    result = self._call(request)
                hub.end(_REQUEST, result)
                reply = reply_of(launched, hub.learned if fresh else None)
        finally:
            hub.abandon_step()
            hub.remove(_REQUEST)
        return reply, result

    def _envoy(self, address: str) -> Envoy:
        return Envoy(self._model._tree, address, self._model) if address else self._model

    def _call(self, request: _Call) -> LocalOutput:
        self._hub.begin({_REQUEST: Share(None, None, 0)})
        value = self._model._module(*request.args, **request.kwargs)
        self._hub.finish_step()
        return LocalOutput(value=value)

    def _generate(self, request: _Generation) -> LocalOutput:
        """Decode with a key-value cache, one step at a time."""
        module: Any = self._model._module
        sampling, device = request.sampling, next(module.parameters()).device
        generator = torch.Generator(device).manual_seed(sampling.seed or 0)
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else _eos(module))}
        tokens: list[int] = []
        given, cache, reason = request.token_ids, None, "length"
        while len(tokens) < sampling.max_tokens:
            self._hub.begin({_REQUEST: Share(None, None, len(tokens))})
            ids = torch.tensor([given], device=device)
            output = module(input_ids=ids, past_key_values=cache, use_cache=True)
            self._hub.forward_done()
            cache = output.past_key_values
            token = self._sample(output.logits[:, -1], sampling, generator)
            self._hub.finish_step()
            tokens.append(token)
            given = [token]
            if _REQUEST in self._hub.ended or token in stops:
                reason = "stop"
                break
        tokenizer = self._model._tokenizer
        text = tokenizer.decode(tokens, skip_special_tokens=True) if tokenizer is not None else None
        return LocalOutput(tuple(request.token_ids), tuple(tokens), text, reason)

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


def _eos(module: Any) -> tuple[int, ...]:
    eos = module.generation_config.eos_token_id
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)
