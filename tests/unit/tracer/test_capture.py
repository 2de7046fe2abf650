"""Finding the source and the values; what is refused, and what the messages say."""

from __future__ import annotations

import contextlib
import linecache
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from invivo.envoy.errors import CaptureError
from invivo.tracer import capture, frames
from support.toy_trace import ToyTrace


class Look(ToyTrace):
    """Captures and skips, but runs nothing."""

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        return self._skipper.skipped(error) is not None


def run(path: Path, source: str, **given: object) -> dict[str, Any]:
    path.write_text(source)
    scope: dict[str, Any] = {"ToyTrace": ToyTrace, "Look": Look, **given}
    exec(compile(source, str(path), "exec"), scope)
    return scope


def test_site() -> None:
    big = [0] * 10
    small = 2
    with Look() as t:
        big = [small]
        total = [big, len(big)]
    site = t.site
    line = sys._getframe().f_code.co_firstlineno + 3
    assert site.block.source == "    with Look() as t:\n        big = [small]\n        total = [big, len(big)]\n"
    assert site.block.filename == __file__
    assert (site.block.lineno, site.block.name, site.block.scope) == (line, "test_site", "function")
    assert (site.block.item, site.block.tracer, site.block.parameters) == (0, "t", ("small",))
    assert (site.needs, site.stores, site.tracer) == (("small", "len"), ("big", "total"), "t")
    assert site.tree.lineno == line
    assert t.captured == ({"small": 2}, {})
    assert big == [0] * 10


def test_a_stale_tracer_of_the_last_round_is_not_captured() -> None:
    for _ in range(2):
        with Look() as t:
            t.stop()  # type: ignore[attr-defined]
        assert t.captured == ({}, {})


def test_unbound_names_are_left_out() -> None:
    with Look() as t:
        print(later, nowhere)  # type: ignore[name-defined]  # noqa: F821
    later = 1
    assert t.captured == ({}, {})
    assert later


def test_a_local_never_falls_back_to_a_global(tmp_path: Path) -> None:
    scope = run(
        tmp_path / "a.py",
        "x = 'global'\ndef f():\n    with Look() as t:\n        print(x)\n    x = 1\n    return t\nt = f()\n",
    )
    assert scope["t"].captured == ({}, {})


def test_a_shadowed_builtin_is_captured(tmp_path: Path) -> None:
    scope = run(tmp_path / "a.py", "len = str\nwith Look() as t:\n    len(sum)\n")
    assert scope["t"].captured == ({"len": str}, {})


def test_comprehension_variables_do_not_hide_globals(tmp_path: Path) -> None:
    source = "x = 1\ndef f():\n    [x for x in ()]\n    with Look() as t:\n        print(x)\n    return t\nt = f()\n"
    assert run(tmp_path / "a.py", source)["t"].captured == ({}, {"x": 1})


def test_class_body_in_a_function() -> None:
    around = 1

    class Body:
        own = 2
        with Look() as t:
            print(around, own, Look)

    assert Body.t.captured.locals == {"own": 2}
    assert Body.t.captured.globals == {"around": 1, "Look": Look}
    assert Body.t.site.block.scope == "class"


def test_sites_are_cached_per_instruction() -> None:
    def one() -> tuple[Any, Any]:
        with Look() as a:
            pass
        with Look() as b:
            pass
        return a.site, b.site

    first, second = one(), one()
    assert first[0] is second[0]
    assert first[1] is second[1]
    assert first[0] is not first[1]


def test_the_cache_is_bounded_and_follows_the_code_object(tmp_path: Path) -> None:
    for i in range(3):
        source = f"with Look() as t:\n    value = {i}\n"
        t = run(tmp_path / f"a{i}.py", source)["t"]
        assert t.site.block.source == source
    assert len(capture._sites) <= capture._CACHE_SIZE


