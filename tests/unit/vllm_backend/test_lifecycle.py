"""What is arranged for an engine's start."""

from __future__ import annotations

import os
import sys
from types import ModuleType

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


@pytest.mark.parametrize("given", [{"__spec__": None, "__file__": "script.py"}, {}], ids=["script", "under pdb"])
def test_what_the_main_module_knows_of_itself_is_as_it_was(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str | None]
) -> None:
    """pdb's main module has no `__spec__` in Python 3.11, and no engine started under it."""
    main = ModuleType("__main__")
    main.__dict__.pop("__spec__")
    main.__dict__.update(given)
    before = dict(main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    Started("a model", {}).start()
    assert main.__dict__ == before


@pytest.mark.parametrize(("given", "used"), [(None, "spawn"), ("fork", "fork")])
def test_processes_of_an_engine_are_spawned(monkeypatch: pytest.MonkeyPatch, given: str | None, used: str) -> None:
    """On GPUs too, where vLLM's own choice is to fork; a user's choice counts."""
    monkeypatch.setenv(METHOD, given or "")
    if given is None:
        monkeypatch.delenv(METHOD)
    assert Started("a model", {}).start() == used
