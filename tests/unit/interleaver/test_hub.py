"""Several blocks on one flat batch: each sees its own rows, and only its own request feels its edits.

The model is a toy, the batch is made by hand; what vLLM does to real ones is tested in `tests/contract`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from invivo.envoy.address import LOGITS, OUTPUT, SAMPLES, port_at
from invivo.envoy.envoy import RootEnvoy
from invivo.envoy.errors import (
    InternalError,
    MisuseError,
    PortNotReachedError,
    PortPassedError,
    PreemptedError,
    UnsupportedError,
    WriteError,
)
from invivo.interleaver.hub import Hub
from invivo.interleaver.mediator import Mediator
from invivo.interleaver.modes import Turns
from invivo.interleaver.windows import Share, Window, shares

Body = Callable[[Any, Mediator], dict[str, object]]


class Toy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.second = torch.nn.Linear(3, 3)
        self.unused = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


class Batch:
    """A model with a hub, and the blocks of some requests."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Toy()
        self.hub = Hub(self.model)
        self.envoy: Any = RootEnvoy(self.hub.tree, "")

    def add(self, request: str, body: Body, turns: Turns | None = None) -> Mediator:
        mediator = Mediator(self.hub.tree, turns or Turns(0, None), lambda mediator: body(self.envoy, mediator))
        self.hub.add(request, mediator, 10)
        return mediator

    def step(self, rows: torch.Tensor, split: dict[str, Share]) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward, logits and samples of one engine step."""
        with torch.inference_mode():
            self.hub.begin(split)
            out = self.model(rows)
            self.hub.forward_done()
            logits = torch.arange(float(len(split) * 10)).reshape(len(split), 10)
            replaced: Any = self.hub.fire(port_at("", LOGITS), logits)
            logits = logits if replaced is None else replaced
            samples = logits.argmax(-1)
            replaced = self.hub.fire(port_at("", SAMPLES), samples)
            self.hub.finish_step()
        return out, samples if replaced is None else replaced


@pytest.fixture
def batch() -> Iterator[Batch]:
    batch = Batch()
    yield batch
    for request in list(batch.hub.mediators):
        batch.hub.end(request, "result")
        batch.hub.remove(request)
    batch.hub.check_integrity()


def split(*counts: int) -> dict[str, Share]:
    """Whole prompts of requests a, b, c, ..., one after the other."""
    starts = [sum(counts[:index]) for index in range(len(counts) + 1)]
    return shares("abcdef"[: len(counts)], starts, [0] * len(counts), counts, starts[-1])


def test_each_block_has_its_own_rows_and_edits(batch: Batch) -> None:
    rows = torch.randn(6, 3)
    plain = batch.model.first(rows)

    def body(envoy: Any, mediator: Mediator) -> dict[str, object]:
        seen = envoy.first.output.clone()
        envoy.first.output[:] = float(mediator is one)
        return {"seen": seen, "inputs": envoy.second.input.clone()}

    one, two = batch.add("a", body), batch.add("c", body)
    out, _ = batch.step(rows, split(2, 1, 3))
    assert torch.equal(one.scope["seen"], plain[:2]) and torch.equal(two.scope["seen"], plain[3:])  # type: ignore[arg-type]
    edited = plain.clone()
    edited[:2], edited[3:] = 1, 0
    assert torch.equal(out, batch.model.second(edited))
    assert torch.equal(one.scope["inputs"], edited[:2])  # type: ignore[arg-type]


def test_logits_and_samples_have_one_row_a_request(batch: Batch) -> None:
    def body(envoy: Any, mediator: Mediator) -> dict[str, object]:
        envoy.logits[0, 3] = 1000
        first = int(envoy.samples)
        envoy.samples = 7
        return {"first": first, "shape": tuple(envoy.samples.shape)}

    one = batch.add("b", body)
    _, samples = batch.step(torch.randn(3, 3), split(1, 2))
    assert one.scope == {"first": 3, "shape": (1,)}
    assert samples.tolist() == [9, 7]


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (lambda e, m: [e.second.output, e.first.output], PortPassedError, "first.output has passed"),
        (lambda e, m: [e.samples, e.logits], PortPassedError, "model.logits has passed"),
        (lambda e, m: [e.logits, e.first.input], PortPassedError, "after all modules"),
        (lambda e, m: e.unused.output, PortNotReachedError, "unused.output did not come in step 0"),
        (lambda e, m: setattr(e.first, "output", 0), WriteError, r"first.output takes float32 \[2, 3\], and got int"),
        (lambda e, m: setattr(e, "samples", 10), WriteError, "from 0 to 9"),
        (lambda e, m: 1 / 0, ZeroDivisionError, "division"),
        (lambda e, m: e.second(torch.ones(5)), RuntimeError, "mat1 and mat2|size mismatch|cannot be multiplied"),
    ],
)
def test_an_error_ends_its_request_and_leaves_the_others(
    batch: Batch, body: Body, kind: type[Exception], message: str
) -> None:
    bad = batch.add("a", body)
    good = batch.add("b", lambda envoy, mediator: {"out": envoy.second.output})
    rows = torch.randn(5, 3)
    plain = batch.model(rows)
    for _ in range(2):  # the first step learns the order, the second knows it
        out, _ = batch.step(rows, split(2, 3))
        assert torch.equal(out, plain)
        assert isinstance(bad.failure, kind) and batch.hub.ended == {"a"}
        with pytest.raises(kind, match=message):
            raise bad.failure
        assert torch.equal(good.scope["out"], plain[2:])  # type: ignore[arg-type]
        for request in ("a", "b"):
            batch.hub.remove(request)
        bad, good = batch.add("a", body), batch.add("b", lambda e, m: {"out": e.second.output})
    batch.step(rows, split(2, 3))


def test_a_bug_of_the_hub_ends_all_blocks_and_not_the_forward(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [batch.add(name, lambda envoy, mediator: {"out": envoy.second.output}) for name in "ab"]
    monkeypatch.setattr(batch.hub, "_serve", lambda *args: [][1])
    rows = torch.randn(2, 3)
    out, _ = batch.step(rows, split(1, 1))
    assert torch.equal(out, batch.model(rows))
    assert all(isinstance(block.failure, InternalError) for block in blocks)
    assert "report" in str(blocks[0].failure)


def test_rows_that_are_no_step_end_the_trace(batch: Batch) -> None:
    block = batch.add("a", lambda envoy, mediator: {"out": envoy.second.output})
    batch.step(torch.randn(2, 3), shares(["a"], [0, 2], [0], [5], 2))
    assert isinstance(block.failure, UnsupportedError)
    assert "its prompt of 5 tokens was split" in str(block.failure)


def test_it_is_told_once_that_a_request_goes_on_without_its_block(batch: Batch) -> None:
    """Also of a block that waits for the end; not of one that ends its request."""

    def reads(envoy: Any, mediator: Mediator) -> dict[str, object]:
        return {"out": envoy.first.output}

    def waits(envoy: Any, mediator: Mediator) -> dict[str, object]:
        return {"out": envoy.first.output, "result": mediator.tracer.result}

    def fails(envoy: Any, mediator: Mediator) -> dict[str, object]:
        raise KeyError

    def goes_on(envoy: Any, mediator: Mediator) -> dict[str, object]:
        return {"out": [envoy.first.output for _ in mediator.tracer.iter[:]]}

    names = ["reads", "waits", "fails", "goes on"]
    for name, body in zip(names, (reads, waits, fails, goes_on), strict=True):
        batch.add(name, body)
    batch.step(torch.randn(4, 3), shares(names, [0, 1, 2, 3, 4], [0] * 4, [1] * 4, 4))
    assert batch.hub.has_news
    assert batch.hub.take_done() == {"reads", "waits"} and batch.hub.ended == {"fails"}
    assert batch.hub.take_done() == frozenset()
    assert batch.hub.has_news, "the engine has yet to end the one that failed"
    batch.hub.remove("fails")
    assert not batch.hub.has_news


def test_what_comes_again_after_an_edit_ends_the_trace(batch: Batch) -> None:
    """As after a preemption; also for a block that is done, since its edits would be missing."""

    def body(envoy: Any, mediator: Mediator) -> dict[str, object]:
        envoy.first.output[:] = 0
        return {}

    block = batch.add("a", body)
    batch.step(torch.randn(2, 3), shares(["a"], [0, 2], [0], [2], 2))
    assert block.done and block.failure is None
    batch.step(torch.randn(3, 3), shares(["a"], [0, 3], [0], [2], 3))
    assert isinstance(block.failure, PreemptedError)
    assert "had to end before step 1" in str(block.failure)


def test_a_block_that_only_reads_goes_on_after_a_preemption(batch: Batch) -> None:
    """What was computed before comes again, in pieces; the block sees the row of its step when that comes."""

    def body(envoy: Any, mediator: Mediator) -> dict[str, object]:
        return {"out": [envoy.first.output for _ in mediator.tracer.iter[:3]]}

    block = batch.add("a", body)
    batch.step(torch.randn(2, 3), shares(["a"], [0, 2], [0], [2], 2))
    batch.step(torch.randn(1, 3), shares(["a"], [0, 1], [2], [2], 1))
    batch.step(torch.randn(2, 3), shares(["a"], [0, 2], [0], [2], 2))
    assert not block.done
    batch.step(torch.randn(2, 3), shares(["a"], [0, 2], [2], [2], 2))
    assert block.done and block.failure is None
    seen: Any = block.scope["out"]
    assert [tensor.shape[0] for tensor in seen] == [2, 1, 1]


def test_an_open_mode_is_refused_at_the_next_port(batch: Batch) -> None:
    def body(envoy: Any, mediator: Mediator) -> dict[str, object]:
        envoy.first.output
        with torch.inference_mode(False):
            return {"out": envoy.second.output}

    block = batch.add("a", body)
    batch.step(torch.randn(2, 3), split(2))
    assert isinstance(block.failure, MisuseError) and "inside a torch mode" in str(block.failure)


def test_gradients_dtype_and_random_state_are_the_blocks_own(batch: Batch) -> None:
    def body(envoy: Any, mediator: Mediator) -> dict[str, object]:
        draws = [torch.rand(2)]
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(True)
        envoy.first.output
        draws.append(torch.rand(2))
        return {"draws": draws, "grad": torch.is_grad_enabled()}

    blocks = [batch.add(name, body) for name in "ab"]
    torch.manual_seed(5)
    batch.step(torch.randn(2, 3), split(1, 1))
    after = torch.rand(1)
    torch.manual_seed(5)
    torch.randn(2, 3)
    assert torch.equal(after, torch.rand(1)), "the engine's draws go on as if there were no block"
    assert torch.get_default_dtype() == torch.float32
    one, two = (block.scope["draws"] for block in blocks)
    assert [x.tolist() for x in one] == [x.tolist() for x in two]  # type: ignore[attr-defined]
    assert one[1].dtype == torch.float64 and blocks[0].scope["grad"]  # type: ignore[index]


def test_blocks_at_one_port_go_on_to_different_ones(batch: Batch) -> None:
    rows = torch.randn(6, 3)
    order: list[str] = []

    def body(*ports: str) -> Body:
        def run(envoy: Any, mediator: Mediator) -> dict[str, object]:
            seen = {}
            for port in ports:
                module, _, kind = port.partition(".")
                seen[port] = getattr(getattr(envoy, module), kind) if kind else getattr(envoy, port)
                order.append(f"{mediator.request} {port}")
            return {"seen": seen}

        return run

    both = body("first.output", "second.output")
    one, *_, last = [
        batch.add("a", both),
        batch.add("b", both),
        batch.add("c", body("first.output", "logits")),
        batch.add("d", both),
        batch.add("e", body("first.output")),
        batch.add("f", both),
    ]
    out, _ = batch.step(rows, split(1, 1, 1, 1, 1, 1))
    assert order == [
        *(f"{request} first.output" for request in "abcdef"),
        *(f"{request} second.output" for request in "abdf"),
        "c logits",
    ]
    seen: Any = one.scope["seen"], last.scope["seen"]
    assert torch.equal(seen[0]["second.output"], out[:1]) and torch.equal(seen[1]["second.output"], out[5:])


def test_what_one_block_sets_is_not_there_in_the_turns_of_the_next(batch: Batch) -> None:
    def sets(envoy: Any, mediator: Mediator) -> dict[str, object]:
        envoy.first.output.clone()
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float64)
        return look(envoy.second.output)

    def sees(envoy: Any, mediator: Mediator) -> dict[str, object]:
        envoy.first.output.clone()
        return look(envoy.second.output)

    def look(_: object) -> dict[str, object]:
        return {"grad": torch.is_grad_enabled(), "dtype": torch.get_default_dtype()}

    with torch.no_grad():  # as in an engine
        before = batch.add("a", sees, Turns(0, None, ()))
        own = batch.add("b", sets)
        after = batch.add("c", sees, Turns(0, None, ()))
        batch.step(torch.randn(3, 3), split(1, 1, 1))
    assert own.scope == {"grad": True, "dtype": torch.float64}
    assert before.scope == after.scope == {"grad": False, "dtype": torch.float32}


def test_integrity_names_what_is_left(batch: Batch) -> None:
    batch.add("a", lambda envoy, mediator: {})
    with pytest.raises(InternalError, match="'blocks': 1"):
        batch.hub.check_integrity()


def test_order_is_learned_once(batch: Batch) -> None:
    batch.add("a", lambda envoy, mediator: {})
    assert batch.hub.learned is None
    batch.step(torch.randn(2, 3), split(2))
    assert batch.hub.learned is not None
    assert batch.hub.tree.places[port_at("first", OUTPUT)] == (2,)
    assert port_at("unused", OUTPUT) not in batch.hub.tree.places
    assert batch.hub.tree.shapes["first"] == "[n, 3]"


def test_the_order_of_a_compiled_model_is_learned_where_a_block_waits_for_a_module() -> None:
    batch = Batch()
    batch.hub = Hub(batch.model, compiled=True)
    batch.add("a", lambda envoy, mediator: {"logits": envoy.logits})
    batch.step(torch.randn(2, 3), split(2))
    assert batch.hub.learned is None, "no module was called"
    batch.add("b", lambda envoy, mediator: {"hidden": batch.envoy.first.output})
    batch.envoy = RootEnvoy(batch.hub.tree, "")
    batch.step(torch.randn(2, 3), {"b": Share(Window(0, 2, 2), Window(0, 1, 1), 0)})
    assert port_at("first", OUTPUT) in batch.hub.tree.places


class Tied(torch.nn.Module):
    """One layer, called twice, with another between."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self.between = torch.nn.Identity()
        self.again = self.layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.between(self.layer(x)))  # type: ignore[no-any-return]


