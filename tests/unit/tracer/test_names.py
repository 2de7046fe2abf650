"""Definite assignment: which names a block needs."""

from __future__ import annotations

import ast
import textwrap

import pytest

from invivo.tracer.names import Flow, mangle

CASES = {
    "h = model.output; h.save()": "model",
    "h += 1": "h",
    "h[0] = v": "v h",
    "h.x = v": "v h",
    "a, (b, *c) = d; a; b; c": "d",
    "a = a": "a",
    "a = b = c; a; b": "c",
    "x: T = v; x": "v T",
    "del h": "h",
    "del h[i]": "h i",
    "if c: h = 1\nh": "c h",
    "if c: h = 1\nelse: h = 2\nh": "c",
    "if c: raise E\nelse: h = 2\nh": "c E",
    "h = 1 if c else d": "c d",
    "c and (h := 1); h": "c h",
    "(h := 1) and c; h": "c",
    "a < (h := b) < (k := d); h; k": "a b d k",
    "for i in r: h = i\nh; i": "r h i",
    "for i in r: break\nelse: h = 1\nh": "r h",
    "for i in r: pass\nelse: h = 1\nh": "r",
    "while True:\n h = f()\n if h: break\nh": "f",
    "while c: h = 1\nh": "c h",
    "while True:\n if c: break\n h = 1\nh": "c h",
    "for i in r:\n if i: continue\n h = 1\n h": "r",
    "try: h = f()\nexcept E as e: h = e\nh": "f E",
    "try: h = f()\nexcept E: pass\nh": "f E h",
    "try: h = f()\nfinally: g(h)\nh": "f g h",
    "try: pass\nfinally: h = 1\nh": "",
    "try: f()\nexcept E: raise\nelse: h = 1\nh": "f E",
    "try: h = f()\nexcept* E: pass\nh": "f E h",
    "with a as h: k = h\nh; k": "a k",
    "with torch.no_grad(): k = 1\nk": "torch",
    "with torch.no_grad(), a: k = 1\nk": "torch a k",
    "match s:\n case [h, *r] if h: pass\n case {'a': h, **r}: pass\n case P(x=h) | Q(h): pass\nh; r": "s P Q h r",
    "match s:\n case 1: h = 1\n case _: h = 2\nh": "s",
    "match s:\n case 1: h = 1\n case other: h = other\nh": "s",
    "import a.b as c, d.e; from f import g as h, i; c; d; h; i; a": "a",
    "f'{a:{b}}{c!r}'": "a b c",
    "f(*a, **b)": "f a b",
    "lambda x, y=d: x + y + free": "d free",
    "def g(x, *a, k=d, **kw) -> R:\n y = x; z = y + free\n return g": "d R free",
    "def g(): return h\nh = 1": "h",
    "h = 1\ndef g(): return h": "",
    "def g():\n h = h2\n def k(): nonlocal h; h += outer\n return k": "h2 outer",
    "def g():\n nonlocal h\n h = 1": "h",
    "def g():\n global h\n h += 1": "h",
    "def g():\n def k(): return h\n h = 1": "",
    "async def g():\n async with a as b: await b\n async for c in d: c": "a d",
    "@deco\ndef g(): pass": "deco",
    "@deco\nclass A(B, m=C):\n x = 1\n y = x\n z = free\n def f(self): return x": "deco B C free x",
    "class A:\n h = h": "h",
    "class A:\n def f(self): return A": "",
    "[x for x in xs if x > lim]": "xs lim",
    "[(x, y) for x in xs for y in x.ys]": "xs",
    "{k: v for k, v in d.items()}": "d",
    "[h := x for x in xs]; h": "xs h",
    "any((h := x) for x in xs)": "any xs",
    "(x for x in x)": "x",
    "sum(x for x in xs); x": "sum xs x",
    "assert c, m": "c m",
    "return_ = 1; raise return_": "",
    "raise E\nh": "E",
    "global h; h = 1; h": "",
    "global h; h += 1": "h",
    "x = y = 1; [x, y]; print(z)": "print z",
}


@pytest.mark.parametrize("source", CASES)
def test_needs(source: str) -> None:
    flow = Flow()
    flow.walk(ast.parse(textwrap.dedent(source.replace("; ", "\n") if "\n" not in source else source)).body)
    assert sorted(flow.needs) == sorted(CASES[source].split())


def test_stores() -> None:
    source = "a = 1\nfor b in c: d: int = 1\nwith e as f: (g := 1)\nimport h.i\ndef j(): k = 1\nclass L: m = 1\n"
    source += (
        "try: pass\nexcept E as n: pass\ndel o\n[p := q for q in r]\nmatch s:\n case {'t': t, **u}: pass\nv: int\n"
    )
    flow = Flow()
    flow.walk(ast.parse(source).body)
    assert list(flow.stores) == "a b d f g h j L n o p t u v".split()


def test_global_declarations() -> None:
    flow = Flow()
    flow.walk(ast.parse("global a\ndef f():\n global b\n def g(): global c\nclass D: global e\n").body)
    assert flow.own_global == {"a"}
    assert flow.declared_global == {"a", "b", "c", "e"}


def test_a_class_body_is_not_seen_by_functions_in_it() -> None:
    outer = Flow()
    inner = Flow(class_body=outer)
    inner.walk(ast.parse("x = 1\nx\nf = lambda: x\n[y for y in x]\n[x for y in z]\n").body)
    assert list(outer.needs) == ["x", "z"]


@pytest.mark.parametrize(
    ("name", "owner", "mangled"),
    [
        ("__a", "C", "_C__a"),
        ("__a", "_C", "_C__a"),
        ("__a", "", "__a"),
        ("__a__", "C", "__a__"),
        ("a", "C", "a"),
        ("__a", "__", "__a"),
        ("_a", "C", "_a"),
    ],
)
def test_mangle(name: str, owner: str, mangled: str) -> None:
    assert mangle(name, owner) == mangled


def test_names_are_mangled_by_the_class_they_are_in() -> None:
    flow = Flow("C")
    flow.walk(ast.parse("__a + self.__b\nclass D:\n  def f(self): return __e\n").body)
    assert set(flow.needs) == {"_C__a", "self", "_D__e"}
