"""One trace at a time: what it takes longer than a plain request, and the module tree beside the engine's start."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from vllm import SamplingParams

from bench import SETTINGS, Bench, wake
from invivo import VLLM
from measure import Figure, less, over
from smollm2 import smollm2_path

PROMPT = "The Eiffel Tower is in the city of"
BAR = 5.0


def tree(bench: Bench) -> list[Figure]:
    """How long the model's names take, which are there without weights."""
    path = str(smollm2_path())
    trees: list[float] = []
    for number in range(6):  # the first one also imports vLLM's model classes
        bench.watch("building the module tree", number, 6)
        began = time.perf_counter()
        VLLM(path, **SETTINGS)
        trees.append(time.perf_counter() - began)
    assert bench.ready is not None
    how = (
        "`VLLM(path)`, which builds the model on the meta device, over `dispatch()`, with vLLM imported; "
        f"here the start took {bench.start:.1f} s (once) and the tree {statistics.median(trees[1:]):.2f} s, the first "
        f"one, which imports the model's classes, {trees[0]:.2f} s"
    )
    limits = "making the modules, none of which has memory"
    return [Figure("meta tree / engine start", "x", [tree / bench.start for tree in trees[1:]], 0.2, how, limits)]


def single(bench: Bench) -> list[Figure]:
    """Warm traces of one token, beside plain requests of the same prompt."""
    model = bench.model
    ids = model.tokenizer(PROMPT)["input_ids"]

    def logits() -> None:
        with model.trace(ids, max_tokens=1, temperature=0):
            found = model.logits.save()
        assert found.shape[0] == 1

    def one() -> None:
        with model.trace(ids, max_tokens=1, temperature=0):
            hidden = model.model.layers[15].output[0].save()
        assert hidden.shape[0] == len(ids)

    def every() -> None:
        with model.trace(ids, max_tokens=1, temperature=0):
            streams: Any = [sum(layer.output) for layer in model.model.layers]
            streams.save()
        assert len(streams) == 30

    functions = {
        "plain": _plain(bench.plain, ids),
        "eager": _plain(bench.eager, ids),
        "ready": _plain(bench.ready, ids),
        "logits": _timed(bench.ready, logits),
        "one": _timed(bench.ready, one),
        "all": _timed(bench.ready, every),
    }
    times = bench.alternate(functions, 40, warm=4)
    how = "`with` to variables in scope, {} `LLM.generate` of the same prompt, one token, {}, alternated"
    longer = how.format("less", "on plain vLLM, compiled")
    same = how.format("over", "on the same engine, compiled")
    path = "finding, checking and pickling the block, compiling it in the worker, and bringing the reply home"
    eagerly = f"{path}; and that its layers are compiled one by one, and not as one piece"
    return [
        Figure("plain request", "ms", times["plain"], None, "`LLM.generate` on plain vLLM, for comparison"),
        Figure("plain eager request", "ms", times["eager"], None, "the same with `enforce_eager=True`"),
        Figure("trace of logits, longer by", "ms", less(times["logits"], times["plain"]), BAR, longer, path),
        Figure("trace of one layer, longer by", "ms", less(times["one"], times["plain"]), BAR, longer, eagerly),
        Figure(
            "the same, against plain eager",
            "ms",
            less(times["one"], times["eager"]),
            None,
            how.format("less", "on plain vLLM with `enforce_eager=True`"),
            path,
        ),
        Figure("trace, one layer saved", "x", over(times["one"], times["ready"]), None, same, eagerly),
        Figure("trace, 30 layers saved", "x", over(times["all"], times["ready"]), None, same, eagerly),
    ]


def _plain(llm: Any, ids: list[int]) -> Callable[[], float]:
    params = SamplingParams(max_tokens=1, temperature=0)
    return _timed(llm, lambda: llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False))


def _timed(llm: Any, function: Callable[[], object]) -> Callable[[], float]:
    """In milliseconds, on an engine that has not slept."""

    def run() -> float:
        wake(llm)
        began = time.perf_counter()
        function()
        return (time.perf_counter() - began) * 1e3

    return run
