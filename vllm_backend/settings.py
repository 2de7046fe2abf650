"""How an engine is told that it is invivo's: an entry of vLLM's `additional_config`."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ..interleaver.limits import Limits
from ..tracer.block import FORMAT

KEY = "invivo"
"""The key in `additional_config`, and the key of the payload in `SamplingParams.extra_args`."""

ENDED = "invivo_ended"
"""Attribute of a `ModelRunnerOutput`: the requests that their blocks have ended."""

SAVES = "invivo_saves"
"""Attribute of a `ModelRunnerOutput`: the cargo (`in_band`) that goes home with the step, by request."""

DONE = "invivo_done"
"""Attribute of a `ModelRunnerOutput`: requests that go on, and whose blocks need no more steps from this one on."""

HELD = "invivo_held"
"""Attribute of a `ModelRunnerOutput`: the requests whose blocks stand at a barrier."""

TOLD = "invivo_told"
"""Attribute of a `ModelRunnerOutput`, and then of a `SchedulerOutput`: what the last stage of a pipeline tells those
before it, by request. Between stages, the name of what is sent along with the hidden states."""

NOW = "invivo_now"
"""Attribute of a `SchedulerOutput` for several workers: the time, which must be the same for all of them."""

SCHEDULER = "invivo.vllm_backend.scheduler.trace_scheduler"
"""Dotted path of what makes the scheduler, for `scheduler_cls`."""


LIMITS = Limits(time=30.0, memory=0.5, saves=4 << 30)
"""The limits of the blocks of an engine that was not given others."""


def settings(limits: Limits = LIMITS) -> dict[str, object]:
    """The entry that makes an engine ready for traces, whose blocks have these limits."""
    return {"format": FORMAT, "limits": msgspec.to_builtins(limits)}


def limits_of(additional_config: Mapping[str, object]) -> Limits:
    """The limits in an engine's `additional_config`; the usual ones if it does not name any."""
    entry = additional_config[KEY]
    given = entry.get("limits") if isinstance(entry, Mapping) else None
    return LIMITS if given is None else msgspec.convert(given, Limits)


def asked_for(additional_config: object) -> bool:
    """Whether an engine's `additional_config` has the entry."""
    return isinstance(additional_config, Mapping) and KEY in additional_config
