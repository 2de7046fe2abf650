"""What the parts of the benchmarks share: the engines, the prompts, and how many rounds there are."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from measure import Measured, Watch, alternate
from smollm2 import smollm2_path

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": 512 << 20,
    "use_tqdm_on_load": False,
}
"""Of all engines. Everything else is vLLM's default: compiled, prefix cache, chunked prefill."""

LAYERS = 30
WIDTH = 576


class Bench:
    """One run.

    The engines are started when they are first asked for and stay until the end, side by side: an engine without
    requests takes no time. Each has processes of its own.

    Args:
        quick: few rounds and few tokens, to see whether everything runs; the figures are not to be relied on.
        watch: see `measure.Watch`.
    """

    def __init__(self, quick: bool, watch: Watch) -> None:
        self.quick = quick
        self.watch = watch
        self.start = 0.0
        """Seconds that the trace-ready engine took to start."""
        self._started: list[Callable[[], object]] = []
        self._random = random.Random(0)

    def rounds(self, count: int) -> int:
        """How many of `count` rounds are made."""
        return max(2, count // 8) if self.quick else count

    def tokens(self, count: int) -> int:
        """How many of `count` tokens are generated."""
        return max(1, count // 8) if self.quick else count

    def alternate(self, functions: Mapping[str, Callable[[], float]], rounds: int, warm: int = 1) -> Measured:
        """See `measure.alternate`."""
        return alternate(functions, self.rounds(rounds), warm, self.watch)

    @cached_property
    def plain(self) -> Any:
        """vLLM alone."""
        return self._plain("the plain engine")

    @cached_property
    def eager(self) -> Any:
        """vLLM alone, with ``enforce_eager=True``."""
        return self._plain("the plain eager engine", enforce_eager=True)

    @cached_property
    def model(self) -> Any:
        """The trace-ready engine, as an `invivo.VLLM`."""
        from invivo import VLLM

        model = VLLM(str(smollm2_path()), **SETTINGS)
        self.watch("starting the trace-ready engine", 0, 1)
        began = time.perf_counter()
        model.dispatch()
        self.start = time.perf_counter() - began
        self._started.append(model.close)
        return model

    @property
    def ready(self) -> Any:
        """The trace-ready engine, as vLLM's `LLM`."""
        return self.model.engine

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Prompts that nobody has seen before, so that no prefix cache knows them."""
        return [[self._random.randrange(1000, 49_000) for _ in range(length)] for _ in range(count)]

    def close(self) -> None:
        """End the engines."""
        while self._started:
            self._started.pop()()

    def _plain(self, name: str, **settings: Any) -> Any:
        from vllm import LLM

        self.watch(f"starting {name}", 0, 1)
        llm = LLM(str(smollm2_path()), **SETTINGS, **settings)
        self._started.append(llm.llm_engine.engine_core.shutdown)
        return llm


class PerRound:
    """What all functions of a round get alike, made anew for each round.

    Args:
        make: makes it.
        users: how many functions take it in each round.
    """

    def __init__(self, make: Callable[[], Any], users: int) -> None:
        self._make = make
        self._users = users
        self._left = 0
        self._made: Any = None

    def take(self) -> Any:
        """It; the functions of one round get the same."""
        if not self._left:
            self._made, self._left = self._make(), self._users
        self._left -= 1
        return self._made


def generate(llm: Any, prompts: list[list[int]], tokens: int) -> float:
    """Seconds that ``LLM.generate`` takes."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    began = time.perf_counter()
    outputs = llm.generate(given, params, use_tqdm=False)
    took = time.perf_counter() - began
    assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
    return took


def wake(llm: Any) -> None:
    """One token: what has slept while others had their turn is awake and in the caches after it."""
    generate(llm, [[17, 31, 5]], 1)
