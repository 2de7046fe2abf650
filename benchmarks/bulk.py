"""What a plain request notices of traces that bring home 100 MB each, and how long that takes.

A plain request and some traces run in one batch. The blocks make their tensors in the first engine step. Then their
replies are fetched, one after the other, by a second thread, while the tokens of the plain request are timed.
"""

from __future__ import annotations

import statistics
import threading
import time
from itertools import pairwise
from typing import Any

import torch
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from bench import Bench
from invivo.tracer.backend import Reply
from invivo.tracer.block import Payload
from invivo.tracer.results import pack, unpack
from invivo.vllm_backend.pickup import receive
from invivo.vllm_backend.request_output import encode_output
from invivo.vllm_backend.sync import with_payload
from measure import Figure

SIZE = 100_000_000
TRACES = 4
QUIET = 20
"""Tokens of the plain request before each reply is fetched; a reply takes a few tokens' time."""

Span = tuple[float, float]


def bulk(bench: Bench) -> list[Figure]:
    """The figures."""
    measured, rounds = [], bench.rounds(12) + 1
    for number in range(rounds):
        bench.watch("a plain request beside replies of 100 MB", number, rounds)
        measured.append(_round(bench.model))
    measured = measured[1:]
    alone, during, times = ([value for one in measured for value in one[part]] for part in range(3))
    # A round has too few gaps for a percentile: there is a value for all rounds but one, each in turn.
    ratios = [
        _p99([gap for other in measured if other is not one for gap in other[1]])
        / _p99([gap for other in measured if other is not one for gap in other[0]])
        for one in measured
    ]
    how = (
        "gaps between the tokens of a plain request while a reply with 100 MB is fetched, p99, over the p99 of its "
        f"other gaps: {_p99(during):.0f} ms of {len(during)} over {_p99(alone):.0f} ms of {len(alone)}, medians "
        f"{statistics.median(during):.0f} and {statistics.median(alone):.0f} ms; a value per round that is left out"
    )
    how_long = "from the call for the reply of a block that has ended to its tensor, the engine decoding meanwhile"
    return [
        Figure(
            "token gaps beside 100 MB, p99", "x", ratios, 1.5, how, "the two cores, which the copying thread shares"
        ),
        Figure("100 MB brought home", "ms", times, None, how_long, "the first use of new pages, and the cores"),
    ]


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[-1]


class _Taking:
    """A backend that keeps payload and request instead of running them."""

    def run(self, payload: Payload, request: Any) -> tuple[Reply, object]:
        """See `tracer.backend.Backend`."""
        self.payload, self.request = payload, request
        return Reply(pack({}), None, "", (), None), None


def _round(model: Any) -> tuple[list[float], list[float], list[float]]:
    """Gaps of the plain request in ms, alone and while a reply came home, and how long the replies took."""
    engine, taking = model.engine.llm_engine, _Taking()
    params = SamplingParams(max_tokens=500, ignore_eos=True, temperature=0)  # it is aborted before that
    params.output_kind = RequestOutputKind.DELTA
    engine.add_request("plain", {"prompt_token_ids": [17, 31, 5]}, params)
    for number in range(TRACES):
        trace = model.trace([17, 31, number], max_tokens=1)
        trace._backend = taking
        with trace as tracer:
            saved: Any = torch.full((SIZE // 4,), 1.5)
            saved.save()
            tracer.result  # the block ends, and its reply is made, when that is fetched
        prompt = {"prompt_token_ids": taking.request.prompt.token_ids}
        engine.add_request(taking.payload.trace, prompt, with_payload(taking.request, taking.payload))
    return _watched(model, engine)


def _watched(model: Any, engine: Any) -> tuple[list[float], list[float], list[float]]:
    tokens: list[float] = []
    ended: list[Any] = []
    spans: list[Span] = []
    thread, since = threading.Thread(), 0
    while engine.has_unfinished_requests():
        outputs = engine.step()
        tokens += [time.perf_counter() for output in outputs if output.request_id == "plain"]
        ended += [output for output in outputs if output.request_id != "plain"]
        if thread.is_alive():
            since = len(tokens)
        elif len(tokens) - since < QUIET:
            continue
        elif len(spans) == TRACES:
            engine.abort_request(["plain"])
        elif len(ended) == TRACES:
            thread = threading.Thread(target=_fetch, args=(model, ended[len(spans)], spans))
            thread.start()
            since = len(tokens)
    assert len(spans) == TRACES, "the plain request was too short"
    gaps: tuple[list[float], list[float]] = [], []
    for before, after in pairwise(tokens[5:]):  # the first steps have the traces in them
        met = any(before < end and begin < after for begin, end in spans)
        gaps[met].append((after - before) * 1e3)
    return *gaps, [(end - begin) * 1e3 for begin, end in spans]


def _fetch(model: Any, output: Any, spans: list[Span]) -> None:
    def call(method: str, *args: object) -> Any:
        return model.engine.collective_rpc(method, args=args)[0]

    began = time.perf_counter()
    reply = receive(call("invivo_collect", output.request_id, encode_output(output)), output.request_id, call)
    saved: Any = unpack(reply.saves)["saved"]
    spans.append((began, time.perf_counter()))
    assert saved.sum() == 1.5 * (SIZE // 4)
