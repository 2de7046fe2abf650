"""`Local` where something happens to the model: it fails, or has other modules than before, or is traced in a block."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

from invivo import Local, MisuseError, UnknownNameError

X = torch.ones(2, 4)


class OwnError(RuntimeError):
    """What a model raises."""


class Failing(nn.Module):
    """Fails where a value is too large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if x.max() > 100:
            raise OwnError("too large")
        out: torch.Tensor = self.last(x)
        return out


@pytest.fixture
def model() -> Iterator[Any]:
    model = Local(Failing())
    yield model
    model.check_integrity()


def test_what_was_saved_before_the_model_failed_is_on_the_exception(model: Any) -> None:
    for _ in range(2):  # with the order of the modules unknown, and known
        with pytest.raises(OwnError, match="too large") as caught:
            with model.trace(X) as tracer:
                kept = model.first.input.save()
                model.first.output[:] = 1000
                model.last.output.save()
        error: Any = caught.value
        assert torch.equal(error.saves["kept"], X)
        assert torch.equal(tracer.saves["kept"], X)
        assert any("raised by the model itself, while the block waited in line" in note for note in error.__notes__)
        assert "at port first.output, step 0" in error.__notes__
        lines = [entry.name for entry in caught.traceback]
        assert lines[-1] == "forward", "the traceback ends in the model"
        assert "kept" not in locals()
        with model.trace(X):
            out = model.last.output.save()
        assert out.shape == X.shape


def test_a_model_that_fails_in_one_invoke_goes_on_in_the_others(model: Any) -> None:
    with pytest.raises(OwnError) as caught:
        with model.trace() as tracer:
            norms = list().save()
            for factor in (1, 1000, 1):
                with tracer.invoke(X):
                    model.first.output[:] = factor
                    norms.append(model.last.output.norm().item())
    error: Any = caught.value
    assert len(error.saves["norms"]) == 2
    assert "in invoke 1 of 0 to 2" in error.__notes__


def test_a_model_that_fails_when_its_block_is_over(model: Any) -> None:
    with pytest.raises(OwnError) as caught:
        with model.trace(X):
            kept = torch.ones(1).save()
            model.first.output[:] = 1000
    error: Any = caught.value
    assert torch.equal(error.saves["kept"], torch.ones(1))
    assert "kept" not in locals()


def test_the_blocks_own_error_goes_before_the_models(model: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        with model.trace(1000 * X):
            with torch.no_grad():
                model.first.input
                1 / 0


class Lora(nn.Module):
    """What PEFT puts in the place of a layer."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.more = base, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.more(x)
        return out


class Refusing:
    """Has what a block looks at by other means than the rest: `.output[...]` and `.save()`."""

    @property
    def output(self) -> object:
        raise KeyError("no output")

    def save(self) -> None:
        raise KeyError("no save")


def test_errors_in_what_stands_for_the_users_words_show_these_alone(model: Any) -> None:
    own, number = Refusing(), 3
    with pytest.raises(IndexError) as first, model.trace(X):
        model.last.output[7]
    with pytest.raises(AttributeError) as second, model.trace(X):
        number.output[0]  # type: ignore[attr-defined]
    with pytest.raises(KeyError) as third, model.trace(X):
        own.output[0]  # type: ignore[index]
    with pytest.raises(KeyError) as fourth, model.trace(X):
        own.save()
    for caught, last in [(first, "model.last.output[7]"), (second, "number.output[0]")]:
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert (frames[-1].filename, (frames[-1].line or "").split("  #")[0]) == (__file__, last)
    for caught, called, last in [(third, "own.output[0]", "output"), (fourth, "own.save()", "save")]:
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert (frames[-2].line or "").startswith(called) and frames[-1].name == last


def test_modules_that_are_replaced_are_met_in_the_next_trace() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model: Any = Local(module)
    layer = model[0]
    with model.trace(X):
        plain = layer.output.save()
    module[0] = Lora(module[0])
    with model.trace(X):
        base = model[0].base.output.save()
        whole = layer.output.save()
    with torch.no_grad():
        assert torch.equal(base, plain)
        assert torch.equal(whole, module[0](X))
    assert "Lora -> [2, 4]" in repr(model)
    inside = model[0].base
    assert layer == model[0]

    module[0] = nn.Linear(4, 4)
    with model.trace(X):
        new = model[0].output.save()
    with torch.no_grad():
        assert torch.equal(new, module[0](X))
    for use in (lambda: model[0].base, lambda: inside.more):
        with pytest.raises(UnknownNameError):
            use()
    with pytest.raises(UnknownNameError, match=r"no module `0\.base` any more"):
        with model.trace(X):
            inside.output.save()
    model.check_integrity()


def test_a_block_cannot_begin_a_trace_of_its_model(model: Any) -> None:
    def again() -> None:
        with model.trace(X):
            model.first.output.save()

    with pytest.raises(MisuseError, match="a block began a trace of its own model, in a function that it calls"):
        with model.trace(X):
            model.first.output
            again()


def test_a_module_named_like_a_port_is_mentioned_where_it_may_have_been_meant() -> None:
    config = BertConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    model: Any = Local(BertModel(config).eval())
    ids = torch.arange(5)[None]
    with pytest.raises(AttributeError, match="no attribute 'dense'") as caught:
        with model.trace(ids):
            model.encoder.layer[0].output.dense.output.save()
    assert any('has a module `output` as well, which is written `["output"]`' in n for n in caught.value.__notes__)
    with model.trace(ids):
        hidden = model.encoder.layer[0]["output"].dense.output.save()
    assert hidden.shape == (1, 5, 16)


@pytest.mark.parametrize("given", [3, "gpt2", None, Failing])
def test_what_is_no_module_is_refused(given: Any) -> None:
    with pytest.raises(MisuseError, match=r"`Local` takes a torch\.nn\.Module, and got "):
        Local(given)
