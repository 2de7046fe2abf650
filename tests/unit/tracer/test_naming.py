"""What is held by saved values, however deep in containers and however many they are."""

from __future__ import annotations

from collections import OrderedDict, deque, namedtuple

from invivo.tracer.naming import held

Pair = namedtuple("Pair", "one other")  # noqa: PYI024


def test_whatever_is_in_a_container_is_held() -> None:
    items = [object() for _ in range(20_000)]
    values = [items[:9_000], {"a": deque(items[9_000:19_990])}, Pair(items[19_990], OrderedDict(x=items[19_991:]))]
    assert held(values) >= {id(item) for item in items}
    assert id(object()) not in held([])


def test_a_container_in_itself_ends() -> None:
    loop: list[object] = []
    loop.append(loop)
    assert held([loop]) == {id(loop)}
