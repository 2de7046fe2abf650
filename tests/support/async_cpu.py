"""vLLM's asynchronous scheduling on a CPU, for tests in a process of their own.

vLLM switches it off on CPUs, and its runner orders the copies to the host with events and streams of CUDA. Here is a
platform that leaves it on, with stand-ins for these: everything is done at once, so there is nothing to order. Both
change the whole process, so a script calls `install` before it makes an engine, and ends with its engine. An engine in
processes of its own would not have them.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

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


def install() -> None:
    """Make this process's vLLM schedule asynchronously on the CPU; before any engine."""
    import torch
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    class AsyncCpu(CpuPlatform):
        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            wanted = vllm_config.scheduler_config.async_scheduling
            super().check_and_update_config(vllm_config)
            vllm_config.scheduler_config.async_scheduling = wanted

    vllm.platforms.current_platform = AsyncCpu()
    cuda: Any = torch.cuda
    cuda.Event, cuda.Stream, cuda.stream, cuda.current_stream = Event, Stream, on, lambda *args: Stream()
