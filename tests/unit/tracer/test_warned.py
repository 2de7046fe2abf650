"""Warnings that the caller's filters make errors: what came home is there all the same."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from invivo import InvivoWarning, Local

MODEL: Any = Local(torch.nn.Sequential(torch.nn.Linear(4, 4)))
X = torch.ones(2, 4)


@pytest.fixture(autouse=True)
def _errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", InvivoWarning)
        yield


def test_a_trace_has_its_saves() -> None:
    log: list[int] = []
    with pytest.raises(InvivoWarning, match=r"`tracer.iter\[:5\]` ran 1 of 5 steps") as caught:
        with MODEL.trace(X) as tracer:
            h = MODEL[0].output.save()
            log.append(1)
            for _ in tracer.iter[:5]:
                pass
    assert h.shape == (2, 4) and tracer.saves["h"] is h
    assert caught.value.saves == {"h": h}  # type: ignore[attr-defined]
    assert caught.value.__context__ is None


def test_invokes_have_their_saves() -> None:
    log: list[int] = []
    with pytest.raises(InvivoWarning, match="`log` was changed") as caught:
        with MODEL.trace() as tracer:
            both = list().save()
            with tracer.invoke(X):
                both.append(1)
            with tracer.invoke(X):
                both.append(2)
                log.append(1)
    assert both == [1, 2] and tracer.saves == caught.value.saves == {"both": both}  # type: ignore[attr-defined]


def test_a_name_that_two_invokes_saved() -> None:
    with pytest.raises(InvivoWarning, match="`h` was saved by invokes 0 and 1"):
        with MODEL.trace() as tracer:
            with tracer.invoke(X):
                h = MODEL[0].output[0].save()
            with tracer.invoke(X):
                h = MODEL[0].output[1].save()
    assert h.shape == (4,)


def test_a_name_that_invokes_with_names_saved() -> None:
    """Each is asked for its own, so nobody is surprised."""
    invokes = []
    with MODEL.trace() as tracer:
        for place in range(2):
            with tracer.invoke(X) as one:
                h = (MODEL[0].output + place).save()
            invokes.append(one)
    assert torch.equal(h, invokes[1].saves["h"]) and not torch.equal(h, invokes[0].saves["h"])


def test_the_exception_of_a_body_goes_first() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        with MODEL.trace(X) as tracer:
            h = MODEL[0].output.save()
            for _ in tracer.iter[3:5]:
                pass
            h / (1 // 0)
    assert list(caught.value.saves) == ["h"]  # type: ignore[attr-defined]
