"""Which vLLM port holds what, family by family, and which transformers value it must equal.

The two libraries compute the same numbers in different places. vLLM merges projections (`qkv_proj`), fuses
the residual addition into the next norm (so a layer returns *two* tensors whose sum is the residual stream),
and names a few modules differently. This module is the one place that knows:

* `readings(family, layers)`: every port part that has a counterpart, with a function that computes what it
  must be from a reference `Step`;
* `targets(family, layers)`: the quantities that a block edits, with the vLLM port to write and the
  transformers module where the same edit has the same effect.

`docs/modules.md` says the same for users, as tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .reference import Change, Edit, Step

Path = tuple[int | str, ...]
Expected = Callable[[Step], Tensor]

FAMILIES = ("gpt2", "llama", "qwen2", "qwen3", "gemma", "mixtral")

GPT2_PARTS = {
    "input norm": ".ln_1",
    "attention": ".attn",
    "MLP norm": ".ln_2",
    "MLP": ".mlp",
    "stream after": "",
}


@dataclass(frozen=True)
class Reading:
    """A vLLM value and what it must equal.

    Attributes:
        quantity: Name of what it is, such as `"attention"` or `"stream after"`.
        address: vLLM module.
        port: `"output"`, or `"inputs"`: the pair (positional arguments, keyword arguments).
        parts: Paths into the port's structure; the value is the sum of the tensors there, and `((),)` is all
            of it.
        expected: Computes the reference's value, rows first, from one of its steps.
    """

    quantity: str
    address: str
    port: Literal["inputs", "output"]
    parts: tuple[Path, ...]
    expected: Expected

    @property
    def name(self) -> str:
        """For messages: `model.layers.1.output[0]+[1] (stream after)`."""
        paths = "+".join("".join(f"[{key!r}]" for key in path) for path in self.parts)
        return f"{self.address}.{self.port}{paths} ({self.quantity})"

    def value(self, structure: Any) -> Tensor:
        """Take the value out of what the port gave; a None part (no residual yet) counts as nothing."""
        total: Tensor | None = None
        for path in self.parts:
            part = structure
            for key in path:
                part = part[key]
            if part is not None:
                total = part if total is None else total + part
        assert total is not None, f"{self.name} holds no tensor"
        return total


@dataclass(frozen=True)
class Target:
    """A quantity to edit in both libraries.

    Attributes:
        quantity: Its name.
        address: vLLM module, whose `output` is edited.
        style: `"tensor"`: the output is the tensor. `"first"`: it is the first part of a tuple. `"stream"`:
            the output is (hidden, residual) and the edit is of their sum.
        reference: transformers module whose output (the first tensor of it) is the same quantity.
        scaled: transformers' value is sqrt(hidden) times vLLM's.
    """

    quantity: str
    address: str
    style: Literal["tensor", "first", "stream"]
    reference: str
    scaled: bool = False

    def edit(self, step: int | None, change: Change) -> Edit:
        """The reference's edit that equals `change` of the vLLM value, at `step` (None: at every step)."""
        return Edit(self.reference, "output", step, _scaled(change) if self.scaled else change)


def readings(family: str, layers: int) -> list[Reading]:
    """Every reading of `family`'s model with `layers` layers, in execution order.

    Raises:
        ValueError: Unknown family.
    """
    if family == "gpt2":
        return list(_gpt2(layers))
    if family in FAMILIES:
        return list(_llama_like(family, layers))
    raise ValueError(f"unknown family {family!r}; known: {', '.join(FAMILIES)}")


def targets(family: str, layers: int) -> list[Target]:
    """Every quantity of `family` to edit, in execution order: embedding, each layer's parts, final norm."""
    if family == "gpt2":
        found = [Target("embedding", "transformer.wte", "tensor", "transformer.wte")]
        for i in range(layers):
            h = f"transformer.h.{i}"
            for quantity, name in GPT2_PARTS.items():
                found.append(Target(quantity, h + name, "tensor", h + name))
        return [*found, Target("final norm", "transformer.ln_f", "tensor", "transformer.ln_f")]
    embedding = "model.embed_tokens"
    found = [Target("embedding", embedding, "tensor", embedding, scaled=family == "gemma")]
    for i in range(layers):
        found += _layer_targets(family, i)
    return [*found, Target("final norm", "model.norm", "first", "model.norm")]


