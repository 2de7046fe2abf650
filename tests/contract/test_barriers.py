"""Barriers: blocks of one trace that wait for each other."""

from __future__ import annotations

from typing import Any

import pytest

from invivo import InvokeError, MisuseError
from support.contract import OTHER, PROMPT, assert_serves, rows


@pytest.mark.parametrize("count", [1, 2])
def test_blocks_meet_at_a_barrier(model: Any, count: int) -> None:
    with model.trace(max_tokens=1, temperature=0) as tracer:
        meet = tracer.barrier(count)
        box: dict[str, Any] = {}
        with tracer.invoke(PROMPT):
            box["h"] = rows(model.model.layers[5].mlp.output)[-1].clone()
            meet()
        with tracer.invoke(OTHER):
            meet()
            seen = sorted(box).save()
    assert seen == ["h"] or count == 1


def test_blocks_find_their_barriers_in_what_they_share(model: Any) -> None:
    with model.trace(max_tokens=1, temperature=0) as tracer:
        pairs = [("first", tracer.barrier(2)), ("last", tracer.barrier(2))]
        order = list().save()
        with tracer.invoke(PROMPT):
            order.append("one")
            for _, meet in pairs:
                meet()
            order.append("over")
        with tracer.invoke(OTHER):
            pairs[0][1]()
            order.append("other")
            pairs[1][1]()
    assert order == ["one", "other", "over"]


def test_barriers_that_cannot_fill(model: Any) -> None:
    with pytest.raises(MisuseError, match="waits for 3 blocks, and 2 of the trace refer to it"):
        with model.trace(max_tokens=1, temperature=0) as tracer:
            meet = tracer.barrier(3)
            for prompt in (PROMPT, OTHER):
                with tracer.invoke(prompt):
                    meet()
    with pytest.raises(InvokeError, match=r"too few of the others can come any more\. At the barrier: invoke 0"):
        with model.trace(max_tokens=1, temperature=0) as tracer:
            meet = tracer.barrier(2)
            with tracer.invoke(PROMPT):
                meet()
            with tracer.invoke(OTHER):
                if model.logits.sum() == 0.5:
                    meet()
    with pytest.raises(MisuseError, match="which begins only when invoke 0 has ended, since it takes `h` over"):
        with model.trace(max_tokens=1, temperature=0) as tracer:
            meet = tracer.barrier(2)
            with tracer.invoke(PROMPT):
                h = model.logits
                meet()
            with tracer.invoke(OTHER):
                meet()
                h.save()
    assert_serves(model)


def test_one_that_takes_a_value_begins_after_a_meeting(model: Any) -> None:
    with model.trace(max_tokens=1, temperature=0) as tracer:
        meet = tracer.barrier(2)
        order = list().save()
        with tracer.invoke(PROMPT):
            meet()
            h = 5
            order.append(0)
        with tracer.invoke(OTHER):
            order.append(h)
        with tracer.invoke(OTHER):
            meet()
            order.append(2)
    assert sorted(order) == [0, 2, 5] and order.index(0) < order.index(5)
