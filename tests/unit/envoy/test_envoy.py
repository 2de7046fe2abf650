"""Envoys, their tree and how they are shown: without any running model."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict

import pytest
import torch

from invivo.envoy.envoy import Envoy, RootEnvoy
from invivo.envoy.errors import OutsideBlockError, UnknownNameError
from invivo.envoy.tree import Learned, ModuleTree


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.Linear(2, 2)
        self.output = torch.nn.Linear(2, 2)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(3, 2)
        self.layers = torch.nn.ModuleList([Layer() for _ in range(12)])


@pytest.fixture
def model() -> RootEnvoy:
    return RootEnvoy(ModuleTree.of(Model()), "")


def test_children_by_name_and_number(model: RootEnvoy) -> None:
    assert model.layers[5].attention.address == "layers.5.attention"
    assert model.layers[-1].address == "layers.11"
    assert [envoy.address for envoy in model.layers[10:]] == ["layers.10", "layers.11"]
    assert [envoy.address for envoy in model.layers][:2] == ["layers.0", "layers.1"]
    assert len(model.layers) == 12
    assert model.layers[0]["output"].address == "layers.0.output", "a child whose name is a port's"
    assert model.layers[0].root is model
    assert "embedding" in dir(model)


@pytest.mark.parametrize("index", [12, 99, -13])
def test_an_index_out_of_range_has_the_valid_one(model: RootEnvoy, index: int) -> None:
    with pytest.raises(UnknownNameError, match=r"it has 12 modules, numbered 0 to 11 \(or -12 to -1\)"):
        model.layers[index]


def test_a_sequence_counts_its_modules_whatever_their_names() -> None:
    """Iterating over one with names gave nothing."""
    named = torch.nn.Sequential(OrderedDict(a=torch.nn.Linear(4, 4), b=torch.nn.ReLU()))
    named.append(torch.nn.Tanh())
    model = RootEnvoy(ModuleTree.of(named), "")
    assert [envoy.address for envoy in model] == ["a", "b", "2"]
    assert len(model) == 3
    assert (model[0].address, model[-1].address, model[2].address) == ("a", "2", "2")
    assert [envoy.address for envoy in model[:2]] == ["a", "b"]


def test_keys_that_are_no_places_are_not_counted() -> None:
    """`stages[1]` was the module of the second key, "2"."""
    layers = {"1": torch.nn.Linear(4, 4), "2": torch.nn.ReLU()}
    stages = RootEnvoy(ModuleTree.of(torch.nn.ModuleDict(layers)), "")
    assert stages["1"].address == "1"
    for use in (lambda: stages[1], lambda: stages[-1], lambda: list(stages), lambda: stages[:1]):
        with pytest.raises(UnknownNameError, match=r'no numbered modules, from 0 on.*\["1"\], \["2"\]'):
            use()
    places = RootEnvoy(ModuleTree.of(torch.nn.ModuleDict({"1": torch.nn.Tanh(), "0": torch.nn.ReLU()})), "")
    assert [envoy.address for envoy in places] == ["0", "1"]
    assert [*RootEnvoy(ModuleTree.of(torch.nn.ModuleList()), "")] == []


def test_a_child_that_begins_with_an_underscore_is_an_item() -> None:
    parent = torch.nn.Module()
    parent._orig_mod = torch.nn.Linear(2, 2)
    model = RootEnvoy(ModuleTree.of(parent), "")
    with pytest.raises(UnknownNameError, match=r'has a module `_orig_mod`.*Write `\["_orig_mod"\]`'):
        model._orig_mod
    assert model["_orig_mod"].address == "_orig_mod"
    with pytest.raises(AttributeError, match="no attribute '_other'") as caught:
        model._other
    assert not isinstance(caught.value, UnknownNameError)


def test_unknown_names_have_the_nearest(model: RootEnvoy) -> None:
    with pytest.raises(
        UnknownNameError, match=r"the model \(Model\) has no module or port `layer`. Did you mean `layers`"
    ):
        model.layer
    with pytest.raises(UnknownNameError, match="It has: attention, output"):
        model.layers[0].zzz
    with pytest.raises(UnknownNameError, match="has no numbered modules"):
        model.embedding[0]
    assert not hasattr(model, "layer")


def test_only_ports_can_be_assigned(model: RootEnvoy) -> None:
    with pytest.raises(UnknownNameError, match=r"no port `outptu` to write to. Did you mean `output`"):
        model.layers[0].outptu = 1
    with pytest.raises(UnknownNameError, match="no port `logits`"):
        model.layers[0].logits = 1


@pytest.mark.parametrize("port", ["input", "inputs", "output"])
def test_ports_need_a_block(model: RootEnvoy, port: str) -> None:
    with pytest.raises(OutsideBlockError, match=rf"`layers.0.attention.{port}` exists only while a block runs"):
        getattr(model.layers[0].attention, port)
    with pytest.raises(OutsideBlockError):
        setattr(model.layers[0].attention, port, 1)


def test_run_level_ports_and_calls_need_a_block(model: RootEnvoy) -> None:
    for use in (lambda: model.logits, lambda: model.samples, lambda: model.embedding(1)):
        with pytest.raises(OutsideBlockError, match=r"with model\.trace"):
            use()


def test_the_tree_as_text(model: RootEnvoy) -> None:
    shown = repr(model)
    assert "0-11" in shown and "12 x Layer" in shown
    assert shown.count("attention") == 1, "equal layers are shown once"
    model.learn(
        Learned((("embedding", "output"), ("layers.3", "output")), {"layers.3": "[n, 2]", "embedding": "[n, 2]"})
    )
    shown = repr(model)
    assert "0-2" in shown and "4-11" in shown and "Layer -> [n, 2]" in shown
    assert repr(model.layers[3]).startswith("layers.3")


def test_the_tree_as_html(model: RootEnvoy) -> None:
    html = model._repr_html_()
    assert html.count("<details") == html.count("</details>") >= 2
    assert "12 x Layer" in html and "<script" not in html


def test_a_module_in_two_places_has_two_addresses() -> None:
    shared = torch.nn.Linear(2, 2)
    tree = ModuleTree.of(torch.nn.ModuleDict({"a": shared, "b": shared}))
    assert set(tree.modules) == {"", "a", "b"}
    assert Envoy(tree, "b").address == "b"


def test_no_torch_is_needed() -> None:
    code = "import sys, invivo.envoy.envoy; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
