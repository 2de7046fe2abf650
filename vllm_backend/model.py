"""`VLLM`: a model in a vLLM engine, as its user sees it."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from ..envoy.envoy import RootEnvoy
from ..envoy.errors import InternalError, PromptError
from ..tracer.outer import OuterTrace
from ..tracer.prompt import Prompt, tokenize
from ..tracer.trace import Trace
from .version import check_version

_NONE: Any = object()
"""No prompt, which is not None given as one."""


class VLLM(RootEnvoy):
    """A model that runs in a vLLM engine, and the root of its module tree.

    Making one loads the tokenizer and the names of the modules, but no weights; the engine starts with the first
    trace, or with `dispatch`. Use it as a context manager, or `close` it, to end the engine before the process does.

    Args:
        model: name or path of the model, as vLLM takes it.
        arguments: engine arguments of vLLM (``dtype``, ``max_model_len``, ``kv_cache_memory_bytes``, ...). The engine
            runs eagerly, since modules of a compiled model cannot be met.

    Raises:
        VersionError: no vLLM, or one that invivo was not tested with.
        UnsupportedError: an argument under which traces could be wrong.
        MisuseError: an unknown engine argument.
    """

    def __init__(self, model: str, **arguments: Any) -> None:
        check_version()
        from .arguments import engine_arguments
        from .compat import EngineArgs
        from .engine import Engine
        from .mirror import mirror

        arguments = engine_arguments(arguments)
        config = EngineArgs(model=model, **arguments).create_engine_config()
        super().__init__(mirror(config), "")
        self._model_config = config.model_config
        self._budget = int(config.scheduler_config.max_num_batched_tokens)
        self._engine = Engine(model, arguments)
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

        Raises:
            EngineClosedError: the engine was closed.
        """
        return self._engine.start()

    def trace(self, prompt: object = _NONE, **sampling: Any) -> Trace | OuterTrace:
        """Trace one request, ``with model.trace(prompt, max_tokens=5, temperature=0) as tracer:``, or several.

        Without a prompt, the prompts are those of ``with tracer.invoke(prompt):`` in the body, and each invoke may
        have sampling arguments that go before those of the trace.

        Args:
            prompt: a text, a list of token ids, or a list of chat messages; or nothing.
            sampling: arguments of `vllm.SamplingParams` (``max_tokens``, ``temperature``, ``seed``, ...), or one
                ``sampling_params``.

        Raises:
            PromptError: the prompt is empty, of another kind, or too long.
            SamplingError: an unknown or refused sampling argument.
            EngineClosedError: the engine was closed.
        """
        from .sampling import sampling_params
        from .sync import SyncBackend

        self._engine.check_open()
        backend = SyncBackend(self._engine)
        if prompt is not _NONE:
            return Trace(self, backend, *self._request((prompt,), sampling))
        sampling_params(dict(sampling))
        return OuterTrace(self, backend, self._request, sampling)

    def _request(self, prompt: tuple[object, ...], sampling: dict[str, Any]) -> tuple[object, int]:
        """What the backend runs for a prompt, and the seed of its block."""
        from .sampling import sampling_params
        from .sync import Request

        if len(prompt) != 1:
            raise PromptError(f"a request has one prompt, and this got {len(prompt)}: make an invoke of each.")
        params = sampling_params(sampling)
        tokens = tokenize(prompt[0], self._tokenizer_for(prompt[0]), self._model_config.get_vocab_size())
        self._check_length(tokens)
        return Request(tokens, params), params.seed or 0

    def dispatch(self) -> Self:
        """Start the engine now instead of with the first trace; returns the model."""
        self._engine.start()
        return self

    def close(self) -> None:
        """End the engine and its processes. Traces raise `EngineClosedError` from then on."""
        self._engine.close()

    def check_integrity(self) -> None:
        """Assert that an idle engine holds nothing of earlier traces. Raises `InternalError`."""
        left = self._engine.call("invivo_check_integrity")
        if left:
            raise InternalError(left)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _tokenizer_for(self, prompt: object) -> Any:
        """The tokenizer where the prompt needs it: loading one takes a moment, and token ids do without."""
        messages = isinstance(prompt, list | tuple) and any(isinstance(item, Mapping) for item in prompt)
        return self.tokenizer if messages or isinstance(prompt, str) else None

    def _check_length(self, prompt: Prompt) -> None:
        count, longest = len(prompt.token_ids), int(self._model_config.max_model_len)
        if count >= longest:
            raise PromptError(
                f"the prompt has {count} tokens, and the engine takes {longest} with what is generated: shorten it, or "
                "raise `max_model_len`."
            )
        if count > self._budget:
            raise PromptError(
                f"the prompt has {count} tokens, and the engine computes at most {self._budget} in one step. A traced "
                f"prompt is computed whole: shorten it, or pass `max_num_batched_tokens={count}` or more to `VLLM`."
            )
