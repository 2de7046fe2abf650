"""What `Local` generates: seeds, prompts in tensors, lengths, and models with caches of other kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from invivo import Local, PortNotReachedError, PromptError, SamplingError, UnsupportedError

IDS = [5, 6, 7, 8, 9]
POSITIONS = 24


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=97, n_positions=POSITIONS, n_embd=16, n_layer=2, n_head=2, bos_token_id=0)
    return Local(GPT2LMHeadModel(config).eval())


def drawn(model: Any, prompt: object = IDS, **sampling: Any) -> tuple[int, ...]:
    with model.trace(prompt, **{"max_tokens": 6, "ignore_eos": True, **sampling}) as tracer:
        pass
    tokens: tuple[int, ...] = tracer.result.token_ids
    return tokens


def test_without_a_seed_tokens_differ_and_torchs_seed_repeats_them(model: Any) -> None:
    torch.manual_seed(3)
    first, second = drawn(model), drawn(model)
    assert first != second
    torch.manual_seed(3)
    assert (drawn(model), drawn(model)) == (first, second)

    with model.trace(max_tokens=6, ignore_eos=True) as tracer:
        for _ in range(3):
            with tracer.invoke(IDS):
                pass
    assert len({result.token_ids for result in tracer.results}) == 3


def test_with_a_seed_or_without_sampling_torchs_numbers_are_left_alone(model: Any) -> None:
    before = torch.get_rng_state()
    assert drawn(model, seed=4) == drawn(model, seed=4)
    assert drawn(model, seed=4) != drawn(model, seed=5)
    assert drawn(model, temperature=0) == drawn(model, temperature=0)
    assert torch.equal(before, torch.get_rng_state())


def test_what_a_block_draws_starts_from_the_requests_seed(model: Any) -> None:
    with model.trace(IDS, max_tokens=1):
        plain = torch.rand(2).save()
    with model.trace(IDS, max_tokens=1, seed=0):
        zero = torch.rand(2).save()
    assert torch.equal(plain, zero)


@pytest.mark.parametrize("prompt", [torch.tensor(IDS), torch.tensor([IDS]), torch.tensor(IDS).numpy()])
def test_token_ids_in_a_tensor_are_a_prompt(model: Any, prompt: object) -> None:
    assert drawn(model, prompt, temperature=0) == drawn(model, temperature=0)


def test_a_batch_in_a_tensor_is_a_prompt_only_with_sampling_arguments(model: Any) -> None:
    ids = torch.tensor([IDS])
    with model.trace(ids, output_hidden_states=True) as tracer:
        logits = model.lm_head.output.save()
    assert logits.shape == (1, 5, 97)
    assert len(tracer.result.value.hidden_states) == 3
    with pytest.raises(PortNotReachedError, match="no token was generated in it"):
        with model.trace(ids):
            model.logits.save()
    with model.trace(max_tokens=2, ignore_eos=True) as several:
        with several.invoke(ids):
            pass
    assert len(several.results[0].token_ids) == 2


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda m: m.trace(torch.tensor([IDS]), max_token=5), SamplingError, "`max_token` is neither.*`max_tokens`"),
        (lambda m: m.trace(torch.tensor([IDS]), max_tokens=5, top_p=1), SamplingError, "unknown.*`top_p`"),
        (lambda m: m.trace(max_token=5), SamplingError, "`max_token` is neither"),
        (lambda m: m.trace(prompt=IDS, max_tokens=1), SamplingError, "unknown sampling argument `prompt`"),
        (lambda m: m.trace(IDS, max_tokens=None), SamplingError, "`max_tokens` is an integer"),
        (lambda m: m.trace(IDS, temperature=float("nan")), SamplingError, "`temperature` a finite number"),
        (lambda m: m.trace(IDS, IDS, max_tokens=1), PromptError, "one prompt, and got 2"),
        (lambda m: m.trace("a", "b"), PromptError, "one prompt, and got 2"),
        (lambda m: m.trace(torch.tensor([IDS, IDS]), max_tokens=1), PromptError, "One trace takes one prompt"),
        (lambda m: m.trace(torch.ones(5), max_tokens=1), PromptError, "a prompt is a text, a list of token ids"),
    ],
)
def test_arguments_that_nobody_takes_are_refused(
    model: Any, make: Callable[[Any], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(model)


def test_an_invoke_needs_a_prompt(model: Any) -> None:
    with pytest.raises(PromptError, match="there is no prompt"):
        with model.trace(max_tokens=1) as tracer:
            with tracer.invoke():
                pass


def test_a_prompt_and_what_follows_fit_the_models_positions(model: Any) -> None:
    assert len(drawn(model, max_tokens=POSITIONS - len(IDS) + 1)) == POSITIONS - len(IDS) + 1
    with pytest.raises(PromptError, match=r"takes 25 positions, and the model has 24.*Lower `max_tokens` to 20"):
        model.trace(IDS, max_tokens=21)
    with pytest.raises(PromptError, match=r"model has 24 \(`max_position_embeddings`\)\. Shorten the prompt"):
        model.trace([5] * 25, max_tokens=1)


@pytest.mark.filterwarnings("ignore")
def test_a_recurrent_model_generates() -> None:
    torch.manual_seed(0)
    module = MambaForCausalLM(MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=2, state_size=4)).eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    model: Any = Local(module)
    with model.trace(IDS, max_tokens=4, temperature=0, ignore_eos=True) as tracer:
        rows = [].save()
        for _ in tracer.iter[:]:
            rows.append(model.backbone.layers[0].output.shape[1])
    expected = list(IDS)
    with torch.no_grad():
        for _ in range(4):
            expected.append(int(module(torch.tensor([expected]), use_cache=False).logits[0, -1].argmax()))
    assert [*IDS, *tracer.result.token_ids] == expected
    assert rows == [5, 1, 1, 1]


def test_models_that_cannot_go_on_from_a_prompt_say_so() -> None:
    config = T5Config(vocab_size=97, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    with pytest.raises(UnsupportedError, match="has an encoder beside its decoder"):
        Local(T5ForConditionalGeneration(config)).trace(IDS)
    recurrent = RecurrentGemmaConfig(
        vocab_size=97, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, lru_width=16
    )
    model = Local(RecurrentGemmaForCausalLM(recurrent).eval())
    with pytest.raises(UnsupportedError, match="gave no `past_key_values` to go on with"):
        with model.trace(IDS, max_tokens=2, ignore_eos=True):
            pass
    model.check_integrity()


def test_a_model_of_transformers_that_does_not_generate_is_called() -> None:
    config = BertConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    model: Any = Local(BertModel(config).eval())
    with model.trace(torch.tensor(IDS)[None]):
        hidden = model.encoder.output[0].save()
    assert hidden.shape == (1, 5, 16)


def test_a_text_for_a_model_of_transformers_that_does_not_generate() -> None:
    """It came to the model itself, which failed somewhere inside."""
    bert: Any = Local(BertModel(BertConfig(vocab_size=40, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)))
    with pytest.raises(PromptError, match="BertModel is no language model that `Local` generates with"):
        bert.trace("some text")


class TakesText(torch.nn.Module):
    def forward(self, text: str) -> int:
        return len(text)


def test_a_text_for_a_module_that_takes_one() -> None:
    model: Any = Local(TakesText())
    with model.trace("four") as tracer:
        pass
    assert tracer.result.value == 4
