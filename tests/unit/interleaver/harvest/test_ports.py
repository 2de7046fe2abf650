"""What users write for ports, and the messages for what does not exist."""

from __future__ import annotations

from typing import Any

import pytest

from invivo import ForeignError, MisuseError, PortNotReachedError, UnknownNameError
from invivo.envoy.envoy import RootEnvoy
from invivo.envoy.tree import Learned, ModuleInfo, ModuleTree
from invivo.interleaver.harvest.ports import choices, in_order


def info(*children: str) -> ModuleInfo:
    return ModuleInfo("Toy", children)


@pytest.fixture
def root() -> RootEnvoy:
    modules = {"": info("model", "lm_head"), "lm_head": info(), "model": info("layers", "norm"), "model.norm": info()}
    modules["model.layers"] = info(*map(str, range(12)))
    for number in range(12):
        modules[f"model.layers.{number}"] = info("attn", "mlp")
        modules[f"model.layers.{number}.attn"] = modules[f"model.layers.{number}.mlp"] = info()
    return RootEnvoy(ModuleTree(modules), "")


def names(asked: object, root: RootEnvoy) -> list[str]:
    return [choice.name for choice in choices(asked, root)]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("model.layers.5.output", ["model.layers.5.output"]),
        ("model.layers[5].output[0]", ["model.layers.5.output[0]"]),
        ("model.layers[-1].mlp", ["model.layers.11.mlp.output"]),
        ("model.layers.5", ["model.layers.5.output"]),
        ("model.layers[5]", ["model.layers.5.output"]),
        ("sum(model.layers.5)", ["sum(model.layers.5.output)"]),
        ("sum( model.layers.3.output )", ["sum(model.layers.3.output)"]),
        ("model.norm.inputs[1]['x']", ["model.norm.inputs[1]['x']"]),
        ("model.logits", ["logits"]),
        ("samples", ["samples"]),
        ("model.layers.1?.mlp.input", ["model.layers.10.mlp.input", "model.layers.11.mlp.input"]),
        ("model.layers.*.mlp", [f"model.layers.{number}.mlp.output" for number in range(12)]),
    ],
)
def test_texts(asked: str, expected: list[str], root: RootEnvoy) -> None:
    assert names(asked, root) == expected


def test_envoys_and_paths(root: Any) -> None:
    assert names(root.model.layers[5].mlp, root) == ["model.layers.5.mlp.output"]
    (choice,) = choices("model.norm.inputs[1]['x'][-2]", root)
    assert choice.path == (1, "x", -2)


def test_one_port_by_name_and_by_wildcard_is_one(root: RootEnvoy) -> None:
    assert names(["model.layers.*", "model.layers.3"], root).count("model.layers.3.output") == 1


@pytest.mark.parametrize(
    ("asked", "kind", "message"),
    [
        ("model.layer.5", UnknownNameError, r"model has no module `layer`. Did you mean `layers`\?"),
        ("model.layers.12.mlp", UnknownNameError, "model.layers has no module `12`"),
        ("model.layers.*.mpl", UnknownNameError, r"model.layers.0 \(and 11 more\) has no module `mpl`.* `mlp`\?"),
        ("model.layers[-13]", UnknownNameError, "numbered 0 to 11"),
        ([], MisuseError, "`ports` is empty"),
        (["model.norm", "model.norm.output"], MisuseError, "asked for twice"),
        ([3], MisuseError, "a port is a text"),
        (3, MisuseError, "got int"),
    ],
)
def test_what_does_not_exist(asked: object, kind: type[Exception], message: str, root: RootEnvoy) -> None:
    with pytest.raises(kind, match=message):
        choices(asked, root)


def test_envoys_of_another_model(root: Any) -> None:
    other: Any = RootEnvoy(root._tree, "")
    with pytest.raises(ForeignError, match="belongs to another model"):
        choices([other.model.norm], root)
    with pytest.raises(MisuseError, match="the whole model"):
        choices([root], root)


def test_the_order_is_that_of_the_model(root: RootEnvoy) -> None:
    fired = (("model.layers.1.mlp", "output"), ("model.layers.1.attn", "output"), ("model.norm", "output"))
    root.learn(Learned(fired, {}))
    asked = choices(["logits", "model.norm", "model.layers.*.*"], root)
    found = [choice.name for choice in in_order(asked, root._tree)]
    assert found == ["model.layers.1.mlp.output", "model.layers.1.attn.output", "model.norm.output", "logits"]


@pytest.mark.parametrize("asked", ["lm_head", "lm_*", ["model.norm", "lm_head"]])
def test_a_port_that_never_fires(asked: object, root: RootEnvoy) -> None:
    root.learn(Learned((("model.norm", "output"),), {}))
    with pytest.raises(PortNotReachedError, match=r"`lm_head.output` has nothing to give: lm_head \(Toy\) did not run"):
        in_order(choices(asked, root), root._tree)
