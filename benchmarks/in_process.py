"""Figures that need no engine: importing, and passing a port of a module in this process."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import greenlet
import torch

from bench import WIDTH, Bench
from invivo import Local
from measure import Figure, alternate, less, over

PORTS = 200


def import_time(bench: Bench) -> list[Figure]:
    """``import invivo``, in fresh processes."""

    def start(code: str) -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return (time.perf_counter() - began) * 1e3

    times = bench.alternate({"with": lambda: start("import invivo"), "without": lambda: start("pass")}, 15, warm=3)
    extra = less(times["with"], times["without"])
    how = "`python -c 'import invivo'` less `python -c pass`, wall time of the process"
    return [Figure("import invivo", "ms", extra, 50.0, how, "looking for one package; the rest is imported when used")]


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


@contextmanager
def one_thread() -> Iterator[None]:
    """torch computes on this thread alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


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


def ports(bench: Bench) -> list[Figure]:
    """One port: hook, switch to the block, copy, switch back, and writing an edit back."""
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

    with one_thread():
        functions = {"walk": walk, "read": read, "edit": edit, "zero": zero, "bare": _bare(x)}
        times = alternate(functions, bench.rounds(100), watch=bench.watch)
    each = {name: [value / PORTS * 1e6 for value in values] for name, values in times.items()}
    reading = less(each["read"], each["walk"])
    writing = less(less(each["edit"], each["walk"]), each["zero"])
    how = (
        f"a block that {{}} at each of {PORTS} modules that do nothing, on [1, {WIDTH}], less the same trace that only "
        "walks over the modules{}; one thread, its CPU time"
    )
    how_bare = (
        "calling such a module with a forward hook that clones its output and switches to a greenlet and back, in the "
        "same rounds: what any way through hooks and greenlets costs on this machine"
    )
    limits = "torch's call of a module that has hooks, the clone, and two greenlet switches: the row below"
    return [
        Figure("port read, local", "µs", reading, 10.0, how.format("reads the output", ""), limits),
        Figure("the same without invivo", "µs", each["bare"], None, how_bare),
        Figure(
            "port read, over that",
            "x",
            over(reading, each["bare"]),
            None,
            "the first of these rows over the second, within rounds: it stays when the machine's speed changes",
        ),
        Figure(
            "port edited, local",
            "µs",
            writing,
            None,
            how.format("zeroes the output", ", and less the zeroing"),
            f"{limits}; a check of what was put there, and a second clone, which the model goes on with",
        ),
    ]