def _layer_targets(family: str, i: int) -> Iterator[Target]:
    layer = f"model.layers.{i}"
    norm, mlp = f"{layer}.input_layernorm", f"{layer}.{mlp_name(family)}"
    after = f"{layer}.post_attention_layernorm"
    yield Target("input norm", norm, "tensor" if i == 0 else "first", norm)
    yield Target("attention", f"{layer}.self_attn", "tensor", f"{layer}.self_attn")
    if family == "gemma":
        before = f"{layer}.pre_feedforward_layernorm"
        yield Target("normed attention", after, "tensor", after)
        yield Target("MLP norm", before, "first", before)
    else:
        yield Target("MLP norm", after, "first", after)
    if family == "mixtral":
        yield Target("gate", f"{mlp}.gate", "first", f"{layer}.mlp.gate")
    yield Target("MLP", mlp, "tensor", f"{layer}.mlp")
    if family == "gemma":
        last = f"{layer}.post_feedforward_layernorm"
        yield Target("normed MLP", last, "tensor", last)
    yield Target("stream after", layer, "stream", layer)


def mlp_name(family: str) -> str:
    """What vLLM calls a layer's MLP."""
    return "block_sparse_moe" if family == "mixtral" else "mlp"


def _scaled(change: Change) -> Change:
    """`change` for rows that are sqrt(hidden) times those it expects."""

    def scaled(rows: Tensor) -> Tensor:
        factor = math.sqrt(rows.shape[-1])
        plain = rows / factor
        replacement = change(plain)
        return (plain if replacement is None else replacement) * factor

    return scaled


def _given(address: str, index: int = 0) -> Expected:
    """What transformers gave to a module, positional or keyword, the `index`-th argument."""
    return lambda step: step.inputs[address][index]


def _got(address: str) -> Expected:
    """What transformers' module returned: the tensor, or the first of a tuple."""
    return lambda step: step.output(address)


def _joined(*addresses: str) -> Expected:
    """Outputs side by side, as vLLM's merged projections give them."""
    return lambda step: torch.cat([step.output(address).flatten(1) for address in addresses], dim=-1)


def _piece(address: str, index: int, count: int) -> Expected:
    """One of `count` equal column blocks of an output."""
    return lambda step: step.output(address).chunk(count, dim=-1)[index]


def _reading(quantity: str, address: str, port: Literal["inputs", "output"], *parts: Path, to: Expected) -> Reading:
    return Reading(quantity, address, port, parts or ((),), to)


def _linear(quantity: str, address: str, before: Expected, after: Expected) -> Iterator[Reading]:
    """A vLLM linear layer: x -> (out, None)."""
    yield _reading(f"{quantity} in", address, "inputs", (0, 0), to=before)
    yield _reading(f"{quantity} out", address, "output", (0,), to=after)


def _around(quantity: str, address: str, reference: str, inside: Iterator[Reading]) -> Iterator[Reading]:
    """A module that takes and gives one tensor in both libraries, and the readings inside it."""
    yield _reading(f"{quantity} in", address, "inputs", (0, 0), to=_given(reference))
    yield from inside
    yield _reading(quantity, address, "output", to=_got(reference))


def _plain(quantity: str, address: str, reference: str) -> Iterator[Reading]:
    """A module that takes and gives one tensor in both libraries."""
    yield from _around(quantity, address, reference, iter(()))


def _fused(quantity: str, address: str, added: Expected, reference: str) -> Iterator[Reading]:
    """A fused norm: (x, residual) -> (norm of their sum, their sum). `added` is x."""
    yield _reading(f"{quantity}: x", address, "inputs", (0, 0), to=added)
    yield _reading(f"{quantity}: sum in", address, "inputs", (0, 0), (0, 1), to=_given(reference))
    yield _reading(quantity, address, "output", (0,), to=_got(reference))
    yield _reading(f"{quantity}: stream", address, "output", (1,), to=_given(reference))


