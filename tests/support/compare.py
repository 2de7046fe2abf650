"""What contract tests share: walking to an Envoy, comparing tensors, and the edits that they make.

Blocks use these functions by name; they travel to the engine by value, as any function of a caller's module does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from support.reference import Trace


def find(model: Any, address: str) -> Any:
    """The Envoy at an address."""
    for name in address.split("."):
        model = model[int(name) if name.isdigit() else name]
    return model


def tensors(value: Any) -> Any:
    """A structure with None for whatever in it is no tensor (some modules take others as arguments)."""
    if isinstance(value, tuple | list):
        return [tensors(part) for part in value]
    if isinstance(value, dict):
        return {name: tensors(part) for name, part in value.items()}
    return value if isinstance(value, torch.Tensor) else None


def errors(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The larger one of the relative errors by norm and by largest element; infinite if the shapes differ."""
    if found.shape != expected.shape:
        return float("inf")
    difference = found.double() - expected.double()
    if not torch.count_nonzero(expected):
        return 0.0 if not torch.count_nonzero(difference) else float("inf")
    by_norm = difference.norm() / expected.double().norm()
    by_element = difference.abs().max() / expected.double().abs().max()
    return float(max(by_norm, by_element))


def worst(logits: Sequence[torch.Tensor], expected: Trace) -> float:
    """The largest error of the logits of all steps."""
    return max(errors(found, step.logits) for found, step in zip(logits, expected.steps, strict=True))


def differences(name: str, run: tuple[list[torch.Tensor], list[int]], expected: Trace, bound: float) -> list[str]:
    """A line for a run, its logits and tokens, that is not as in the reference; none for one that is."""
    logits, tokens = run
    error = worst(logits, expected)
    if tokens == expected.tokens and error < bound:
        return []
    return [f"{name}: {error:.2e}, {tokens} for {expected.tokens}"]


def zero(rows: torch.Tensor) -> None:
    rows.zero_()


def vector(rows: torch.Tensor) -> torch.Tensor:
    """One row of numbers that depend on the width alone, the same in this process and in the engine's."""
    return torch.cos(torch.arange(1, rows.shape[-1] + 1, dtype=torch.float32) ** 2).to(rows.device)


def add(rows: torch.Tensor) -> None:
    rows += vector(rows)


def nudge(rows: torch.Tensor) -> None:
    rows += 0.1 * vector(rows)


def replace_last(rows: torch.Tensor) -> None:
    rows[-1] = vector(rows)


def replace_first(rows: torch.Tensor) -> None:
    rows[0] = vector(rows)


every_edit = pytest.mark.parametrize(
    ("change", "at"),
    [(zero, None), (add, None), (replace_last, None), (replace_first, 0), (add, 3)],
    ids=["zero", "add", "replace the last", "replace the first of the prompt", "add in step 3"],
)
"""A test of what an edit `change` does, at step `at` or at every step."""
