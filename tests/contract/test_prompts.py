"""Prompts: text, token ids, chat messages; and the ones that the model cannot take."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from invivo import PromptError
from support.contract import PROMPT, assert_serves, prompt_ids, tokens


def numbers_of_numpy(ids: list[int]) -> list[np.int64]:
    return [*map(np.int64, ids)]


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, numbers_of_numpy])
def test_token_ids_are_the_text(model: Any, kind: Any) -> None:
    with model.trace(PROMPT, max_tokens=3, temperature=0) as text:
        pass
    with model.trace(kind(prompt_ids(model)), max_tokens=3, temperature=0) as ids:
        pass
    assert tokens(text) == tokens(ids)


def test_chat_messages_go_through_the_template(model: Any) -> None:
    tokenizer = model.tokenizer if hasattr(type(model), "tokenizer") else model._tokenizer
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    with model.trace(messages, max_tokens=8, temperature=0) as tracer:
        pass
    result: Any = tracer.result
    assert list(result.prompt_token_ids) == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert "Paris" in tokenizer.decode(tokens(tracer))


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([1, 49152], "token id 49152 is out of range: this model has ids 0 to 49151"),
        ([-1], "token id -1 is out of range"),
        (["a", "b"], "One trace takes one prompt"),
        ([{"role": "user"}], "the tokenizer's chat template does not take these messages"),
        ([{"role": "user", "content": 5}], "a text as `content`; got list"),
        ("half a character: \ud800", "it is no valid text"),
        ({"text": "a"}, "a prompt is a text, a list of token ids, or a list of chat messages"),
        (None, "this is NoneType None"),
        (3.5, "this is float 3.5"),
        ([1.5], "a prompt is a text"),
        ([True], "a prompt is a text"),
        ([[1, 2]], "a prompt is a text"),
    ],
    ids=repr,
)
def test_prompts_that_are_none(model: Any, prompt: Any, words: str) -> None:
    with pytest.raises(PromptError, match=words):
        with model.trace(prompt, max_tokens=1, temperature=0):
            pass
    assert_serves(model)


def test_several_prompts_are_sent_to_invokes(model: Any) -> None:
    with pytest.raises(PromptError, match="a trace takes one prompt, and got 2"):
        model.trace("a", "b")


@pytest.mark.engine
def test_a_prompt_over_the_models_length(smollm2: Any) -> None:
    model = smollm2
    with pytest.raises(PromptError) as caught:
        with model.trace([5] * 600, max_tokens=1, temperature=0):
            pass
    message = str(caught.value)
    assert "the prompt has 600 tokens, and the engine takes 512 with what is generated" in message
    assert "raise `max_model_len`" in message
    with pytest.raises(PromptError):
        with model.trace([5] * 512, max_tokens=1, temperature=0):
            pass
    with model.trace([5] * 511, max_tokens=4, temperature=0, ignore_eos=True) as tracer:
        rows = model.model.embed_tokens.output.shape[0].save()
    assert rows == 511
    assert len(tokens(tracer)) == 1
    assert_serves(model)


def test_a_prompt_over_the_token_budget_is_refused_with_the_numbers() -> None:
    from invivo import VLLM
    from smollm2 import smollm2_path
    from support.contract import ENGINE

    model = VLLM(str(smollm2_path()), **(ENGINE | {"max_num_batched_tokens": 64}))
    with pytest.raises(PromptError) as caught:
        with model.trace([5] * 65, max_tokens=1):
            pass
    message = str(caught.value)
    assert "the prompt has 65 tokens, and the engine computes at most 64 in one step" in message
    assert "pass `max_num_batched_tokens=65` or more" in message
    assert not model._engine.running, "nothing was started for a prompt that is refused"
    model.close()


def test_a_prompt_of_one_token(model: Any) -> None:
    with model.trace([504], max_tokens=2, temperature=0) as tracer:
        shape = model.logits.shape.save()
    assert tuple(shape) == (1, 49152)
    assert len(tokens(tracer)) == 2
