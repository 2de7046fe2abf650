"""Names that are nearly right, and what the errors advise."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from invivo import Local, UnknownNameError
from invivo.tracer.invoke import Invoke
from invivo.tracer.outer_tracer import OuterTracer
from invivo.tracer.tracer import Tracer

MODEL: Any = Local(torch.nn.Sequential(torch.nn.Linear(4, 4)))
X = torch.ones(2, 4)


@pytest.mark.parametrize("kind", [Tracer, OuterTracer, Invoke])
def test_a_tracer_names_what_is_near(kind: type[Tracer]) -> None:
    tracer: Any = kind.__new__(kind)
    with pytest.raises(UnknownNameError, match=r"the tracer has no `itr`\. Did you mean `iter`"):
        tracer.itr
    with pytest.raises(UnknownNameError, match=r"has no `next`\. For the next step, loop"):
        tracer.next()
    with pytest.raises(UnknownNameError, match=r"has no `zzz`\. It has: .*iter.*stop"):
        tracer.zzz
    assert not hasattr(tracer, "_repr_html_") and not hasattr(tracer, "saved")
    assert copy.copy(Tracer()).spent is False


def test_an_unknown_name_in_a_body() -> None:
    with pytest.raises(UnknownNameError, match="`itr`"):
        with MODEL.trace(X) as tracer:
            for _ in tracer.itr[:]:
                pass


def helper(value: Any) -> Any:
    return value.save()


def test_where_save_is_not_known() -> None:
    with pytest.raises(AttributeError, match="'save'") as caught:
        with MODEL.trace(X):
            helper(MODEL[0].output)
    assert any("write `invivo.save(x)`" in note for note in caught.value.__notes__)
    with pytest.raises(AttributeError, match="'save'") as caught:
        with MODEL.trace(X):
            MODEL[0].output.save("name")
    assert any("takes no name" in note for note in caught.value.__notes__)
