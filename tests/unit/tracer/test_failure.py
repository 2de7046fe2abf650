"""Exceptions of a block come home as themselves, with tracebacks that look native."""

from __future__ import annotations

import gc
import linecache
import os
import sys
import textwrap
import traceback
import weakref
from collections.abc import Callable

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from invivo.envoy import errors
from invivo.tracer.failure import Failure, describe, rebuild
from invivo.tracer.results import to_bytes
from invivo.tracer.tracebacks import FrameLine, make_traceback


class Plain(Exception):
    pass


class Custom(Exception):
    def __init__(self, code: int, *, extra: object) -> None:
        super().__init__(f"code {code}")
        self.code = code
        self.extra = extra


class Refusing(Exception):
    def __init__(self) -> None:
        super().__init__("fixed text")


class Native(OSError):
    def __init__(self, path: str) -> None:
        super().__init__(2, "no such thing", path)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def caught(function: Callable[[], object]) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def travel(error: BaseException, **at: object) -> BaseException:
    data = msgspec.msgpack.encode(describe(error, **at))  # type: ignore[arg-type]
    return rebuild(msgspec.msgpack.decode(data, type=Failure))


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def thrower(error: BaseException) -> Callable[[], object]:
    def throw() -> object:
        raise error

    return throw


def divide(x: dict[str, int]) -> float:
    return x["a"] + (1 / 0)


def chain() -> None:
    try:
        divide({"a": 1})
    except ZeroDivisionError as error:
        raise Plain("second") from error


def context() -> None:
    try:
        divide({"a": 1})
    except ZeroDivisionError:
        raise Plain("second")  # noqa: B904 - the context is what is tested


def recurse() -> None:
    recurse()


def group() -> None:
    raise ExceptionGroup("several", [ValueError(1), ExceptionGroup("inner", [KeyError("x")])])


@pytest.mark.parametrize(
    "function",
    [
        lambda: divide({"a": 1}),
        chain,
        context,
        group,
        lambda: os.stat("/does/not/exist"),
        lambda: b"\xff".decode(),
        lambda: compile("a b", "file.py", "exec"),
        lambda: int("x"),
        lambda: {}["missing"],
        lambda: torch.ones(2) @ torch.ones(3),
        lambda: (_ for _ in ()).throw(StopAsyncIteration),
        lambda: not_defined_anywhere,  # type: ignore[name-defined]  # noqa: F821
        lambda: [].no_such_method(1),  # type: ignore[attr-defined]
    ],
)
def test_looks_the_same(function: Callable[[], object]) -> None:
    error = caught(function)
    back = travel(error)
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert shown(back) == shown(error)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the traceback module has hints since Python 3.12")
def test_hints_become_notes_where_objects_are_gone() -> None:
    error = caught(lambda: [].appendd)  # type: ignore[attr-defined]
    back = travel(error)
    assert "Did you mean: 'append'?" in shown(error)
    assert "Did you mean: 'append'?" in shown(back)


def test_frames_show_file_line_function_and_source() -> None:
    back = travel(caught(lambda: divide({"a": 1})))
    entry = traceback.extract_tb(back.__traceback__)[-1]
    assert entry.filename == __file__
    assert entry.name == "divide"
    assert entry.lineno == divide.__code__.co_firstlineno + 1
    assert entry.line == 'return x["a"] + (1 / 0)'
    assert "~~^~~" in shown(back)
    frame = back.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    assert frame is not None
    assert frame.tb_frame.f_code.co_firstlineno == divide.__code__.co_firstlineno


def test_source_that_only_the_engine_has() -> None:
    name = "/nowhere/engine_only.py"
    source = "def f():\n    x = 1\n    return x.boom\n"
    scope: dict[str, Callable[[], object]] = {}
    exec(compile(source, name, "exec"), scope)
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    failure = describe(caught(scope["f"]))
    del linecache.cache[name]
    text = shown(rebuild(failure))
    assert "    return x.boom\n           ^^^^^^" in text


