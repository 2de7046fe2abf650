"""Invokes that send what an earlier one has sent are encoded once, and all others for themselves."""

from __future__ import annotations

import linecache
from itertools import count
from typing import Any

import msgspec
import pytest
import torch

from invivo.envoy.envoy import RootEnvoy
from invivo.envoy.errors import ForeignError
from invivo.envoy.tree import ModuleTree
from invivo.tracer import outer
from invivo.tracer.backend import Reply
from invivo.tracer.block import Payload
from invivo.tracer.codec import decode
from invivo.tracer.outer import OuterTrace
from invivo.tracer.results import pack

_numbers = count()


class Backend:
    """Keeps what it is given."""

    payloads: list[Payload]

    def run(self, payload: Payload, request: object) -> tuple[Reply, object]:
        raise AssertionError("a group is run as such")

    def run_group(self, payloads: Any, requests: Any) -> list[tuple[Reply, object]]:
        self.payloads = list(payloads)
        return [(Reply(pack({}), None, "", (), None), None) for _ in payloads]


def root() -> RootEnvoy:
    return RootEnvoy(ModuleTree.of(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))), "")


def sent(values: str, model: Any = None, **names: Any) -> list[Payload]:
    """The payloads of one block for each of the values, which it reads as `value`."""
    source = (
        f"with trace as t:\n    for value in {values}:\n        with t.invoke(value):\n            (model, t, value)\n"
    )
    name = f"<repeated {next(_numbers)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    backend, seeds = Backend(), count(7)
    model = model or root()
    trace = OuterTrace(model, backend, lambda prompt, given: (None, next(seeds)), {})
    exec(compile(source, name, "exec"), {"__name__": name, "trace": trace, "model": model, **names})
    return backend.payloads


def value_of(payload: Payload) -> Any:
    """What the block would find under `value`."""
    scopes = decode(payload.values, payload.tensors, envoy=lambda address: address, tracer="tracer")
    return next(names["value"] for names in scopes.values() if "value" in names)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was encoded."""
    calls: list[object] = []
    encode = outer.encode_values

    def note(*arguments: Any) -> Any:
        calls.append(arguments)
        return encode(*arguments)

    monkeypatch.setattr(outer, "encode_values", note)
    return calls


SAME = {"numbers": "[5] * 4", "text": "['a'] * 4", "none": "[None] * 4", "modules": "[model[0], model[0], model[0]]"}


@pytest.mark.parametrize("values", SAME.values(), ids=SAME)
def test_one_block_on_the_same_values_is_encoded_once(values: str, encoded: list[object]) -> None:
    payloads = sent(values)
    assert len(encoded) == 1 and len({payload.values for payload in payloads}) == 1
    assert len({payload.trace for payload in payloads}) == len(payloads)
    assert [payload.seed for payload in payloads] == [*range(7, 7 + len(payloads))]
    assert [payload.group.index for payload in payloads if payload.group] == [*range(len(payloads))]


OTHERS: dict[str, list[Any]] = {
    "numbers": [1, 2, 3],
    "equal ones of other types": [1, True, 1.0],
    "signs of zero": [0.0, -0.0, 0.0],
    "equal lists": [[1], [1], [2]],
    "equal tuples": [(1,), (True,), (1.0,)],
    "text": ["a", "b", "a"],
}


@pytest.mark.parametrize("given", OTHERS.values(), ids=OTHERS)
def test_each_block_has_the_values_that_it_captured(given: list[Any]) -> None:
    found = [value_of(payload) for payload in sent("given", given=given)]
    assert repr(found) == repr(given)


def test_modules_go_by_their_address_and_not_by_the_object() -> None:
    model = root()
    assert [value_of(payload) for payload in sent("[model[0], model[1], model[0]]", model=model)] == ["0", "1", "0"]


def test_a_value_that_changes_between_invokes_is_captured_as_it_is_then() -> None:
    class Growing(list[int]):
        def __iter__(self) -> Any:
            for number in range(3):
                self.append(number)
                yield torch.full((2,), float(number))

    assert [value_of(payload).tolist() for payload in sent("Growing()", Growing=Growing)] == [[0, 0], [1, 1], [2, 2]]


def test_a_module_of_another_model_is_refused_as_ever() -> None:
    with pytest.raises(ForeignError):
        sent("[model[0], other[0]]", other=root())


def test_what_is_sent_is_what_each_would_send_alone() -> None:
    first, *others = sent("[3] * 3")
    for payload in others:
        assert payload.group is not None and first.group is not None
        group = msgspec.structs.replace(payload.group, index=0)
        assert msgspec.structs.replace(payload, trace=first.trace, seed=first.seed, group=group) == first
