"""Names are refused where they stand, before anything runs; code that may never run is left alone."""

from __future__ import annotations

import ast
import textwrap

import pytest
import torch

from invivo.envoy.envoy import RootEnvoy
from invivo.envoy.errors import UnknownNameError
from invivo.envoy.tree import ModuleTree
from invivo.tracer.block import Block
from invivo.tracer.capture import Captured, Site
from invivo.tracer.check import check_names


@pytest.fixture(scope="module")
def model() -> RootEnvoy:
    layers = torch.nn.ModuleList([torch.nn.ModuleDict({"mlp": torch.nn.Linear(2, 2)}) for _ in range(3)])
    return RootEnvoy(ModuleTree.of(torch.nn.ModuleDict({"layers": layers})), "")


def check(model: RootEnvoy, body: str) -> None:
    source = "with trace:\n" + textwrap.indent(textwrap.dedent(body), "    ")
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.With)
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    stores = tuple(node.id for node in names if isinstance(node.ctx, ast.Store))
    block = Block(source, "user.py", 1, 0, "<module>", "module", None, ())
    site = Site(block, (), stores, frozenset(), frozenset(), tree, None, enter=0, start=0, binds=False)
    check_names(site, Captured({"layer": model.layers[0]}, {"model": model, "n": 5}))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("model.layer", r"user.py:2: .*no module or port `layer`. Did you mean `layers`"),
        ("x = 1\nh = model.layers[0].mpl.output", r"user.py:3: .*`mpl`. Did you mean `mlp`"),
        ("h = model.layers[3].mlp.output", r"layers\[3\] does not exist: it has 3 modules, numbered 0 to 2"),
        ("h = model.layers[-4]", "does not exist"),
        ("for i in range(3):\n    model.layers[i].mpl.output", r"user.py:3: .*`mpl`"),
        ("layer.mpl.output", "`mpl`"),
        ("model.layers[0].mlp.outputs = 1", r"no port `outputs` to write to. Did you mean `output`"),
        ("f(model.layers[0].mlp.output, key=[model.lyrs])", "`lyrs`"),
        ("if model.lyrs:\n    pass", "`lyrs`"),
    ],
)
def test_refused(model: RootEnvoy, body: str, message: str) -> None:
    with pytest.raises(UnknownNameError, match=message):
        check(model, body)


@pytest.mark.parametrize(
    "body",
    [
        "h = model.layers[-1].mlp.output[0].anything",
        "model.layers[n].mlp.output = 1",
        "model.logits[0] = 1",
        "if n:\n    model.other",
        "try:\n    model.other\nexcept AttributeError:\n    pass",
        "f = lambda: model.other",
        "model = 1\nmodel.other",
        "h = n and model.other",
        "for layer in model.layers[1:]:\n    layer.mlp.output",
    ],
)
def test_left_alone(model: RootEnvoy, body: str) -> None:
    check(model, body)
