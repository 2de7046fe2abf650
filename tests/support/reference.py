"""The reference that contract tests compare with: a transformers model, run one step at a time.

`Reference(path).run(prompt_ids, steps, edits)` decodes greedily with a key-value cache, exactly as an engine
does: step 0 is the forward over the whole prompt, step k the forward that takes generated token k-1. For
every step it keeps what went into and came out of **every** module, by the module's transformers address.
What those values mean, family by family, is the business of `mapping.py`.

Values are kept as *rows*: transformers' leading batch dimension of one is dropped, so a hidden state is
`[rows, hidden]`, as it is in vLLM. Step 0 has one row per prompt token, later steps one.

An `Edit` changes a module's input or output as the model runs, the way a block does it in invivo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from pathlib import Path

Change = Callable[[Tensor], Tensor | None]
"""Edits rows in place and returns None, or returns a replacement of the same shape."""

Value = Any
"""A tensor, None, or a tuple or dict of values, in the module's own structure."""


class Edit(NamedTuple):
    """A change made while the reference runs.

    Attributes:
        address: transformers module, such as `"model.layers.1.mlp"`.
        kind: `"output"` for what the module returns, `"input"` for what it is given. The tensor edited is the
            first one of either.
        step: The step to edit; None for every step.
        change: What to do to the rows `[rows, ...]`.
    """

    address: str
    kind: Literal["input", "output"]
    step: int | None
    change: Change


@dataclass
class Step:
    """What one forward did.

    Attributes:
        inputs: Module address to its arguments: positional ones first, then keyword ones, in call order.
        outputs: Module address to what it returned.
        order: The ports in the order in which they fired, as (module address, `"inputs"` or `"output"`).
        logits: `[1, vocabulary]`, those of the last row.
        token: The greedy token.
    """

    inputs: dict[str, tuple[Value, ...]] = field(default_factory=dict)
    outputs: dict[str, Value] = field(default_factory=dict)
    order: list[tuple[str, str]] = field(default_factory=list)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    token: int = -1

    def output(self, address: str) -> Tensor:
        """The first tensor that the module at `address` returned, as rows."""
        return first_tensor(self.outputs[address])

    def input(self, address: str) -> Tensor:
        """The first tensor that the module at `address` was given, as rows."""
        return first_tensor(self.inputs[address])


@dataclass
class Trace:
    """All steps of one run, in order."""

    steps: list[Step]

    @property
    def tokens(self) -> list[int]:
        """The greedy tokens, one a step."""
        return [step.token for step in self.steps]


