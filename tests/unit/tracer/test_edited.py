"""A file that is edited after its import, before its trace runs for the first time."""

from __future__ import annotations

import ast
import importlib.util
import linecache
import os
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

import pytest
from _pytest.assertion.rewrite import rewrite_asserts

from invivo.envoy.errors import CaptureError
from invivo.tracer.edited import same_body
from support.toy_trace import ToyTrace

SOURCE = """\
from support.toy_trace import ToyTrace
def plain(function):
    return function
scale = 2
@plain
def phase(x):
    assert x
    with ToyTrace() as t:
        assert x, f"{x} is {len(x) - 2}"
        y = [x[-2] + 2 * scale, "two", {"a": 2.0}, (2, -2)].save()
        z = (lambda v: v + [w for w in x if w < 2][0])(2).save()
    return scale, y, z
"""
X = [1, 5, 7]


class Rewriting(SourceFileLoader):
    def source_to_code(self, data, path, *, _optimize=-1):  # type: ignore[no-untyped-def,override]
        return super().source_to_code(bytes(data).replace(b" + ", b" - "), path)


class AssertionRewritingHook(SourceFileLoader):
    """As pytest's."""

    def source_to_code(self, data, path, *, _optimize=-1):  # type: ignore[no-untyped-def,override]
        tree = ast.parse(data)
        rewrite_asserts(tree, data)
        return compile(tree, path, "exec", dont_inherit=True)


def load(path: Path, loader: type[SourceFileLoader] = SourceFileLoader) -> ModuleType:
    made = loader("job", str(path))
    spec = importlib.util.spec_from_file_location("job", path, loader=made)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    made.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _no_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(SOURCE)
    return path


EDITS = {
    "a number": ("2 * scale", "9 * scale"),
    "an index": ("x[-2]", "x[-1]"),
    "an operator": ("2 * scale", "2 / scale"),
    "a name": ("* scale", "* sc"),
    "a text": ('"two"', '"six"'),
    "a type": ("2.0}", "2  }"),
    "a constant tuple": ("(2, -2)", "(2, -3)"),
    "a function in the body": ("lambda v: v +", "lambda v: v -"),
    "a comprehension": ("if w < 2", "if w > 2"),
    "a longer line": ("* scale", "* scale + 1"),
    "the name after as": ("as t:", "as u:"),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("loader", [SourceFileLoader, AssertionRewritingHook])
def test_an_edit_of_the_body_is_seen(edit: str, loader: type[SourceFileLoader], path: Path) -> None:
    job = load(path, loader)
    old, new = EDITS[edit]
    assert old in SOURCE
    path.write_text(SOURCE.replace(old, new))
    with pytest.raises(CaptureError, match="edited after it was imported") as caught:
        job.phase(X)
    assert str(caught.value).startswith(f"{path}:8: ")


@pytest.mark.parametrize("loader", [SourceFileLoader, AssertionRewritingHook])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ("scale = 2\n", "scale = 3\n"),
        ("return scale, y, z", "print(scale)\n    return None"),
        (".save()\n    return", ".save()  # a comment\n    return"),
    ],
)
def test_what_is_no_edit_of_the_body(old: str, new: str, loader: type[SourceFileLoader], path: Path) -> None:
    job = load(path, loader)
    path.write_text(SOURCE.replace(old, new))
    assert job.phase(X) == (2, [9, "two", {"a": 2.0}, (2, -2)], 3)


def test_code_that_its_importer_has_rewritten_is_not_compared(path: Path) -> None:
    job = load(path, Rewriting)
    assert job.phase(X)[0] == 2


def test_code_that_was_compiled_without_the_imports_of_its_file_is_the_same() -> None:
    """As what is around invokes is. Python 3.11 has instructions of its own for functions of imported modules."""
    text = "import math\ndef run(t):\n    with t:\n        math.sin(2)\n"
    compiled = compile(text.replace("import math", "pass"), "job.py", "exec")
    code = next(value for value in compiled.co_consts if isinstance(value, CodeType))
    (tree,) = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.With))
    lines = tuple(text.splitlines(keepends=True))
    assert same_body(lines, tree, 0, code, SourceFileLoader("job", "job.py"))
    edited = tuple(text.replace("sin", "cos").splitlines(keepends=True))
    assert not same_body(edited, tree, 0, code, SourceFileLoader("job", "job.py"))


def test_a_file_that_is_older_than_the_process_is_not_compared(path: Path) -> None:
    job = load(path)
    path.write_text(SOURCE.replace("2 *", "9 *"))
    os.utime(path, (1e9, 1e9))
    assert job.phase(X)[1][0] == 23


def test_after_a_reload_the_new_text_runs_though_the_old_one_is_known(path: Path) -> None:
    load(path).phase(X)
    path.write_text(SOURCE.replace("2 *", "9 *"))
    assert load(path).phase(X)[1][0] == 23


def test_before_a_reload_the_old_text_runs_if_it_is_known(path: Path) -> None:
    job = load(path)
    assert linecache.getlines(str(path))
    path.write_text(SOURCE.replace("2 *", "9 *"))
    assert job.phase(X)[1][0] == 9


def test_text_that_was_registered_for_exec(tmp_path: Path) -> None:
    name = str(tmp_path / "<cell 2>")
    linecache.cache[name] = (len(SOURCE), None, SOURCE.splitlines(True), name)
    scope: dict[str, object] = {"__loader__": SourceFileLoader("a", "a"), "ToyTrace": ToyTrace}
    exec(compile(SOURCE, name, "exec"), scope)
    assert scope["phase"](X)[0] == 2  # type: ignore[operator]
