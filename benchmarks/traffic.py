"""Untraced traffic on a trace-ready engine, and traces that look at logits only, beside vLLM alone: all compiled."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import Any

import blocks
from bench import Bench, PerRound, generate, wake
from measure import Figure, less, over

REQUESTS, LENGTH, TOKENS = 16, 8, 64


def traffic(bench: Bench) -> list[Figure]:
    """Throughput, and when tokens come."""
    return [*_throughput(bench), *_latency(bench)]


def _throughput(bench: Bench) -> list[Figure]:
    plain, ready, tokens = bench.plain, bench.ready, bench.tokens(TOKENS)
    prompts = PerRound(lambda: bench.prompts(REQUESTS, LENGTH), 3)

    def run(llm: Any) -> float:
        wake(llm)
        return 1 / generate(llm, prompts.take(), tokens)

    def logits() -> float:
        wake(ready)
        return 1 / blocks.traced(bench.model, prompts.take(), tokens, blocks.logits)

    speeds = bench.alternate(
        {"plain vLLM": lambda: run(plain), "untraced": lambda: run(ready), "traces of logits": logits}, 8
    )
    ratios = over(speeds["untraced"], speeds["plain vLLM"])
    per_second = REQUESTS * tokens * statistics.median(speeds["plain vLLM"])
    how = (
        f"`LLM.generate` of {REQUESTS} requests of {LENGTH} + {tokens} tokens on an invivo engine over the same on "
        f"plain vLLM with the same settings, both compiled ({per_second:.0f} tokens/s), in the rounds in which {{}}"
    )
    rest = "the questions in each engine step, of scheduler and runner, whether there is a traced request"
    return [
        Figure("untraced, after plain", "x", ratios[0::2], 0.99, how.format("plain vLLM went first"), rest, least=True),
        Figure("untraced, before plain", "x", ratios[1::2], 0.99, how.format("the other did"), rest, least=True),
        Figure(
            "traces of logits, throughput",
            "x",
            over(speeds["traces of logits"], speeds["plain vLLM"]),
            0.95,
            f"a trace of {REQUESTS} invokes that read `model.logits` at every step, from `with` to its end, over "
            "`LLM.generate` of the same prompts on plain vLLM, both compiled",
            "copying each request's row of the logits (49,152 floats), and telling each block of the end of its "
            "request, one call for each",
            least=True,
        ),
    ]


def _latency(bench: Bench) -> list[Figure]:
    plain, ready, tokens = bench.plain, bench.ready, bench.tokens(32)
    prompts = PerRound(lambda: bench.prompts(REQUESTS, LENGTH), 2)
    gaps: dict[str, list[float]] = {"plain": [], "ready": []}

    def run(name: str, llm: Any) -> float:
        wake(llm)
        first, between = _stamps(llm, prompts.take(), tokens)
        gaps[name].append(statistics.mean(between))
        return first

    firsts = bench.alternate({"plain": lambda: run("plain", plain), "ready": lambda: run("ready", ready)}, 6)
    kept = len(firsts["plain"])
    base, other = gaps["plain"][-kept:], gaps["ready"][-kept:]
    how = f"{REQUESTS} untraced requests at once, driven by `add_request` and `step`, over the same on plain vLLM: {{}}"
    extra = statistics.median(less(firsts["ready"], firsts["plain"]))
    first = f"until the first token, mean of the requests; {extra * 1e3:+.1f} ms"
    then = f"between tokens, mean; {statistics.median(base) * 1e3:.1f} ms on plain vLLM"
    return [
        Figure("untraced, time to first token", "x", over(firsts["ready"], firsts["plain"]), None, how.format(first)),
        Figure("untraced, time between tokens", "x", over(other, base), None, how.format(then)),
    ]


def _stamps(llm: Any, prompts: list[list[int]], tokens: int) -> tuple[float, list[float]]:
    """Mean time to the first token, and all times between tokens, in seconds."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    params.output_kind = RequestOutputKind.DELTA
    seen: dict[str, list[float]] = {}
    began = time.perf_counter()
    for number, prompt in enumerate(prompts):
        seen[f"{began}-{number}"] = []
        engine.add_request(f"{began}-{number}", {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen[output.request_id].append(time.perf_counter())
    assert all(len(stamps) == tokens for stamps in seen.values())
    first = statistics.mean(stamps[0] - began for stamps in seen.values())
    return first, [after - before for stamps in seen.values() for before, after in pairwise(stamps)]
