"""What travels: the block on its way to the engine, and what it saved on its way home. No engine is needed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from bench import LAYERS, WIDTH, Bench
from in_process import Chain
from invivo import Local
from invivo.envoy.envoy import Envoy
from invivo.envoy.tree import ModuleTree
from invivo.interleaver.launch import Launched, launch
from invivo.interleaver.mediator import Mediator
from invivo.tracer.backend import Reply
from invivo.tracer.block import Payload
from invivo.tracer.outer import OuterTrace
from invivo.tracer.results import from_bytes, pack, to_bytes
from invivo.tracer.trace import Trace
from measure import Figure

STEPS = 64


class Sink:
    """A backend that encodes payloads, notes when that was done, and runs nothing."""

    done = 0.0
    payloads: Sequence[Payload] = ()

    @property
    def encoded(self) -> list[bytes]:
        """What would be sent."""
        return [msgspec.msgpack.encode(payload) for payload in self.payloads]

    def run(self, payload: Payload, request: object) -> tuple[Reply, object]:
        """See `tracer.backend.Backend`."""
        return self.run_group([payload], [request])[0]

    def run_group(self, payloads: Sequence[Payload], requests: Sequence[object]) -> list[tuple[Reply, object]]:
        """See `tracer.backend.Backend`."""
        for payload in payloads:
            msgspec.msgpack.encode(payload)
        self.done = time.perf_counter()
        self.payloads = payloads
        return [(Reply(pack({}), None, "", (), None), None) for _ in payloads]


def worker(tree: ModuleTree, root: Any, kind: type[Mediator] = Mediator) -> Callable[[Payload], Launched]:
    """Makes mediators of payloads as an engine's worker does."""
    return lambda payload: launch(
        payload, tree, lambda address: Envoy(tree, address, root) if address else root, capture_output=True, kind=kind
    )


def payloads(bench: Bench) -> list[Figure]:
    """A block of ten lines with the usual things in it."""
    model: Any = Local(Chain(4))
    sink = Sink()
    vector, strengths, threshold = torch.randn(WIDTH), [0.5, 1.0, 2.0], 0.1

    def norms(values: list[torch.Tensor]) -> list[float]:
        return [float(value.norm()) for value in values]

    def capture() -> float:
        began = time.perf_counter()
        with Trace(model, sink, None, 0) as tracer:
            seen = []
            for step in tracer.iter[:3]:
                for unit in model.units:
                    hidden = unit.output
                    hidden[-1] += strengths[step] * vector
                    if hidden.abs().mean() > threshold:
                        seen.append(hidden[-1])
                model.samples = model.logits.argmax(-1)
            sizes: Any = norms(seen)
            sizes.save()
        return (sink.done - began) * 1e3

    capture()
    (sent,) = sink.encoded
    make = worker(model._tree, model)

    def start() -> float:
        began = time.perf_counter()
        mediator = make(msgspec.msgpack.decode(sent, type=Payload)).mediator
        mediator.go_on()
        took = time.perf_counter() - began
        mediator.drop(RuntimeError("measured"))
        return took * 1e3

    saves = {"kept": [[torch.randn(1, WIDTH) for _ in range(LAYERS)] for _ in range(STEPS)]}

    def home() -> float:
        began = time.perf_counter()
        from_bytes(to_bytes(saves))
        return (time.perf_counter() - began) / (LAYERS * STEPS) * 1e6

    times = bench.alternate({"capture": capture, "start": start, "home": home}, 200, warm=3)
    (payload,) = sink.payloads
    tensors = sum(len(blob.data) for blob in payload.tensors)
    block = (
        "a block of ten lines that reads a tensor of 576, a list, a number and a function, and was seen before; no "
        "engine"
    )
    how = f"from before the `with` to the encoded msgpack payload: find, check, read variables, pickle, encode; {block}"
    return [
        Figure("capture of ten lines", "ms", times["capture"], 1.0, how, "pickling a function by value"),
        Figure(
            "payload of ten lines",
            "bytes",
            [float(len(sent) - tensors)],
            2048.0,
            f"what is sent for it, with everything but the elements of its tensor, {tensors} bytes; {block}",
            "the source text, and the function, which travels as code",
        ),
        Figure(
            "payload of a further invoke",
            "bytes",
            [_further(model)],
            None,
            f"what each further invoke adds to what is sent, where all run one block that adds a tensor of {WIDTH}",
            "what each request must have of its own",
        ),
        Figure(
            "start in the worker",
            "ms",
            times["start"],
            None,
            f"from the bytes of a payload to its first port: decode, compile, switch; {block}",
            "unpickling the function",
        ),
        Figure(
            "one saved tensor",
            "µs",
            times["home"],
            None,
            f"packed to bytes and unpacked, of {LAYERS * STEPS} that one block saves, each [1, {WIDTH}]; worker and "
            f"client together, {statistics.median(times['home']) / 2:.1f} µs each",
            "making a tensor object on either side",
        ),
    ]


def _further(model: Any) -> float:
    """Bytes that one more invoke of the same block adds."""
    sink = Sink()
    vector = torch.randn(WIDTH)

    def add(tracer: Any) -> None:
        with tracer.invoke(None):
            hidden = model.units[0].output
            hidden[-1] += vector

    sizes = []
    for count in (1, 16):
        with OuterTrace(model, sink, lambda prompt, sampling: (None, 0), {}) as tracer:
            for _ in range(count):
                add(tracer)
        sizes.append(sum(map(len, sink.encoded)))
    return (sizes[1] - sizes[0]) / 15
