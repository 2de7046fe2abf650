"""Inputs that were found by attacking the library, each with what it must do."""

from __future__ import annotations

import traceback
from typing import Any

import numpy as np
import pytest
import torch

from invivo import (
    ForeignError,
    InvivoWarning,
    Local,
    SamplingError,
    StepError,
    UnknownNameError,
    WriteError,
)
from support.contract import PROMPT, assert_serves, first, same, tokens
from support.toy_module import Toy


@pytest.fixture
def toy() -> Any:
    torch.manual_seed(7)
    return Local(Toy())


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in column-major order."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def test_a_value_of_another_memory_layout(model: Any) -> None:
    """Kernels take the strides of what vLLM makes for granted, and its engine died of others."""
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        plain = model.logits.save()
    mlp, attention = model.model.layers[3].mlp, model.model.layers[4].self_attn.o_proj
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        mlp.output = transposed(mlp.output)
        attention.input = transposed(attention.input)
        again = model.logits.save()
    assert same(again, plain)
    assert_serves(model)


def test_a_sparse_value_is_refused(model: Any) -> None:
    with pytest.raises(WriteError, match="the layout must be the same"):
        with model.trace(PROMPT, max_tokens=1, temperature=0):
            model.model.layers[3].mlp.output = first(model.model.layers[3].mlp.output).to_sparse()
    assert_serves(model)


@pytest.mark.parametrize("number", [10**6, -5])
def test_a_number_that_the_model_cannot_look_up_is_refused(smollm2: Any, number: int) -> None:
    """A token id or a position behind the end of its table ended the engine, and on a GPU everybody's use of it."""
    model = smollm2
    for port in (model.model.embed_tokens, model.model.layers[2]):
        with pytest.raises(WriteError, match=rf"takes whole numbers from 0 to \d+ here.*has put {number} to {number}"):
            with model.trace(PROMPT, max_tokens=1, temperature=0):
                port.inputs[0][0][:] = number
    with pytest.raises(WriteError, match=r"embed_tokens\.input takes whole numbers"):
        with model.trace(PROMPT, max_tokens=1, temperature=0):
            model.model.embed_tokens(torch.tensor([number]))
    assert_serves(model)


def test_other_token_ids_are_as_another_prompt(model: Any) -> None:
    with model.trace([5, 6, 7], max_tokens=1, temperature=0):
        model.model.embed_tokens.inputs[0][0][:] = 17
        edited = model.logits.save()
    with model.trace([17, 17, 17], max_tokens=1, temperature=0):
        plain = model.logits.save()
    assert same(edited, plain)


@pytest.mark.parametrize("token", [2**32 + 5, 2**40, -(2**40), 10**30, torch.tensor([2**32 + 5])])
def test_a_sample_that_does_not_fit_its_type_is_refused(smollm2: Any, token: Any) -> None:
    model = smollm2
    with pytest.raises((WriteError, RuntimeError, OverflowError)):
        with model.trace(PROMPT, max_tokens=1, temperature=0):
            model.samples = token
    assert_serves(model)


@pytest.mark.parametrize("token", [torch.tensor(3 + 1j), torch.tensor(True), torch.tensor(3.0), True, 3.0, "3", None])
def test_a_sample_that_is_no_whole_number_is_refused(model: Any, token: Any) -> None:
    with pytest.raises(WriteError):
        with model.trace(PROMPT, max_tokens=1, temperature=0):
            model.samples = token
    assert_serves(model)


def test_a_sample_as_a_number_of_numpy(model: Any) -> None:
    token = np.int64(1234)
    with model.trace(PROMPT, max_tokens=1, temperature=0) as tracer:
        model.samples = token
    assert tokens(tracer) == [1234]


def test_arguments_in_another_order_are_refused(toy: Any) -> None:
    """Edits go back by place: the two tensors changed places, silently."""
    with pytest.raises(WriteError, match=r"keys \['one', 'other', 'factor'\], in this order"):
        with toy.trace(torch.ones(2, 4)):
            arguments = toy.named.inputs[1]
            arguments["one"] = arguments.pop("one")
            arguments["one"][:] = 1
            toy.last.output


def test_arguments_that_are_no_tensors_cannot_be_changed(toy: Any) -> None:
    with pytest.raises(WriteError, match="holds 3, which is not a tensor and cannot be replaced"):
        with toy.trace(torch.ones(2, 4)):
            toy.named.inputs[1]["factor"] = 5
            toy.last.output


def test_arguments_of_the_same_order_are_edited(toy: Any) -> None:
    with toy.trace(torch.ones(2, 4)):
        arguments = toy.named.inputs[1]
        arguments["one"] = torch.zeros(2, 4)
        arguments["other"][:] = 1
        out = toy.named.output.save()
    assert torch.equal(out, torch.full((2, 4), -3.0))


@pytest.mark.parametrize("key", [True, [False], 1.0, slice(0.5, None), slice(True), None, ..., "1", torch.tensor(0.5)])
def test_keys_that_are_no_whole_numbers(toy: Any, key: Any) -> None:
    with pytest.raises(StepError, match="a step is a whole number from 0 on"):
        with toy.trace(torch.ones(2, 4)) as tracer:
            for _ in tracer.iter[key]:
                pass
    toy.check_integrity()


