"""The body around invokes: captured, run on the client, and what its invokes take from each other."""

from __future__ import annotations

import linecache
import sys
import textwrap
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
import torch

from invivo.envoy.envoy import RootEnvoy
from invivo.envoy.errors import CaptureError, MisuseError, OutsideBlockError
from invivo.envoy.tree import ModuleTree
from invivo.tracer.backend import Reply
from invivo.tracer.block import Payload
from invivo.tracer.codec import decode
from invivo.tracer.outer import OuterTrace
from invivo.tracer.results import pack

_numbers = count()


class Backend:
    """Keeps what it is given, and says that nothing was saved."""

    def __init__(self) -> None:
        self.payloads: Sequence[Payload] = []
        self.requests: Sequence[object] = []

    def run(self, payload: Payload, request: object) -> tuple[Reply, object]:
        raise AssertionError("a group is run as such")

    def run_group(self, payloads: Sequence[Payload], requests: Sequence[object]) -> list[tuple[Reply, object]]:
        self.payloads, self.requests = payloads, requests
        return [(Reply(pack({}), None, "", (), None), number) for number in range(len(payloads))]


class Outer(OuterTrace):
    """A trace on that backend."""

    def __init__(self, **sampling: Any) -> None:
        self.backend = Backend()
        tree = ModuleTree.of(torch.nn.Sequential(torch.nn.Linear(2, 2)))
        super().__init__(RootEnvoy(tree, ""), self.backend, lambda prompt, given: ((prompt, given), 0), sampling)

    @property
    def takes(self) -> list[dict[str, int]]:
        """For each invoke, the names that it takes and from which."""
        return [dict(payload.group.takes) for payload in self.backend.payloads if payload.group is not None]

    @property
    def gives(self) -> list[tuple[str, ...]]:
        """For each invoke, the names that it gives."""
        return [payload.group.gives for payload in self.backend.payloads if payload.group is not None]


def run(source: str, **names: Any) -> dict[str, Any]:
    """Run a module's text that Python can find; its variables."""
    name = f"<invokes {next(_numbers)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    space: dict[str, Any] = {"__name__": name, **names}
    exec(compile(source, name, "exec"), space)
    return space


def second(body: str, first: str = "h = 1") -> Outer:
    """A trace whose first invoke assigns `h`, and whose second one has this body."""
    trace = Outer()
    lines = ["with trace as t:", "    h0 = 0", "    with t.invoke(1):", textwrap.indent(first, " " * 8)]
    lines += ["    with t.invoke(2):", textwrap.indent(textwrap.dedent(body).strip(), " " * 8), ""]
    run("\n".join(lines), trace=trace)
    return trace


TAKEN = {
    "read": "x = h",
    "augmented": "h += 1",
    "deleted": "del h",
    "branch": "if h0:\n    h = 2\nx = h",
    "one branch returns": "try:\n    h = 2\nexcept ValueError:\n    pass\nx = h",
    "loop": "for h0 in []:\n    h = 2\nx = h",
    "loop body first reads": "for _ in range(2):\n    x = h\n    h = 2",
    "while": "while h0:\n    h = 2\nx = h",
    "match": "match h0:\n    case 1:\n        h = 2\nx = h",
    "comprehension": "x = [h for _ in range(2)]",
    "first iterable of its own name": "x = [h for h in h]",
    "nested function": "def f():\n    return h\nx = f()",
    "default": "def f(h=h):\n    return h",
    "lambda": "x = (lambda: h)()",
    "class body": "class C:\n    y = h",
    "swallowing with": "import contextlib\nwith contextlib.suppress(ValueError):\n    h = 2\nx = h",
    "attribute": "h.x = 1",
    "walrus after and": "x = h0 and (h := 2)\ny = h",
}
ASSIGNED = {
    "not read": "x = 1",
    "assigned": "h = 2\nx = h",
    "both branches": "if h0:\n    h = 2\nelse:\n    h = 3\nx = h",
    "branch that leaves": "for _ in range(2):\n    if h0:\n        h = 2\n    else:\n        break\n    x = h",
    "loop variable": "for h in range(2):\n    x = h",
    "endless loop": "while True:\n    h = 2\n    break\nx = h",
    "finally": "try:\n    pass\nfinally:\n    h = 2\nx = h",
    "harmless with": "import torch\nwith torch.no_grad():\n    h = 2\nx = h",
    "as": "import contextlib\nwith contextlib.nullcontext(1) as h:\n    x = h",
    "match that always fits": "match h0:\n    case h:\n        x = h",
    "comprehension variable": "x = [h for h in range(2)]",
    "parameter": "def f(h):\n    return h",
    "walrus": "if (h := 2):\n    x = h",
    "deleted again": "h = 2\ndel h\nx = h",
    "import": "import math as h\nx = h",
}