def _logits(hidden: str) -> Iterator[Reading]:
    yield _reading("last hidden", "logits_processor", "inputs", (0, 1), to=lambda step: step.output(hidden)[-1:])
    yield _reading("logits", "logits_processor", "output", to=lambda step: step.logits)


def _gpt2(layers: int) -> Iterator[Reading]:
    yield from _plain("token embedding", "transformer.wte", "transformer.wte")
    yield from _plain("position embedding", "transformer.wpe", "transformer.wpe")
    for i in range(layers):
        h = f"transformer.h.{i}"
        yield _reading("stream before", h, "inputs", (0, 0), to=_given(h))
        yield from _plain("input norm", f"{h}.ln_1", f"{h}.ln_1")
        yield _reading("attention in", f"{h}.attn", "inputs", (1, "hidden_states"), to=_given(f"{h}.attn"))
        merged = f"{h}.attn.c_attn"
        yield from _linear("qkv", merged, _given(merged), _got(merged))
        for index, part in enumerate("qkv"):
            yield _reading(part, f"{h}.attn.attn", "inputs", (0, index), to=_piece(merged, index, 3))
        yield _reading("heads", f"{h}.attn.attn", "output", to=_given(f"{h}.attn.c_proj"))
        yield from _linear("o", f"{h}.attn.c_proj", _given(f"{h}.attn.c_proj"), _got(f"{h}.attn.c_proj"))
        yield _reading("attention", f"{h}.attn", "output", to=_got(f"{h}.attn"))
        yield from _plain("MLP norm", f"{h}.ln_2", f"{h}.ln_2")
        yield from _around("MLP", f"{h}.mlp", f"{h}.mlp", _gpt2_mlp(f"{h}.mlp"))
        yield _reading("stream after", h, "output", to=_got(h))
    yield from _plain("final norm", "transformer.ln_f", "transformer.ln_f")
    yield from _logits("transformer.ln_f")


def _gpt2_mlp(m: str) -> Iterator[Reading]:
    yield from _linear("up", f"{m}.c_fc", _given(f"{m}.c_fc"), _got(f"{m}.c_fc"))
    yield from _plain("activation", f"{m}.act", f"{m}.act")
    yield from _linear("down", f"{m}.c_proj", _given(f"{m}.c_proj"), _got(f"{m}.c_proj"))


def _llama_like(family: str, layers: int) -> Iterator[Reading]:
    yield _reading("ids", "model.embed_tokens", "inputs", (0, 0), to=_given("model.embed_tokens"))
    yield _reading("embedding", "model.embed_tokens", "output", to=_embedding(family))
    for i in range(layers):
        yield from _layer(family, i)
    last = f"model.layers.{layers - 1}"
    yield from _fused("final norm", "model.norm", _contribution(family, last), "model.norm")
    yield from _logits("model.norm")


def _embedding(family: str) -> Expected:
    """transformers' Gemma embedding multiplies by sqrt(hidden); vLLM's model does so after the embedding."""

    def expected(step: Step) -> Tensor:
        out = step.output("model.embed_tokens")
        return out / math.sqrt(out.shape[-1]) if family == "gemma" else out

    return expected


def _contribution(family: str, layer: str) -> Expected:
    """What a layer's MLP half adds to the stream."""
    return _got(f"{layer}.post_feedforward_layernorm" if family == "gemma" else f"{layer}.mlp")