@pytest.mark.parametrize("key", [np.int64(0), torch.tensor(0), [np.int32(0)], slice(np.int64(0), np.int64(1))])
def test_keys_that_are_integers_of_numpy_and_torch(toy: Any, key: Any) -> None:
    with toy.trace(torch.ones(2, 4)) as tracer:
        steps = list(tracer.iter[key]).save()
    assert [(type(step), step) for step in steps] == [(int, 0)]


def test_a_loop_over_the_same_steps_twice(model: Any) -> None:
    """The second loop begins anew, so it says that its first step has passed."""
    with pytest.raises(StepError, match="step 0 has passed"):
        with model.trace(PROMPT, max_tokens=4, temperature=0, ignore_eos=True) as tracer:
            steps = tracer.iter[:]
            for step in steps:
                if step == 1:
                    break
            for step in steps:
                pass


def test_modules_are_equal_by_address(toy: Any) -> None:
    other: Any = Local(Toy())
    assert toy.first == toy.first
    assert toy.first != toy.last
    assert toy.first != other.first
    assert toy.first in [toy.last, toy.first]
    assert {toy.first: 1}[toy.first] == 1
    with toy.trace(torch.ones(2, 4)):
        seen = [layer == toy.last for layer in (toy.first, toy.last)].save()
    assert seen == [False, True]


@pytest.mark.engine
def test_what_skips_the_body_is_in_no_error_of_the_engine(smollm2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = smollm2

    def fails(*_: object) -> None:
        raise OSError("the engine is away")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="is away") as caught:
        patch.setattr(model._engine, "generate", fails)
        try:
            raise ValueError("around it")
        except ValueError:
            with model.trace(PROMPT, max_tokens=1):
                pass
    assert isinstance(caught.value.__context__, ValueError)
    assert_serves(model)


def test_a_named_expression_is_saved_under_its_name(toy: Any) -> None:
    with toy.trace(torch.ones(2, 4)):
        (size := toy.first.output.shape).save()
    assert size == (2, 4)


def test_samples_cannot_be_written_where_their_logprobs_are_reported(smollm2: Any) -> None:
    """The output had the log-probabilities of the token that vLLM had sampled itself."""
    model = smollm2
    for in_place in (False, True):
        with pytest.raises(WriteError, match="cannot be written in a trace with `logprobs`"):
            with model.trace(PROMPT, max_tokens=2, temperature=0, logprobs=2):
                if in_place:
                    model.samples[0] = 17
                else:
                    model.samples = 17
    with model.trace(PROMPT, max_tokens=1, temperature=0, logprobs=2) as tracer:
        read = int(model.samples)
        read.save()
    assert read in tracer.result.outputs[0].logprobs[0]


class Pooled(torch.nn.Module):
    """Returns one of torch's own tuples with names."""

    def forward(self, x: torch.Tensor) -> Any:
        return torch.max(x, 1)


def test_torchs_tuples_with_names_stay_what_they_are() -> None:
    model: Any = Local(Pooled())
    with model.trace(torch.eye(3)):
        model.output.values[0] = 5
        places = model.output.indices.save()
    assert places.tolist() == [0, 1, 2]


def test_an_edit_that_does_not_fit_at_the_very_end_is_an_error_of_the_last_line(toy: Any) -> None:
    """It is found after the block, and had no line of the caller's."""
    with pytest.raises(WriteError) as caught:
        with toy.trace(torch.ones(2, 4)):
            out = toy.last.output
            out.unsqueeze_(0)  # the line
    lines = traceback.extract_tb(caught.value.__traceback__)
    assert lines[-1].filename == __file__ and "# the line" in (lines[-1].line or "")


def test_a_kept_tracer_of_an_earlier_trace_may_be_captured_but_not_used(toy: Any) -> None:
    """``with self.model.trace(...) as self.tracer`` made every later block that read `self` fail."""
    runs = {}
    with toy.trace(torch.ones(2, 4)) as tracer:
        pass
    runs["first"] = tracer
    with toy.trace(torch.ones(2, 4)):
        count = len(runs).save()
    assert count == 1
    with pytest.raises(ForeignError, match="was asked of the tracer of a trace that has ended"):
        with toy.trace(torch.ones(2, 4)):
            runs["first"].result


def test_a_save_that_a_stop_leaves_out_is_warned_about(model: Any) -> None:
    with pytest.warns(InvivoWarning, match=r"`tracer.stop\(\)` in line \d+ left the block before this save"):
        with model.trace(PROMPT, max_tokens=5, temperature=0) as tracer:
            scores = []
            for step in tracer.iter[:]:
                scores.append(model.logits.max().item())
                if step == 1:
                    tracer.stop()
            scores.save()
    assert tracer.saves == {}


@pytest.mark.parametrize("given", [" Paris", [7042], 3.0, None])
def test_what_is_no_token_gets_told_what_is(model: Any, given: Any) -> None:
    with pytest.raises(WriteError, match="takes the id of a token"):
        with model.trace(PROMPT, max_tokens=1, temperature=0):
            model.samples = given


def test_near_misses_of_ports_and_arguments(model: Any, smollm2: Any) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean `logits`"):
        with model.trace(PROMPT, max_tokens=1):
            model.logit
    with pytest.raises(SamplingError) as caught:
        smollm2.trace(PROMPT, max_new_tokens=1)
    assert "`_" not in str(caught.value)
