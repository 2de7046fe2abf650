"""What a port costs the worker: one hub, the blocks of several requests, and a model whose modules do nothing."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from bench import WIDTH, Bench
from in_process import Chain, one_thread
from invivo.envoy.envoy import RootEnvoy
from invivo.interleaver.hub import Hub
from invivo.interleaver.lagging_hub import LaggingHub
from invivo.interleaver.mediator import Mediator
from invivo.interleaver.steady_mediator import SteadyMediator
from invivo.interleaver.windows import shares
from invivo.tracer.block import Payload
from invivo.tracer.trace import Trace
from measure import Curve, Figure, less
from payloads import Sink, worker

PORTS = 100
COUNTS = (1, 2, 4, 8, 16)
LENGTHS = (1, 10, 100, 300)
STEPS = 4
"""Steps that are timed together, after one that is not."""
KEPT = 32
"""The same where blocks have 16 steps in one turn, after those in which it is seen that they may."""
UNKEPT = 4


class Worker:
    """A chain of modules with a hub, and payloads of blocks that do something at each of the first `ports` of them.

    Args:
        ports: how many modules there are.
        steady: with the hub of an engine that may run a forward again, where blocks which do the same in each step and
            only read have several steps in one turn.
    """

    def __init__(self, ports: int, *, steady: bool = False) -> None:
        self.module = Chain(ports).eval()
        self.hub = LaggingHub(self.module) if steady else Hub(self.module)
        self.root: Any = RootEnvoy(self.hub.tree, "")
        self._launch = worker(self.hub.tree, self.root, SteadyMediator if steady else Mediator)
        sink, model = Sink(), self.root
        with Trace(model, sink, None, 0) as tracer:
            for _ in tracer.iter[:]:
                for unit in model.units:
                    unit.address
        (self.walk,) = sink.payloads
        with Trace(model, sink, None, 0) as tracer:
            for _ in tracer.iter[:]:
                for unit in model.units:
                    unit.output
        (self.read,) = sink.payloads
        with Trace(model, sink, None, 0) as tracer:
            for _ in tracer.iter[:]:
                for unit in model.units:
                    unit.output.zero_()
        (self.edit,) = sink.payloads

    def cpu(self, payload: Payload | None, count: int) -> float:
        """Seconds of this thread for a step of the model, with the blocks of `count` requests on it."""
        names = [str(number) for number in range(count)]
        rows, starts = torch.ones(count, WIDTH), range(count + 1)
        lagging = self.hub if isinstance(self.hub, LaggingHub) else None
        untimed, timed = (1, STEPS) if lagging is None else (UNKEPT, KEPT)
        with torch.inference_mode():
            for name in names if payload is not None else ():
                launched = self._launch(payload)  # type: ignore[arg-type]  # in the engine's mode, as in an engine
                self.hub.add(name, launched.mediator, None)
            for step in range(untimed + timed):
                if step == untimed:
                    began = time.thread_time()
                    assert lagging is None or lagging.armed or payload is not self.read
                if lagging is None or not (lagging.armed and lagging.lags(follows=True)):
                    self.hub.begin(shares(names, starts, [step] * count, [1] * count, count))
                self.hub.run(partial(self.module, rows))
                self.hub.forward_done()
                self.hub.finish_step()
            if lagging is not None:
                lagging.catch_up()
            took = (time.thread_time() - began) / timed
            for name in names if payload is not None else ():
                mediator = self.hub.mediators[name]
                assert mediator.failure is None and not mediator.done
                self.hub.end(name, None)
                self.hub.remove(name)
        self.hub.check_integrity()
        return took


def worker_ports(bench: Bench) -> list[Figure | Curve]:
    """CPU of a port with 1 to 16 blocks at it, and of a step with 1 to 300 ports."""
    with one_thread():
        chain = Worker(PORTS)
        functions = {
            f"{kind}, {count}": partial(chain.cpu, payload, count)
            for count in COUNTS
            for kind, payload in (("none", None), ("walk", chain.walk), ("read", chain.read), ("edit", chain.edit))
        }
        steady = Worker(PORTS, steady=True)
        functions |= {
            f"{kind}, {count}": partial(steady.cpu, payload, count)
            for count in (1, COUNTS[-1])
            for kind, payload in (("steady walk", steady.walk), ("steady", steady.read))
        }
        times = bench.alternate(functions, 12)
        chains = {length: Worker(length) for length in LENGTHS}
        steps = bench.alternate(
            {f"{length} ports": partial(one.cpu, one.read, 1) for length, one in chains.items()}, 12
        )

    def each(kind: str, count: int, base: str) -> list[float]:
        extra = less(times[f"{kind}, {count}"], times[f"{base}, {count}"])
        return [value / PORTS * 1e6 for value in extra]

    def further(kind: str, base: str) -> list[float]:
        more = less(each(kind, COUNTS[-1], base), each(kind, 1, base))
        return [value / (COUNTS[-1] - 1) for value in more]

    how = (
        f"CPU time of the thread for a hub's steps, with blocks made from payloads that read the output of each of "
        f"{PORTS} modules that do nothing, {{}}, less the same with blocks that only walk over the modules; one row of "
        f"{WIDTH} each"
    )
    everything = (
        "the same less steps without any block: with the block's own Python and what beginning and ending a step costs"
    )
    kept = (
        f"the same where the blocks have 16 steps in one turn, as they do in an engine where all of them only read and "
        f"do the same in each step, {{}}; {KEPT} steps, all turns included"
    )
    copies = "the hook, writing the rows to where they are kept, a view for each step, and the block's own Python"
    limits = "a hook and a call of the module through torch, one copy, two greenlet switches, and Python around them"
    more = "two greenlet switches, a view of the copy, and the block's own Python"
    at, others = "blocks at a port", "16 blocks less one, over 15"
    return [
        Figure("port, one block", "µs", each("read", 1, "walk"), 15.0, how.format("one block"), limits),
        Figure("port, each further block", "µs", further("read", "walk"), 4.0, how.format(others), more),
        Figure(
            "port, one steady block", "µs", each("steady", 1, "steady walk"), 15.0, kept.format("one block"), copies
        ),
        Figure(
            "port, each further steady block",
            "µs",
            further("steady", "steady walk"),
            4.0,
            kept.format(others),
            "a view for each step, and the block's own Python",
        ),
        Figure("port, one block, everything", "µs", each("read", 1, "none"), None, everything, limits),
        Figure(
            "port edited, one block", "µs", each("edit", 1, "walk"), None, "each zeroed in place", "writing it back"
        ),
        Curve("read", "µs", at, {n: each("read", n, "walk") for n in COUNTS}, how.format("1 to 16 blocks")),
        Curve("edited", "µs", at, {n: each("edit", n, "walk") for n in COUNTS}, "zeroed in place, otherwise the same"),
        Curve(
            "step",
            "µs",
            "ports read in a step",
            {n: [value * 1e6 for value in steps[f"{n} ports"]] for n in LENGTHS},
            "CPU time of a whole step of such a model, one block that reads everything",
        ),
    ]
