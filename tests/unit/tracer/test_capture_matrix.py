"""Every place and every kind of statement: the body is skipped, run once by the program, and its saves are bound."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import linecache
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from support.toy_trace import Recorder, ToyTrace

LIMIT = [3]


def execute(source: str, name: str, **given: object) -> dict[str, Any]:
    """Runs source text that `linecache` knows under a name."""
    text = textwrap.dedent(source)
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    scope: dict[str, Any] = {"ToyTrace": ToyTrace, "__name__": "executed", **given}
    exec(compile(text, name, "exec"), scope)
    return scope


def test_function() -> None:
    a = [1]
    with ToyTrace() as t:
        b = [a, LIMIT, len(a)].save()  # type: ignore[attr-defined]
        unsaved = 1
    assert b == [[1], [3], 1]
    assert set(t.captured.locals) == {"a"}
    assert set(t.captured.globals) == {"LIMIT"}
    with pytest.raises(UnboundLocalError):
        print(unsaved)


def test_method_with_private_names() -> None:
    class Holder:
        __shared = 4

        def __init__(self) -> None:
            self.__value = 3

        def run(self, __argument: int) -> list[int]:  # noqa: PYI063
            with ToyTrace():
                __total = [self.__value + self.__shared + __argument].save()  # type: ignore[attr-defined]
            return __total  # noqa: RET504

    assert Holder().run(5) == [12]


def test_closure_reads_and_nonlocal() -> None:
    count = [0]
    label = "x"

    def inner() -> None:
        nonlocal count
        with ToyTrace():
            count = [count[0] + 1, label].save()  # type: ignore[attr-defined]

    inner()
    inner()
    assert count == [2, "x"]


def test_nonlocal_statement_in_the_block_and_in_nested_functions() -> None:
    total: Any = [1]

    def inner() -> Any:
        with ToyTrace():
            nonlocal total
            steps = 0

            def step() -> None:
                nonlocal steps, total
                steps += 1
                total = [*total, steps]

            step()
            step()
            total.save()
        return total

    assert inner() == [1, 1, 2]
    assert total == [1, 1, 2]


def test_global() -> None:
    scope = execute(
        """
        counter = [1]
        def inside():
            with ToyTrace():
                global counter
                counter = [*counter, 2].save()
        def before():
            global counter
            with ToyTrace():
                counter = [*counter, 3].save()
        def nested():
            with ToyTrace():
                def f():
                    global counter
                    counter = [*counter, 4].save()
                f()
        inside(); before(); nested()
        """,
        "<global>",
    )
    assert scope["counter"] == [1, 2, 3, 4]


def test_async_function() -> None:
    async def run(x: int) -> Any:
        await asyncio.sleep(0)
        with ToyTrace():
            y = [x].save()  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        return y

    async def many() -> list[Any]:
        return await asyncio.gather(*(run(i) for i in range(3)))

    assert asyncio.run(many()) == [[0], [1], [2]]


def test_generator() -> None:
    def produce() -> Iterator[list[int]]:
        for i in range(3):
            with ToyTrace():
                y = [i].save()  # type: ignore[attr-defined]
            yield y

    assert list(produce()) == [[0], [1], [2]]


def test_generator_suspended_inside_another_with() -> None:
    log: list[str] = []

    def produce() -> Iterator[list[int]]:
        with Recorder(log, "a"):
            for i in range(2):
                with ToyTrace():
                    y = [i].save()  # type: ignore[attr-defined]
                yield y

    assert list(produce()) == [[0], [1]]
    assert log == ["+a", "-a"]


def test_loop_with_break_and_comprehension_around() -> None:
    def one(i: int) -> Any:
        with ToyTrace():
            y = [i].save()  # type: ignore[attr-defined]
        return y  # noqa: RET504

    assert [one(i) for i in range(2)] == [[0], [1]]
    results = []
    for i in range(5):
        with ToyTrace():
            y = [i].save()  # type: ignore[attr-defined]
        if i == 2:
            break
        results.append(y)
    assert results == [[0], [1]]


def test_class_body() -> None:
    around = [5]

    class Config:
        base = [1]  # noqa: RUF012
        with ToyTrace() as t:
            both = [base, around, LIMIT].save()  # type: ignore[attr-defined]
            unsaved = 1

    assert Config.both == [[1], [5], [3]]
    assert not hasattr(Config, "unsaved")
    assert set(Config.t.scope) >= {"base", "both", "unsaved"}
    assert "__module__" not in Config.t.scope


def test_exec_with_one_and_with_two_namespaces() -> None:
    text = "x = [1]\nwith ToyTrace() as t:\n    y = [x, z].save()\n"
    linecache.cache["<two>"] = (len(text), None, text.splitlines(keepends=True), "<two>")
    own: dict[str, Any] = {}
    exec(compile(text, "<two>", "exec"), {"ToyTrace": ToyTrace, "z": 2}, own)
    assert own["y"] == [[1], 2]
    assert execute(text, "<one>", z=2)["y"] == [[1], 2]


def test_one_line() -> None:
    scope = execute(
        """
        a = [1]
        with ToyTrace() as t: y = [a].save()
        with ToyTrace() as t: x = a; z = [x, 2].save()
        with ToyTrace(): y.append(z); keep = t
        def f(a):
            with ToyTrace() as t: y = [a].save()
            with ToyTrace() as t: x = a; z = [x, y].save()
            with ToyTrace(): t
            return z
        w = f(1)
        """,
        "<one line>",
    )
    assert (scope["y"], scope["z"], scope["w"]) == ([[1], [[1], 2]], [[1], 2], [1, [1]])
    assert "x" not in scope
    assert "keep" not in scope


def test_two_traces_on_one_line_in_a_loop() -> None:
    scope = execute(
        """
        out = []
        for i in range(2):
            with ToyTrace() as a: x = [i].save()
            with ToyTrace() as b: y = [x, i].save()
            out.append((x, y))
        """,
        "<one-line>",
    )
    assert scope["out"] == [([0], [[0], 0]), ([1], [[1], 1])]


@pytest.mark.parametrize("body", ["pass", "...", "'text'", "\n    pass", "\n    ...", "\n    'text'"])
def test_bodies_that_do_nothing(body: str) -> None:
    scope = execute(f"with ToyTrace() as t: {body}\nafter = 1\n", f"<empty {body!r}>")
    assert scope["after"] == 1


@pytest.mark.parametrize("order", ["rta", "tra", "rat", "art", "atr", "tar"])
@pytest.mark.parametrize("form", ["with {}: body()", "with {}:\n    body()", "with (\n {},\n):\n    body()"])
def test_several_items(order: str, form: str) -> None:
    """Items before the trace run in the caller, those after it in the block; each exactly once, in order."""
    items = {"r": "Recorder(log, 'r')", "a": "Recorder(log, 'a') as who", "t": "ToyTrace() as t"}
    log: list[str] = []
    text = form.format(", ".join(items[key] for key in order))
    execute(text, f"<{order} {form}>", log=log, Recorder=Recorder, body=lambda: log.append("body"))
    before, after = order.split("t")
    # The block runs when our own item is left: the items before it are still open.
    expected = [f"+{key}" for key in before + after]
    expected += ["body", *(f"-{key}" for key in reversed(before + after))]
    assert log == expected


def test_nested_with_statements_and_as_forms() -> None:
    log: list[str] = []

    class Box:
        t: Any = None

    box = Box()
    slots: dict[str, Any] = {}
    with Recorder(log, "outer"), ToyTrace() as box.t, Recorder(log, "inner"):
        y = [1].save()  # type: ignore[attr-defined]
    with ToyTrace() as slots["t"]:
        z = [y].save()  # type: ignore[attr-defined]
    assert log == ["+outer", "+inner", "-inner", "-outer"]
    assert z == [[1]]
    assert isinstance(box.t, ToyTrace)
    assert isinstance(slots["t"], ToyTrace)


def _twice(function: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(function)
    def both() -> Any:
        return function(), function()

    return both


def test_decorators() -> None:
    @_twice
    @functools.lru_cache
    def decorated() -> Any:
        with ToyTrace():

            @_twice
            def inner() -> int:
                return 1

            y = [inner()].save()  # type: ignore[attr-defined]
        return y  # noqa: RET504

    assert decorated() == ([(1, 1)], [(1, 1)])


def test_statements() -> None:
    """f-strings, walrus, comprehensions, lambdas, match, try, star-unpacking, loops, classes, del, assert, imports."""
    data = {"kind": "pair", "items": (1, 2, 3)}
    n = 2
    with ToyTrace() as t:
        text = f"{n:>{n + 1}}|{data['kind']!r}|{[v * n for v in data['items']]}"  # type: ignore[attr-defined]
        if (m := n * 2) > 3:
            m += 1
        squares = [q for v in range(m) if (q := v * n) > 2]
        scaled = sorted(data["items"], key=lambda v: -v * n)  # type: ignore[call-overload]
        match data:
            case {"kind": "pair", "items": (first, *rest)}:
                matched = (first, rest)
            case _:
                matched = None
        log = []
        try:
            _ = 1 / (n - 2)
        except ZeroDivisionError as problem:
            log.append(str(problem))
        else:
            log.append("else")
        finally:
            log.append("finally")
        head, *middle, last = [*range(3), n]

        class Inner:
            size = n

            def double(self) -> int:
                return self.size * n

        import math as maths
        from os import path

        while True:
            n -= 1
            if n < -1:
                break
        else:
            log.append("never")
        total = sum(Inner().double() for _ in range(2))
        extra = {**data, "n": n}
        del data
        assert n == -2, "counted down"
        out = [text, m, squares, scaled, matched, log, head, middle, last, total, extra["n"], maths.pi > 3]
        out.append(path.basename("a/b"))
        out.save()  # type: ignore[attr-defined]
    assert out == [
        "  2|'pair'|[2, 4, 6]", 5, [4, 6, 8], [3, 2, 1], (1, [2, 3]), ["division by zero", "finally"],
        0, [1, 2], 2, 0 - 8 - 8 + 16 - 4 - 4 + 0 if total_is_late(t) else 8, -2, True, "b",
    ]  # fmt: skip
    assert set(t.captured.locals) == {"n", "data"}


def total_is_late(t: ToyTrace) -> bool:
    """`n` is -2 by the time that `Inner().double()` runs, but `size` was taken when it was 2: 2 * (2 * -2)."""
    return t.scope["n"] == -2


def test_step_loops() -> None:
    with ToyTrace() as t:
        steps, every = [], []
        with t.all():
            every.append(len(every))
        with t.iter[0] as step:
            steps.append(step)
        out = [steps, every].save()  # type: ignore[attr-defined]
    assert out == [[0, 1, 2], [0, 1, 2]]


def test_step_loops_of_a_captured_tracer() -> None:
    outer = ToyTrace()
    with ToyTrace():
        seen = []
        with outer.iter[0] as step:
            seen.append(step)
        seen.save()  # type: ignore[attr-defined]
    assert seen == [0, 1, 2]


def test_save_in_helpers_of_the_block() -> None:
    with ToyTrace():
        keep = lambda v: [v].save()  # type: ignore[attr-defined]  # noqa: E731
        out = keep(3)
        pair = [[v].save() for v in (1, 2)].save(stream=True)  # type: ignore[attr-defined]
    assert out == [3]
    assert pair == [[1], [2]]


def test_contextlib_exit_stack_around() -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(Recorder([], "a"))
        with ToyTrace():
            y = [1].save()  # type: ignore[attr-defined]
    assert y == [1]


def test_a_file_whose_name_is_not_utf8() -> None:
    """Python has such bytes as halves of surrogate pairs, which no message can have."""
    block = execute("with ToyTrace() as t:\n    x = 1\n", "caf\udce9.py")["t"].site.block
    assert block.filename == "caf\\udce9.py"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(block), type=type(block)) == block
