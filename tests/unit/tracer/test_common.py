"""Tensors that several blocks capture are kept once and sent once; each block gets its own."""

from __future__ import annotations

import msgspec
import pytest
import torch

from invivo import Local
from invivo.envoy.errors import InvivoWarning, SaveLimitError
from invivo.tracer.block import FORMAT, Block, Payload, TensorBlob
from invivo.tracer.buffers import Refusal
from invivo.tracer.common import Blobs, apart, together

BLOCK = Block("with t:\n    pass\n", "f.py", 1, 0, "<module>", "module", None, ())


def payload(*tensors: TensorBlob) -> Payload:
    return Payload(FORMAT, "trace", BLOCK, b"", tensors, 0, ())


def test_a_tensor_is_kept_once_until_it_changes() -> None:
    blobs, tensor = Blobs(), torch.ones(2)
    first = blobs.of(tensor)
    assert blobs.of(tensor) is first
    tensor += 1
    changed = blobs.of(tensor)
    assert changed is not first and changed.data != first.data


def test_changes_that_torch_does_not_count_are_seen() -> None:
    with torch.inference_mode():
        blobs, tensor = Blobs(), torch.ones(2)
        first = blobs.of(tensor)
        tensor += 1
        assert blobs.of(tensor).data != first.data
    tensor = torch.zeros(2)
    first = blobs.of(tensor)
    tensor.numpy()[0] = 5
    assert blobs.of(tensor).data != first.data


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(Refusal, match="meta"):
        Blobs().of(torch.ones(2, device="meta"))


def test_what_several_have_is_taken_out_and_put_back() -> None:
    blobs = Blobs()
    large, small, own = blobs.of(torch.ones(2000)), blobs.of(torch.ones(2)), blobs.of(torch.zeros(3000))
    before = [payload(large, small), payload(small, own, large), payload(own, own)]
    after, common = apart(before)
    assert [len(msgspec.msgpack.encode(one)) < 500 for one in after] == [True, True, True]
    assert {len(blob.data) for blob in common} == {8000, 12000}
    for one, other in zip(after, before, strict=True):
        assert together(one.tensors, common) == list(other.tensors)


def test_payloads_without_anything_in_common_stay_as_they_are() -> None:
    before = [payload(Blobs().of(torch.ones(2000))), payload(Blobs().of(torch.ones(2000)))]
    assert apart(before) == (before, ())


def test_each_block_has_its_own_copy() -> None:
    model = Local(torch.nn.Identity())
    weights = torch.ones(2000)
    with pytest.warns(InvivoWarning, match="`weights` was changed in the block"), model.trace() as tracer:
        sums = list().save()
        for _ in range(3):
            with tracer.invoke(torch.ones(1)):
                weights.add_(1)
                sums.append(weights.sum().item())
    assert sums == [4000.0] * 3
    assert weights.sum() == 2000


def test_what_invokes_add_to_shared_objects_is_within_the_limit_too() -> None:
    model = Local(torch.nn.Identity(), save_limit=1000)
    with pytest.raises(SaveLimitError, match=r"hold 7\.8 KiB, and the limit is 1000"):
        with model.trace() as tracer:
            rows = list().save()
            for _ in range(2):
                with tracer.invoke(torch.ones(1)):
                    rows.append(torch.ones(1000))
    model.check_integrity()


def test_what_a_captured_tensor_leaves_behind() -> None:
    """As docs/tracing.md says."""
    model = Local(torch.nn.Identity())
    probe, w, base = torch.nn.Linear(4, 1), torch.ones(4, requires_grad=True), torch.zeros(4)
    views = [base[:2]]
    with model.trace(torch.ones(2, 4)):
        kinds = (type(probe.weight) is torch.Tensor, probe.weight.requires_grad, w.requires_grad).save()
        with torch.inference_mode(False), torch.enable_grad():
            w.requires_grad_()
            (2 * w).sum().backward()
            slope = w.grad.clone().save()  # type: ignore[union-attr]
        views[0].add_(1)
        views.save()
        left = base.clone().save()
    assert kinds == (True, False, False)
    assert slope.tolist() == [2.0] * 4
    assert views[0].tolist() == [1, 1] and left.tolist() == [0] * 4
