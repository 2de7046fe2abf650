"""Rule 9: an exception of a block is raised where the `with` ends, as itself, and the engine serves on."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch

import invivo
from invivo import (
    BlockError,
    CaptureError,
    EngineClosedError,
    ForeignError,
    Local,
    MisuseError,
    OutsideBlockError,
    SamplingError,
    TransferError,
    UnknownNameError,
    UnsupportedError,
    WriteError,
)
from support.contract import ENGINE, PROMPT, assert_raised_at, assert_serves, marked_line, rows, shown


class ProbeError(Exception):
    """An exception class of the user's own module, with more than a message."""

    def __init__(self, layer: int, norm: float) -> None:
        super().__init__(f"layer {layer} has norm {norm:.1f}")
        self.layer = layer
        self.norm = norm


def check_finite(value: torch.Tensor) -> None:
    """A helper of the user's module that fails."""
    if value.shape[-1] == 576:
        raise ValueError("not what I wanted")  # <in the helper>


def test_the_type_the_line_and_the_port(model: Any) -> None:
    with pytest.raises(RuntimeError) as caught:
        with model.trace(PROMPT, max_tokens=30, temperature=0, ignore_eos=True):
            fine = model.model.layers[3].mlp.output.save()
            fine.reshape(7, 7)  # <reshape>
    error: Any = caught.value
    assert type(error) is RuntimeError
    assert "shape '[7, 7]' is invalid" in str(error)
    assert_raised_at(error, __file__, "reshape")
    assert "fine.reshape(7, 7)" in shown(error)
    assert "at port model.layers.3.mlp.output, step 0" in error.__notes__
    assert rows(error.saves["fine"]).shape == (9, 576)
    assert "fine" not in locals()
    assert_serves(model)


def test_the_step_is_named(model: Any) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        with model.trace(PROMPT, max_tokens=30, temperature=0, ignore_eos=True) as tracer:
            ran = list().save()
            for step in tracer.iter[:]:
                ran.append(step)
                1 / (2 - step)  # <division>
    error: Any = caught.value
    assert error.saves["ran"] == [0, 1, 2]
    assert any("step 2" in note for note in error.__notes__)
    assert_raised_at(error, __file__, "division")
    assert_serves(model)


def test_an_exception_in_a_helper_of_the_callers_module(model: Any) -> None:
    with pytest.raises(ValueError, match="not what I wanted") as caught:
        with model.trace(PROMPT, max_tokens=3, temperature=0):
            h = rows(model.model.layers[3].mlp.output)
            check_finite(h)  # <call of the helper>
    assert_raised_at(caught.value, __file__, "call of the helper")
    assert_raised_at(caught.value, __file__, "in the helper")
    assert "check_finite" in shown(caught.value)
    assert_serves(model)


def test_an_exception_class_of_the_callers_module(model: Any) -> None:
    with pytest.raises(ProbeError) as caught:
        with model.trace(PROMPT, max_tokens=3, temperature=0):
            raise ProbeError(3, 2.5)  # <own class>
    assert type(caught.value) is ProbeError
    assert (caught.value.layer, caught.value.norm) == (3, 2.5)
    assert str(caught.value) == "layer 3 has norm 2.5"
    assert_raised_at(caught.value, __file__, "own class")
    assert_serves(model)


@pytest.mark.engine
def test_a_class_that_only_the_block_has(smollm2: Any) -> None:
    """It was made in the engine's process, so a `BlockError` stands for it, with its name and text."""
    model = smollm2
    with pytest.raises(BlockError, match=r"Inner.*made up"):
        with model.trace(PROMPT, max_tokens=3, temperature=0):

            class Inner(Exception):
                pass

            raise Inner("made up")
    assert_serves(model)


@pytest.mark.parametrize(
    "error",
    [KeyError("k"), StopIteration(3), AssertionError(), OSError(2, "no", "file"), SystemExit(3), KeyboardInterrupt()],
    ids=lambda error: type(error).__name__,
)
def test_exceptions_of_every_kind(model: Any, error: BaseException) -> None:
    kind, args = type(error), error.args
    with pytest.raises(kind) as caught:
        with model.trace(PROMPT, max_tokens=30, temperature=0, ignore_eos=True):
            raise kind(*args)  # <any kind>
    assert type(caught.value) is type(error)
    assert str(caught.value) == str(error) or isinstance(error, OSError)
    assert_raised_at(caught.value, __file__, "any kind")
    assert_serves(model)


def test_causes_are_kept(model: Any) -> None:
    with pytest.raises(RuntimeError) as caught:
        with model.trace(PROMPT, max_tokens=3, temperature=0):
            try:
                {}["missing"]
            except KeyError as error:
                raise RuntimeError("outer") from error
    assert isinstance(caught.value.__cause__, KeyError)
    assert "direct cause" in shown(caught.value)