REFUSED = {
    "return": ("def f():\n    with ToyTrace():\n        x = 1\n        return x\nf()\n", 4, "`return`"),
    "yield": ("def f():\n    with ToyTrace():\n        yield 1\nlist(f())\n", 3, "`yield`"),
    "yield from": ("def f():\n    with ToyTrace():\n        yield from ()\nlist(f())\n", 3, "`yield`"),
    "await": (
        "async def f():\n    with ToyTrace():\n        x = [await g()]\nf().send(None)\n", 3, "`await`",
    ),
    "async with": (
        "async def f():\n    with ToyTrace():\n        async with g(): pass\nf().send(None)\n", 3, "`async with`",
    ),
    "async for": (
        "async def f():\n    with ToyTrace():\n        async for x in g(): pass\nf().send(None)\n", 3, "`async for`",
    ),
    "async comprehension": (
        "async def f():\n    with ToyTrace():\n        y = [x async for x in g()]\nf().send(None)\n",
        3, "an asynchronous comprehension",
    ),
    "break": ("for i in (1,):\n    with ToyTrace():\n        if i: break\n", 3, "`break` of a loop outside"),
    "continue": ("for i in (1,):\n    with ToyTrace():\n        if i:\n            continue\n", 4, "`continue`"),
    "break in the else of a loop": (
        "for i in (1,):\n    with ToyTrace():\n        for j in (1,): pass\n        else: break\n", 4, "`break`",
    ),
    "import *": ("with ToyTrace():\n    from os import *\n", 2, "`import *`"),
    "super": (
        "class A:\n    def f(self):\n        with ToyTrace():\n            super().f()\nA().f()\n", 4, "`super()`",
    ),
    "two traces": ("m = ToyTrace()\nwith m.trace('a') as a, m.trace('b') as b:\n    pass\n", 2, "a second trace"),
    "unpacked as": ("with ToyTrace() as (a, b):\n    pass\n", 1, "`as` with several names"),
    "return in a later item": ("def f():\n    with ToyTrace(), (yield):\n        pass\nlist(f())\n", 2, "`yield`"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    source, line, what = REFUSED[case]
    path = tmp_path / "refused.py"
    with pytest.raises(CaptureError) as caught:
        run(path, source)
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}: {what}")
    assert "Instead: " in message
    assert sys.gettrace() is not frames.Skipper._trace


FINE = {
    "return in a function": "with Look() as t:\n    def f(): return 1\n    g = lambda: (yield)\n",
    "async function": (
        "with Look() as t:\n    async def f():\n        async with a: await b\n        return [x async for x in y]\n"
    ),
    "loops of its own": "with Look() as t:\n    for i in r:\n        if i: break\n        while i: continue\n",
    "super in a class": "with Look() as t:\n    class A:\n        def f(self): super().f()\n",
    "super with arguments": "with Look() as t:\n    super(A, a).f()\n",
}


@pytest.mark.parametrize("case", FINE)
def test_not_refused(case: str, tmp_path: Path) -> None:
    assert run(tmp_path / "fine.py", FINE[case])["t"].site


def test_an_attribute_after_as_and_a_body_that_starts_with_try(tmp_path: Path) -> None:
    source = "with ToyTrace() as box.t:\n    try: pass\n    finally: pass\n"
    with pytest.raises(CaptureError, match=r"a\.py:1: the body cannot be skipped when it starts with `try`"):
        run(tmp_path / "a.py", source, box=lambda: None)


def test_no_source() -> None:
    with pytest.raises(CaptureError) as caught:
        exec("with ToyTrace():\n    y = 1\n", {"ToyTrace": ToyTrace})
    assert str(caught.value).startswith("<string>:1: the source of the body cannot be had")
    assert "linecache.cache[name]" in str(caught.value)


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="3.13 keeps the source of -c")
def test_no_source_of_a_command_line() -> None:
    path = [entry for entry in sys.path if entry]
    code = f"import sys; sys.path[:0] = {path!r}\nfrom support.toy_trace import ToyTrace\nwith ToyTrace(): y = 1"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "CaptureError: <string>:3: the source of the body cannot be had" in done.stderr


def test_entered_by_hand() -> None:
    trace = ToyTrace()
    with pytest.raises(CaptureError, match="without a `with` statement"):
        trace.__enter__()
    with contextlib.ExitStack() as stack, pytest.raises(CaptureError, match="ExitStack"):
        stack.enter_context(ToyTrace())


EDITS = {
    "a line was put in": "\nwith Look() as t:\n    value = 1\n",
    "the body was edited": "with Look() as t:\n    wholly, other = 1\n    other = 2\n",
    "a name in the body was changed": "with Look() as t:\n    valve = 1\n",
    "the with is gone": "value = 1\n",
    "it does not parse": "with Look( as t:\n",
    "it is empty": "",
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_file_changed_since_its_import(edit: str, tmp_path: Path) -> None:
    path = tmp_path / "edited.py"
    code = compile("with Look() as t:\n    value = 1\n", str(path), "exec")
    path.write_text(EDITS[edit])
    linecache.checkcache(str(path))
    with pytest.raises(CaptureError, match=r"edited after it was imported|cannot be had"):
        exec(code, {"Look": Look})


def test_a_file_that_linecache_knew_before_an_edit_was_imported(tmp_path: Path) -> None:
    path = tmp_path / "edited.py"
    path.write_text("with Look() as t: pass\n")
    assert linecache.getlines(str(path))
    scope = run(path, "x = 1\n\n\nwith Look() as t:\n    y = x\n")
    assert scope["t"].captured.locals == {"x": 1}


@pytest.mark.parametrize("flag", ["-Xno_debug_ranges", "-O", "-OO"])
def test_interpreter_flags(flag: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    path = [entry for entry in sys.path if entry]
    script.write_text(
        f"import sys; sys.path[:0] = {path!r}\nfrom support.toy_trace import ToyTrace\n"
        "def f(x):\n    with ToyTrace() as t:\n        assert x\n        y = [x].save()\n    return y\nprint(f(1))\n"
    )
    done = subprocess.run([sys.executable, flag, str(script)], capture_output=True, text=True, check=False)
    assert done.stdout == "[1]\n", done.stderr


def test_capture_is_fast_in_a_long_file(tmp_path: Path) -> None:
    """A warm capture does not depend on the length of the file: well under 0.2 ms for all of it."""
    filler = "".join(f"def g{i}(a, b):\n    return a + b * {i}\n\n" for i in range(1700))
    source = filler + (
        "def f(a, b):\n    with Look() as t:\n        c = [a, b]\n        d = [c, a]\n"
        "        e = (c, d)\n    return t\n"
        "def many(n):\n    for _ in range(n): f(1, 2)\n"
    )
    scope = run(tmp_path / "long.py", source)
    scope["many"](20)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        scope["many"](100)
        best = min(best, (time.perf_counter() - started) / 100)
    assert best < 0.0002
