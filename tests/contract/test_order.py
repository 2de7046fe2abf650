"""Rule 6: ports come in execution order; one that has passed, or never comes, is an error that says so."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from invivo import Local, PortNotReachedError, PortPassedError
from support.contract import PROMPT, assert_raised_at, assert_serves, stream


class Branching(torch.nn.Module):
    """Calls `twice` two times, and `never` not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.twice = torch.nn.Linear(4, 4)
        self.never = torch.nn.Linear(4, 4)
        self.last = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.twice(self.twice(self.first(x))))
        return out


def toy() -> tuple[Any, torch.Tensor]:
    torch.manual_seed(3)
    return Local(Branching()), torch.randn(3, 4)


def test_a_layer_after_a_later_one(model: Any) -> None:
    with pytest.raises(PortPassedError) as caught:
        with model.trace(PROMPT, max_tokens=3, temperature=0):
            late = stream(model.model.layers[5])
            early = stream(model.model.layers[2])
    message = str(caught.value)
    assert "model.layers.2.output has passed" in message
    assert "the model is at model.layers.5.output" in message
    assert "Read ports in execution order" in message
    assert_serves(model)


def test_the_error_is_at_the_line_of_the_late_read(model: Any) -> None:
    with pytest.raises(PortPassedError) as caught:
        with model.trace(PROMPT, max_tokens=3, temperature=0):
            model.logits
            model.model.norm.output  # <late read>
    assert_raised_at(caught.value, __file__, "late read")
    assert "after all modules" in str(caught.value)


@pytest.mark.parametrize("kind", ["input after output", "inner after outer", "logits after samples"])
def test_what_is_in_order_within_a_step(model: Any, kind: str) -> None:
    with pytest.raises(PortPassedError, match="has passed"):
        with model.trace(PROMPT, max_tokens=1, temperature=0):
            layer = model.model.layers[4]
            if kind == "input after output":
                layer.mlp.output
                layer.mlp.input
            elif kind == "inner after outer":
                layer.output
                layer.mlp.output
            else:
                model.samples
                model.logits
    assert_serves(model)


def test_the_first_trace_of_a_model_knows_what_has_passed_too() -> None:
    model, x = toy()
    with pytest.raises(PortPassedError, match=r"first\.output has passed: the model is at last\.output"):
        with model.trace(x):
            model.last.output
            model.first.output
    model.check_integrity()


def test_places_in_the_order_are_named() -> None:
    model, x = toy()
    with model.trace(x):
        pass
    with pytest.raises(PortPassedError) as caught:
        with model.trace(x):
            model.last.output
            model.first.output
    # the model's input, then input and output of first, of twice (two times), of last
    assert "last.output (place 8 in execution order), and first.output is at place 2" in str(caught.value)


class Either(torch.nn.Module):
    """Calls its layers in an order that depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = [self.one, self.two] if x.sum() > 0 else [self.two, self.one]
        for layer in layers:
            x = layer(x)
        return x


def test_an_order_that_depends_on_the_data_is_learned_anew() -> None:
    """The second order was refused for good."""
    model: Any = Local(Either())
    with model.trace(torch.ones(1, 4)):
        model.one.output
    for last in (True, False):
        with pytest.raises(PortPassedError) if last else nullcontext() as caught:
            with model.trace(-torch.ones(1, 4)):
                two = model.two.output.save()
                one = model.one.output.save()
        if caught is not None:
            assert "run this trace again: it is learned anew" in caught.value.__notes__[0]
    assert torch.equal(one, model._module.one(two))
    model.check_integrity()


def test_a_port_left_behind_cannot_be_read_again(model: Any) -> None:
    with pytest.raises(PortPassedError):
        with model.trace(PROMPT, max_tokens=1, temperature=0):
            model.model.layers[4].mlp.output
            model.model.layers[5].mlp.output
            model.model.layers[4].mlp.output
    assert_serves(model)


def test_a_module_that_runs_twice_can_be_read_twice() -> None:
    model, x = toy()
    module = model._module
    with model.trace(x):
        pass
    with model.trace(x):
        one = model.twice.output.save()
        between = model.twice.input.save()
        two = model.twice.output.save()
    assert torch.equal(one, module.twice(module.first(x)))
    assert torch.equal(between, one)
    assert torch.equal(two, module.twice(one))
    with pytest.raises(PortPassedError):
        with model.trace(x):
            model.twice.output
            model.twice.input
            model.twice.output
            model.twice.input
    model.check_integrity()


def test_a_module_that_is_not_called() -> None:
    model, x = toy()
    for _ in range(2):
        with pytest.raises(PortNotReachedError) as caught:
            with model.trace(x):
                model.never.output  # <never>
        assert "never.output did not come in step 0: the module was not called" in str(caught.value)
        assert_raised_at(caught.value, __file__, "never")
    model.check_integrity()


@pytest.mark.engine
def test_a_module_that_the_engine_does_not_call_as_a_module(smollm2: Any) -> None:
    model = smollm2
    with pytest.raises(PortNotReachedError) as caught:
        with model.trace(PROMPT, max_tokens=20, temperature=0, ignore_eos=True):
            model.lm_head.output  # <head>
    message = str(caught.value)
    assert "lm_head.output did not come in step 0" in message
    assert "The engine does not call this module as a module" in message
    assert_raised_at(caught.value, __file__, "head")
    assert_serves(model)


def test_a_passed_port_can_be_caught_in_the_block(model: Any) -> None:
    """It is an ordinary exception there, and the block goes on."""
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        model.model.layers[9].mlp.output
        caught = False
        try:
            model.model.layers[8].mlp.output
        except PortPassedError:
            caught = True
        caught.save()
        logits = model.logits.save()
    assert caught
    assert logits.shape == (1, 49152)


def test_every_port_of_a_step_in_order(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        seen = list().save()
        model.model.embed_tokens.input
        for layer in model.model.layers:
            for port in (layer.input, layer.self_attn.output, layer.mlp.input, layer.mlp.output, layer.output):
                seen.append(port is not None)
        model.model.norm.input
        model.model.norm.output
        model.logits
        model.samples
    assert seen == [True] * 150
