"""Several blocks on one flat batch: each sees its own rows, and only its own request feels its edits.

The model is a toy, the batch is made by hand; what vLLM does to real ones is tested in `tests/contract`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from invivo.envoy.address import OUTPUT, port_at
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
from invivo.interleaver.windows import Share, Window, shares
from support.hub_batch import Batch, Body, split


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
def tied() -> Batch:
    return Batch(Tied)


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
