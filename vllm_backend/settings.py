"""How an engine is told that it is invivo's: an entry of vLLM's `additional_config`."""

from __future__ import annotations

from collections.abc import Mapping

from ..tracer.block import FORMAT

KEY = "invivo"
"""The key in `additional_config`, and the key of the payload in `SamplingParams.extra_args`."""

ENDED = "invivo_ended"
"""Attribute of a `ModelRunnerOutput`: the requests that their blocks have ended."""

SAVES = "invivo_saves"
"""Attribute of a `ModelRunnerOutput`: the parcels (`in_band`) that go home with the step, by request."""

SCHEDULER = "invivo.vllm_backend.scheduler.TraceScheduler"
"""Dotted path of the scheduler, for `scheduler_cls`."""


def settings() -> dict[str, object]:
    """The entry that makes an engine ready for traces."""
    return {"format": FORMAT}


def asked_for(additional_config: object) -> bool:
    """Whether an engine's `additional_config` has the entry."""
    return isinstance(additional_config, Mapping) and KEY in additional_config
