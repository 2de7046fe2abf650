"""Which blocks surely meet no module: those that name the model for its logits and samples alone."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch

from invivo import save
from invivo.envoy.envoy import RootEnvoy
from invivo.envoy.tree import ModuleTree
from invivo.tracer.meets import no_module
from support.toy_trace import ToyTrace

LIST = [1, 2.0, ("three", torch.zeros(4))]


@pytest.fixture(scope="module")
def model() -> Any:
    return RootEnvoy(ModuleTree.of(torch.nn.ModuleDict({"mlp": torch.nn.Linear(2, 2)})), "")


def meets_none(trace: ToyTrace) -> bool:
    return no_module(trace.site, trace.captured)


class Stopped(Exception):
    """Raised in bodies, which run here after all: their Envoys have no session."""


def captured(trace: ToyTrace, body: Any) -> ToyTrace:
    with contextlib.suppress(Exception):  # of Envoys outside of a block
        body(trace)
    return trace


def test_logits_and_samples(model: Any) -> None:
    vector, seen = torch.ones(3), {"a": [0]}

    def body(trace: ToyTrace) -> None:
        with trace:
            kept = save([])
            for _ in trace.iter:
                kept.append(torch.softmax(model.logits, -1) @ vector * math.pi + seen["a"][0] + LIST[0])
                model.logits[:, 3] = -1
                model.samples = 5

    assert meets_none(captured(ToyTrace(), body))


def test_a_module(model: Any) -> None:
    def body(trace: ToyTrace) -> None:
        with trace:
            model.logits, model.mlp.output

    assert not meets_none(captured(ToyTrace(), body))


def test_the_model_under_another_name(model: Any) -> None:
    def body(trace: ToyTrace) -> None:
        with trace:
            other = model
            other.logits

    assert not meets_none(captured(ToyTrace(), body))


def test_the_model_handed_to_a_function(model: Any) -> None:
    def body(trace: ToyTrace) -> None:
        with trace:
            getattr(model, "logits")  # noqa: B009

    assert not meets_none(captured(ToyTrace(), body))


def test_variables_that_are_not_named() -> None:
    def body(trace: ToyTrace) -> None:
        with trace:
            eval("1")

    assert not meets_none(captured(ToyTrace(), body))


def helper() -> int:
    return 1


@pytest.mark.parametrize("value", [helper, Stopped, Stopped(), lambda: 0, [Stopped()], {"a": (helper,)}, [0] * 5000])
def test_values_that_may_lead_to_modules(value: Any, model: Any) -> None:
    def body(trace: ToyTrace) -> None:
        with trace:
            str(value), model.logits

    assert not meets_none(captured(ToyTrace(), body))


def test_a_module_or_the_model_in_a_variable(model: Any) -> None:
    for value in (model.mlp, [model], {"m": model.mlp}):

        def body(trace: ToyTrace, value: Any = value) -> None:
            with trace:
                str(value)

        assert not meets_none(captured(ToyTrace(), body))


def test_a_container_in_itself() -> None:
    loop: list[Any] = [1]
    loop.append(loop)

    def body(trace: ToyTrace) -> None:
        with trace:
            str(loop[0])

    assert meets_none(captured(ToyTrace(), body))
