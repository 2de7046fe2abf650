"""Traced decoding beside vLLM alone: what blocks cost that meet modules at every step, and how that grows."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import blocks
from bench import Bench, PerRound, generate, wake
from measure import Curve, Figure, over

REQUESTS, LENGTH, TOKENS = 16, 8, 64

CONCURRENT = (1, 4, 16, 64)
PORTS = (1, 10, 30, 90)
FEW = 16
"""Tokens where something grows."""

SCENARIOS: dict[str, tuple[blocks.Invoke, float, str]] = {
    "read one layer": (
        blocks.read_one,
        0.97,
        "a greenlet switch, a copy of one row and the block's own Python, for each request",
    ),
    "read 30 layers": (
        blocks.read_all,
        0.92,
        "30 times the Python of one port, for each request, on the thread that runs the model",
    ),
    "save one layer": (
        blocks.save_one,
        0.96,
        "what reading costs, and one reply for each request when all end in one step",
    ),
    "save 30 layers": (
        blocks.save_all,
        0.90,
        "what reading costs, and packing and unpacking each saved tensor, small as it is",
    ),
    "steer one layer": (
        blocks.steer_one,
        0.97,
        "what reading costs, the addition in each block, and one write back of all rows for each step",
    ),
}
"""By name: the block, its bar against plain eager, and what limits it."""

Functions = dict[str, Callable[[], float]]


def decode(bench: Bench) -> list[Figure]:
    """Throughput of 16 traces over that of plain vLLM, eager and compiled."""
    tokens = bench.tokens(TOKENS)
    prompts = PerRound(lambda: bench.prompts(REQUESTS, LENGTH), 2 + len(SCENARIOS))
    speeds = bench.alternate(_functions(bench, prompts, tokens, SCENARIOS, compiled=True), 6)
    per_step = {name: statistics.median([1 / speed for speed in values]) / tokens for name, values in speeds.items()}
    eager, compiled = (f"{per_step[name] * 1e3:.1f} ms a step" for name in ("plain eager", "plain"))
    how = (
        f"a trace of {REQUESTS} invokes of {LENGTH} + {tokens} tokens, from `with` to what was saved, over "
        "`LLM.generate` of the same prompts on plain {}"
    )
    figures = []
    for name, (_, bar, limits) in SCENARIOS.items():
        against = how.format(f"vLLM with `enforce_eager=True` ({eager})")
        figures.append(
            Figure(
                f"{name}, of plain eager", "x", over(speeds[name], speeds["plain eager"]), bar, against, limits, True
            )
        )
    for name in SCENARIOS:
        against = how.format(f"vLLM, compiled ({compiled})")
        why = "that the steps run eagerly: a compiled model has no modules to meet"
        figures.append(
            Figure(f"{name}, of plain compiled", "x", over(speeds[name], speeds["plain"]), None, against, why, True)
        )
    return figures


def growth(bench: Bench) -> list[Curve]:
    """The same from 1 to 64 concurrent traces, and from 1 to 90 ports a step."""
    tokens = bench.tokens(FEW)
    scenarios = {"read logits": (blocks.logits, 0.0, ""), **SCENARIOS}
    curves: dict[str, dict[int, list[float]]] = {name: {} for name in scenarios}
    for count in CONCURRENT:
        prompts = PerRound(partial(bench.prompts, count, LENGTH), 1 + len(scenarios))
        functions = _functions(bench, prompts, tokens, scenarios)
        speeds = bench.alternate({f"{name}, {count} at once": run for name, run in functions.items()}, 3)
        base = speeds[f"plain eager, {count} at once"]
        for name in scenarios:
            curves[name][count] = over(speeds[f"{name}, {count} at once"], base)
    how = f"as in the rows above, with {tokens} tokens of each request: throughput over plain eager vLLM"
    concurrent = [Curve(name, "x", "concurrent traces", points, how) for name, points in curves.items()]
    return [*concurrent, _ports(bench, tokens)]


def _ports(bench: Bench, tokens: int) -> Curve:
    scenarios: dict[str, tuple[blocks.Invoke, float, str]] = {
        f"read {count} ports": (blocks.read_ports(count), 0.0, "") for count in PORTS
    }
    prompts = PerRound(lambda: bench.prompts(REQUESTS, LENGTH), 1 + len(scenarios))
    speeds = bench.alternate(_functions(bench, prompts, tokens, scenarios), 3)
    points = {count: over(speeds[f"read {count} ports"], speeds["plain eager"]) for count in PORTS}
    how = (
        f"{REQUESTS} traces at once that read so many ports at every step (of layers; 90 are the layers and the "
        f"attention and MLP in each), {tokens} tokens: throughput over plain eager vLLM"
    )
    return Curve("read", "x", "ports read in each step", points, how)


def _functions(
    bench: Bench,
    prompts: PerRound,
    tokens: int,
    scenarios: dict[str, tuple[blocks.Invoke, float, str]],
    compiled: bool = False,
) -> Functions:
    """What is compared; each gives runs per second."""

    def plain(llm: Any) -> float:
        wake(llm)
        return 1 / generate(llm, prompts.take(), tokens)

    def traced(invoke: blocks.Invoke) -> float:
        wake(bench.ready)
        return 1 / blocks.traced(bench.model, prompts.take(), tokens, invoke)

    eager, model = bench.eager, bench.model
    assert model is not None, "started before anything is timed"
    functions: Functions = {"plain": partial(plain, bench.plain)} if compiled else {}
    functions["plain eager"] = partial(plain, eager)
    for name, (invoke, *_) in scenarios.items():
        functions[name] = partial(traced, invoke)
    return functions
