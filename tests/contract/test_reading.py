"""Rule 4: what a port gives is this request's own rows, whole, a private copy, in the module's own structure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import invivo
from support.contract import OTHER, PROMPT, error_of, first, prompt_ids, rows, same, stream
from support.reference import Reference


def test_all_layers_equal_the_reference(model: Any, reference: Reference) -> None:
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        read = list().save()
        for layer in model.model.layers:
            attention = rows(layer.self_attn.output)
            mlp_input = rows(layer.mlp.input)
            read.append((attention, mlp_input, rows(layer.mlp.output), stream(layer)))
    step = reference.run(prompt_ids(model), 1).steps[0]
    assert len(read) == len(model.model.layers) == 30
    wrong = []
    for number, parts in enumerate(read):
        name = f"model.layers.{number}"
        outputs = [f"{name}.self_attn", f"{name}.post_attention_layernorm", f"{name}.mlp", name]
        for address, found in zip(outputs, parts, strict=True):
            if not same(found, step.output(address)):
                wrong.append(f"{address}: {error_of(found, step.output(address)):.1e}")
    assert not wrong, wrong


def test_embedding_final_norm_logits_and_sample_equal_the_reference(model: Any, reference: Reference) -> None:
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        embedded = rows(model.model.embed_tokens.output).save()
        normed = rows(model.model.norm.output).save()
        logits = model.logits.save()
        sample = model.samples.save()
    step = reference.run(prompt_ids(model), 1).steps[0]
    assert same(embedded, step.output("model.embed_tokens"))
    assert same(normed, step.output("model.norm"))
    assert same(logits, step.logits)
    assert sample.tolist() == [step.token]
    assert sample.shape == (1,)
    assert not sample.is_floating_point()


def test_values_have_the_rows_of_their_step(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=3, temperature=0) as tracer:
        shapes = list().save()
        for _ in tracer.iter[:]:
            shapes.append((rows(model.model.layers[7].mlp.output).shape, model.logits.shape))
    count = len(prompt_ids(model))
    assert shapes == [(torch.Size([n, 576]), torch.Size([1, 49152])) for n in (count, 1, 1)]


def test_a_value_stays_what_it_was_when_read(model: Any) -> None:
    """vLLM's fused norms write into the tensors that a layer returned."""
    with model.trace(PROMPT, max_tokens=2, temperature=0) as tracer:
        kept = []
        unchanged = list().save()
        for step in tracer.iter[:]:
            value = model.model.layers[5].output
            parts = value if isinstance(value, tuple) else (value,)
            kept.append((parts, [part.clone() for part in parts]))
            model.model.layers[6].output
            model.model.norm.output
            model.logits
        for parts, copies in kept:
            unchanged.append(all(bool((a == b).all()) for a, b in zip(parts, copies, strict=True)))
    assert unchanged == [True, True]


def test_a_port_read_twice_is_one_object(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        mlp = model.model.layers[5].mlp
        is_same = (mlp.output is mlp.output).save()
        is_same_input = (model.model.layers[6].mlp.input is model.model.layers[6].mlp.input).save()
    assert is_same
    assert is_same_input


def test_input_is_in_inputs(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        norm = model.model.layers[3].post_attention_layernorm
        args, kwargs = norm.inputs
        is_first = (norm.input is args[0]).save()
        kinds = [type(args).__name__, type(kwargs).__name__].save()
    assert is_first
    assert kinds == ["tuple", "dict"]


@pytest.mark.engine
def test_structure_is_the_modules_own(smollm2: Any, topology: tuple[str, dict[str, Any]]) -> None:
    model = smollm2
    config = json.loads((Path(topology[0]) / "config.json").read_text(encoding="utf-8"))
    widths = [64 * config[f"num_{kind}_heads"] for kind in ("attention", "key_value")]
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        rotated = model.model.layers[0].self_attn.rotary_emb.output
        hidden, *rest = model.model.layers[0].output
        kinds = [type(rotated).__name__, [list(part.shape) for part in rotated], len(rest)].save()
        projected = model.model.layers[1].self_attn.o_proj.output
        second = (projected[1] is None).save()
    assert kinds == ["tuple", [[9, width] for width in widths], 1]
    assert second


def test_inputs_are_read_before_what_is_inside_and_outputs_after(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        layer = model.model.layers[4]
        before = layer.input
        down = first(layer.mlp.down_proj.output)
        mlp = layer.mlp.output
        equal = bool((down == mlp).all()).save()
        layer.output
    assert equal


def test_the_last_layer_by_a_negative_number(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        address = model.model.layers[-1].address.save()
        last = stream(model.model.layers[-1]).save()
        logits = model.logits.save()
    assert address == "model.layers.29"
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        again = stream(model.model.layers[29]).save()
    assert torch.equal(last, again)


@pytest.mark.calls_later_stages
def test_modules_called_in_the_block_run_the_real_weights(model: Any, reference: Reference) -> None:
    """The logit lens, over all layers, in one trace."""
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        lens = list().save()
        for layer in model.model.layers:
            lens.append(model.lm_head(model.model.norm(stream(layer)))[-1])
    step = reference.run(prompt_ids(model), 1).steps[0]
    whole: Any = reference.model
    with torch.inference_mode():
        for number, found in enumerate(lens):
            after = step.output(f"model.layers.{number}")
            assert same(found, whole.lm_head(whole.model.norm(after))[-1])


def test_calling_a_module_fires_no_port_and_changes_nothing(model: Any, reference: Reference) -> None:
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        hidden = stream(model.model.layers[2])
        kept = hidden.clone()
        model.model.norm(hidden)
        model.model.layers[20].mlp(hidden)
        untouched = bool((hidden == kept).all()).save()
        mlp = rows(model.model.layers[20].mlp.output).save()
        normed = rows(model.model.norm.output).save()
        logits = model.logits.save()
    step = reference.run(prompt_ids(model), 1).steps[0]
    assert untouched
    assert same(mlp, step.output("model.layers.20.mlp"))
    assert same(normed, step.output("model.norm"))
    assert same(logits, step.logits)


def test_ports_through_helpers_and_methods_of_the_caller(model: Any, reference: Reference) -> None:
    class Probe:
        def __init__(self, layer: int) -> None:
            self.layer = layer

        def read(self, model: Any) -> Any:
            return invivo.save(rows(model.model.layers[self.layer].mlp.output))

    probe = Probe(9)
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        found = probe.read(model)
    assert same(found, reference.run(prompt_ids(model), 1).steps[0].output("model.layers.9.mlp"))


def test_another_prompt_has_its_own_values(model: Any, reference: Reference) -> None:
    with model.trace(OTHER, max_tokens=2, temperature=0) as tracer:
        read = list().save()
        for _ in tracer.iter[:]:
            read.append(stream(model.model.layers[11]))
    steps = reference.run(prompt_ids(model, OTHER), 2).steps
    for found, step in zip(read, steps, strict=True):
        assert same(found, step.output("model.layers.11"))


def test_the_tree_shows_shapes_once_known(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        pass
    assert "576]" in repr(model.model.layers[0].mlp)
    assert "model.layers" not in repr(model.model.norm)
    assert "<details" in model._repr_html_()
