"""What is arranged for an engine's start."""

from __future__ import annotations

import os

import pytest

from invivo.vllm_backend.lifecycle import Lifecycle

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


class Started(Lifecycle[str]):
    """Its engine is how vLLM would make processes at its start."""

    def _make(self) -> str:
        return os.environ[METHOD]

    def _shutdown(self, llm: str) -> None:
        pass

    def call(self, method: str, *args: object) -> None:
        """There is no worker."""

    def settle(self) -> None:
        """There are no requests."""


@pytest.mark.parametrize(("given", "used"), [(None, "spawn"), ("fork", "fork")])
def test_processes_of_an_engine_are_spawned(monkeypatch: pytest.MonkeyPatch, given: str | None, used: str) -> None:
    """On GPUs too, where vLLM's own choice is to fork; a user's choice counts."""
    monkeypatch.setenv(METHOD, given or "")
    if given is None:
        monkeypatch.delenv(METHOD)
    assert Started("a model", {}).start() == used
