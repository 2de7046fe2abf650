"""What crosses between the workers of one model, in bytes: counted where invivo hands it to a collective or a message.

Two requests share every step: one of `LENGTH` tokens that does what its row says, and one of `OTHERS` tokens, traced
too, that looks at nothing. Rows of the second one never cross.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from bench import SETTINGS, WIDTH, Bench
from measure import Figure
from smollm2 import even_smollm2_path

LENGTH, OTHERS = 64, 192
FLOAT = 4

ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
"""vLLM binds each worker to a NUMA node of its own, and has none start where there are fewer of these."""


class Counting:
    """Mixed into vLLM's workers, see ``worker_extension_cls``."""

    model_runner: Any
    _counts: Counter[str] | None = None

    def counted(self) -> dict[str, int]:
        """Bytes that this worker has sent since the last call; the first one begins to count."""
        if self._counts is None:
            self._counts = Counter()
            _count_collectives(self._counts)
            _count_messages(self._counts, self.model_runner.serving)
        found = dict(self._counts)
        self._counts.clear()
        return found


def _count_collectives(counts: Counter[str]) -> None:
    import invivo.interleaver.ranks as ranks

    def counting(what: str, call: Callable[..., Any], size: Callable[[Any, Any], int]) -> Callable[..., Any]:
        def counted(gathered: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
            if str(sys._getframe(1).f_globals["__name__"]).startswith("invivo."):
                counts[what] += size(gathered, given)
            return call(gathered, given, *args, **kwargs)

        return counted

    distributed: Any = torch.distributed
    vars(ranks)["gather_flat"] = counting(
        "rows", vars(ranks)["gather_flat"], lambda gathered, given: gathered.nbytes - given.nbytes
    )
    distributed.all_gather = counting(
        "agreements", distributed.all_gather, lambda gathered, given: given.nbytes * (len(gathered) - 1)
    )
    distributed.all_gather_object = counting(
        "agreements",
        distributed.all_gather_object,
        lambda gathered, given: len(pickle.dumps(given)) * (len(gathered) - 1),
    )


def _count_messages(counts: Counter[str], serving: Any) -> None:
    from vllm.distributed import get_pp_group

    from invivo.vllm_backend.settings import TOLD

    group: Any = get_pp_group()
    send, hear_back = group.isend_tensor_dict, serving.hear_back

    def sending(tensors: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        for name, tensor in tensors.items():
            counts["told" if name == TOLD else "hidden states"] += tensor.nbytes
        return send(tensors, *args, **kwargs)

    def hearing_back(told: dict[str, bytes]) -> None:
        if not group.is_last_rank:
            counts["told back"] += sum(map(len, told.values()))
        hear_back(told)

    group.isend_tensor_dict, serving.hear_back = sending, hearing_back


class Scenario(NamedTuple):
    """One row.

    Attributes:
        name: what the first request does; None: neither is traced.
        invoke: does it.
        what: which bytes are shown.
        most: how many there may be.
        tokens: that are generated.
    """

    name: str
    invoke: Callable[[Any, Any, list[int]], None] | None
    what: str
    most: int | None
    tokens: int = 1


def _logits(model: Any, tracer: Any, prompt: list[int]) -> None:
    with tracer.invoke(prompt):
        model.logits


def _layer(model: Any, tracer: Any, prompt: list[int]) -> None:
    with tracer.invoke(prompt):
        model.model.layers[3].output


def _edited_layer(model: Any, tracer: Any, prompt: list[int]) -> None:
    with tracer.invoke(prompt):
        model.model.layers[3].output[0][:] += 1


def _gated(model: Any, tracer: Any, prompt: list[int]) -> None:
    with tracer.invoke(prompt):
        model.model.layers[3].mlp.act_fn.output


def _edited(model: Any, tracer: Any, prompt: list[int]) -> None:
    with tracer.invoke(prompt):
        model.model.layers[3].mlp.act_fn.output[:] *= 2


def _queries(model: Any, tracer: Any, prompt: list[int]) -> None:
    with tracer.invoke(prompt):
        model.model.layers[3].self_attn.qkv_proj.output


def _early(model: Any, tracer: Any, prompt: list[int]) -> None:
    with tracer.invoke(prompt):
        model.model.layers[3].mlp.output


def _late(model: Any, tracer: Any, prompt: list[int]) -> None:
    with tracer.invoke(prompt):
        model.model.layers[25].mlp.output


def _late_in_each_step(model: Any, tracer: Any, prompt: list[int]) -> None:
    with tracer.invoke(prompt):
        for _ in tracer.iter[:]:
            model.model.layers[25].mlp.output


TENSOR = (
    Scenario("untraced requests", None, "all", 0),
    Scenario("logits", _logits, "rows", 0),
    Scenario("output of a layer", _layer, "rows", 0),
    Scenario("output of a layer, edited", _edited_layer, "rows", 0),
    Scenario("activation of an MLP", _gated, "rows", LENGTH * 1536 * FLOAT),
    Scenario("activation of an MLP, edited", _edited, "rows", LENGTH * 1536 * FLOAT),
    Scenario("queries, keys and values", _queries, "rows", LENGTH * (12 + 4 + 4) * 64 * FLOAT),
    Scenario("agreements of a step with one port", _gated, "agreements", None),
)
HEAD = 4096
"""Bytes that a message of a stage may have beside rows."""

PIPELINE = (
    Scenario("untraced requests", None, "all", 0),
    Scenario("hidden states, which vLLM sends", None, "hidden states", None),
    Scenario("logits", _logits, "told", HEAD),
    Scenario("MLP of the first stage", _early, "told", LENGTH * WIDTH * FLOAT + HEAD),
    Scenario("MLP of the last stage", _late, "told", HEAD),
    Scenario("MLP of the last stage, back", _late, "told back", 0),
    Scenario(
        "MLP of the last stage in each of two steps, back",
        _late_in_each_step,
        "told back",
        LENGTH * WIDTH * FLOAT + HEAD,
        tokens=2,
    ),
)


def ranks(bench: Bench) -> list[Figure]:
    """Bytes by topology and by what a block does."""
    figures = []
    for title, workers, scenarios in (
        ("two ranks", {"tensor_parallel_size": 2}, TENSOR),
        ("two stages", {"pipeline_parallel_size": 2}, PIPELINE),
    ):
        bench.watch(f"starting the engine of {title}", 0, 1)
        with _engine(**workers) as model:
            for number, scenario in enumerate(scenarios):
                bench.watch(scenario.name, number, len(scenarios))
                _bytes(bench, model, scenario)  # a port that was never read is compared once
                figures.append(_figure(title, scenario, _bytes(bench, model, scenario)))
    return figures


@contextmanager
def _engine(**workers: Any) -> Iterator[Any]:
    from invivo import VLLM

    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    extension = f"{Counting.__module__}.{Counting.__qualname__}"
    settings = {**SETTINGS, "enforce_eager": True, "worker_extension_cls": extension}
    try:
        with VLLM(str(even_smollm2_path()), **settings, **workers) as model:
            model.dispatch()
            yield model
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _bytes(bench: Bench, model: Any, scenario: Scenario) -> int:
    (prompt,), (other,) = bench.prompts(1, LENGTH), bench.prompts(1, OTHERS)
    sampling: dict[str, Any] = {"max_tokens": scenario.tokens, "temperature": 0, "ignore_eos": True}
    model.engine.collective_rpc("counted")
    if scenario.invoke is None:
        model.generate([prompt, other], use_tqdm=False, **sampling)
    else:
        with model.trace(**sampling) as tracer:
            scenario.invoke(model, tracer, prompt)
            with tracer.invoke(other):
                pass
    counts: Counter[str] = Counter()
    for worker in model.engine.collective_rpc("counted"):
        counts.update(worker)
    hidden = counts["hidden states"]
    return counts.total() - hidden if scenario.what == "all" else counts[scenario.what]


def _figure(title: str, scenario: Scenario, found: int) -> Figure:
    return Figure(
        f"{title}: {scenario.name}",
        "bytes",
        [float(found)],
        scenario.most,
        f"bytes that all workers of {title} give to collectives and messages, while a request of {LENGTH} tokens does "
        f"this beside one of {OTHERS} that does nothing; SmolLM2 with twelve heads, float32",
    )
