"""Figures that need no engine: importing, capturing, and passing a port of a module in this process."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import greenlet
import msgspec
import torch

from invivo import Local
from invivo.tracer.backend import Reply
from invivo.tracer.block import Payload
from invivo.tracer.results import pack
from invivo.tracer.trace import Trace
from measure import Figure, alternate

PORTS = 200
WIDTH = 576


def import_time(rounds: int) -> list[Figure]:
    """``import invivo``, in fresh processes."""

    def start(code: str) -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return (time.perf_counter() - began) * 1e3

    times = alternate({"with": lambda: start("import invivo"), "without": lambda: start("pass")}, rounds)
    extra = [a - b for a, b in zip(times["with"], times["without"], strict=True)]
    how = "`python -c 'import invivo'` less `python -c pass`, wall time of the process"
    return [Figure("import invivo", "ms", extra, 50.0, how)]


class Unit(torch.nn.Module):
    """A module that does nothing, so that all the time is the port's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Chain(torch.nn.Module):
    """Many of them, one after the other."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.units = torch.nn.ModuleList(Unit() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for unit in self.units:
            x = unit(x)
        return x


class Sink:
    """A backend that encodes the payload, notes when it was done, and runs nothing."""

    done = 0.0
    size = 0

    def run(self, payload: Payload, request: object) -> tuple[Reply, object]:
        """See `tracer.backend.Backend`."""
        self.size = len(msgspec.msgpack.encode(payload))
        self.done = time.perf_counter()
        return Reply(pack({}), None, "", (), None), None


def capture(rounds: int) -> list[Figure]:
    """A block of ten lines with the usual things in it, up to the bytes that would be sent."""
    model: Any = Local(Chain(4))
    sink = Sink()
    vector, strengths, threshold = torch.randn(WIDTH), [0.5, 1.0, 2.0], 0.1

    def norms(values: list[torch.Tensor]) -> list[float]:
        return [float(value.norm()) for value in values]

    def once() -> float:
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

    times = alternate({"block": once}, rounds)
    how = (
        "from before the `with` to the encoded msgpack payload, no engine: find and check the block, read its "
        "variables (a tensor of 576, a list, a number, a function), pickle, encode; the block was seen before"
    )
    return [Figure("capture of ten lines", "ms", times["block"], 1.0, f"{how}; {sink.size} bytes")]


def _bare(x: torch.Tensor) -> Callable[[], float]:
    """The parts that a port is made of, alone: module call, hook, clone, switch there and back."""
    module = Chain(PORTS).eval()

    def block(_first: object) -> None:
        back = greenlet.getcurrent().parent
        assert back is not None
        while True:
            back.switch()

    running = greenlet.greenlet(block)
    running.switch(None)

    def hook(module: torch.nn.Module, args: object, output: torch.Tensor) -> None:
        running.switch(output.clone())

    for unit in module.units:
        unit.register_forward_hook(hook)

    def bare() -> float:
        began = time.thread_time()
        with torch.no_grad():
            module(x)
        return time.thread_time() - began

    return bare


def ports(rounds: int) -> list[Figure]:
    """One port: hook, switch to the block, copy, switch back, and writing an edit back."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    module = Chain(PORTS).eval()
    model: Any = Local(module)
    x = torch.randn(1, WIDTH)

    def walk() -> float:
        began = time.thread_time()
        with model.trace(x):
            for unit in model.units:
                unit.address
        return time.thread_time() - began

    def read() -> float:
        began = time.thread_time()
        with model.trace(x):
            for unit in model.units:
                unit.output
        return time.thread_time() - began

    def edit() -> float:
        began = time.thread_time()
        with model.trace(x):
            for unit in model.units:
                unit.output.zero_()
        return time.thread_time() - began

    def zero() -> float:
        with torch.inference_mode():
            own = x.clone()
            began = time.thread_time()
            for _ in range(PORTS):
                own.zero_()
            return time.thread_time() - began

    times = alternate({"walk": walk, "read": read, "edit": edit, "zero": zero, "bare": _bare(x)}, rounds)
    torch.set_num_threads(threads)
    each = {name: [value / PORTS * 1e6 for value in values] for name, values in times.items()}
    reading = [a - b for a, b in zip(each["read"], each["walk"], strict=True)]
    writing = [a - b - c for a, b, c in zip(each["edit"], each["walk"], each["zero"], strict=True)]
    how = (
        f"a block that {{}} at each of {PORTS} modules that do nothing, on [1, {WIDTH}], less the same trace that only "
        "walks over the modules{}; one thread, its CPU time"
    )
    how_bare = (
        "calling such a module with a forward hook that clones its output and switches to a greenlet and back, in the "
        "same rounds: what any way through hooks and greenlets costs on this machine"
    )
    return [
        Figure("port read, local", "µs", reading, 10.0, how.format("reads the output", "")),
        Figure("the same without invivo", "µs", each["bare"], None, how_bare),
        Figure("port edited, local", "µs", writing, 10.0, how.format("zeroes the output", ", and less the zeroing")),
    ]
