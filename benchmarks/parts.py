"""The parts of the benchmarks, by the names that `--only` takes; what they need is imported when they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from bench import Bench
from measure import Curve, Figure


class Part(NamedTuple):
    """One of them: what it is about, and what measures it."""

    title: str
    measure: Callable[[Bench], Sequence[Figure | Curve]]


def _import(bench: Bench) -> Sequence[Figure | Curve]:
    from in_process import import_time

    return import_time(bench)


def _payloads(bench: Bench) -> Sequence[Figure | Curve]:
    from payloads import payloads

    return payloads(bench)


def _local(bench: Bench) -> Sequence[Figure | Curve]:
    from in_process import ports

    return ports(bench)


def _worker(bench: Bench) -> Sequence[Figure | Curve]:
    from worker import worker_ports

    return worker_ports(bench)


def _tree(bench: Bench) -> Sequence[Figure | Curve]:
    from single import tree

    return tree(bench)


def _single(bench: Bench) -> Sequence[Figure | Curve]:
    from single import single

    return single(bench)


def _traffic(bench: Bench) -> Sequence[Figure | Curve]:
    from traffic import traffic

    return traffic(bench)


def _decode(bench: Bench) -> Sequence[Figure | Curve]:
    from decode import decode

    return decode(bench)


def _growth(bench: Bench) -> Sequence[Figure | Curve]:
    from decode import growth

    return growth(bench)


def _prefill(bench: Bench) -> Sequence[Figure | Curve]:
    from prefill import prefill

    return prefill(bench)


def _bulk(bench: Bench) -> Sequence[Figure | Curve]:
    from bulk import bulk

    return bulk(bench)


def _harvest(bench: Bench) -> Sequence[Figure | Curve]:
    from harvesting import harvesting

    return harvesting(bench)


def _ranks(bench: Bench) -> Sequence[Figure | Curve]:
    from ranks import ranks

    return ranks(bench)


PARTS = {
    "import": Part("importing", _import),
    "payloads": Part("capture and serialization", _payloads),
    "local": Part("ports of a module in this process", _local),
    "worker": Part("ports in the worker", _worker),
    "tree": Part("the module tree", _tree),
    "single": Part("one warm trace of one token", _single),
    "traffic": Part("who does not trace, and who looks at logits only", _traffic),
    "decode": Part("traced decoding", _decode),
    "prefill": Part("prefill capture", _prefill),
    "harvest": Part("harvesting activations", _harvest),
    "growth": Part("growth", _growth),
    "bulk": Part("large saves", _bulk),
    "ranks": Part("what crosses between workers", _ranks),
}
