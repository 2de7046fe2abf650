"""Traces of asynchronous engines that the tests of them share, and ways to take their outputs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from support.contract import PROMPT, stream

STEPS: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
LONG: dict[str, Any] = {"max_tokens": 400, "temperature": 0, "ignore_eos": True}


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, 120))


async def outputs_of(tracer: Any) -> list[Any]:
    return [output async for output in tracer.backend]


def streamed_trace(model: Any, prompt: Any = PROMPT, **sampling: Any) -> Any:
    with model.trace(prompt, **{**STEPS, **sampling}) as tracer:
        states = list().save()
        for step in tracer.iter[:]:
            h = stream(model.model.layers[5]).save(stream=True)
            states.append(h)
            token = model.samples.item()
            token.save(stream=True)
    return tracer


def endless(model: Any) -> Any:
    with model.trace(PROMPT, **LONG) as tracer:
        for step in tracer.iter[:]:
            h = model.model.layers[5].mlp.output[-1].save(stream=True)
    return tracer