@pytest.mark.parametrize("body", TAKEN.values(), ids=TAKEN)
def test_a_name_that_may_be_read_first_is_taken(body: str) -> None:
    trace = second(body)
    assert trace.takes == [{}, {"h": 0}] and trace.gives == [("h",), ()]


@pytest.mark.parametrize("body", ASSIGNED.values(), ids=ASSIGNED)
def test_a_name_that_is_surely_assigned_is_not(body: str) -> None:
    assert second(body).takes == [{}, {}]


@pytest.mark.parametrize(
    "first",
    ["if h0:\n    h = 1", "for h in []:\n    pass", "h: int = 3", "with t.iter[:] as h:\n    pass", "def h(): ..."],
)
def test_what_counts_as_assigned_by_the_earlier_invoke(first: str) -> None:
    assert second("x = h", first).takes == [{}, {"h": 0}]


def test_the_latest_invoke_gives() -> None:
    trace = Outer()
    with trace as t:
        with t.invoke(1):
            h = 1
        with t.invoke(2):
            h = 2
        with t.invoke(3):
            h + 1
    assert trace.takes == [{}, {}, {"h": 1}] and trace.gives == [(), ("h",), ()]


def test_an_assignment_of_the_body_comes_between() -> None:
    trace = Outer()
    with trace as t:
        for h in range(2):
            with t.invoke(1):
                h += 1
        with t.invoke(2):
            h += 1
    assert trace.takes == [{}, {}, {"h": 1}]


def helper(t: Any, prompt: object) -> None:
    with t.invoke(prompt):
        h = 1
    with t.invoke(prompt):
        h + 1


def test_names_of_functions_are_their_own() -> None:
    trace = Outer()
    with trace as t:
        helper(t, 1)
        helper(t, 2)
        assert "h" not in locals()
    assert trace.takes == [{}, {"h": 0}, {}, {"h": 2}]


def test_sampling_and_prompts() -> None:
    trace = Outer(max_tokens=5, seed=1)
    prompts = ["a", "b"]
    with trace as t:
        for number, prompt in enumerate(prompts):
            with t.invoke(prompt, max_tokens=number):
                pass
    assert trace.backend.requests == [
        (("a",), {"max_tokens": 0, "seed": 1}),
        (("b",), {"max_tokens": 1, "seed": 1}),
    ]
    groups = [payload.group for payload in trace.backend.payloads if payload.group is not None]
    assert [(group.index, group.size) for group in groups] == [(0, 2), (1, 2)]
    assert len({group.trace for group in groups}) == 1
    assert len({payload.trace for payload in trace.backend.payloads}) == 2


MODULE = """
start = 2
with trace as t:
    numbers = [start * 2].save()
    other = 5
    with t.invoke(1) as mine:
        inside = start
    third = {"a": 1}.save()
"""


