"""What the local backend generates: sampling arguments, prompts, and the forwards of a causal language model."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..envoy.address import suggestion
from ..envoy.errors import PromptError, SamplingError, UnsupportedError
from ..tracer.prompt import check_alone, tokenize


@dataclass(frozen=True)
class LocalSampling:
    """Sampling arguments of the local backend.

    Attributes:
        max_tokens: number of tokens at most, at least 1.
        temperature: 0 takes the most likely token; else logits are divided by it.
        seed: seed of sampling and of the block's random numbers. Without one, sampling starts from a number that
            torch's own generator draws when the trace is made (`torch.manual_seed` repeats it), the block's from 0.
        ignore_eos: go on after the end-of-sequence token.
        stop_token_ids: further tokens that end the generation.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()


SAMPLING = tuple(LocalSampling.__dataclass_fields__)


class Generation(NamedTuple):
    """A prompt, how to go on from it, and the seed that its tokens are drawn with."""

    token_ids: list[int]
    sampling: LocalSampling
    draw: int


def generates(module: torch.nn.Module) -> bool:
    """Whether prompts can be generated from: the module is a language model of transformers."""
    return getattr(module, "generation_config", None) is not None


def vocabulary(module: torch.nn.Module) -> int | None:
    """The bound of token ids; None for a module that is only called."""
    config: Any = module.config if generates(module) else None
    return getattr(config, "vocab_size", None)


def sampling_of(given: Mapping[str, Any]) -> LocalSampling:
    """Sampling arguments, checked.

    Raises:
        SamplingError: an unknown one, or a value that it cannot have.
    """
    for name in given:
        if name not in SAMPLING:
            raise SamplingError(f"unknown sampling argument `{name}`.{suggestion(name, SAMPLING)}")
    sampling = LocalSampling(**given)
    tokens: Any = sampling.max_tokens
    temperature: Any = sampling.temperature
    if (
        not isinstance(tokens, numbers.Integral)
        or not isinstance(temperature, numbers.Real)
        or not math.isfinite(temperature)
    ):
        raise SamplingError(f"`max_tokens` is an integer and `temperature` a finite number; got {sampling}.")
    if tokens < 1 or temperature < 0:
        raise SamplingError(f"`max_tokens` is at least 1 and `temperature` at least 0; got {sampling}.")
    return sampling


def is_prompt(module: torch.nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
    """Whether the arguments of a trace are a prompt with sampling arguments; else the module is called with them.

    A tensor could be either: it is a prompt if it has one dimension, or if there are sampling arguments.

    Raises:
        PromptError: more than one prompt, or none, or a text for a model of transformers that does not generate.
        SamplingError: an argument that is neither of sampling nor of the module's forward.
    """
    if not generates(module):
        _check_no_text(module, args)
        return False
    sampling = any(name in SAMPLING for name in kwargs)
    if sampling or any(isinstance(arg, str) for arg in args):
        check_alone(len(args))
    if sampling and not args:
        sampling_of(kwargs)
        raise PromptError("there is no prompt: it is the first argument, before the sampling arguments.")
    if sampling or (len(args) == 1 and (not isinstance(args[0], torch.Tensor) or args[0].dim() == 1)):
        return True
    _check_call(module, args, kwargs)
    return False


def _check_no_text(module: torch.nn.Module, args: tuple[object, ...]) -> None:
    """Refuse a text where none can be meant; other modules may take texts."""
    if args and isinstance(args[0], str) and hasattr(module, "config") and hasattr(module, "get_input_embeddings"):
        raise PromptError(
            f"{type(module).__name__} is no language model that `Local` generates with, so a trace calls it with the "
            'arguments of its forward, which takes no text: `model.trace(**tokenizer(text, return_tensors="pt"))`.'
        )


def _check_call(module: torch.nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    """Refuse arguments that the forward would swallow: those of transformers take any, and leave most of them alone."""
    own = [*inspect.signature(module.forward).parameters]
    wrong = [name for name in kwargs if name not in own and not name.startswith(("output_", "return_"))]
    if wrong and (args or len(wrong) == len(kwargs)):
        raise SamplingError(
            f"`{wrong[0]}` is neither a sampling argument nor named by the module's forward."
            f"{suggestion(wrong[0], SAMPLING)} To call the module with it in any case, give all by name (`{own[0]}=`)."
        )


def generation(module: Any, prompt: object, sampling: LocalSampling, tokenizer: Any) -> Generation:
    """What to generate.

    Raises:
        PromptError: a prompt that the model cannot take, or has no room to go on from.
        UnsupportedError: the model does not generate from a prompt alone.
    """
    config = getattr(module, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(
            f"{type(module).__name__} has an encoder beside its decoder, and `Local` generates with decoders only. "
            "Call the module instead, with the arguments of its forward."
        )
    if isinstance(prompt, torch.Tensor) and prompt.dim() == 2 and prompt.shape[0] == 1:
        prompt = prompt[0]
    tokens = tokenize(prompt, tokenizer, vocabulary(module)).token_ids
    _check_length(config, len(tokens), sampling.max_tokens)
    draw = sampling.seed
    if draw is None:
        draw = 0 if sampling.temperature == 0 else int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    return Generation(tokens, sampling, draw)


def _check_length(config: Any, prompt: int, more: int) -> None:
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    needed = prompt + more - 1  # the last token is not computed from
    if not isinstance(positions, int) or not 0 < positions < needed:
        return
    room = positions - prompt + 1
    advice = f"lower `max_tokens` to {room}, or shorten the prompt" if room > 0 else "shorten the prompt"
    raise PromptError(
        f"the prompt has {prompt} tokens, and `max_tokens` is {more}: that takes {needed} positions, and the model has "
        f"{positions} (`max_position_embeddings`). {advice[0].upper()}{advice[1:]}."
    )


class Decoder:
    """The forwards of one generation, each with what the ones before have left in the model's cache.

    Args:
        module: a causal language model of transformers.

    Raises:
        UnsupportedError: its forward takes no cache.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._cache: object = None
        self._first = True
        takes = inspect.signature(module.forward).parameters
        self._name = "cache_params" if "cache_params" in takes else "past_key_values"  # recurrent models have the first
        if self._name not in takes and not any(taken.kind is taken.VAR_KEYWORD for taken in takes.values()):
            raise self._unsupported("takes no `past_key_values` or `cache_params`")

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Run the model on the tokens that it has not seen yet; the logits of the last one, ``[1, vocab]``."""
        if self._cache is None and not self._first:
            raise self._unsupported(f"gave no `{self._name}` to go on with")
        self._first = False
        ids = torch.tensor([token_ids], device=next(self._module.parameters()).device)
        output = self._module(input_ids=ids, use_cache=True, **{self._name: self._cache})
        self._cache = getattr(output, self._name, None)
        logits = getattr(output, "logits", None)
        if not isinstance(logits, torch.Tensor):
            raise self._unsupported("gave no `logits`")
        return logits[:, -1]

    def _unsupported(self, why: str) -> UnsupportedError:
        return UnsupportedError(
            f"`Local` cannot generate with {type(self._module).__name__}: its forward {why}. Call the module instead, "
            "with the arguments of its forward."
        )


def end_tokens(module: Any, sampling: LocalSampling) -> set[int]:
    """The tokens that end a generation."""
    eos = module.generation_config.eos_token_id
    if sampling.ignore_eos or eos is None:
        return {*sampling.stop_token_ids}
    return {*sampling.stop_token_ids, *(eos if isinstance(eos, list | tuple) else (int(eos),))}