@pytest.fixture
def tied(monkeypatch: pytest.MonkeyPatch) -> Batch:
    monkeypatch.setitem(globals(), "Toy", Tied)
    return Batch()


def test_the_next_call_of_a_module_is_reached_in_the_first_step_too(tied: Batch) -> None:
    def body(envoy: Any, mediator: Mediator) -> dict[str, object]:
        between = envoy.between.output
        return {"between": between, "second": envoy.layer.output}

    blocks = [tied.add(request, body) for request in "ab"]
    rows = torch.randn(2, 3)
    for block in blocks:
        tied.step(rows, {block.request: Share(Window(0, 2, 2), Window(1, 1, 2), 0)})
        assert block.failure is None
        first = tied.model.layer(rows)
        assert torch.equal(block.scope["between"], first)  # type: ignore[arg-type]
        assert torch.equal(block.scope["second"], tied.model.layer(first))  # type: ignore[arg-type]


def test_a_call_that_does_not_come_again_has_the_same_error_in_all_steps(batch: Batch) -> None:
    """And it comes when the forward is over at the latest, so that a block that catches it has the logits."""

    def body(envoy: Any, mediator: Mediator) -> dict[str, object]:
        envoy.second.output
        with pytest.raises(PortPassedError) as caught:
            envoy.first.output
        return {"message": str(caught.value), "logits": envoy.logits}

    found = []
    for _ in range(2):
        block = batch.add("a", body)
        batch.step(torch.randn(2, 3), split(2))
        assert block.failure is None and block.scope["logits"] is not None
        found.append(block.scope["message"])
        batch.hub.end("a", "result")
        batch.hub.remove("a")
    assert found[0] == found[1] and "first.output has passed: the model is at second.output" in str(found[0])


def test_the_other_name_of_a_module_is_told(tied: Batch) -> None:
    block = tied.add("a", lambda envoy, mediator: {"out": envoy.again.output})
    tied.step(torch.randn(2, 3), {"a": Share(Window(0, 2, 2), Window(1, 1, 2), 0)})
    assert isinstance(block.failure, PortNotReachedError)
    assert "not called by this name" in str(block.failure) and "it fires as layer.output" in str(block.failure)


def test_a_block_goes_on_when_it_has_caught_the_error_of_an_edit(batch: Batch) -> None:
    def body(envoy: Any, mediator: Mediator) -> dict[str, object]:
        envoy.first.output.resize_(7)
        with pytest.raises(WriteError):
            envoy.second.output
        return {"out": envoy.second.output, "logits": envoy.logits}

    block = batch.add("a", body)
    rows = torch.randn(2, 3)
    plain = batch.model(rows)
    out, _ = batch.step(rows, split(2))
    assert block.failure is None and not block.edited
    assert torch.equal(block.scope["out"], plain)  # type: ignore[arg-type]
    assert torch.equal(out, plain)
