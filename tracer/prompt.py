"""Prompts: text, token ids or chat messages, as token ids."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..envoy.errors import PromptError


class Prompt(NamedTuple):
    """A prompt as the model takes it.

    Attributes:
        token_ids: at least one id.
        text: the text that was tokenized, where there was one.
    """

    token_ids: list[int]
    text: str | None


def tokenize(prompt: object, tokenizer: Any, vocabulary: int | None = None) -> Prompt:
    """Token ids of a prompt.

    Args:
        prompt: text; a sequence of token ids (also a tensor or array of them); or a list of chat messages, dicts with
            ``role`` and ``content``, which go through the tokenizer's chat template.
        tokenizer: a transformers tokenizer; None if only token ids can be taken.
        vocabulary: if known, the bound of token ids.

    Raises:
        PromptError: empty, of another kind, with ids out of range, or in need of a tokenizer or template that is not
            there.
    """
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"the prompt cannot be tokenized, since it is no valid text: {error}.") from error
        ids = list(_needed(tokenizer, "a text")(prompt)["input_ids"])
        return _checked(ids, prompt, vocabulary)
    to_list = getattr(prompt, "tolist", None)  # of a tensor or an array
    if to_list is not None:
        prompt = to_list()
    if isinstance(prompt, list | tuple) and prompt and all(isinstance(item, Mapping) for item in prompt):
        _needed(tokenizer, "a list of chat messages")
        if not getattr(tokenizer, "chat_template", None):
            raise PromptError(
                "the prompt is a list of chat messages, and this model's tokenizer has no chat template: give the "
                "text as the model was trained on it."
            )
        try:
            text = tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # whatever the template's language or the template itself raises
            raise PromptError(
                f"the tokenizer's chat template does not take these messages ({error}): each is a dict with a `role` "
                f"and a text as `content`; got {_shown(prompt)}."
            ) from error
        return _checked(list(tokenizer(text, add_special_tokens=False)["input_ids"]), text, vocabulary)
    if isinstance(prompt, list | tuple) and ({*map(type, prompt)} <= {int} or all(map(_is_id, prompt))):
        return _checked([*map(operator.index, prompt)], None, vocabulary)
    raise PromptError(
        f"a prompt is a text, a list of token ids, or a list of chat messages (dicts); this is {_shown(prompt)}. "
        "One trace takes one prompt."
    )


def listed(prompts: object) -> list[object]:
    """A list of prompts; one prompt, in whatever form `tokenize` takes it, makes a list of one."""
    if isinstance(prompts, list | tuple):
        one = prompts and all(isinstance(part, bool | Mapping) or _is_id(part) for part in prompts)
        return [prompts] if one else list(prompts)
    return [prompts]


def check_alone(count: int) -> None:
    """Raise `PromptError` if a trace is given several prompts."""
    if count > 1:
        raise PromptError(
            f"a trace takes one prompt, and got {count}. For several, leave the prompt out of `trace(...)` and "
            "give each to a `with tracer.invoke(prompt):` in its body."
        )


def _is_id(item: object) -> bool:
    """Whether it is a whole number, also one of numpy, or a tensor without dimensions."""
    if isinstance(item, bool) or getattr(item, "ndim", None):
        return False
    try:
        operator.index(item)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def _needed(tokenizer: Any, kind: str) -> Any:
    if tokenizer is None:
        raise PromptError(f"the prompt is {kind}, and this model has no tokenizer: give token ids.")
    return tokenizer


def _checked(ids: list[int], text: str | None, vocabulary: int | None) -> Prompt:
    if not ids:
        raise PromptError("the prompt is empty: the model needs at least one token (the tokenizer's BOS token, say).")
    if vocabulary is not None and not (min(ids) >= 0 and max(ids) < vocabulary):
        wrong = next(token for token in ids if not 0 <= token < vocabulary)
        raise PromptError(f"token id {wrong} is out of range: this model has ids 0 to {vocabulary - 1}.")
    return Prompt(ids, text)


def _shown(prompt: object) -> str:
    text = repr(prompt)
    return f"{type(prompt).__name__} {text if len(text) < 60 else text[:57] + '...'}"
