"""A platform plugin for vLLM: asynchronous scheduling on a CPU, for tests in processes of their own.

vLLM switches it off on CPUs, and its runner orders the copies to the host with events and streams of CUDA. This
platform leaves it on, with stand-ins for these: everything is done at once, so there is nothing to order. Processes
that find `platform` among the entry points of their packages use it, and nobody else does.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms.cpu import CpuPlatform

if TYPE_CHECKING:
    from collections.abc import Iterator


class Event:
    """Has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        """Nothing to mark."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class Stream:
    """Has nothing outstanding."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, other: Stream) -> None:
        """Nothing to wait for."""


@contextmanager
def on(stream: Stream) -> Iterator[None]:
    """Work goes where it would go anyway."""
    yield


class AsyncCpu(CpuPlatform):
    """See the module."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """As in vLLM, without switching asynchronous scheduling off."""
        wanted = vllm_config.scheduler_config.async_scheduling
        super().check_and_update_config(vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted


def platform() -> str:
    """The entry point: every process of an engine comes by here."""
    cuda: Any = torch.cuda
    cuda.Event, cuda.Stream, cuda.stream, cuda.current_stream = Event, Stream, on, lambda *args: Stream()
    return f"{__name__}.{AsyncCpu.__name__}"