def test_a_notebook_cell_shows_the_cell() -> None:
    name = "<ipython-input-7>"
    source = textwrap.dedent("""
        def cell():
            raise ValueError("ä" + "ö")
        """)
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope: dict[str, Callable[[], object]] = {}
    exec(compile(source, name, "exec"), scope)
    error = caught(scope["cell"])
    assert shown(travel(error)) == shown(error)


@pytest.mark.parametrize(("function", "args"), [(group, None), (lambda: sys.exit(3), (3,)), (recurse, None)])
def test_special_kinds(function: Callable[[], object], args: tuple[object, ...] | None) -> None:
    error = caught(function)
    back = travel(error)
    assert type(back) is type(error)
    assert str(back) == str(error)
    if args is not None:
        assert back.args == args


def test_keyboard_interrupt_stays_one() -> None:
    assert type(travel(KeyboardInterrupt())) is KeyboardInterrupt
    assert travel(SystemExit(4)).code == 4  # type: ignore[attr-defined]


def test_exit_codes_and_native_fields_are_set() -> None:
    back = travel(caught(lambda: os.stat("/does/not/exist")))
    assert isinstance(back, FileNotFoundError)
    assert back.filename == "/does/not/exist"
    assert back.errno == 2


def test_custom_constructors_are_not_called_with_wrong_arguments() -> None:
    back = travel(Custom(3, extra=torch.ones(1)))
    assert type(back) is Custom
    assert str(back) == "code 3"
    assert back.args == ("code 3",)
    assert back.code == 3
    assert not hasattr(back, "extra")
    assert str(travel(Refusing())) == "fixed text"
    native = travel(Native("/p"))
    assert type(native) is Native
    assert native.filename == "/p"


def test_a_class_made_in_a_function_is_found() -> None:
    class Local(ValueError):
        pass

    assert type(travel(Local("a", 1))) is Local


def test_unknown_types_become_block_errors() -> None:
    failure = msgspec.structs.replace(describe(caught(thrower(Plain("text")))), module="gone", qualname="Lost")
    back = rebuild(failure)
    assert type(back) is errors.BlockError
    assert str(back) == "gone.Lost: text"
    assert "in throw" in shown(back)


@pytest.mark.parametrize("name", ["dict", "print", "__import__", "object", "Nope", "ValueError.mro", ""])
def test_only_exceptions_are_made(name: str) -> None:
    failure = Failure(module="builtins", qualname=name, args=to_bytes({"args": ("x",), "state": {}}), message="m")
    assert type(rebuild(failure)) is errors.BlockError


def test_nothing_is_imported() -> None:
    sys.modules.pop("antigravity", None)
    rebuild(Failure(module="antigravity", qualname="Error", args=b"", message=""))
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    "kind", [value for value in vars(errors).values() if isinstance(value, type) and value is not errors.InvivoWarning]
)
def test_own_exceptions_stay_themselves(kind: type[Exception]) -> None:
    back = travel(kind("what happened"))
    assert type(back) is kind
    assert str(back) == str(kind("what happened"))


def test_notes_and_the_place_in_the_model() -> None:
    error = Plain("x")
    error.add_note("mine")
    back = travel(error, port="model.layers.5.output", step=2)
    assert back.__notes__ == ["mine", "at port model.layers.5.output, step 2"]
    assert travel(Plain(), step=1).__notes__ == ["at step 1"]


