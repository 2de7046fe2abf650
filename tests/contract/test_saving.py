"""Rules 2 and 3: names, and what comes home under them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import invivo
from invivo import InvivoWarning, SaveError
from support.contract import PROMPT, assert_serves, rows, tokens

OUTSIDE: Any = None


def test_saved_names_are_bound_and_others_are_not(model: Any) -> None:
    kept = "mine"
    with model.trace(PROMPT, max_tokens=1, temperature=0) as tracer:
        kept = "changed in the block"
        unsaved = model.logits
        saved = model.samples.save()
    assert kept == "mine"
    assert "unsaved" not in locals()
    assert saved.shape == (1,)
    assert set(tracer.saves) == {"saved"}
    assert tracer.saves["saved"] is saved


def test_any_object_is_saved(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        h = rows(model.model.layers[2].mlp.output)
        shape = h.shape.save()
        number = h.shape[-1].save()
        real = float(h.norm()).save()
        text = "x".save()
        flag = True.save()
        nothing = None
        nothing.save()
        items = [1, (2.5, "b"), {"k": {3, 4}}, b"bytes", 1j, range(3)].save()
        dtype = h.dtype.save()
        array = h[0, :3].cpu().numpy().save()
        empty = torch.empty(0, 5).save()
    assert shape == torch.Size([9, 576])
    assert isinstance(shape, torch.Size)
    assert (number, text, flag, nothing) == (576, "x", True, None)
    assert math.isfinite(real)
    assert items == [1, (2.5, "b"), {"k": {3, 4}}, b"bytes", 1j, range(3)]
    assert dtype is torch.float32
    assert array.shape == (3,)
    assert empty.shape == (0, 5)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.bool, torch.complex64]
)
def test_tensors_of_every_dtype(model: Any, dtype: torch.dtype) -> None:
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        value = torch.arange(6).reshape(2, 3).t().to(dtype).save()
    assert value.dtype == dtype
    assert value.device.type == "cpu"
    assert torch.equal(value, torch.arange(6).reshape(2, 3).t().to(dtype))
    value[0] = 1  # it is the caller's own


def test_the_value_is_the_one_at_the_end_of_the_block(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=2, temperature=0, ignore_eos=True) as tracer:
        grown = list().save()
        h = rows(model.model.layers[2].mlp.output).save()
        h[:] = 5
        total = 0
        for step in tracer.iter[:]:
            grown.append(step)
            total += 10
        total.save()
    assert grown == [0, 1]
    assert torch.equal(h, torch.full_like(h, 5))
    assert total == 20


def test_the_same_object_twice_comes_home_as_one(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        h = model.logits.save()
        both = [h, h].save()
    assert both[0] is both[1]
    assert both[0] is h


def test_save_in_helper_functions_and_as_a_function(model: Any) -> None:
    def helper(envoy: Any) -> Any:
        return invivo.save(rows(envoy.output).sum())

    with model.trace(PROMPT, max_tokens=1, temperature=0):
        total = helper(model.model.layers[1].mlp)
        again = invivo.save(total * 2)
        save = invivo.save
        seven = save(7)
        text = invivo.save("text")
        same = 7
        save(same)
    assert torch.equal(again, total * 2)
    assert (seven, text, same) == (7, "text", 7)


def test_saving_to_attributes_and_items_of_a_saved_container(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        out = {}.save()
        for number in (1, 4):
            out[number] = rows(model.model.layers[number].mlp.output)
    assert sorted(out) == [1, 4]
    assert out[4].shape == (9, 576)


def test_walrus_tuple_targets_and_augmented_assignment(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        if (h := rows(model.model.layers[1].mlp.output).save()) is not None:
            a, (b, *rest) = 1, (2, 3, 4)
            a.save(), b.save(), rest.save()
    assert h.shape == (9, 576)
    assert (a, b, rest) == (1, 2, [3, 4])


def test_globals_are_bound_in_their_module(model: Any) -> None:
    def run() -> None:
        global OUTSIDE
        with model.trace(PROMPT, max_tokens=1, temperature=0):
            OUTSIDE = int(model.samples[0]).save()

    run()
    assert OUTSIDE == 7042


def test_enclosing_functions_see_what_was_saved(model: Any) -> None:
    found = None

    def run() -> None:
        nonlocal found
        with model.trace(PROMPT, max_tokens=1, temperature=0):
            found = int(model.samples[0]).save()

    run()
    assert found == 7042


def test_captured_values_are_those_at_capture(model: Any) -> None:
    values = [1, 2]
    tensor = torch.ones(3)
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        copied = list(values).save()
        seen = tensor.clone().save()
    assert copied == [1, 2]
    assert torch.equal(seen, tensor)


def test_a_module_level_script_gets_its_names(model: Any) -> None:
    import linecache

    source = (
        "with model.trace(prompt, max_tokens=1, temperature=0) as tracer:\n"
        "    token = int(model.samples[0]).save()\n"
        "    hidden = 5\n"
        "after = token + 1\n"
    )
    name = "<script of test_saving>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope: dict[str, Any] = {"model": model, "prompt": PROMPT, "__name__": "script"}
    exec(compile(source, name, "exec"), scope)
    assert scope["token"] == 7042
    assert scope["after"] == 7043
    assert "hidden" not in scope


def test_a_value_that_cannot_come_home(model: Any) -> None:
    class Thing:
        pass

    with pytest.raises(SaveError, match=r"`things\[1\]\[\"x\"\]` cannot be saved: .*Thing") as caught:
        with model.trace(PROMPT, max_tokens=2, temperature=0):
            fine = model.logits.save()
            things = [1, {"x": Thing()}].save()
    assert "fine" not in locals()
    assert caught.value.saves is not None
    assert_serves(model)


def test_saving_a_name_in_a_loop_keeps_the_last_value_and_says_so(model: Any) -> None:
    with pytest.warns(InvivoWarning, match=r"the value saved here as `h` is lost") as caught:
        with model.trace(PROMPT, max_tokens=3, temperature=0, ignore_eos=True) as tracer:
            for _ in tracer.iter[:]:
                h = model.samples.save()
    assert len(caught) == 2
    assert h.tolist() == tokens(tracer)[-1:]


def test_a_saved_name_that_was_bound_again(model: Any) -> None:
    with pytest.warns(InvivoWarning, match=r"the value saved here as `h` is lost"):
        with model.trace(PROMPT, max_tokens=1, temperature=0) as tracer:
            h = model.logits.save()
            h = h * 2
    assert "h" not in tracer.saves


def test_saves_and_result_are_on_the_tracer(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=3, temperature=0) as tracer:
        a = model.logits.save()
        b = (2).save()
    assert set(tracer.saves) == {"a", "b"}
    assert len(tokens(tracer)) == 3


def test_print_in_a_block_reaches_the_caller(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        print("rows:", rows(model.model.layers[0].mlp.output).shape[0])
        print("ünïcode", end="|\n")
    assert capsys.readouterr().out == "rows: 9\nünïcode|\n"


@pytest.mark.engine
def test_text_that_no_utf8_has_is_printed_as_escapes(smollm2: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of a surrogate pair kept everything else that the block sent from coming home."""
    with smollm2.trace(PROMPT, max_tokens=1, temperature=0):
        print("\ud83d")
        count = smollm2.logits.shape[0].save()
    assert capsys.readouterr().out == "\\ud83d\n"
    assert count == 1


def test_a_large_save(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        large = torch.arange(8_000_000, dtype=torch.float32).save()
    assert torch.equal(large, torch.arange(8_000_000, dtype=torch.float32))
