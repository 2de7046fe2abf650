"""Calls that meet an engine which dies get invivo's word for it; the engine is a stand-in."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from invivo.envoy.errors import EngineDiedError, InternalError
from invivo.vllm_backend import watch
from invivo.vllm_backend.async_engine import TracingLLM
from invivo.vllm_backend.engine import Engine
from invivo.vllm_backend.lifecycle import alive

FAILED = "Call to collective_rpc method failed: cancelled"
"""What vLLM's client raises, as a plain `Exception`, where a worker is killed during a call."""

Call = Callable[[Any], object]


def engine_core(**attributes: object) -> Any:
    """An engine's client whose calls fail."""

    async def fails(*_: object) -> None:
        raise Exception(FAILED)

    return SimpleNamespace(collective_rpc_async=fails, **attributes)


def by_waiting(core: Any) -> object:
    """Call a method of a `vllm.LLM`."""

    def call(method: str, args: tuple[object, ...]) -> Any:
        return asyncio.run(core.collective_rpc_async(method, args))

    engine = Engine("a model", {})
    llm: Any = SimpleNamespace(collective_rpc=call, llm_engine=SimpleNamespace(engine_core=core))
    engine._llm = llm
    return engine.call("invivo_collect")


class Llm(TracingLLM):
    """Has been made somehow."""

    def __init__(self, core: Any) -> None:
        self.engine_core = core

    def __del__(self) -> None:
        """There is nothing to shut down."""


def by_awaiting(core: Any) -> object:
    """Call a method of an `AsyncLLM`."""
    with alive():
        return asyncio.run(Llm(core).collective_rpc("invivo_collect"))


@pytest.fixture(params=[by_waiting, by_awaiting])
def call(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.setattr(watch, "_LAST_WORDS", 0.5)
    found: Call = request.param
    return found


def test_an_engine_that_dies_of_its_worker_is_called_dead(call: Call) -> None:
    core = engine_core(resources=SimpleNamespace(engine_dead=False))
    threading.Timer(0.2, lambda: setattr(core.resources, "engine_dead", True)).start()
    with pytest.raises(EngineDiedError, match="Make a new") as caught:
        call(core)
    assert FAILED in str(caught.value.__cause__.__cause__)  # type: ignore[union-attr]


@pytest.mark.parametrize("core", [engine_core(), engine_core(resources=SimpleNamespace(engine_dead=False))])
def test_a_failure_of_an_engine_that_lives_is_one_of_invivo(call: Call, core: Any) -> None:
    with pytest.raises(InternalError, match=f"a worker failed in `invivo_collect`: {FAILED}"):
        call(core)
