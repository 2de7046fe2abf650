"""Every shape of source text: layout, encodings, line ends, what a body may start with."""

from __future__ import annotations

from typing import Any

import pytest

from support.toy_trace import Recorder, ToyTrace

SHAPES = {
    "tabs": "if True:\n\tx = [1]\n\twith ToyTrace() as t:\n\t\tif x:\n\t\t\ty = [x, 'é'].save()\n",
    "multi-line string at depth": (
        "def f():\n    x = [1]\n    with ToyTrace() as t:\n        s = '''one\ntwo\n  three'''\n"
        "        y = [x, s].save()\n    return y\ny = f()\n"
    ),
    "multi-line f-string first": (
        "def f():\n    x = 1\n    with ToyTrace() as t:\n        f'''{x}\n{noisy()}'''\n"
        "        y = [x].save()\n    return y\ny = f()\n"
    ),
    "f-string first": (
        "def f():\n    x = 1\n    with ToyTrace(): f'{noisy()} {x}'; y = [x].save()\n    return y\ny = f()\n"
    ),
    "backslashes": "x = [1]\nwith \\\n  ToyTrace() \\\n    as t: \\\n  y = \\\n [x].save()\n",
    "parenthesised": "x = [1]\nwith (\n    ToyTrace() as t\n):\n    y = (\n        [\nx\n]\n    ).save()\n",
    "comments at column 0": (
        "def f():\n    with ToyTrace():\n# here\n        y = [1].save()\n# there\n    return y\ny = f()\n"
    ),
    "non-ascii": "größe = ['ü']; ẞ = 1\nwith ToyTrace('éééé') as t: y = ['日本', größe, ẞ].save()\n",
    "multi-line call": "x = [1]\nwith ToyTrace(\n    'a',\n    'b',\n) as t:\n    y = [x].save()\n",
    "method chain": "x = [1]\nwith (ToyTrace()\n    .trace(\n  'a')) as t:\n    y = [x].save()\n",
    "conditional": "x = [1]\nwith (ToyTrace() if x else None) as t:\n    y = [x].save()\n",
    "in finally": "try:\n    x = [1]\nfinally:\n    with ToyTrace() as t:\n        y = [x].save()\n",
    "in finally after an error": (
        "x = [1]\ntry:\n    try:\n        1 / 0\n    finally:\n        with ToyTrace() as t:\n"
        "            y = [x].save()\nexcept ZeroDivisionError:\n    pass\n"
    ),
    "in except": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    with ToyTrace() as t:\n        y = [1].save()\n",
    "in match": "match 1:\n    case 1:\n        with ToyTrace() as t:\n            y = [1].save()\n",
    "no newline at the end": "with ToyTrace() as t:\n    y = [1].save()",
    "body starts with try": "with ToyTrace():\n    try:\n        y = [1].save()\n    finally:\n        pass\n",
    "try after as": "with ToyTrace() as t:\n    try:\n        y = [1].save()\n    finally:\n        pass\nt.site\n",
    "try after as in a function": (
        "def f():\n    with ToyTrace() as t:\n        try:\n            noisy(); y = [1].save()\n"
        "        except BaseException:\n            noisy(); noisy()\n    t.site\n    return y\ny = f()\n"
    ),
    "try after as a cell": (
        "def f():\n    with ToyTrace() as t:\n        try: y = [1].save()\n        finally: pass\n"
        "    return y, (lambda: t)().site\ny = list(f())\n"
    ),
    "try after as a global": (
        "def f():\n    global t, y\n    with ToyTrace() as t:\n        try: y = [1].save()\n        finally: pass\n"
        "f()\nt.site\n"
    ),
    "try in try": (
        "def f():\n    try:\n        with ToyTrace() as t:\n            try: y = [1].save()\n"
        "            finally: noisy()\n    finally: t.site\n    return y\ny = f()\n"
    ),
    "several targets": "def f(x):\n    with ToyTrace(): a = y = [x].save()\n    return y\ny = f(1)\n",
    "code that the compiler leaves out": (
        "def f(x):\n    with ToyTrace():\n        y = [x if True else x.nothing].save()\n        if 0: z = x.never\n"
        "        while True:\n            break\n            y = x.dead\n    return y\ny = f(1)\n"
    ),
    "one-line pass after as": "def f():\n    with ToyTrace() as t: pass\n    return t\ny = [f().site]\n",
    "body starts with while": "with ToyTrace():\n    while True:\n        y = [1].save()\n        break\n",
    "body starts with a decorator": (
        "with ToyTrace():\n    @noisy_decorator\n    def g(): return 1\n    y = [g()].save()\n"
    ),
    "body starts with match": "x = 1\nwith ToyTrace():\n    match x:\n        case 1:\n            y = [x].save()\n",
    "body starts with a with": "with ToyTrace():\n    with Recorder([], 'a'):\n        y = [1].save()\n",
    "body starts with a class": "with ToyTrace():\n    class A: b = 1\n    y = [A.b].save()\n",
    "body starts with import": "with ToyTrace():\n    import os\n    y = [os.sep].save()\n",
    "future annotations": (
        "from __future__ import annotations\nwith ToyTrace():\n    def g(a: Nowhere) -> Nope: return a\n"
        "    y = [g(1)].save()\n"
    ),
    "many constants": (
        "def f():\n"
        + "".join(f"    v{i} = {i}.5\n" for i in range(300))
        + "    with ToyTrace() as t: y = [v299].save()\n"
        "    return y\ny = f()\n"
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_shapes_of_source(shape: str, newline: str, tmp_path: Any) -> None:
    path = tmp_path / "shape.py"
    path.write_bytes(SHAPES[shape].replace("\n", newline).encode())
    calls: list[int] = []
    scope: dict[str, Any] = {
        "ToyTrace": ToyTrace,
        "Recorder": Recorder,
        "noisy": lambda: calls.append(1),
        "noisy_decorator": lambda f: (calls.append(1), f)[1],
    }
    exec(compile(path.read_bytes(), str(path), "exec"), scope)
    assert isinstance(scope["y"], list)
    assert len(calls) == ("noisy" in SHAPES[shape])
