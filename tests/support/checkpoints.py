"""Tiny random checkpoints, one per model family, that vLLM and transformers both load.

No model hub can be reached while the tests run, so every family but SmolLM2 is made here: three layers, about
a hundred hidden units, SmolLM2's vocabulary, float32. The weights are drawn so that a wrong value shows:

* every matrix has standard deviation `1/sqrt(fan in)`, so each attention and MLP moves the residual stream by
  about its own size, and logits differ from position to position;
* norm scales are not all one and biases are not all zero, so taking a norm's input for its output, or leaving
  out a bias, is an error of tens of per cent and not of nothing;
* heads, key-value heads, hidden, intermediate and expert counts all differ, so a transposed or merged tensor
  cannot pass for another.

Draws depend on the names of the configuration class and of the parameter alone: the same files everywhere.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from transformers import PreTrainedModel

VOCABULARY = 49_152
"""Rows of SmolLM2's embedding: every id of its tokenizer is valid for every checkpoint made here."""

POSITIONS = 512
"""Longest sequence that the checkpoints accept, prompt and generated tokens together."""

DRAWING_VERSION = 1
"""Part of the folder's name, as the recipe is: raise it when the drawing of weights changes."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class Recipe:
    """How to make one family's checkpoint.

    Attributes:
        config: Name of the transformers configuration class.
        settings: Its arguments.
        embedding_std: Standard deviation of the token embedding (smaller where it is tied to the head).
        norm_base: Value that norm scales scatter around; 0 where the model itself adds one (Gemma).
        gain: Factor on every matrix; above one where the embedding would else drown the layers (GPT-2).
    """

    config: str
    settings: Mapping[str, Any]
    embedding_std: float = 1.0
    norm_base: float = 1.0
    gain: float = 1.0


def _decoder(**changes: Any) -> dict[str, Any]:
    """Settings that the Llama-like families share, with `changes` put over them."""
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    return settings | changes


RECIPES: Mapping[str, Recipe] = {
    "gpt2": Recipe(
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 128,
            "n_inner": 320,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": POSITIONS,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        embedding_std=0.2,
        gain=2.5,
    ),
    "llama": Recipe("LlamaConfig", _decoder(hidden_size=128)),
    "qwen2": Recipe("Qwen2Config", _decoder(hidden_size=128)),
    "qwen3": Recipe("Qwen3Config", _decoder()),
    "gemma": Recipe(
        "Gemma2Config",
        # Caps and a window small enough to matter for values and prompts of this size.
        _decoder(
            tie_word_embeddings=True,
            query_pre_attn_scalar=32,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=1.0,
            sliding_window=8,
        ),
        embedding_std=0.03,
        norm_base=0.0,
    ),
    "mixtral": Recipe("MixtralConfig", _decoder(hidden_size=128, num_local_experts=6, num_experts_per_tok=2)),
}

FAMILIES = tuple(RECIPES)

SPLIT_RECIPES: Mapping[str, Recipe] = {
    "llama with one key-value head": Recipe("LlamaConfig", _decoder(hidden_size=128, num_key_value_heads=1)),
}
"""Further ones, for models that are split."""


def default_folder() -> Path:
    """Where checkpoints are kept between test sessions: `invivo/tiny` in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "invivo" / "tiny"


def tiny_checkpoint(family: str, *, tokenizer: Path | None = None, folder: Path | None = None) -> Path:
    """Return the folder of `family`'s checkpoint, made now if it is not there yet.

    Args:
        family: One of `FAMILIES`.
        tokenizer: Folder of a SmolLM2 checkpoint; its tokenizer files are copied beside the weights. Without
            one the checkpoint takes token ids only.
        folder: Where to keep checkpoints; `default_folder()` if not given.

    Raises:
        KeyError: Unknown family.
    """
    recipe = RECIPES[family] if family in RECIPES else SPLIT_RECIPES[family]
    family = family.replace(" ", "-")
    suffix = "text" if tokenizer is not None else "ids"
    key = zlib.crc32(repr((recipe, DRAWING_VERSION)).encode())
    target = (folder or default_folder()) / f"{family}-{key:08x}-{suffix}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{family}-", dir=target.parent))
    try:
        build(recipe).save_pretrained(made)
        for name in TOKENIZER_FILES if tokenizer is not None else ():
            if tokenizer is not None and (tokenizer / name).exists():
                shutil.copy(tokenizer / name, made / name)
        made.chmod(0o755)
        made.rename(target)
    except OSError:
        if not target.exists():  # else another process made the same one meanwhile
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


def build(recipe: Recipe) -> PreTrainedModel:
    """Make the float32 model of `recipe` with its drawn weights."""
    import torch
    import transformers

    config = getattr(transformers, recipe.config)(**recipe.settings)
    make: Any = transformers.AutoModelForCausalLM.from_config
    model: PreTrainedModel = make(config, dtype=torch.float32)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_draw(recipe, name, parameter, is_embedding=id(parameter) in embeddings))
    return model


def _draw(recipe: Recipe, name: str, parameter: torch.Tensor, *, is_embedding: bool) -> torch.Tensor:
    """Draw one parameter's values, from the names of its model and its own."""
    import torch

    generator = torch.Generator().manual_seed(zlib.crc32(f"{recipe.config} {name}".encode()))
    values = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
    if is_embedding:
        return values * recipe.embedding_std
    if parameter.dim() == 1:
        is_scale = name.endswith("weight")
        return values * 0.2 + recipe.norm_base if is_scale else values * 0.05
    transposed = recipe.config == "GPT2Config"  # its Conv1D keeps [in, out]
    fan_in = parameter.shape[-2] if transposed else parameter.shape[-1]
    return values.mul(recipe.gain / math.sqrt(fan_in))
