"""The reference agrees with itself: what contract tests are measured against must be right first."""

from __future__ import annotations

import pytest
import torch

from support.checkpoints import FAMILIES, RECIPES, tiny_checkpoint
from support.mapping import readings, targets
from support.reference import Edit, Reference, Step, as_rows, first_tensor, route

PROMPT = [17, 49_000, 2222, 31, 5, 6, 1234, 777, 4000]
STEPS = 4
BOUND = 1e-4


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference relative to the norm of `expected`."""
    assert found.shape == expected.shape
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def reference(family: str, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tiny_checkpoint(family, folder=tmp_path_factory.mktemp("tiny")))


def block(family: str, i: int) -> str:
    return f"transformer.h.{i}" if family == "gpt2" else f"model.layers.{i}"


def added(family: str, i: int, step: Step) -> torch.Tensor:
    """What layer i adds to the residual stream."""
    names = {
        "gpt2": ("attn", "mlp"),
        "gemma": ("post_attention_layernorm", "post_feedforward_layernorm"),
    }.get(family, ("self_attn", "mlp"))
    return sum((step.output(f"{block(family, i)}.{name}") for name in names), torch.zeros(()))


def test_the_stream_is_the_sum_of_its_parts(family: str, reference: Reference) -> None:
    trace = reference.run(PROMPT, STEPS)
    assert len(trace.steps) == STEPS
    for number, step in enumerate(trace.steps):
        for i in range(3):
            before, after = step.input(block(family, i)), step.output(block(family, i))
            assert before.shape[0] == (len(PROMPT) if number == 0 else 1)
            assert error(before + added(family, i, step), after) < 1e-6
            if i:
                assert torch.equal(before, step.output(block(family, i - 1)))


def test_decoding_with_a_cache_equals_one_forward_without(reference: Reference) -> None:
    trace = reference.run(PROMPT, STEPS)
    whole = reference.logits(PROMPT + trace.tokens[:-1])[len(PROMPT) - 1 :]
    assert error(torch.cat([step.logits for step in trace.steps]), whole) < BOUND
    assert whole.argmax(dim=-1).tolist() == trace.tokens


def test_logits_are_far_from_ties(reference: Reference) -> None:
    """Greedy tokens can be compared between libraries only if float noise (about 1e-6) cannot change them."""
    for step in reference.run(PROMPT, STEPS).steps:
        first, second = step.logits[-1].topk(2).values
        assert float(first - second) > 1e-4 * float(step.logits.std())


def test_every_reading_can_be_computed_and_varies_from_row_to_row(family: str, reference: Reference) -> None:
    prefill, decode = reference.run(PROMPT, 2).steps
    table = readings(family, 3)
    assert len({reading.name for reading in table}) == len(table)
    for reading in table:
        rows, row = reading.expected(prefill), reading.expected(decode)
        single = reading.address == "logits_processor"
        assert rows.shape == (1 if single else len(PROMPT), *row.shape[1:]), reading.name
        assert row.shape[0] == 1, reading.name
        if not single and reading.quantity != "positions":
            assert not torch.equal(rows[0], rows[-1]), reading.name


def test_zeroing_each_target_at_each_layer_changes_the_logits(family: str, reference: Reference) -> None:
    plain = reference.run(PROMPT, 1)
    for target in targets(family, 3):
        edited = reference.run(PROMPT, 1, [target.edit(0, torch.Tensor.zero_)])
        assert not torch.allclose(edited.steps[0].logits, plain.steps[0].logits, rtol=1e-3), target
        assert torch.count_nonzero(edited.steps[0].output(target.reference)) == 0, target


def test_a_zeroed_mlp_leaves_the_stream_to_the_attention(family: str, reference: Reference) -> None:
    layer = block(family, 1)
    trace = reference.run(PROMPT, 2, [Edit(f"{layer}.mlp", "output", None, torch.Tensor.zero_)])
    for step in trace.steps:
        attention = {"gpt2": "attn", "gemma": "post_attention_layernorm"}.get(family, "self_attn")
        middle = step.input(layer) + step.output(f"{layer}.{attention}")
        assert error(step.output(layer), middle) < 1e-6


def test_an_edit_at_one_step_leaves_the_steps_before_it_alone(family: str, reference: Reference) -> None:
    def shift(rows: torch.Tensor) -> torch.Tensor:
        return rows + 1

    plain = reference.run(PROMPT, 3)
    edited = reference.run(PROMPT, 3, [Edit(block(family, 0), "output", 1, shift)])
    assert torch.equal(edited.steps[0].logits, plain.steps[0].logits)
    assert not torch.allclose(edited.steps[1].logits, plain.steps[1].logits)


def test_an_edit_of_an_input_is_the_edit_of_the_output_before_it(family: str, reference: Reference) -> None:
    def double(rows: torch.Tensor) -> None:
        rows *= 2

    into = reference.run(PROMPT, 2, [Edit(block(family, 1), "input", None, double)])
    out_of = reference.run(PROMPT, 2, [Edit(block(family, 0), "output", None, double)])
    for a, b in zip(into.steps, out_of.steps, strict=True):
        assert torch.equal(a.logits, b.logits)


def test_nothing_is_left_on_the_model(family: str, reference: Reference) -> None:
    plain = reference.run(PROMPT, 1)
    with pytest.raises(AttributeError):
        reference.run(PROMPT, 1, [Edit("model.layers.99", "output", None, torch.Tensor.zero_)])
    for module in reference.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert torch.equal(reference.run(PROMPT, 1).steps[0].logits, plain.steps[0].logits)


def test_checkpoints_are_the_same_every_time(tmp_path_factory: pytest.TempPathFactory) -> None:
    paths = [tiny_checkpoint("qwen3", folder=tmp_path_factory.mktemp("again")) for _ in range(2)]
    first, second = ((path / "model.safetensors").read_bytes() for path in paths)
    assert first == second
    folder = paths[0].parent
    before = (paths[0] / "model.safetensors").stat().st_mtime_ns
    assert tiny_checkpoint("qwen3", folder=folder) == paths[0]
    assert (paths[0] / "model.safetensors").stat().st_mtime_ns == before
    assert [path.name for path in folder.iterdir()] == [paths[0].name]


def test_an_unknown_family_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(KeyError):
        tiny_checkpoint("llama99", folder=tmp_path_factory.mktemp("none"))
    with pytest.raises(ValueError, match="unknown family 'llama99'"):
        readings("llama99", 3)
    assert set(RECIPES) == set(FAMILIES)


def test_route_chooses_the_largest_and_weighs_them_to_one() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    kept, weights, chosen = route(logits, 2)
    assert kept is logits
    assert chosen.tolist() == [[1, 2]]
    assert weights.sum().item() == pytest.approx(1)
    assert (weights[0, 0] / weights[0, 1]).item() == pytest.approx(torch.e, rel=1e-5)


def test_rows_drop_the_batch_dimension_only() -> None:
    hidden, table = torch.zeros(1, 5, 8), torch.zeros(1, 6)
    assert as_rows(hidden).shape == (5, 8)
    assert as_rows(table).shape == (1, 6)
    assert as_rows(table, ids=True).shape == (6,)
    nested = as_rows((hidden, None, {"x": hidden}, "text"))
    assert (nested[1], nested[3]) == (None, None)
    assert first_tensor(nested[1:]).shape == (5, 8)
    with pytest.raises(LookupError):
        first_tensor((None, ()))