def test_own_frames_are_left_out() -> None:
    space = {"__name__": "invivo.made_up"}
    exec("def enter(f):\n    f()\n\ndef refuse(error):\n    raise error\n", space)
    enter, refuse = space["enter"], space["refuse"]

    def user() -> None:
        refuse(errors.PortPassedError("passed"))  # type: ignore[operator]

    def user_library() -> None:
        refuse(TypeError("inside"))  # type: ignore[operator]

    def names(error: BaseException) -> list[str]:
        return [line.name for line in describe(error).frames]

    def keep_enter(function: Callable[[], object]) -> BaseException:
        error = caught(lambda: enter(function))  # type: ignore[operator]
        assert error.__traceback__ is not None
        assert error.__traceback__.tb_next is not None
        return error.with_traceback(error.__traceback__.tb_next.tb_next)

    assert names(keep_enter(user)) == ["user"]
    assert names(keep_enter(user_library)) == ["user_library", "refuse"]
    assert names(keep_enter(thrower(errors.InternalError("bug")))) == ["throw"]


def test_arguments_that_cannot_travel_become_text() -> None:
    back = travel(Plain(torch.ones(1), {"a": [1, (2,)]}, object))
    assert back.args == ("tensor([1.])", {"a": [1, (2,)]}, "<class 'object'>")


def test_describe_never_raises() -> None:
    assert "could not be made" in describe(Unprintable()).message
    strange = travel(Plain("\ud800" * 3))
    assert "ud800" in str(strange)
    assert len(describe(Plain("x" * 10**6)).message) < 30_000


def test_a_loop_of_causes_ends() -> None:
    first, second = Plain("1"), Plain("2")
    first.__cause__, second.__cause__ = second, first
    back = travel(first)
    assert str(back.__cause__) == "2"
    assert back.__cause__ is not None
    assert back.__cause__.__cause__ is None


def test_rebuilt_frames_hold_nothing() -> None:
    class Marker:
        pass

    marker = Marker()
    alive = weakref.ref(marker)
    failure = describe(caught(chain))

    def caller(_: Marker) -> BaseException:
        return rebuild(failure)

    gc.disable()
    try:
        back = caller(marker)
        gone = weakref.ref(back)
        del marker
        assert alive() is None
        del back
        assert gone() is None
    finally:
        gc.enable()


def test_trace_functions_do_not_see_the_rebuilt_frames() -> None:
    failure = describe(caught(chain))
    seen = []
    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: seen.append(frame.f_code.co_filename))
    try:
        rebuild(failure)
    finally:
        sys.settrace(before)
    assert __file__ not in seen


lines = st.builds(
    FrameLine,
    filename=st.text(max_size=8),
    lineno=st.integers(-(2**63), 2**63 - 1),
    name=st.text(max_size=8),
    line=st.text(max_size=8),
    end_lineno=st.none() | st.integers(-(2**63), 2**63 - 1),
    colno=st.none() | st.integers(-(2**63), 2**63 - 1),
    end_colno=st.none() | st.integers(-(2**63), 2**63 - 1),
    first=st.none() | st.integers(-(2**63), 2**63 - 1),
)
small = st.builds(
    FrameLine,
    filename=st.text(max_size=8),
    lineno=st.integers(-2, 50),
    name=st.text(max_size=8),
    line=st.text(max_size=8),
    end_lineno=st.none() | st.integers(-2, 50),
    colno=st.none() | st.integers(-2, 50),
    end_colno=st.none() | st.integers(-2, 50),
    first=st.none() | st.integers(-2, 50),
)


@settings(deadline=None)
@given(st.lists(lines | small, max_size=4), st.text(max_size=20), st.text(max_size=20), st.binary(max_size=30))
def test_hostile_failures_are_rebuilt_as_errors(
    frames: list[FrameLine], module: str, qualname: str, args: bytes
) -> None:
    back = rebuild(Failure(module=module, qualname=qualname, args=args, message="m", frames=tuple(frames)))
    assert isinstance(back, BaseException)
    traceback.format_exception(back)


@pytest.mark.parametrize("name", ["/dev/zero", "/", "a\0b", ""])
def test_source_is_looked_for_in_files_only(name: str) -> None:
    made = make_traceback([FrameLine(name, 3, "f", "text", 3, 0, 4)])
    assert len(traceback.format_tb(made)) == 1


def test_no_frames_no_traceback() -> None:
    assert make_traceback([]) is None
