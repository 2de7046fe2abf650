"""Compiling layers by themselves: which ones, for which calls, and who shares what was compiled."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from invivo.vllm_backend.compat import TorchCompileWithNoGuardsWrapper
from invivo.vllm_backend.compiled_kind import ROWS, CompiledKind
from invivo.vllm_backend.layers import Layers, layers_of

WIDTH = 6


def twice(values: torch.Tensor) -> torch.Tensor:
    return values * 2


def halved(values: torch.Tensor) -> torch.Tensor:
    return values / 2


class Layer(torch.nn.Module):
    """As a decoder layer of vLLM: `calls` counts how often its Python runs."""

    def __init__(self, scale: float = 1.5, act: Any = twice) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.scale, self.act = scale, act

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        residual = hidden if residual is None else hidden + residual
        return self.act(self.linear(residual)) * self.scale + positions[:, None], residual


class Unfit(Layer):
    """Its forward depends on values, which no compiler can know."""

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        if hidden.sum() > 0:
            hidden = hidden + 1
        return super().forward(positions, hidden, residual)


class More(Layer):
    """It does something else for more rows than it is traced with."""

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        hidden = hidden * 2 if hidden.shape[0] > ROWS + 7 else hidden * 3
        return Layer.forward(self, positions, hidden, residual)


class Odd(Layer):
    """It does something else for an even number of rows."""

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        hidden = hidden * 2 if hidden.shape[0] % 2 else hidden * 3
        return Layer.forward(self, positions, hidden, residual)


class Model(TorchCompileWithNoGuardsWrapper, torch.nn.Module):  # type: ignore[misc]
    """What vLLM compiles, as far as `Layers` looks at it."""

    def __init__(self, *layers: Layer) -> None:
        torch.nn.Module.__init__(self)
        self.layers = torch.nn.ModuleList(layers)
        self.do_not_compile = False

    def forward(self, rows: int, given: torch.Tensor | None = None) -> torch.Tensor:
        assert given is not None or self.do_not_compile, "the model itself is not compiled while its layers are"
        hidden = torch.linspace(-1, 1, rows * WIDTH).reshape(rows, WIDTH) if given is None else given
        positions, residual = torch.arange(rows), None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        assert residual is not None
        return cast(torch.Tensor, hidden + residual)


def config(backend: str = "inductor") -> Any:
    return SimpleNamespace(compilation_config=SimpleNamespace(inductor_compile_config={}, backend=backend))


@pytest.fixture(autouse=True)
def _as_the_engine() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def run(model: Model, layers: Layers, given: torch.Tensor, met: Any) -> tuple[torch.Tensor, list[int]]:
    """What the model gives, and the layers whose modules were called."""
    called: list[int] = []
    hooks = [
        cast(Any, layer).linear.register_forward_hook(lambda *_, number=number: called.append(number))
        for number, layer in enumerate(model.layers)
    ]
    with layers.on(met):
        found = model.forward(len(given), given)
    for hook in hooks:
        hook.remove()
    assert not any("forward" in vars(layer) for layer in model.layers)
    return found, called


def compiled(*layers: Layer) -> tuple[Model, Layers]:
    model = Model(*layers)
    found = Layers(model, config())
    found.compile(lambda: model.forward(ROWS))
    return model, found


def test_layers_without_anybody_inside_run_compiled_for_any_number_of_rows() -> None:
    model, layers = compiled(*(Layer() for _ in range(4)))
    assert len(layers) == 4
    assert len(layers._kinds) == 2  # the first one has no residual stream to add
    for rows in (1, 2, ROWS, 40):
        given = torch.randn(rows, WIDTH)
        found, called = run(model, layers, given, lambda address: address == "layers.2")
        assert called == [2]
        torch.testing.assert_close(found, model.forward(rows, given))


def test_weights_that_were_replaced_are_felt() -> None:
    model, layers = compiled(Layer(), Layer(), Layer())
    cast(Any, model.layers[2]).linear.weight = torch.nn.Parameter(torch.ones(WIDTH, WIDTH), requires_grad=False)
    given = torch.randn(3, WIDTH)
    found, called = run(model, layers, given, lambda address: False)
    assert not called
    torch.testing.assert_close(found, model.forward(3, given))


@pytest.mark.parametrize("other", [{"scale": 2.5}, {"act": halved}], ids=["another number", "another function"])
def test_layers_that_differ_in_more_than_their_tensors_share_nothing(other: dict[str, Any]) -> None:
    model, layers = compiled(Layer(), Layer(), Layer(**other), Layer())
    assert len(layers._kinds) == 3
    given = torch.randn(5, WIDTH)
    found, called = run(model, layers, given, lambda address: False)
    assert not called
    torch.testing.assert_close(found, model.forward(5, given))


@pytest.mark.parametrize(
    "given",
    [
        torch.randn(WIDTH, 4).T,
        torch.randn(4, WIDTH, dtype=torch.float64),
        torch.nn.Parameter(torch.randn(4, WIDTH)),
    ],
    ids=["another layout", "another type", "a subclass"],
)
def test_a_call_that_is_not_like_the_traced_one_runs_module_by_module(given: torch.Tensor) -> None:
    model, layers = compiled(Layer(), Layer())
    if given.dtype == torch.float64:
        model.double()
    found, called = run(model, layers, given, lambda address: False)
    assert called[0] == 0
    torch.testing.assert_close(found, model.forward(4, given))


def test_arguments_are_compared_by_number_name_and_size() -> None:
    layer = Layer()
    positions, hidden = torch.arange(ROWS), torch.randn(ROWS, WIDTH)
    kind = CompiledKind(layer, (positions, hidden), {"residual": None}, {})
    fits, now = kind.fits, (torch.arange(4), torch.randn(4, WIDTH))
    assert fits(now, {"residual": None})
    assert not fits(now, {"residual": now[1]})
    assert not fits((*now, None), {})
    assert not fits(now, {})
    assert not fits((now[0], None), {"residual": None})
    assert not fits((None, now[1]), {"residual": None})
    assert not fits((now[0], torch.randn(5, WIDTH)), {"residual": None})
    assert not fits((now[0], torch.randn(4, WIDTH + 1)), {"residual": None})
    assert not fits((torch.tensor(1), now[1]), {"residual": None})
    assert kind.holds_for(Layer(), (positions, hidden), {"residual": None})


@pytest.mark.parametrize("residual", [3, torch.randn(WIDTH, ROWS).T], ids=["a number", "another layout"])
def test_what_a_layer_is_given_must_be_contiguous_tensors(residual: Any) -> None:
    with pytest.raises(ValueError, match="not a contiguous tensor"):
        CompiledKind(Layer(), (torch.arange(ROWS), torch.randn(ROWS, WIDTH), residual), {}, {})


def test_one_argument_must_tell_the_number_of_rows() -> None:
    with pytest.raises(ValueError, match="no tensor that has a row for each token"):
        CompiledKind(Layer(), (torch.arange(3), torch.randn(3, WIDTH), None), {}, {})


def test_layers_that_the_compiler_does_not_take_stay_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "invivo.vllm_backend.layers"):
        model, layers = compiled(Layer(), Unfit(), Unfit(), Layer())
    assert len(layers) == 2
    first, second = caplog.records
    assert "compiled 2 layers" in first.message
    assert "Unfit runs module by module" in second.message and second.levelno == logging.WARNING
    given = torch.randn(5, WIDTH)
    found, called = run(model, layers, given, lambda address: False)
    assert called == [1, 2]
    torch.testing.assert_close(found, model.forward(5, given))


@pytest.mark.parametrize("kind", [More, Odd])
def test_layers_that_ask_for_the_number_of_rows_stay_as_they_are(kind: type[Layer]) -> None:
    model, layers = compiled(kind(), Layer(), kind())
    for rows in (2, ROWS, 40):
        given = torch.randn(rows, WIDTH)
        found, called = run(model, layers, given, lambda address: False)
        assert called == [0, 2]
        torch.testing.assert_close(found, model.forward(rows, given))


def test_a_failing_forward_leaves_the_model_as_it_was() -> None:
    model = Model(Layer())
    layers = Layers(model, config())
    with pytest.raises(TypeError):
        layers.compile(lambda: model.forward(cast(int, "rows")))
    assert not model.do_not_compile and not any("forward" in vars(layer) for layer in model.layers)


def test_an_engine_whose_compiler_is_another_one_compiles_no_layers() -> None:
    model = Model(Layer())
    layers = Layers(model, config("eager"))
    layers.compile(lambda: pytest.fail("nothing is run"))
    assert len(layers) == 0


def test_only_outermost_layers_in_one_place_of_what_is_compiled_are_taken() -> None:
    inner, shared, replaced = Layer(), Layer(), Layer()
    inner.add_module("experts", torch.nn.ModuleList([Layer()]))
    vars(replaced)["forward"] = replaced.forward
    model = Model(inner, shared, shared, replaced, Layer())
    whole = torch.nn.ModuleDict({"model": model, "other": torch.nn.ModuleList([Layer()])})
    assert list(layers_of(whole, [model])) == ["model.layers.0", "model.layers.4"]
