"""`VLLM`: a model in a vLLM engine, as its user sees it."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic, sleep
from types import TracebackType
from typing import Any, Literal, Self

from ..envoy.envoy import RootEnvoy
from ..envoy.errors import InternalError, MisuseError, PromptError, SamplingError, UnsupportedError
from ..interleaver.limits import limits
from ..tracer.outer import OuterTrace
from ..tracer.prompt import Prompt, check_alone, listed, tokenize
from ..tracer.trace import Trace
from .version import check_version

_NONE: Any = object()
"""No prompt, which is not None given as one."""

_SETTLED, _PAUSE = 5.0, 0.02
"""Seconds until a request that has just ended must have left the worker (it does with the next step); between looks."""


class VLLM(RootEnvoy):
    """A model that runs in a vLLM engine, and the root of its module tree.

    Making one loads the tokenizer and the names of the modules, but no weights; the engine starts with the first
    trace, or with `dispatch`. Use it as a context manager, or `close` it, to end the engine before the process does.

    Args:
        model: name or path of the model, as vLLM takes it.
        time_limit: seconds that a block may take between two ports, while all else waits; None for no limit.
        memory_limit: what a block may add to the memory of the engine's process between two ports, and what it may hold
            of a GPU's: bytes, or below 1 a share of what is available; None for no limit.
        save_limit: bytes that a block may save, of a trace of several each one, and bytes of the objects that these
            share; None for no limit.
        mode: with ``"sync"`` the end of a `with` waits for its requests. With ``"async"`` it only starts them, and
            ``async for output in tracer.backend`` takes the outputs as they come; many traces run at once.
        arguments: engine arguments of vLLM (``dtype``, ``max_model_len``, ``kv_cache_memory_bytes``, ...). vLLM's
            defaults stay; where a block waits for a module of a compiled model, that engine step alone runs eagerly.
            ``enforce_eager=True`` starts in seconds, and is good for small experiments.

    Raises:
        VersionError: no vLLM, or one that invivo was not tested with.
        UnsupportedError: an argument under which traces could be wrong.
        MisuseError: an unknown engine argument, another mode, or a limit that is no positive number.
    """

    def __init__(
        self,
        model: str,
        *,
        mode: Literal["sync", "async"] = "sync",
        time_limit: float | None = 30.0,
        memory_limit: float | None = 0.5,
        save_limit: int | None = 4 << 30,
        **arguments: Any,
    ) -> None:
        check_version()
        if mode not in ("sync", "async"):
            raise MisuseError(f'`mode={mode!r}`: it is "sync" or "async".')
        from .arguments import check_config, engine_arguments, unsplit
        from .async_engine import AsyncEngine
        from .compat import EngineArgs
        from .engine import Engine
        from .mirror import mirror

        blocks = limits(time_limit, memory_limit, save_limit)
        arguments = engine_arguments(arguments, blocks, streams=mode == "async")
        config = EngineArgs(model=model, **arguments).create_engine_config()
        check_config(config)
        whole = unsplit(arguments)
        super().__init__(
            mirror(config if whole == arguments else EngineArgs(model=model, **whole).create_engine_config()), ""
        )
        self._model_config = config.model_config
        self._budget = int(config.scheduler_config.max_num_batched_tokens)
        self._engine: Engine | AsyncEngine = (AsyncEngine if mode == "async" else Engine)(model, arguments)
        self._loaded_tokenizer: Any = None

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer (transformers), loaded at first use."""
        if self._loaded_tokenizer is None:
            from transformers import AutoTokenizer

            self._loaded_tokenizer = AutoTokenizer.from_pretrained(
                self._model_config.tokenizer, trust_remote_code=self._model_config.trust_remote_code
            )
        return self._loaded_tokenizer

    @property
    def engine(self) -> Any:
        """The `vllm.LLM`, started if need be: for anything that is not a trace.

        With ``mode="async"``, the `vllm.v1.engine.async_llm.AsyncLLM`. It runs on an event loop of its own, and its
        coroutines belong there.

        Raises:
            EngineClosedError: the engine was closed.
        """
        return self._engine.start()

    def trace(
        self, prompt: object = _NONE, *more: object, reuse_prefix: bool = False, blocking: bool = True, **sampling: Any
    ) -> Trace | OuterTrace:
        """Trace one request, ``with model.trace(prompt, max_tokens=5, temperature=0) as tracer:``, or several.

        Without a prompt, the prompts are those of ``with tracer.invoke(prompt):`` in the body, and each invoke may
        have sampling arguments (and `reuse_prefix`) that go before those of the trace.

        Args:
            prompt: a text, a list of token ids, or a list of chat messages; or nothing.
            more: refused: a trace takes one prompt, or has invokes.
            reuse_prefix: take from the prefix cache what it has of the prompt. The block then sees only the rest of the
                prompt in step 0 (at least its last token), so do this where it looks at later steps or at logits.
            blocking: the mode of the engine decides whether the `with` waits, and False is refused where it does.
            sampling: arguments of `vllm.SamplingParams` (``max_tokens``, ``temperature``, ``seed``, ...), or one
                ``sampling_params``.

        Raises:
            PromptError: the prompt is empty, of another kind, or too long, or there are several.
            SamplingError: an unknown or refused sampling argument.
            UnsupportedError: ``blocking=False`` where the engine waits.
            EngineClosedError: the engine was closed.
        """
        from .async_engine import AsyncEngine
        from .asynchronous import AsyncBackend
        from .sampling import sampling_params
        from .sync import SyncBackend

        engine = self._engine
        engine.check_open()
        check_alone(1 + len(more))
        if not blocking and not isinstance(engine, AsyncEngine):
            raise UnsupportedError(
                "`blocking=False`: this model runs one trace at a time and waits for it. Make it with "
                '`VLLM(..., mode="async")`; no trace blocks then, and `await tracer` waits.'
            )
        backend = AsyncBackend(engine) if isinstance(engine, AsyncEngine) else SyncBackend(engine)
        given = {**sampling, "reuse_prefix": reuse_prefix}
        if prompt is _NONE:
            sampling_params(dict(sampling))
            return OuterTrace(self, backend, self._request, given)
        return Trace(self, backend, *self._request((prompt,), given))

    def _request(self, prompt: tuple[object, ...], given: dict[str, Any]) -> tuple[object, int]:
        """What the backend runs for a prompt, and the seed of its block."""
        from .async_engine import AsyncEngine
        from .asynchronous import check_streams
        from .sampling import sampling_params
        from .sync import Request

        if len(prompt) != 1:
            raise PromptError(f"a request has one prompt, and this got {len(prompt)}: make an invoke of each.")
        reuse_prefix = given.pop("reuse_prefix")
        if not isinstance(reuse_prefix, bool):
            raise SamplingError(f"`reuse_prefix` takes True or False, and got {reuse_prefix!r}.")
        params = sampling_params(given)
        if isinstance(self._engine, AsyncEngine):
            check_streams(params)
        tokens = tokenize(prompt[0], self._tokenizer_for(prompt[0]), self._model_config.get_vocab_size())
        self._check_length(tokens)
        self._check_budget(tokens)
        return Request(tokens, params, reuse_prefix), params.seed or 0

    def generate(self, prompts: object, *, use_tqdm: bool = True, **sampling: Any) -> list[Any]:
        """Generate without traces, all prompts at once.

        Args:
            prompts: one prompt as `trace` takes it, or a list of such.
            use_tqdm: show vLLM's progress bars.
            sampling: as in `trace`, for all prompts; ``n`` and ``stop`` too.

        Returns:
            vLLM's `RequestOutput` of each prompt, in order.

        Raises:
            PromptError: a prompt is empty, of another kind, or too long.
            SamplingError: an unknown sampling argument.
            UnsupportedError: the model was made with ``mode="async"``.
            EngineClosedError: the engine was closed.
        """
        from .async_engine import AsyncEngine
        from .sampling import plain_params

        self._engine.check_open()
        if isinstance(self._engine, AsyncEngine):
            raise UnsupportedError(
                '`model.generate` waits, and this model was made with `mode="async"`, where nothing does. Start a '
                "trace for each prompt, with a body of `pass`, and take its outputs, or leave `mode` out."
            )
        params = plain_params(sampling)
        given = []
        for prompt in listed(prompts):
            tokens = tokenize(prompt, self._tokenizer_for(prompt), self._model_config.get_vocab_size())
            self._check_length(tokens)
            given.append({"prompt_token_ids": tokens.token_ids} | ({"prompt": tokens.text} if tokens.text else {}))
        return self._engine.generate(given, [params] * len(given), use_tqdm=use_tqdm)

    def dispatch(self) -> Self:
        """Start the engine now instead of with the first trace; returns the model."""
        self._engine.start()
        return self

    def close(self) -> None:
        """End the engine and its processes. Traces raise `EngineClosedError` from then on."""
        self._engine.close()

    def check_integrity(self) -> None:
        """Assert that an idle engine holds nothing of earlier traces. Raises `InternalError`."""
        self._engine.settle()
        latest = monotonic() + _SETTLED
        while left := self._engine.call("invivo_check_integrity"):
            if monotonic() > latest:
                raise InternalError(left)
            sleep(_PAUSE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _tokenizer_for(self, prompt: object) -> Any:
        """The tokenizer where the prompt needs it: loading one takes a moment, and token ids do without."""
        messages = isinstance(prompt, list | tuple) and any(issubclass(kind, Mapping) for kind in {*map(type, prompt)})
        return self.tokenizer if messages or isinstance(prompt, str) else None

    def _check_length(self, prompt: Prompt) -> None:
        count, longest = len(prompt.token_ids), int(self._model_config.max_model_len)
        if count >= longest:
            raise PromptError(
                f"the prompt has {count} tokens, and the engine takes {longest} with what is generated: shorten it, or "
                "raise `max_model_len`."
            )

    def _check_budget(self, prompt: Prompt) -> None:
        count = len(prompt.token_ids)
        if count > self._budget:
            raise PromptError(
                f"the prompt has {count} tokens, and the engine computes at most {self._budget} in one step. A traced "
                f"prompt is computed whole: shorten it, or pass `max_num_batched_tokens={count}` or more to `VLLM`."
            )
