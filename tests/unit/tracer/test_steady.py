"""Which blocks do the same in each step and only read."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from invivo.tracer.steady import is_steady
from support.toy_trace import ToyTrace

STEADY = [
    "for step in t.iter[:]:\n    kept.append(model.layers[0].output[0][-1])",
    "for _ in t.iter[1:]:\n    h = model.layers[0].output",
    "for _ in t.all():\n    for layer in model.layers:\n        kept.append(layer.output[0].float().norm(dim=-1))",
    "for _ in t.iter:\n    a, b = model.x.output\n    total += a.sum() + b.sum()\nkept = [total]",
    "seen = []\nfor _ in t.iter[:]:\n    seen.append([m.output for m in model.layers])\nseen.copy()",
    "for _ in t.iter[:]:\n    kept.append((model.logits.softmax(-1).topk(k=3), -model.samples.item() < 3))",
]
OTHERS = [
    "model.layers[0].output",
    "for _ in t.iter[:3]:\n    model.x.output",
    "for _ in t.iter[::2]:\n    model.x.output",
    "for _ in other.iter[:]:\n    model.x.output",
    "for step in t.iter[:]:\n    if step:\n        model.x.output",
    "for _ in t.iter[:]:\n    h = model.x.output\n    h += 1",
    "for _ in t.iter[:]:\n    model.x.output[:] = 0",
    "for _ in t.iter[:]:\n    model.x.output[0][:] += v",
    "for _ in t.iter[:]:\n    model.x.output = 0",
    "for _ in t.iter[:]:\n    model.x.output.mul_(2)",
    "for _ in t.iter[:]:\n    f(model.x.output)",
    "for _ in t.iter[:]:\n    torch.add(a, b, out=model.x.output)",
    "for _ in t.iter[:]:\n    a if model.x.output else b",
    "for _ in t.iter[:]:\n    a and model.x.output",
    "for _ in t.iter[:]:\n    [m.output for m in x if m]",
    "for _ in t.iter[:]:\n    kept.append(lambda: 1)",
    "for _ in t.iter[:]:\n    t.stop()",
    "for _ in t.iter[:]:\n    model.x.output.save()",
    "for _ in t.iter[:]:\n    break",
    "for _ in t.iter[:]:\n    pass\nelse:\n    pass",
    "for _ in t.iter[:]:\n    pass\nfor _ in t.iter[:]:\n    pass",
    "for _ in t.iter[:]:\n    0 < a < model.samples",
    "for _ in t.iter[:]:\n    f(**model.x.output)",
    "try:\n    for _ in t.iter[:]:\n        model.x.output\nfinally:\n    pass",
]


def steady(source: str, head: str = "with ToyTrace() as t:") -> bool:
    import linecache

    inner = textwrap.indent(source, " " * 8)
    text = f"def body(ToyTrace, model, kept, total, other):\n    {head}\n{inner}\n    return t\n"
    name = f"<steady {hash(text)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    scope: dict[str, Any] = {}
    exec(compile(text, name, "exec"), scope)
    found: list[ToyTrace] = []

    class Kept(ToyTrace):
        def __enter__(self) -> Any:
            import sys

            from invivo.tracer import capture

            frame = sys._getframe(1)
            self.site = capture.locate(frame)
            self.captured = capture.read(self.site, frame)
            found.append(self)
            raise InterruptedError

    with pytest.raises(InterruptedError):
        scope["body"](Kept, 1, [], 0, 2)
    return is_steady(found[0].site, found[0].captured)


@pytest.mark.parametrize("source", STEADY)
def test_steady(source: str) -> None:
    assert steady(source)


@pytest.mark.parametrize("source", OTHERS)
def test_not_steady(source: str) -> None:
    assert not steady(source)


def test_the_tracer_around_an_invoke() -> None:
    def body(trace: ToyTrace) -> ToyTrace:
        with ToyTrace() as inner:
            for _ in trace.iter:
                pass
        return inner

    inner = body(ToyTrace())
    assert is_steady(inner.site, inner.captured)
