"""Rule 6, names: what the model does not have is refused at the `with`, with the nearest matches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from invivo import Local, UnknownNameError
from support.contract import PROMPT, assert_serves, marked_line


def test_a_misspelled_module(model: Any) -> None:
    with pytest.raises(UnknownNameError) as caught:
        with model.trace(PROMPT, max_tokens=1, temperature=0):
            x = model.model
            model.model.layer[5].output  # <misspelled>
    message = str(caught.value)
    assert message.startswith(f"{__file__}:{marked_line(__file__, 'misspelled')}: ")
    assert "model (LlamaModel) has no module or port `layer`. Did you mean `layers`?" in message
    assert_serves(model)


def test_a_misspelled_port(model: Any) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean `output`"):
        with model.trace(PROMPT, max_tokens=1, temperature=0):
            model.model.layers[5].outputs
    with pytest.raises(UnknownNameError, match=r"has no port `outptu` to write to\. Did you mean `output`"):
        with model.trace(PROMPT, max_tokens=1, temperature=0):
            model.model.layers[5].outptu = 1
    assert_serves(model)


@pytest.mark.parametrize("index", [30, 99, -31])
def test_an_index_out_of_range(model: Any, index: int) -> None:
    with pytest.raises(UnknownNameError) as caught:
        with model.trace(PROMPT, max_tokens=1, temperature=0):
            model.model.layers[30].output
    assert "model.layers[30] does not exist: it has 30 modules, numbered 0 to 29 (or -30 to -1)." in str(caught.value)
    with pytest.raises(UnknownNameError, match=rf"model.layers\[{index}\] does not exist"):
        model.model.layers[index]


def test_nothing_runs_when_a_name_is_wrong(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnknownNameError):
        with model.trace(PROMPT, max_tokens=1, temperature=0):
            print("ran")
            model.model.layers[5].mpl.output
    assert capsys.readouterr().out == ""


def test_unknown_names_are_attribute_errors_too(model: Any) -> None:
    assert not hasattr(model, "decoder")
    assert getattr(model.model, "nothing", None) is None
    with pytest.raises(AttributeError):
        model.model.nothing


def test_names_in_a_block_that_are_not_the_models(model: Any) -> None:
    """Chains that start at a name which the block assigns itself are left alone."""
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        norm = model.model.norm
        norm = [norm]
        count = norm.count(3).save()
    assert count == 0


def test_aliases_of_modules_are_checked(model: Any) -> None:
    layers = model.model.layers
    with pytest.raises(UnknownNameError, match=r"`mpl`\. Did you mean `mlp`"):
        with model.trace(PROMPT, max_tokens=1, temperature=0):
            layers[5].mpl.output
    with pytest.raises(UnknownNameError, match="`mpl`"):
        with model.trace(PROMPT, max_tokens=1, temperature=0):
            for i in range(3):
                layers[i].mpl.output


def test_children_whose_name_is_taken_are_reached_by_item() -> None:
    inner = torch.nn.ModuleDict({"output": torch.nn.Linear(2, 2), "input": torch.nn.Linear(2, 2)})

    class Taken(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.parts["output"](self.parts["input"](x))
            return out

    model: Any = Local(Taken())
    x = torch.ones(1, 2)
    with model.trace(x):
        first = model.parts["input"].output.save()
        second = model.parts["output"].output.save()
    assert torch.equal(second, inner["output"](first))
    model.check_integrity()


def test_slices_iteration_and_length(model: Any) -> None:
    layers = model.model.layers
    assert len(layers) == 30
    assert [layer.address for layer in layers[2:4]] == ["model.layers.2", "model.layers.3"]
    assert [layer.address for layer in layers][-1] == layers[-1].address == "model.layers.29"
    assert "mlp" in dir(layers[0])
    assert model.model["layers"][3].address == "model.layers.3"
