"""What a checker sees of the public names; `make lint` reads this file and nothing runs it."""

from __future__ import annotations

from typing import assert_type

import invivo
from invivo import VLLM, Activations, Local, PortError, UnknownNameError, errors, harvest, save


def names(number: int) -> None:
    assert_type(invivo.__version__, str)
    assert_type(save(number), int)
    assert_type(errors.PortError, type[PortError])


def kinds(model: VLLM, local: Local, unknown: UnknownNameError) -> tuple[VLLM, Local, AttributeError]:
    return model, local, unknown


def harvests(model: VLLM, local: Local) -> None:
    assert_type(harvest(model, ["text", [1, 2]], [model.model.norm, "logits"], "folder"), Activations)
    assert_type(harvest(local, [[1]], "model.norm", "folder", positions=slice(1, None)), Activations)
