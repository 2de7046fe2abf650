"""The way into every vLLM process: a `vllm.general_plugins` entry point.

vLLM calls `register` in the front end, in the engine core and in every worker. It makes workers offer their runner to
`worker.attach` once they have built it, and that does nothing unless the engine's `additional_config` asks for invivo.
"""

from __future__ import annotations

from functools import wraps

from ..envoy.errors import VersionError
from .version import check_version


def register() -> None:
    """Wrap the creation of the runner, once per process; a vLLM that is not supported is left as it is."""
    try:
        check_version()
    except VersionError:
        return  # our own engines check again and raise; other engines are not our business
    from .compat import WorkerWrapperBase

    original = WorkerWrapperBase.init_device
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def init_device(self: WorkerWrapperBase) -> None:
        original(self)
        from .worker import attach

        attach(self)

    WorkerWrapperBase.init_device = init_device