def _layer(family: str, i: int) -> Iterator[Reading]:
    layer = f"model.layers.{i}"
    norm = f"{layer}.input_layernorm"
    after, before_mlp = f"{layer}.post_attention_layernorm", f"{layer}.pre_feedforward_layernorm"
    rotary = "model.rotary_emb"
    yield _reading("positions", layer, "inputs", (0, 0), to=lambda step: step.inputs[rotary][1].flatten())
    yield _reading("stream before", layer, "inputs", (0, 1), (0, 2), to=_given(layer))
    if i == 0:
        yield from _plain("input norm", norm, norm)
    else:
        yield from _fused("input norm", norm, _contribution(family, f"model.layers.{i - 1}"), norm)
    yield from _attention(family, f"{layer}.self_attn")
    if family == "gemma":
        yield from _plain("normed attention", after, after)
        yield from _fused("MLP norm", before_mlp, _got(after), before_mlp)
    else:
        yield from _fused("MLP norm", after, _got(f"{layer}.self_attn"), after)
    inside = _moe(layer) if family == "mixtral" else _mlp(f"{layer}.mlp")
    yield from _around("MLP", f"{layer}.{mlp_name(family)}", f"{layer}.mlp", inside)
    if family == "gemma":
        last = f"{layer}.post_feedforward_layernorm"
        yield from _plain("normed MLP", last, last)
    yield _reading("stream after", layer, "output", (0,), (1,), to=_got(layer))
    yield _reading("MLP's contribution", layer, "output", (0,), to=_contribution(family, layer))
    middle = before_mlp if family == "gemma" else after
    yield _reading("stream between", layer, "output", (1,), to=_given(middle))


def _attention(family: str, a: str) -> Iterator[Reading]:
    q, k, v = (f"{a}.{name}_proj" for name in "qkv")
    yield _reading("attention in", a, "inputs", (1, "hidden_states"), to=_given(a))
    yield from _linear("qkv", f"{a}.qkv_proj", _given(q), _joined(q, k, v))
    if family == "qwen3":
        yield from _plain("q norm", f"{a}.q_norm", f"{a}.q_norm")
        yield from _plain("k norm", f"{a}.k_norm", f"{a}.k_norm")
        q, k = f"{a}.q_norm", f"{a}.k_norm"
    yield _reading("q", f"{a}.rotary_emb", "inputs", (0, 1), to=_joined(q))
    yield _reading("k", f"{a}.rotary_emb", "inputs", (0, 2), to=_joined(k))
    for index, part in enumerate((q, k)):
        yield _reading(f"rotated {'qk'[index]}", f"{a}.rotary_emb", "output", (index,), to=_rotated(part))
        yield _reading(f"rotated {'qk'[index]}", f"{a}.attn", "inputs", (0, index), to=_rotated(part))
    yield _reading("v", f"{a}.attn", "inputs", (0, 2), to=_got(v))
    yield _reading("heads", f"{a}.attn", "output", to=_given(f"{a}.o_proj"))
    yield from _linear("o", f"{a}.o_proj", _given(f"{a}.o_proj"), _got(f"{a}.o_proj"))
    yield _reading("attention", a, "output", to=_got(a))


def _rotated(address: str) -> Expected:
    """A query or key after rotary embedding (transformers does this in a function, not in a module)."""

    def expected(step: Step) -> Tensor:
        cos: Tensor
        sin: Tensor
        cos, sin = step.outputs["model.rotary_emb"]
        rows = step.output(address)
        heads = rows.reshape(rows.shape[0], -1, cos.shape[-1])
        first, second = heads.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        rotated: Tensor = heads * cos[:, None] + turned * sin[:, None]
        return rotated.flatten(1)

    return expected


def _mlp(m: str) -> Iterator[Reading]:
    both, down = _joined(f"{m}.gate_proj", f"{m}.up_proj"), f"{m}.down_proj"
    yield from _linear("gate and up", f"{m}.gate_up_proj", _given(f"{m}.gate_proj"), both)
    yield _reading("activation in", f"{m}.act_fn", "inputs", (0, 0), to=both)
    yield _reading("activation", f"{m}.act_fn", "output", to=_given(down))
    yield from _linear("down", down, _given(down), _got(down))


def _moe(layer: str) -> Iterator[Reading]:
    ours, theirs = f"{layer}.block_sparse_moe", f"{layer}.mlp"
    gate = f"{theirs}.gate"
    yield from _linear("gate", f"{ours}.gate", _given(gate), _got(gate))
    yield _reading("experts in", f"{ours}.experts", "inputs", (0, 0), to=_given(f"{theirs}.experts"))
    yield _reading("gate logits", f"{ours}.experts", "inputs", (0, 1), to=_got(gate))
    yield _reading("experts", f"{ours}.experts", "output", to=_got(f"{theirs}.experts"))
