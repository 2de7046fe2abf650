"""Traced decoding beside vLLM alone: what blocks cost that meet modules at every step, and how that grows."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import blocks
from bench import Bench, PerRound, generate, wake
from measure import Curve, Figure, Measured, around, beside, over

REQUESTS, LENGTH, TOKENS = 16, 8, 64
ROUNDS = 6

CONCURRENT = (1, 4, 16, 64)
PORTS = (1, 10, 30, 90)
FEW = 12
"""Tokens where something grows."""

PIECES = "that the layers are compiled one by one, and not as one piece with all around them"

Invokes = dict[str, blocks.Invoke]


class Scenario(NamedTuple):
    """What a block does at every step, its bar against plain eager vLLM, and what limits it."""

    invoke: blocks.Invoke
    bar: float
    limits: str


SCENARIOS = {
    "read one layer": Scenario(
        blocks.read_one,
        0.97,
        "a greenlet switch, a copy of one row and the block's own Python, for each request",
    ),
    "read 30 layers": Scenario(
        blocks.read_all,
        0.92,
        "30 times the Python of one port, for each request, on the thread that runs the model",
    ),
    "save one layer": Scenario(
        blocks.save_one,
        0.96,
        "what reading costs, and one reply for each request when all end in one step",
    ),
    "save 30 layers": Scenario(
        blocks.save_all,
        0.90,
        "what reading costs, and packing and unpacking each saved tensor, small as it is",
    ),
    "steer one layer": Scenario(
        blocks.steer_one,
        0.97,
        "what reading costs, the addition in each block, and one write back of all rows for each step",
    ),
}
INVOKES = {name: scenario.invoke for name, scenario in SCENARIOS.items()}


def decode(bench: Bench) -> list[Figure]:
    """Throughput of 16 traces over that of plain vLLM, eager and compiled."""
    tokens = bench.tokens(TOKENS)
    speeds, eagerly = _with_neighbours(bench, tokens)
    per_step = {name: statistics.median([1 / speed for speed in values]) / tokens for name, values in speeds.items()}
    eager, compiled = (f"{per_step[name] * 1e3:.1f} ms a step" for name in ("plain eager", "plain"))
    how = (
        f"a trace of {REQUESTS} invokes of {LENGTH} + {tokens} tokens, from `with` to what was saved, over "
        "`LLM.generate` of the same prompts on plain {}"
    )
    figures = []
    for name, scenario in SCENARIOS.items():
        ratios = over(speeds[name], eagerly[name])
        against = how.format(f"vLLM with `enforce_eager=True` ({eager}), right before and right after it")
        figures.append(
            Figure(f"{name}, of plain eager", "x", ratios, scenario.bar, against, scenario.limits, least=True)
        )
    for name in SCENARIOS:
        ratios = over(speeds[name], speeds["plain"])
        against = how.format(f"vLLM, compiled ({compiled})")
        figures.append(Figure(f"{name}, of plain compiled", "x", ratios, None, against, PIECES, least=True))
    return figures


def growth(bench: Bench) -> list[Curve]:
    """The same from 1 to 64 concurrent traces, and from 1 to 90 ports a step."""
    tokens = bench.tokens(FEW)
    invokes = {"read logits": blocks.logits, **INVOKES}
    curves: dict[str, dict[int, list[float]]] = {name: {} for name in invokes}
    for count in CONCURRENT:
        speeds = _speeds(bench, count, tokens, invokes, 2, warm=count == CONCURRENT[0])
        for name in invokes:
            curves[name][count] = over(speeds[name], speeds["plain eager"])
    how = f"as in the rows of traced decoding, with {tokens} tokens for each request: throughput over plain eager vLLM"
    concurrent = [Curve(name, "x", "concurrent traces", points, how) for name, points in curves.items()]
    return [*concurrent, _ports(bench, tokens)]


def _ports(bench: Bench, tokens: int) -> Curve:
    invokes = {f"read {count} ports": blocks.read_ports(count) for count in PORTS}
    speeds = _speeds(bench, REQUESTS, tokens, invokes, 2)
    points = {count: over(speeds[f"read {count} ports"], speeds["plain eager"]) for count in PORTS}
    how = (
        f"{REQUESTS} traces at once that read so many ports at every step (of layers; 90 are the layers and the "
        f"attention and MLP in each), {tokens} tokens: throughput over plain eager vLLM"
    )
    return Curve("read", "x", "ports read in each step", points, how)


def _with_neighbours(bench: Bench, tokens: int) -> tuple[Measured, Measured]:
    """Runs per second of each scenario and of plain requests; and of plain eager ones before and after each."""
    _warm(bench, _functions(bench, 2, 2, INVOKES, compiled=True), ROUNDS)
    made = _functions(bench, REQUESTS, tokens, INVOKES, compiled=True, more=len(INVOKES))
    functions = around("plain eager", made["plain eager"], {name: made[name] for name in INVOKES})
    speeds = bench.alternate({"plain": made["plain"], **functions}, ROUNDS, warm=0)
    return {name: speeds[name] for name in made}, beside(speeds, "plain eager", INVOKES)


def _warm(bench: Bench, functions: dict[str, Callable[[], float]], rounds: int) -> None:
    for name, function in functions.items():
        bench.watch(f"{name}, to warm up", 0, rounds)
        function()


def _speeds(
    bench: Bench,
    count: int,
    tokens: int,
    invokes: Invokes,
    rounds: int,
    *,
    warm: bool = True,
) -> Measured:
    """Runs per second of each scenario, and of plain requests, with `count` requests at once."""
    if warm:  # two tokens of two requests do for that
        _warm(bench, _functions(bench, 2, 2, invokes), rounds)
    functions = _functions(bench, count, tokens, invokes)
    named = {f"{name}, {count} at once": function for name, function in functions.items()}
    return dict(zip(functions, bench.alternate(named, rounds, warm=0).values(), strict=True))


def _functions(
    bench: Bench, count: int, tokens: int, invokes: Invokes, *, compiled: bool = False, more: int = 0
) -> dict[str, Callable[[], float]]:
    """What is compared; some of them run again in a round, `more` times in all."""
    llms = {**({"plain": bench.plain} if compiled else {}), "plain eager": bench.eager}
    ready, model = bench.ready, bench.model
    prompts = PerRound(lambda: bench.prompts(count, LENGTH), len(llms) + len(invokes) + more)

    def plain(llm: Any) -> float:
        wake(llm)
        return 1 / generate(llm, prompts.take(), tokens)

    def traced(invoke: blocks.Invoke) -> float:
        wake(ready)
        return 1 / blocks.traced(model, prompts.take(), tokens, invoke)

    return {
        **{name: partial(plain, llm) for name, llm in llms.items()},
        **{name: partial(traced, invoke) for name, invoke in invokes.items()},
    }
