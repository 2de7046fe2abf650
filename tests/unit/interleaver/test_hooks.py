"""Hooks of one step: which fire, in which order, and that none stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from invivo.envoy.address import INPUT, OUTPUT, Port, port_at
from invivo.interleaver.hooks import Hooks


class Layer(torch.nn.Module):
    def __init__(self, shared: torch.nn.Module) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(self.inner(x))  # type: ignore[no-any-return]


class Silent(torch.nn.Module):
    """A module whose call is not torch's, as vLLM's compiled models."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Linear(2, 2)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding(x)  # type: ignore[no-any-return]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = torch.nn.ReLU()
        self.inner = Silent()
        self.layers = torch.nn.ModuleList([Layer(shared) for _ in range(3)])
        self.head = self.inner.embedding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for layer in self.layers:
            x = layer(x)
        return x


def watched(*ports: Port) -> tuple[Model, Hooks, list[Port]]:
    model, fired = Model(), []  # type: ignore[var-annotated]
    hooks = Hooks(model, lambda port, value: fired.append(port))
    for port in ports:
        hooks.watch(port)
    return model, hooks, fired


def clean(model: torch.nn.Module) -> bool:
    return not any(
        module._forward_hooks or module._forward_pre_hooks or module._forward_pre_hooks_with_kwargs
        for module in model.modules()
    )


def test_a_port_fires_once_a_call_and_leaves_no_hook() -> None:
    model, hooks, fired = watched(port_at("layers.1.inner", OUTPUT))
    model(torch.ones(1, 2))
    assert fired.count(port_at("layers.1.inner", OUTPUT)) == 1
    assert port_at("layers.0.inner", OUTPUT) not in fired
    assert len(hooks) > 0
    hooks.clear()
    assert len(hooks) == 0 and clean(model)
    fired.clear()
    model(torch.ones(1, 2))
    assert fired == []


def test_a_module_in_several_places_is_told_by_its_caller() -> None:
    """The shared ReLU is three addresses, each of which fires in its own layer."""
    model, _, fired = watched(*(port_at(f"layers.{index}.shared", OUTPUT) for index in range(3)))
    model(torch.ones(1, 2))
    outputs = [port for port in fired if port.address.endswith("shared") and port.kind == OUTPUT]
    assert outputs == [port_at(f"layers.{index}.shared", OUTPUT) for index in range(3)]


def test_a_tied_module_under_a_silent_parent_fires_under_its_first_address() -> None:
    model, _, fired = watched(port_at("inner.embedding", OUTPUT))
    model(torch.ones(1, 2))
    assert port_at("inner.embedding", OUTPUT) in fired


def test_a_port_asked_for_inside_of_its_module_still_fires() -> None:
    """Inside layer 1, its own output is asked for; torch had decided about its hooks when it was called."""
    model, fired = Model(), []
    hooks: Any = None

    def fire(port: Port, value: object) -> None:
        fired.append(port)
        if port == port_at("layers.1.inner", OUTPUT):
            hooks.watch(port_at("layers.1", OUTPUT))

    hooks = Hooks(model, fire)
    hooks.watch(port_at("layers.1.inner", OUTPUT))
    model(torch.ones(1, 2))
    assert port_at("layers.1", OUTPUT) in fired


def test_all_ports_in_execution_order() -> None:
    model, fired = Model(), []  # type: ignore[var-annotated]
    hooks = Hooks(model, lambda port, value: fired.append(port))
    hooks.watch_all()
    model(torch.ones(1, 2))
    first = [
        port_at("", INPUT),
        port_at("inner.embedding", INPUT),
        port_at("inner.embedding", OUTPUT),
        port_at("layers.0", INPUT),
        port_at("layers.0.inner", INPUT),
        port_at("layers.0.inner", OUTPUT),
        port_at("layers.0.shared", INPUT),
        port_at("layers.0.shared", OUTPUT),
        port_at("layers.0", OUTPUT),
    ]
    assert fired[: len(first)] == first
    assert fired[-1] == port_at("", OUTPUT)
    hooks.clear()
    assert clean(model)


def test_a_replacement_is_what_the_model_goes_on_with() -> None:
    model = Model()
    hooks = Hooks(model, lambda port, value: torch.zeros(1, 2) if port == port_at("layers.2", OUTPUT) else None)
    hooks.watch(port_at("layers.2", OUTPUT))
    assert torch.equal(model(torch.ones(1, 2)), torch.zeros(1, 2))


@pytest.mark.parametrize("asked", ["1", "2", "3"])
def test_a_sequential_calls_a_module_in_the_order_of_its_places(asked: str) -> None:
    """Whichever is asked for first, also from inside: the calls before are counted."""
    act = torch.nn.Sequential(torch.nn.Tanh())
    model, fired = torch.nn.Sequential(torch.nn.Linear(2, 2), act, torch.nn.Linear(2, 2), act), []
    hooks: Any = None

    def fire(port: Port, value: object) -> None:
        fired.append(port)
        if port is port_at(asked, OUTPUT):
            hooks.watch(port_at("3.0", OUTPUT))

    hooks = Hooks(model, fire)
    hooks.watch(port_at(asked, OUTPUT))
    for _ in range(2):
        fired.clear()
        model(torch.ones(1, 2))
        places = [port.address for port in fired if port.kind == OUTPUT and port.address in ("1", "3")]
        assert places == ["1", "3"]
    assert port_at("3.0", OUTPUT) in fired
    hooks.clear()
    assert clean(model)


def test_a_module_that_another_has_under_two_names_fires_as_the_first() -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = self.b = torch.nn.Sequential(torch.nn.Linear(2, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))  # type: ignore[no-any-return]

    model, fired = Twice(), []  # type: ignore[var-annotated]
    hooks = Hooks(model, lambda port, value: fired.append(port))
    hooks.watch(port_at("b.0", OUTPUT))
    model(torch.ones(1, 2))
    assert fired.count(port_at("a.0", OUTPUT)) == 2 and port_at("b.0", OUTPUT) not in fired
    assert hooks.fires_as(port_at("b.0", OUTPUT)) is port_at("a.0", OUTPUT)
    assert hooks.fires_as(port_at("a.0", OUTPUT)) is port_at("a.0", OUTPUT)
    assert hooks.fires_as(port_at("b", INPUT)) is port_at("a", INPUT)
