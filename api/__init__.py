"""invivo: read and edit the internals of a model while vLLM serves it.

::

    from invivo import VLLM

    model = VLLM("path/of/a/checkpoint")
    with model.trace("The Eiffel Tower is in the city of", temperature=0.0, max_tokens=1) as tracer:
        hidden = model.model.layers[5].output[0].save()
    print(hidden.shape)

This module is the package's face and holds no code of its own: each public name is fetched from where it lives when it
is first used (PEP 562), so that ``import invivo`` loads neither torch nor vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .envoy import errors as errors
    from .envoy.errors import (
        BlockError,
        CaptureError,
        EngineClosedError,
        EngineDiedError,
        ForeignError,
        InternalError,
        InvivoError,
        InvivoWarning,
        InvokeError,
        LimitError,
        MemoryLimitError,
        MisuseError,
        OutsideBlockError,
        PortError,
        PortNotReachedError,
        PortPassedError,
        PreemptedError,
        PromptError,
        RanksError,
        SamplingError,
        SaveError,
        SaveLimitError,
        StepError,
        TimeLimitError,
        TransferError,
        UnknownNameError,
        UnsupportedError,
        VersionError,
        WriteError,
    )
    from .interleaver.harvest.dataset import Activations
    from .interleaver.local import Local
    from .tracer.saves import save
    from .vllm_backend.harvest import harvest
    from .vllm_backend.model import VLLM

    __version__: str

__all__ = [
    "VLLM",
    "Activations",
    "BlockError",
    "CaptureError",
    "EngineClosedError",
    "EngineDiedError",
    "ForeignError",
    "InternalError",
    "InvivoError",
    "InvivoWarning",
    "InvokeError",
    "LimitError",
    "Local",
    "MemoryLimitError",
    "MisuseError",
    "OutsideBlockError",
    "PortError",
    "PortNotReachedError",
    "PortPassedError",
    "PreemptedError",
    "PromptError",
    "RanksError",
    "SamplingError",
    "SaveError",
    "SaveLimitError",
    "StepError",
    "TimeLimitError",
    "TransferError",
    "UnknownNameError",
    "UnsupportedError",
    "VersionError",
    "WriteError",
    "__version__",
    "errors",
    "harvest",
    "save",
]

_HOMES = {
    "Activations": ".interleaver.harvest.dataset",
    "VLLM": ".vllm_backend.model",
    "Local": ".interleaver.local",
    "harvest": ".vllm_backend.harvest",
    "save": ".tracer.saves",
}
"""Where the public names live; the names of `errors` are not listed, for they are all in one module."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object
    if name == "__version__":
        from importlib.metadata import version

        value = version("invivo")
    elif name == "errors":
        value = import_module(".envoy.errors", __name__)
    else:
        value = getattr(import_module(_HOMES.get(name, ".envoy.errors"), __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
