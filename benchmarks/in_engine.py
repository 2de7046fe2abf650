"""Figures that need an engine: what a trace costs, itself and others, and the module tree beside the engine's start."""

from __future__ import annotations

import time
from typing import Any

from vllm import SamplingParams

from bulk import bulk
from harvesting import harvesting
from invivo import VLLM
from measure import Figure, alternate
from smollm2 import smollm2_path

PROMPT = "The Eiffel Tower is in the city of"
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 256 << 20,
    "disable_log_stats": True,
    "use_tqdm_on_load": False,
}


def engine(rounds: int) -> list[Figure]:
    """Starts one engine and measures on it."""
    path = str(smollm2_path())
    trees: list[float] = []
    for _ in range(6):  # the first one also imports vLLM's model classes
        began = time.perf_counter()
        VLLM(path, **ENGINE)
        trees.append(time.perf_counter() - began)
    with VLLM(path, **ENGINE) as model:
        began = time.perf_counter()
        model.dispatch()
        start = time.perf_counter() - began
        fraction = [tree / start for tree in trees[1:]]
        how = (
            "`VLLM(path)`, which builds the model on the meta device, over `dispatch()`, with vLLM imported; "
            f"here the start took {start:.1f} s (once) and the tree {sorted(trees[1:])[2]:.2f} s, the first one, which "
            f"imports the model's classes, {trees[0]:.2f} s"
        )
        return [
            Figure("meta tree / engine start", "x", fraction, 0.2, how),
            *_overhead(model, rounds),
            *bulk(model, 12),
            *harvesting(model, 5),
        ]


def _overhead(model: Any, rounds: int) -> list[Figure]:
    params = SamplingParams(max_tokens=1, temperature=0)
    ids = model.tokenizer(PROMPT)["input_ids"]

    def plain() -> float:
        began = time.perf_counter()
        model.engine.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        return (time.perf_counter() - began) * 1e3

    def traced() -> float:
        began = time.perf_counter()
        with model.trace(ids, max_tokens=1, temperature=0):
            hidden = model.model.layers[15].output[0].save()
        assert hidden.shape[0] == len(ids)
        return (time.perf_counter() - began) * 1e3

    def every_layer() -> float:
        began = time.perf_counter()
        with model.trace(ids, max_tokens=1, temperature=0):
            streams: Any = [sum(layer.output) for layer in model.model.layers]
            streams.save()
        assert len(streams) == 30
        return (time.perf_counter() - began) * 1e3

    times = alternate({"plain": plain, "one": traced, "all": every_layer}, rounds)

    def over(name: str) -> list[float]:
        return [a / b for a, b in zip(times[name], times["plain"], strict=True)]

    how = "`with` to variables in scope, over `LLM.generate` of the same prompt, one token, same engine, alternated"
    return [
        Figure("plain request", "ms", times["plain"], None, "`LLM.generate`, for comparison"),
        Figure("trace, one layer saved", "x", over("one"), None, how),
        Figure("trace, 30 layers saved", "x", over("all"), None, how),
    ]
