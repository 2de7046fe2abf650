"""Skipping leaves nothing behind: trace functions, coverage, debuggers and the collector see a normal `with`."""

from __future__ import annotations

import bdb
import gc
import json
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from invivo.tracer import capture, frames
from support.toy_trace import ToyTrace

TESTS = Path(__file__).parents[2]


def python(script: Path, *before: str, text: str | None = None) -> str:
    """Runs a script with the tests' import paths; returns what it prints."""
    path = [str(TESTS), *(entry for entry in sys.path if entry)]
    runner = f"import sys; sys.path[:0] = {path!r}; import runpy; sys.argv = sys.argv[1:]; "
    runner += (
        "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
        if before
        else ("runpy.run_path(sys.argv[0], run_name='__main__')")
    )
    done = subprocess.run(
        [sys.executable, "-c", runner, *before, str(script)],
        input=text, capture_output=True, text=True, timeout=120, check=False, cwd=script.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write(folder: Path, source: str) -> Path:
    path = folder / "script.py"
    path.write_text("from support.toy_trace import ToyTrace\n" + textwrap.dedent(source))
    return path


def test_module_top_level(tmp_path: Path) -> None:
    script = write(tmp_path, "x = [1]\nwith ToyTrace() as t:\n    y = [x].save()\nprint(y, type(t).__name__)\n")
    assert python(script) == "[[1]] ToyTrace\n"


def test_trace_functions_are_put_back() -> None:
    seen: list[tuple[str, int]] = []

    def tracing(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code is body.__code__:
            seen.append((event, frame.f_lineno - body.__code__.co_firstlineno))
        return tracing if frame.f_code is body.__code__ else None

    def body() -> None:
        x = 1
        with ToyTrace():
            x = [2].save()  # type: ignore[attr-defined]
        x = 3
        frame = sys._getframe()
        assert frame.f_trace is tracing
        assert not frame.f_trace_opcodes
        assert x

    before = sys.gettrace()
    sys.settrace(tracing)
    try:
        body()
        assert sys.gettrace() is tracing
    finally:
        sys.settrace(before)
    lines = [line for event, line in seen if event == "line"]
    assert lines[:2] == [1, 2]
    assert lines[-4:] == [4, 5, 6, 7, 8][-4:]
    assert seen[-1] == ("return", 8)


def test_without_a_trace_function_none_is_left() -> None:
    before = sys.gettrace()
    sys.settrace(None)
    try:
        with ToyTrace():
            pass
        assert sys.gettrace() is None
        assert sys._getframe().f_trace is None
        assert not sys._getframe().f_trace_opcodes
    finally:
        sys.settrace(before)


def test_another_exception_is_not_swallowed() -> None:
    interrupt = KeyboardInterrupt()

    class Interrupted(ToyTrace):
        def __exit__(self, *_: object) -> bool:
            skipped: bool = super().__exit__(KeyboardInterrupt, interrupt, None)
            assert not skipped
            raise interrupt

    before = sys.gettrace()
    with pytest.raises(KeyboardInterrupt):
        with Interrupted():
            y = 1
    assert sys.gettrace() is before


def test_other_threads_are_not_touched() -> None:
    started, go = threading.Event(), threading.Event()
    done: list[int] = []

    def work() -> None:
        started.set()
        done.extend(i for i in range(20_000))
        go.wait()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    for _ in range(50):
        with ToyTrace():
            y = [1].save()  # type: ignore[attr-defined]
    go.set()
    thread.join()
    assert len(done) == 20_000
    assert y == [1]


def test_many_threads_in_the_same_with() -> None:
    results: dict[int, Any] = {}

    def work(i: int) -> None:
        for _ in range(100):
            with ToyTrace():
                y = [i].save()  # type: ignore[attr-defined]
            results[i] = y

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: [i] for i in range(4)}


def test_a_recursive_caller() -> None:
    def depth(n: int) -> Any:
        below = depth(n - 1) if n else []
        with ToyTrace():
            y = [n, *below].save()  # type: ignore[attr-defined]
        return y  # noqa: RET504

    assert depth(4) == [4, 3, 2, 1, 0]


class _Big:
    pass


def test_nothing_stays_alive() -> None:
    def use() -> weakref.ref[_Big]:
        big = _Big()
        with ToyTrace():
            y = [type(big).__name__].save()  # type: ignore[attr-defined]
        assert y == ["_Big"]
        return weakref.ref(big)

    use()
    gc.collect()
    gc.disable()
    try:
        assert use()() is None, "a cycle keeps the caller's frame"
    finally:
        gc.enable()


def test_a_deleted_local_is_freed_at_once() -> None:
    big = _Big()
    alive = weakref.ref(big)
    with ToyTrace() as t:
        y = [type(big).__name__].save()  # type: ignore[attr-defined]
    t.captured.locals.clear()
    t.scope.clear()
    del big
    assert alive() is None, "the snapshot behind f_locals keeps it"
    assert y == ["_Big"]


def test_a_snapshot_that_the_caller_holds_is_left_alone() -> None:
    kept = 5
    mine = locals()
    with ToyTrace():
        y = [kept].save()  # type: ignore[attr-defined]
    assert mine["kept"] == 5
    assert y == [5]


def test_exceptions_before_the_body_are_not_swallowed() -> None:
    class Broken(ToyTrace):
        def __enter__(self) -> ToyTrace:
            super_enter = sys._getframe(1)
            assert super_enter is not None
            raise KeyError("enter")

    with pytest.raises(KeyError, match="enter"), Broken():
        pass


def test_bind_into_a_function_and_its_cells() -> None:
    def function() -> tuple[Any, Any]:
        plain, celled = 1, 1
        frames.bind(sys._getframe(), {"plain": 2, "celled": 3}, ())
        return plain, (lambda: celled)()

    assert function() == (2, 3)


def test_bind_leaves_other_names_alone_and_global_ones_to_the_globals() -> None:
    def function() -> tuple[Any, Any]:
        first, second = 1, 1
        frames.bind(sys._getframe(), {"first": 2, "_bound_by_a_test": 4}, {"_bound_by_a_test"})
        second += 1
        return first, second

    assert function() == (2, 2)
    assert globals().pop("_bound_by_a_test") == 4


COVERED = """
def f(x):
    before = 1
    if x:
        with ToyTrace() as t:
            inside = [x].save()
        after = 1
    else:
        after = 2
    for _ in range(2):
        with ToyTrace(): pass
        again = after
    with ToyTrace() as t: one = [x].save()
    if after == 1:
        last = 1
    return one

class Caller:
    def call(self):
        result = f([1])
        return result

Caller().call()
done = 1
with ToyTrace():
    top = [1].save()
end = 1
"""


@pytest.mark.parametrize("branch", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_coverage_goes_on(tmp_path: Path, branch: bool, whole: bool) -> None:
    """Lines after the block are recorded, also in the callers; with invivo itself measured or not."""
    script = write(tmp_path, COVERED)
    include = [] if whole else [f"--include={script}"]
    python_args = ["coverage", "run", *(["--branch"] if branch else []), *include]
    python(script, *python_args)
    report = tmp_path / "out.json"
    subprocess.run(
        [sys.executable, "-m", "coverage", "json", "-q", "-o", str(report), f"--include={script}"],
        cwd=tmp_path, check=True, capture_output=True,
    )  # fmt: skip
    (data,) = json.loads(report.read_text())["files"].values()
    lines = script.read_text().splitlines()
    missing = {lines[line - 1].strip() for line in data["missing_lines"]}
    # The body counts as run or not; everything else that ran is recorded.
    assert missing <= {"after = 2", "inside = [x].save()", "top = [1].save()"}, missing
    assert "after = 2" in missing
    if branch:
        where = {text.strip(): number for number, text in enumerate(lines, 1)}
        arcs = {tuple(arc) for arc in data["executed_branches"]}
        assert (where["if after == 1:"], where["last = 1"]) in arcs
        assert (where["if x:"], where["with ToyTrace() as t:"]) in arcs


class _Stepper(bdb.Bdb):
    """Steps over every line of one function."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.lines: list[int] = []
        self.problems: list[str] = []

    def user_line(self, frame: FrameType) -> None:
        if frame.f_code.co_name == self.name:
            self.lines.append(frame.f_lineno - frame.f_code.co_firstlineno)
            self.set_next(frame)
        else:
            self.set_step()

    def user_exception(self, frame: FrameType, exc_info: Any) -> None:
        self.problems.append(exc_info[0].__name__)


def test_a_debugger_goes_on_stepping() -> None:
    def stepped() -> Any:
        a = 1
        with ToyTrace() as t:
            y = [a].save()  # type: ignore[attr-defined]
        b = [t, y]
        return b[1]

    debugger = _Stepper("stepped")
    before = sys.gettrace()
    try:
        result = debugger.runcall(stepped)
    finally:
        sys.settrace(before)
    assert result == [1]
    assert debugger.problems == []
    assert debugger.lines[:2] == [1, 2]
    assert debugger.lines[-2:] == [4, 5]


def test_pdb_in_a_process(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        def f():
            a = 1
            with ToyTrace() as t:
                y = [a].save()
            b = y
            c = b
            return c
        print("result", f())
        """,
    )
    commands = "break f\ncontinue\nnext\nnext\nnext\nnext\nnext\np ('saw', b)\nbreak 9\ncontinue\ncontinue\nquit\n"
    out = python(script, "pdb", text=commands)
    assert "-> b = y" in out
    assert "('saw', [1])" in out
    assert "result [1]" in out


def test_notebook_cells() -> None:
    interactive = pytest.importorskip("IPython.core.interactiveshell")
    shell = interactive.InteractiveShell.instance()
    try:
        shell.user_ns["ToyTrace"] = ToyTrace
        for cell in (
            "x = [1]\nwith ToyTrace() as t:\n    y = [x].save()\nz = y\n",
            "def f(a):\n    with ToyTrace() as t:\n        b = [a, x].save()\n    return b\nw = f(2)\n",
            "import asyncio\nawait asyncio.sleep(0)\nwith ToyTrace(): v = [x].save()\n",
        ):
            shell.run_cell(cell).raise_error()
        assert shell.user_ns["z"] == [[1]]
        assert shell.user_ns["w"] == [2, [1]]
        assert shell.user_ns["v"] == [[1]]
    finally:
        interactive.InteractiveShell.clear_instance()


def test_skipping_is_for_one_use() -> None:
    class Again(ToyTrace):
        def __exit__(self, *exit_: object) -> bool:
            handled = super().__exit__(*exit_)
            with pytest.raises(AssertionError, match="one use"):
                self._skipper.arm()
            return handled

    with Again():
        y = [1].save()  # type: ignore[attr-defined]
    assert y == [1]
    assert isinstance(capture.Captured({}, {}), tuple)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="no sys.monitoring")
def test_without_a_free_monitoring_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tools are taken: a trace function does it, as on Python 3.11."""
    from invivo.tracer import monitoring

    monkeypatch.setattr(monitoring, "_FREE_IDS", ())

    def function() -> Any:
        a = 1
        with ToyTrace() as t:
            y = [a].save()  # type: ignore[attr-defined]
        return t, y

    before = sys.gettrace()
    assert function()[1] == [1]
    assert sys.gettrace() is before