def test_an_exception_after_the_end_of_the_request(model: Any) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        with model.trace(PROMPT, max_tokens=2, temperature=0) as tracer:
            kept = model.logits.save()
            tracer.result
            1 / 0  # <after the result>
    error: Any = caught.value
    assert error.saves["kept"].shape == (1, 49152)
    assert_raised_at(error, __file__, "after the result")
    assert_serves(model)


def test_handled_exceptions_stay_in_the_block(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        try:
            raise ValueError
        except ValueError:
            handled = (1).save()
    assert handled == 1


def write_shape(out: Any) -> Any:
    return out[..., :3, :]


def write_dtype(out: Any) -> Any:
    return out.double()


def write_rows(out: Any) -> Any:
    return torch.cat([out, out], -2)


def write_number(out: Any) -> Any:
    return 0


def write_structure(out: Any) -> Any:
    return (out, out)


WRITES: dict[Any, str] = {
    write_shape: "the shape must be the same",
    write_dtype: "the dtype must be the same",
    write_rows: "the shape must be the same",
    write_number: r"and got int. To fill it with one value, write `model.layers.6.mlp.output\[:\] = ...`",
    write_structure: "and got tuple",
}


@pytest.mark.parametrize("make", WRITES, ids=lambda make: make.__name__)
def test_wrong_values_written(model: Any, make: Any) -> None:
    with pytest.raises(WriteError, match=WRITES[make]) as caught:
        with model.trace(PROMPT, max_tokens=30, temperature=0, ignore_eos=True):
            before = model.model.layers[5].mlp.output.save()
            out = model.model.layers[6].mlp.output
            model.model.layers[6].mlp.output = make(out)  # <write>
    error: Any = caught.value
    assert "model.layers.6.mlp.output takes float32 [" in str(error)
    assert_raised_at(error, __file__, "write")
    assert list(error.saves) == ["before"]
    assert_serves(model)


@pytest.mark.engine
def test_wrong_structure_written_to_a_tuple(smollm2: Any) -> None:
    model = smollm2
    with pytest.raises(WriteError, match=r"takes a tuple of 2 values, and got Tensor|got float32"):
        with model.trace(PROMPT, max_tokens=3, temperature=0):
            hidden, residual = model.model.layers[6].output
            model.model.layers[6].output = hidden + residual
    with pytest.raises(WriteError, match=r"model.layers.6.output\[1\] takes float32 \[9, 576\]"):
        with model.trace(PROMPT, max_tokens=3, temperature=0):
            hidden, residual = model.model.layers[6].output
            model.model.layers[6].output = (hidden, residual[:3])
    assert_serves(model)


@pytest.mark.parametrize("what", ["resize", "transpose"])
def test_shapes_changed_in_place(model: Any, what: str) -> None:
    with pytest.raises((WriteError, RuntimeError)):
        with model.trace(PROMPT, max_tokens=3, temperature=0):
            out = model.model.layers[6].mlp.output
            if what == "resize":
                out.resize_(2, 2)
            else:
                out.transpose_(-1, -2)
            model.model.layers[7].mlp.output
    assert_serves(model)


def test_a_port_outside_of_a_block(model: Any) -> None:
    for read in (lambda: model.model.layers[0].output, lambda: model.logits, lambda: model.model.norm(1)):
        with pytest.raises(OutsideBlockError, match=r"exists only while a block runs. Use it inside `with"):
            read()
    with pytest.raises(OutsideBlockError, match="`save` exists only while a block runs"):
        invivo.save(1)
    with pytest.raises(OutsideBlockError):
        model.model.layers[0].mlp.output = 1


def test_a_tracer_after_its_block(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=1, temperature=0) as tracer:
        pass
    with pytest.raises(OutsideBlockError):
        tracer.stop()
    with pytest.raises(OutsideBlockError):
        list(tracer.iter[:])


def test_a_module_of_another_model(model: Any) -> None:
    other: Any = Local(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    with pytest.raises(ForeignError):
        with model.trace(PROMPT, max_tokens=1, temperature=0):
            other[0].output
    assert_serves(model)


def test_an_unknown_sampling_argument(model: Any) -> None:
    with pytest.raises(SamplingError, match=r"unknown sampling argument `max_token`. Did you mean `max_tokens`"):
        with model.trace(PROMPT, max_token=1):
            pass
    with pytest.raises(SamplingError):
        with model.trace(PROMPT, max_tokens=-1):
            pass
    with pytest.raises(SamplingError):
        with model.trace(PROMPT, temperature=-2.0):
            pass
    assert_serves(model)


def test_a_closed_engine() -> None:
    from invivo import VLLM
    from smollm2 import smollm2_path

    with VLLM(str(smollm2_path()), **ENGINE) as model:
        pass
    with pytest.raises(EngineClosedError, match=r"was closed\. Make a new `VLLM\(\.\.\.\)` to start another one"):
        with model.trace(PROMPT, max_tokens=1, temperature=0):
            pass
    with pytest.raises(EngineClosedError):
        model.dispatch()
    model.close()


def test_engine_arguments_that_traces_cannot_have() -> None:
    from invivo import VLLM
    from smollm2 import smollm2_path

    path = str(smollm2_path())
    with pytest.raises(MisuseError, match=r"unknown engine argument `max_model_length`\. Did you mean `max_model_len`"):
        VLLM(path, max_model_length=3)
    with pytest.raises(UnsupportedError, match="several engines of one model for asynchronous callers only"):
        VLLM(path, data_parallel_size=2)
    with pytest.raises(UnsupportedError, match="not tried with this executor"):
        VLLM(path, tensor_parallel_size=2, distributed_executor_backend="external_launcher")
    with pytest.raises(UnsupportedError, match="engines that run in Ray cannot be watched"):
        VLLM(path, mode="async", data_parallel_size=2, data_parallel_backend="ray")
    with pytest.raises(UnsupportedError, match="needs its own scheduler"):
        VLLM(path, scheduler_cls="some.where.Scheduler")


def test_a_body_that_cannot_be_captured(model: Any) -> None:
    def run() -> Any:
        with model.trace(PROMPT, max_tokens=1, temperature=0):
            return model.logits  # <return>

    with pytest.raises(CaptureError) as caught:
        run()
    line = marked_line(__file__, "return")
    assert f"{__file__}:{line}: `return` in a captured block." in str(caught.value)
    assert "save the value (`x = x.save()`) and return it after the `with`" in str(caught.value)
    with pytest.raises(CaptureError):
        model.trace(PROMPT, max_tokens=1, temperature=0).__enter__()
    assert_serves(model)


def test_a_variable_that_cannot_travel(model: Any) -> None:
    import threading

    lock = {"a": [threading.Lock()]}
    with pytest.raises(TransferError) as caught:
        with model.trace(PROMPT, max_tokens=1, temperature=0):
            len(lock)
    assert "`lock" in str(caught.value) and "locks live in this process" in str(caught.value)
    assert_serves(model)


def test_a_mode_left_open(model: Any) -> None:
    with pytest.raises(MisuseError, match="inside a torch mode"):
        with model.trace(PROMPT, max_tokens=3, temperature=0):
            torch.autocast("cpu").__enter__()
            model.logits
    assert_serves(model)


@pytest.mark.parametrize("mode", ["device", "default device", "function", "dispatch", "autocast", "inference"])
def test_a_mode_left_open_at_the_end(model: Any, mode: str) -> None:
    """What the block leaves open is closed behind it: the model goes on as before."""
    with model.trace(PROMPT, max_tokens=2, temperature=0):
        shape = model.model.layers[3].mlp.output.shape.save()
        if mode == "device":
            torch.device("meta").__enter__()
        elif mode == "default device":
            torch.set_default_device("meta")
        elif mode == "function":
            torch.overrides.BaseTorchFunctionMode().__enter__()
        elif mode == "dispatch":
            torch.utils._python_dispatch.TorchDispatchMode().__enter__()
        elif mode == "autocast":
            torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
        else:
            kept = torch.inference_mode(False)
            kept.__enter__()
    assert shape[-1] == 576
    assert torch.zeros(1).device.type == "cpu"
    assert not torch.is_autocast_enabled("cpu")
    assert_serves(model)


def test_recursion(model: Any) -> None:
    def forever(n: int) -> int:
        return forever(n + 1) + 1

    with pytest.raises(RecursionError):
        with model.trace(PROMPT, max_tokens=3, temperature=0):
            forever(0)
    assert_serves(model)


def test_names_that_do_not_exist_in_the_block(model: Any) -> None:
    with pytest.raises(NameError, match="undefined_thing"):
        with model.trace(PROMPT, max_tokens=1, temperature=0):
            undefined_thing  # noqa: F821
    with pytest.raises(AttributeError, match="no attribute 'no_such'"):
        with model.trace(PROMPT, max_tokens=1, temperature=0):
            math.pi.no_such
    assert_serves(model)


def test_an_index_known_at_run_time_only(model: Any) -> None:
    index = 99
    with pytest.raises(UnknownNameError, match=r"model.layers\[99\] does not exist: it has 30 modules"):
        with model.trace(PROMPT, max_tokens=3, temperature=0):
            model.model.layers[index].output
    assert_serves(model)


def test_the_callers_trace_function_is_put_back(model: Any) -> None:
    def tracing(frame: Any, event: str, arg: Any) -> None:
        """Traces calls, and no lines in them."""

    before = sys.gettrace()
    sys.settrace(tracing)
    try:
        with pytest.raises(ZeroDivisionError):
            with model.trace(PROMPT, max_tokens=1, temperature=0):
                1 / 0
        during = sys.gettrace()
    finally:
        sys.settrace(before)
    assert during is tracing
