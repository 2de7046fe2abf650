"""A platform plugin for vLLM: workers in Ray on a CPU, for tests in processes of their own.

vLLM asks Ray for a device of its platform for each worker, and its CPU has none (`ray_device_key` is empty). This one
names Ray's "GPU", of which a cluster has as many as it is told; nothing else is different. Processes that find
`platform` among the entry points of their packages use it, and nobody else does.
"""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


class RayCpu(CpuPlatform):
    """See the module."""

    ray_device_key = "GPU"


def platform() -> str:
    """The entry point: every process of an engine comes by here."""
    return f"{__name__}.{RayCpu.__name__}"
