"""The parts of the GPU's benchmarks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

import gpu_bench
from gpu_bench import LAYERS, MIDDLE, WIDTH, GpuBench, per_second, timed
from measure import Curve, Figure, over

TOKENS, LENGTH, REQUESTS = 128, 32, 16
CONCURRENT = (1, 16, 64)
PROMPTS, LONG = 64, 512
NEW_REQUESTS, NEW_TOKENS = 16, 24

_LIMITS = "Python in the engine's one thread, which is what the untraced steps of so small a model wait for, too"


class Part(NamedTuple):
    """One of them: what it is about, and what measures it."""

    title: str
    measure: Callable[[GpuBench], Sequence[Figure | Curve]]


class _Scenario(NamedTuple):
    invoke: Callable[[Any, Any, list[int]], Any]
    bar: float | None


_SCENARIOS = {
    "logits": _Scenario(gpu_bench.logits, 0.95),
    "read one layer": _Scenario(gpu_bench.read_one, 0.85),
    "save one layer": _Scenario(gpu_bench.save_one, None),
    "steer one layer": _Scenario(gpu_bench.steer_one, 0.85),
    f"read {LAYERS} layers": _Scenario(gpu_bench.read_all, 0.6),
}


def decode(bench: GpuBench) -> list[Figure | Curve]:
    """Throughput of traced decoding over that of untraced requests in the same engine."""
    figures: list[Figure | Curve] = []
    curves: dict[str, dict[int, list[float]]] = {name: {} for name in _SCENARIOS}
    for count in CONCURRENT:
        prompts = bench.prompts(count, LENGTH)
        runs: dict[str, Callable[[], float]] = {
            "untraced": lambda prompts=prompts: bench.generate(prompts, TOKENS)  # type: ignore[misc]
        }
        for name, scenario in _SCENARIOS.items():
            runs[name] = lambda prompts=prompts, of=scenario.invoke: bench.traced(prompts, TOKENS, of)  # type: ignore[misc]
        named = {f"{name}, {count} at once": run for name, run in runs.items()}
        times = dict(zip(runs, bench.alternate(named, 6 if count == REQUESTS else 3).values(), strict=True))
        base = times["untraced"]
        step = statistics.median(base) / TOKENS * 1e3
        for name, scenario in _SCENARIOS.items():
            curves[name][count] = ratios = over(base, times[name])
            how = (
                f"{count} untraced requests of {LENGTH} + {TOKENS} tokens ({step:.2f} ms a step) over a trace of as "
                "many invokes on the same engine, from `with` to its end; no token can end a request"
            )
            bar = scenario.bar if count == REQUESTS else None
            if count == REQUESTS:
                figures.append(Figure(name, "x", ratios, bar, how, _LIMITS, least=True))
    how = "as in the rows of traced decoding"
    return [*figures, *(Curve(name, "x", "concurrent traces", points, how) for name, points in curves.items())]


def prefill(bench: GpuBench) -> list[Figure | Curve]:
    """Throughput of prefill with everything brought home over that without, and the rate of bytes."""
    prompts, size = bench.prompts(PROMPTS, LONG), PROMPTS * LONG * LAYERS * WIDTH * 2
    source = torch.ones(size // 8, dtype=torch.bfloat16, device="cuda")
    pinned = torch.empty(size // 8, dtype=torch.bfloat16, pin_memory=True)
    pageable = torch.zeros(size // 8, dtype=torch.bfloat16)
    runs: dict[str, Callable[[], float]] = {
        "untraced": lambda: bench.generate(prompts, 1),
        "all layers read": lambda: bench.traced(prompts, 1, gpu_bench.read_prompt),
        "all layers home": lambda: bench.traced(prompts, 1, gpu_bench.whole_all),
        "copies to pinned memory": lambda: 4 * timed(lambda: pinned.copy_(source)),
        "copies to ordinary memory": lambda: 4 * timed(lambda: pageable.copy_(source)),
    }
    times = bench.alternate(runs, 8)
    base = times["untraced"]
    how = (
        f"{PROMPTS} untraced prompts of {LONG} tokens and one more ({statistics.median(base) * 1e3:.0f} ms) over a "
        f"trace of as many invokes that {{}} `layer.output[0]` of all {LAYERS} layers"
    )
    rates = (
        f"{per_second(size, times['all layers home'])} from `with` to its end, where a copy from the GPU does "
        f"{per_second(size, times['copies to pinned memory'])} to pinned memory and "
        f"{per_second(size, times['copies to ordinary memory'])} to ordinary memory"
    )
    home = [
        copy / took for copy, took in zip(times["copies to ordinary memory"], times["all layers home"], strict=True)
    ]
    return [
        Figure(
            "prefill, all layers read",
            "x",
            over(base, times["all layers read"]),
            None,
            how.format("reads"),
            "",
            least=True,
        ),
        Figure(
            "prefill, all layers and tokens home",
            "x",
            over(base, times["all layers home"]),
            0.8,
            f"{how.format('saves')}, {size / 1e9:.1f} GB: {rates}",
            "Python in the one thread of engine and client, and the copies of the last prompts",
            least=True,
        ),
        Figure("prefill, rate of that of copies to ordinary memory", "x", home, None, rates, ""),
    ]


def first(bench: GpuBench) -> list[Figure | Curve]:
    """What the first steps with new ports cost everybody in the engine."""
    model, longest, usual = bench.model, list[float](), list[float]()
    for number in range(bench.rounds(8)):
        bench.watch("steps with new ports", number, bench.rounds(8))
        prompts = bench.prompts(NEW_REQUESTS, LENGTH)
        layers = [number, (number + MIDDLE) % LAYERS]
        with bench.steps() as seen, model.trace(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True) as tracer:
            for at, prompt in enumerate(prompts):
                if at == 0:
                    with tracer.invoke(prompt):
                        for _ in tracer.iter[:]:
                            for layer in layers:
                                model.model.layers[layer].mlp.output
                else:
                    with tracer.invoke(prompt):
                        model.logits
        longest.append(max(seen) * 1e3)
        usual.append(statistics.median(seen) * 1e3)
    how = (
        f"the longest of the engine steps of {NEW_REQUESTS} requests, of which one reads two modules in each step that "
        "nobody has read before, which is how long the others wait for a token; the usual step there takes "
        f"{statistics.median(usual):.1f} ms"
    )
    return [Figure("longest step with new ports", "ms", longest, 1000, how, "capturing a graph of the forward")]


PARTS = {
    "decode": Part("traced decoding on a GPU", decode),
    "prefill": Part("prefill capture on a GPU", prefill),
    "first": Part("the first steps with new ports on a GPU", first),
}
