"""Running a block from its source: rewrites, scopes, errors, tracebacks."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from invivo.envoy.errors import CaptureError
from invivo.tracer.block import Block, TracerHandle
from invivo.tracer.program import SAVE, compile_block
from support.toy_trace import ToyTrace


def block(source: str, **fields: Any) -> Block:
    given: dict[str, Any] = {
        "source": source, "filename": "user.py", "lineno": 10, "item": 0, "name": "f", "scope": "function",
        "tracer": None, "parameters": (), **fields,
    }  # fmt: skip
    return Block(**given)


def test_programs_are_cached_by_block() -> None:
    assert compile_block(block("with m:\n    x = 1\n")) is compile_block(block("with m:\n    x = 1\n"))
    assert compile_block(block("with m:\n    x = 1\n")) is not compile_block(block("with m:\n    x = 2\n"))


@pytest.mark.parametrize("scope", ["module", "function", "class"])
def test_scopes(scope: str) -> None:
    program = compile_block(block("with m:\n    y = x + z\n", scope=scope, parameters=("x",), name="<module>"))
    assert program.run({"x": 1}, {"z": 2}, {})["y"] == 3
    assert program.run({"x": 2}, {"z": 2}, {})["y"] == 4


@pytest.mark.parametrize("scope", ["module", "function", "class"])
def test_extras_are_hidden_by_variables_and_not_reported(scope: str) -> None:
    program = compile_block(block("with m:\n    y = [a, b]\n    c = 1\n", scope=scope))
    scope_ = program.run({}, {"b": "mine"}, {"a": 1, "b": 2, "c": 3})
    assert scope_["y"] == [1, "mine"]
    assert scope_["c"] == 1
    assert "a" not in scope_
    assert not [name for name in scope_ if name.startswith("__invivo") or name == "__builtins__"]


def test_missing_parameters_fail_where_they_are_read() -> None:
    program = compile_block(block("with m:\n    y = 1\n    x\n", parameters=("x",)))
    with pytest.raises(NameError) as caught:
        program.run({}, {}, {})
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.filename, last.lineno, last.name) == ("user.py", 12, "f")
    assert program.scope_of(caught.value.__traceback__) == {"y": 1}
    assert program.run({"x": 1}, {}, {})["y"] == 1


@pytest.mark.parametrize("scope", ["module", "function", "class"])
def test_save_is_rewritten_in_place(scope: str) -> None:
    calls: list[tuple[Any, bool]] = []

    def save(value: Any, *argument: Any, stream: bool = False, names: tuple[str, ...] = ()) -> Any:
        if argument:
            return value(*argument)
        calls.append((value, stream))
        return value

    source = (
        "with m:\n    a = (1).save()\n    b = [v.save(stream=True) for v in (2,)]\n    c = f'{(3).save()}'\n"
        "    keep = Own().save('path')\n"
    )
    own = type("Own", (), {"save": lambda self, path: path})
    scope_ = compile_block(block(source, scope=scope)).run({}, {"Own": own}, {SAVE: save})
    assert calls == [(1, False), (2, True), (3, False)]
    assert (scope_["a"], scope_["b"], scope_["c"], scope_["keep"]) == (1, [2], "3", "path")


class _Module:
    """Has an output that can be assigned to, as an Envoy has."""

    def __init__(self) -> None:
        self.output: list[Any] = [[1], [2], [3]]


@pytest.mark.parametrize("scope", ["module", "function", "class"])
def test_items_of_outputs_are_those_of_any_object(scope: str) -> None:
    source = (
        "with m:\n"
        "    x = X()\n"
        "    a = [x.output[0], x.output[-1], x.output[True], x.output[0:2], [i.output[2] for i in (x,)]]\n"
        "    x.output[1] = 5\n"
        "    x.output[1] += 1\n"
        "    x.output[0][0] += 7\n"
        "    del x.output[2]\n"
        "    b = (lambda y=x: y.output[0])(), x.output\n"
        "    def f(y=x):\n"
        "        return y.output[1]\n"
        "    c = f()\n"
    )
    scope_ = compile_block(block(source, scope=scope)).run({}, {"X": _Module}, {})
    assert scope_["a"] == [[8], [3], [2], [[8], [2]], [[3]]]
    assert scope_["b"] == ([8], [[8], 6])
    assert scope_["c"] == 6
    assert not [name for name in scope_ if name.startswith("__invivo")]


@pytest.mark.parametrize(("read", "error"), [("x.output[7]", IndexError), ("None.output[0]", AttributeError)])
def test_errors_of_items_are_at_the_line_that_reads_them(read: str, error: type[Exception]) -> None:
    program = compile_block(block(f"with m:\n    x = X()\n    {read}\n"))
    with pytest.raises(error) as caught:
        program.run({}, {"X": _Module}, {})
    last = [frame for frame in traceback.extract_tb(caught.value.__traceback__) if frame.filename == "user.py"][-1]
    assert (last.lineno, last.name) == (12, "f")


def test_later_items_wrap_the_body() -> None:
    from support.toy_trace import Recorder

    log: list[str] = []
    source = "with outer, trace as t, Recorder(log, 'a') as a, Recorder(log, 'b'):\n    log.append('body')\n"
    program = compile_block(block(source, item=1, tracer="t"))
    program.run({}, {"Recorder": Recorder, "log": log}, {"t": TracerHandle()})
    assert log == ["+a", "+b", "body", "-b", "-a"]


class _Tracer(TracerHandle):
    iter = {0: (5, 6)}  # noqa: RUF012

    def all(self) -> range:
        return range(2)


@pytest.mark.parametrize("scope", ["module", "function", "class"])
def test_loops_only_for_tracers(scope: str) -> None:
    class Manager:
        def all(self) -> Manager:
            return self

        def __enter__(self) -> str:
            return "entered"

        def __exit__(self, *_: object) -> None: ...

    source = (
        "with m as t:\n    seen = []\n    with t.all(): seen.append(0)\n    with t.iter[0] as s: seen.append(s)\n"
        "    with other.all() as o: seen.append(o)\n    with captured.all() as c: seen.append(c)\n"
    )
    program = compile_block(block(source, scope=scope, tracer="t", parameters=("captured",)))
    scope_ = program.run({"captured": _Tracer()}, {"other": Manager()}, {"t": _Tracer()})
    assert scope_["seen"] == [0, 0, 5, 6, "entered", 0, 1]
    assert scope_["s"] == 6


def test_nested_functions_share_variables_and_globals_are_reported() -> None:
    source = (
        "    with m:\n        n = start\n        def up():\n            nonlocal n\n            global g\n"
        "            n += 1\n            g = n\n        up(); up()\n"
    )
    scope_ = compile_block(block(source, parameters=("start",))).run({"start": 5}, {"g": 0}, {})
    assert (scope_["n"], scope_["g"]) == (7, 7)


def test_traceback_shows_the_callers_file_line_and_function() -> None:
    def work(values: list[int]) -> None:
        with ToyTrace():
            total = 0
            for value in values:
                total += 1 // value

    with pytest.raises(ZeroDivisionError) as caught:
        work([1, 0])
    entries = [e for e in traceback.extract_tb(caught.value.__traceback__) if e.filename == __file__]
    first = work.__code__.co_firstlineno
    assert [(e.name, e.lineno and e.lineno - first) for e in entries][-2:] == [("work", 1), ("work", 4)]
    assert entries[-1].line == "total += 1 // value"
    text = "".join(traceback.format_exception(caught.value))
    assert "total += 1 // value" in text
    assert "~~^^~~~" in text.replace("^^^", "^^") or "^" in text


@pytest.mark.parametrize(
    ("source", "scope", "where"),
    [
        ("x = 1\nwith ToyTrace():\n    y = 1\n\n    x / 0\n", "<module>", 5),
        ("class A:\n    with ToyTrace():\n        1 / 0\n", "A", 3),
        ("class A:\n    def f(self):\n        with ToyTrace(): [1 / 0 for _ in (1,)]\nA().f()\n", "f", 3),
        ("def f():\n    with ToyTrace():\n        def g():\n            return 1 / 0\n        g()\nf()\n", "g", 4),
    ],
)
def test_traceback_in_every_scope(source: str, scope: str, where: int, tmp_path: Path) -> None:
    path = tmp_path / "user.py"
    path.write_text(source)
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile(source, str(path), "exec"), {"ToyTrace": ToyTrace})
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.filename, last.lineno) == (str(path), where)
    if sys.version_info >= (3, 12) or "for _" not in source:
        assert last.name == scope


@pytest.mark.parametrize("scope", ["module", "function", "class"])
def test_scope_of_an_exception(scope: str) -> None:
    program = compile_block(block("with m:\n    y = 1\n    def g(): z = 2; 1 / 0\n    g()\n", scope=scope))
    with pytest.raises(ZeroDivisionError) as caught:
        program.run({}, {}, {SAVE: None, "extra": 1})
    assert program.scope_of(caught.value.__traceback__)["y"] == 1
    assert "z" not in program.scope_of(caught.value.__traceback__)
    assert program.scope_of(None) == {}


def test_lazy_annotations() -> None:
    source = "with m:\n    def g(a: Nowhere): return 1\n    y = g(0)\n"
    assert compile_block(block(source, lazy_annotations=True)).run({}, {}, {})["y"] == 1


def test_source_of_a_newer_python() -> None:
    with pytest.raises(CaptureError, match=r"user\.py:10: the engine's Python cannot read the block"):
        compile_block(block("with m:\n    y := := 1\n"))


def test_runs_of_one_program_do_not_meet() -> None:
    program = compile_block(block("with m:\n    out = []\n    out.append(x)\n", parameters=("x",)))
    assert [program.run({"x": i}, {}, {})["out"] for i in range(3)] == [[0], [1], [2]]


def test_columns_are_those_of_the_file() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        compile_block(block("        with m:\n            y = 1 / 0\n")).run({}, {}, {})
    positions = (
        list(caught.value.__traceback__.tb_next.tb_next.tb_frame.f_code.co_positions())
        if (
            caught.value.__traceback__
            and caught.value.__traceback__.tb_next
            and caught.value.__traceback__.tb_next.tb_next
        )
        else []
    )
    assert (11, 11, 16, 21) in positions
