"""Activations of whole prompts, brought home, beside vLLM alone."""

from __future__ import annotations

import statistics
import time
from functools import partial

import torch

import blocks
from bench import LAYERS, WIDTH, Bench, PerRound, generate, wake
from measure import Figure, around, beside, less, over

PROMPTS, LENGTH = 32, 128
EVERYTHING = "30 layers, all tokens"

CAPTURES: dict[str, tuple[blocks.Invoke, int, bool]] = {
    "one layer, last token": (blocks.last_of_one, 1, False),
    "one layer, all tokens": (blocks.whole_one, 1, True),
    "30 layers, last token": (blocks.last_of_all, LAYERS, False),
    EVERYTHING: (blocks.whole_all, LAYERS, True),
}
"""By name: the block, its layers, and whether it takes all tokens."""


def prefill(bench: Bench) -> list[Figure]:
    """Throughput of prefill with captures over that without, and what the captures take in copies of their bytes."""
    count = bench.tokens(PROMPTS)
    prompts = PerRound(lambda: bench.prompts(count, LENGTH), 1 + 2 * len(CAPTURES))
    for invoke, *_ in CAPTURES.values():  # to warm up
        bench.watch("to warm up", 0, 1)
        blocks.traced(bench.model, bench.prompts(2, LENGTH), 1, invoke)
    everything = torch.ones(count * LENGTH * LAYERS, WIDTH)
    eager, model = bench.eager, bench.model

    def plain() -> float:
        wake(eager)
        return generate(eager, prompts.take(), 1)

    def traced(invoke: blocks.Invoke) -> float:
        wake(bench.ready)
        return blocks.traced(model, prompts.take(), 1, invoke)

    def memcpy() -> float:
        target = torch.zeros_like(everything)  # its pages are there
        began = time.perf_counter()
        target.copy_(everything)
        return time.perf_counter() - began

    captures = {name: partial(traced, invoke) for name, (invoke, *_) in CAPTURES.items()}
    runs = around("plain eager", plain, captures)
    times = bench.alternate({**runs, "memcpy": memcpy}, 5, warm=0)
    base = beside(times, "plain eager", CAPTURES)
    figures = [
        _ratio(
            name,
            over(base[name], times[name]),
            statistics.median(base[name]),
            0.95 if name == EVERYTHING else None,
            count,
        )
        for name in CAPTURES
    ]
    size = everything.nbytes / 1e6
    extra, copies = less(times[EVERYTHING], base[EVERYTHING]), times["memcpy"]
    rate = (
        f"{size / statistics.median(extra):.0f} MB/s" if statistics.median(extra) > 0 else "faster than the rounds vary"
    )
    how = (
        f"the time that `{EVERYTHING}` took longer than plain prefill, in copies (`Tensor.copy_`) of the "
        f"{size:.0f} MB that it brings home: {rate}, where a copy does {size / statistics.median(copies):.0f} MB/s"
    )
    limits = (
        "three passes over the data that are not the model's: from the batch into private copies, from there into "
        "shared memory, whose pages are new, and the caller's first look"
    )
    return [*figures, Figure("prefill capture, all that it adds", "copies", over(extra, copies), None, how, limits)]


def _ratio(name: str, ratios: list[float], base: float, bar: float | None, count: int) -> Figure:
    _, layers, whole = CAPTURES[name]
    size = layers * count * (LENGTH if whole else 1) * WIDTH * 4 / 1e6
    how = (
        f"`LLM.generate` of {count} prompts of {LENGTH} tokens (and one more) on plain vLLM with `enforce_eager=True` "
        f"({base:.1f} s), right before and right after it, over a trace of as many invokes that saves "
        f"`layer.output[0]`, until {size:.3g} MB are home"
    )
    limits = "copying, and the first use of new pages" if whole else "one turn of each block for each layer"
    return Figure(f"prefill capture, {name}", "x", ratios, bar, how, limits, least=True)