class Reference:
    """A transformers causal language model with eager attention.

    Args:
        path: Folder of the checkpoint.
        dtype: Of the model. In float64 what it gives is right to all digits of a float32.
    """

    def __init__(self, path: Path | str, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoModelForCausalLM

        self.model: nn.Module = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        )
        self.model.train(False)

    @torch.inference_mode()
    def run(self, prompt_ids: Sequence[int], steps: int, edits: Sequence[Edit] = (), *, record: bool = True) -> Trace:
        """Decode `steps` tokens greedily, end-of-text ignored.

        Without `record`, steps hold logits and tokens only, and the run is faster.

        Raises:
            AttributeError: An edit's address is not a module of the model.
            AssertionError: An edit's module was not called in a step that the edit names.
        """
        recorder = _Recorder(self.model, edits, record=record)
        trace = Trace([])
        cache = None
        ids = list(prompt_ids)
        try:
            for number in range(steps):
                step = recorder.start(number)
                tokens = torch.tensor([ids])
                out = self.model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
                recorder.check()
                step.logits = out.logits[0].clone()
                step.token = int(step.logits[-1].argmax())
                trace.steps.append(step)
                cache, ids = out.past_key_values, [step.token]
        finally:
            recorder.remove()
        return trace

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits `[rows, vocabulary]` of one forward over `ids` without a cache."""
        logits: Tensor = self.model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
        return logits


class _Recorder:
    """The hooks of one run: they apply its edits, then record."""

    def __init__(self, model: nn.Module, edits: Sequence[Edit], *, record: bool) -> None:
        self.step = Step()
        self.number = 0
        self.edits = list(edits)
        self.applied: set[int] = set()
        self.handles = []
        for edit in self.edits:
            model.get_submodule(edit.address)  # raises if there is none
        edited = {edit.address for edit in edits}
        for address, module in model.named_modules():
            if not record and address not in edited:
                continue
            self.handles.append(module.register_forward_pre_hook(self._before(address), with_kwargs=True))
            self.handles.append(module.register_forward_hook(self._after(address)))

    def start(self, number: int) -> Step:
        self.step, self.number, self.applied = Step(), number, set()
        return self.step

    def check(self) -> None:
        for index, edit in enumerate(self.edits):
            due = edit.step is None or edit.step == self.number
            where = f"{edit.address}.{edit.kind}, step {self.number}"
            assert not due or index in self.applied, f"an edit was not applied: {where}"

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _due(self, address: str, kind: str) -> list[Edit]:
        found = []
        for index, edit in enumerate(self.edits):
            if (edit.address, edit.kind) == (address, kind) and edit.step in (None, self.number):
                self.applied.add(index)
                found.append(edit)
        return found

    def _before(self, address: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            for edit in self._due(address, "input"):
                args, kwargs = _replace_input(args, kwargs, edit.change)
            embeds = isinstance(module, nn.Embedding)
            self.step.order.append((address, "inputs"))
            self.step.inputs[address] = tuple(as_rows(v, ids=embeds) for v in (*args, *kwargs.values()))
            return args, kwargs

        return hook

    def _after(self, address: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            for edit in self._due(address, "output"):
                output = _replace_output(module, output, edit.change)
            self.step.order.append((address, "output"))
            self.step.outputs[address] = as_rows(output)
            return output

        return hook


def first_tensor(value: Value) -> Tensor:
    """The first tensor in a structure.

    Raises:
        LookupError: There is none.
    """
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (tuple, list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            try:
                return first_tensor(part)
            except LookupError:
                continue
    raise LookupError("no tensor in this value")


def as_rows(value: Any, *, ids: bool = False) -> Value:
    """Copy a structure, without the batch dimension of its tensors.

    A tensor of three or more dimensions has one in front; `ids` says that two-dimensional ones do too. Things
    that are neither tensors nor tuples, lists or dicts (caches, masks of other kinds) become None.
    """
    if isinstance(value, Tensor):
        batched = value.dim() >= 3 or (ids and value.dim() == 2)
        return value[0].clone() if batched and value.shape[0] == 1 else value.clone()
    if isinstance(value, (tuple, list)):
        return tuple(as_rows(part, ids=ids) for part in value)
    if isinstance(value, dict):
        return {name: as_rows(part, ids=ids) for name, part in value.items()}
    return None


def _changed(tensor: Tensor, change: Change) -> Tensor:
    """A copy of `tensor` with `change` made to its rows."""
    copy = tensor.clone()
    rows = copy[0] if copy.dim() >= 3 else copy
    replacement = change(rows)
    if replacement is not None:
        rows.copy_(replacement)
    return copy


def _replace_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor | None]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (_changed(args[0], change), *args[1:]), kwargs
    name = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
    return args, kwargs | {name: _changed(kwargs[name], change)}


def _replace_output(module: nn.Module, output: Any, change: Change) -> Any:
    if isinstance(output, Tensor):
        return _changed(output, change)
    head = _changed(output[0], change)
    if hasattr(module, "top_k") and len(output) == 3:
        return route(head, module.top_k)
    return (head, *output[1:])


def route(router_logits: Tensor, top_k: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What a Mixtral router returns for these logits: (logits, weights of the chosen experts, their indices).

    transformers' gate chooses the experts itself; vLLM's returns logits and the experts choose. An edit of
    the logits therefore needs the choice made again here.
    """
    weights, chosen = torch.topk(torch.softmax(router_logits.float(), dim=-1), top_k, dim=-1)
    return router_logits, weights / weights.sum(dim=-1, keepdim=True), chosen