def test_what_is_bound_at_the_end() -> None:
    for text in (
        MODULE,
        "def f(trace):\n" + textwrap.indent(MODULE, "    ") + "    return locals()\nspace = f(trace)\n",
    ):
        space = run(text, trace=Outer())
        space = space.get("space", space)
        assert space["numbers"] == [4] and space["third"] == {"a": 1} and space["start"] == 2
        assert space["mine"].result == 0 and space["t"].results == [0]
        assert not {"other", "inside"} & set(space)
    text = "class C:\n" + textwrap.indent(MODULE, "    ")
    made = run(text, trace=Outer())["C"]
    assert made.numbers == [4] and made.mine is made.t.invokes[0] and not hasattr(made, "other")


def test_closures_and_nonlocal() -> None:
    total = 3
    trace = Outer()

    def change() -> list[int]:
        nonlocal total
        with trace as t:
            seen = [total].save()  # type: ignore[attr-defined]
            with t.invoke(1):
                nonlocal_free = total
        return seen  # type: ignore[no-any-return]

    assert change() == [3] and total == 3


def test_errors_have_their_lines() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        with Outer() as t:
            with t.invoke(1):
                pass
            1 // 0  # line of the error
    frames = [entry for entry in caught.traceback if str(entry.path) == __file__]
    assert "# line of the error" in str(frames[-1].statement)
    assert frames[-1].name == "test_errors_have_their_lines"


@pytest.mark.parametrize(
    ("body", "error", "match"),
    [
        ("pass", MisuseError, "made no invoke"),
        ("return", CaptureError, "`return`"),
        ("t.iter[0].__iter__().__next__()", OutsideBlockError, "inside `with tracer.invoke"),
        ("t.saves", OutsideBlockError, "once the `with` has ended"),
        ("t.barrier(0)", MisuseError, "at least 1"),
        ("with t.invoke(1):\n    with t.invoke(2):\n        pass", CaptureError, "an invoke inside of another one"),
        ("with t.invoke(1):\n    h = 1\nprint(h)", OutsideBlockError, "`h` is assigned in invoke 0"),
        ("with t.invoke(1):\n    h = 1\nif h: pass", OutsideBlockError, "`h` is assigned in invoke 0"),
        ("with t.invoke(1):\n    pass\nt.invoke(2)", MisuseError, "without a `with`"),
        ("i = t.invoke(1)\nwith i:\n    pass\nwith i:\n    pass", MisuseError, "entered once"),
        ("x = [1]\nwith t.invoke(1):\n    x\nx.append(2)", MisuseError, "`x` was changed in the body"),
    ],
)
def test_refused(body: str, error: type[Exception], match: str) -> None:
    text = "def f():\n    with trace as t:\n" + textwrap.indent(body, " " * 8) + "\nf()\n"
    with pytest.raises(error, match=match):
        run(text, trace=Outer())


def test_tracing_is_put_back() -> None:
    seen: list[str] = []

    def watch(frame: Any, event: str, _: object) -> Callable[..., Any]:
        seen.append(event)
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        with Outer() as t:
            for prompt in range(3):
                with t.invoke(prompt):
                    pass
        assert sys.gettrace() is watch
    finally:
        sys.settrace(before)
    assert len(t.results) == 3


def test_a_global_that_the_body_assigns_is_captured_as_it_is_then() -> None:
    source = """
def traced():
    global number
    with trace as t:
        for _ in range(2):
            number = number + 1
            with t.invoke("a"):
                (number,)
        with t.invoke("a"):
            number = number + 10
        with t.invoke("a"):
            (number,)
number = 1
traced()
"""
    trace = Outer()
    scope = run(source, trace=trace)
    scopes = [decode(one.values, one.tensors, envoy=str, tracer=None) for one in trace.backend.payloads]
    values = [next((names["number"] for names in each.values() if "number" in names), None) for each in scopes]
    assert values == [2, 3, 3, None]
    assert trace.takes == [{}, {}, {}, {"number": 2}]
    assert scope["number"] == 1
