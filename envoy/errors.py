"""Every exception that invivo raises, in one tree.

::

    InvivoError
    ├── MisuseError              the caller can fix it; the message says how
    │   ├── CaptureError         the body of the `with` cannot be captured
    │   ├── TransferError        a captured variable cannot travel to the engine
    │   ├── UnknownNameError     no such module, port or step source (also an AttributeError)
    │   ├── OutsideBlockError    a port was asked for outside of a running block
    │   ├── ForeignError         an Envoy or tracer of another model was used
    │   ├── PortError
    │   │   ├── PortPassedError      the model has already gone past that port
    │   │   ├── PortNotReachedError  the port did not fire in this step
    │   │   └── StepError            the step is past, or the request has ended
    │   ├── InvokeError          what another invoke of the trace was to give, or to meet at, is not there
    │   ├── WriteError           a value of another shape, dtype or structure was written
    │   ├── SaveError            a saved value cannot come home
    │   ├── LimitError           the block was ended, since it used too much of the engine
    │   │   ├── TimeLimitError       it kept the engine waiting
    │   │   ├── MemoryLimitError     it filled the memory
    │   │   └── SaveLimitError       it saved too much
    │   ├── RanksError           the ranks of a split model did not do the same in a block
    │   ├── BlockError           an exception of the block whose type the caller does not have
    │   ├── SamplingError        an unknown or invalid sampling argument
    │   ├── PromptError          a prompt that is empty, too long or of a wrong kind
    │   ├── EngineClosedError    the engine was closed
    │   ├── UnsupportedError     a feature of the engine under which traces would be wrong
    │   │   └── PreemptedError       memory ran out, and what the block had edited was thrown away
    │   └── VersionError         a version of vLLM that invivo was not tested with
    ├── EngineDiedError          the engine process is gone
    └── InternalError            a bug in invivo: please report it

    InvivoWarning (a UserWarning)

The module imports nothing, so that every other one may import it.
"""

from __future__ import annotations


class InvivoError(Exception):
    """Base of everything that invivo raises by itself."""


class MisuseError(InvivoError):
    """Something the caller can fix; the message says what happened, where, why and what to do."""


class CaptureError(MisuseError):
    """The body of the `with` cannot be captured."""


class TransferError(MisuseError):
    """A captured variable cannot travel to the engine."""


class UnknownNameError(MisuseError, AttributeError):
    """A module, port or attribute that the model does not have."""


class OutsideBlockError(MisuseError):
    """A port was read or written where no block is running."""


class ForeignError(MisuseError):
    """An Envoy of one model was used in a trace of another."""


class PortError(MisuseError):
    """A port could not be served."""


class PortPassedError(PortError):
    """The model has gone past the port in this step."""


class PortNotReachedError(PortError):
    """The port did not fire in this step."""


class StepError(PortError):
    """A step that is past, that cannot come, or a request that has ended."""


class InvokeError(MisuseError):
    """Another invoke of the same trace did not do what this one relies on: give a value, or come to a barrier."""


class WriteError(MisuseError):
    """A value that does not fit the port it was written to."""


class SaveError(MisuseError):
    """A saved value that cannot be sent home."""


class LimitError(MisuseError):
    """The block used more of the engine than a limit allows, and was ended."""


class TimeLimitError(LimitError):
    """The block went on for too long without handing over to the model."""


class MemoryLimitError(LimitError):
    """The block added too much to the memory of its process, or holds too much of the GPU's."""


class SaveLimitError(LimitError):
    """The block saved more bytes than one trace may."""


class RanksError(MisuseError):
    """A block runs on every rank of a split model, and did not do the same on all of them."""


class BlockError(MisuseError):
    """Stands for an exception of the block whose type is not known where the `with` ends."""


class SamplingError(MisuseError):
    """An unknown or invalid sampling argument."""


class PromptError(MisuseError):
    """A prompt that the model cannot take."""


class EngineClosedError(MisuseError):
    """The engine was closed by `close()` or at the end of its `with`."""


class UnsupportedError(MisuseError):
    """A setting of the engine under which a trace could be wrong."""


class PreemptedError(UnsupportedError):
    """The engine ran out of memory for keys and values and threw away those that the block had edited."""


class VersionError(MisuseError):
    """A vLLM that is missing or that invivo was not tested with."""


class EngineDiedError(InvivoError):
    """The engine process has died; a new model object starts a new one."""


class InternalError(InvivoError):
    """A bug in invivo. Please report it with the traceback."""

    def __str__(self) -> str:
        return f"{super().__str__()}\nThis is a bug in invivo, not in your code; please report it."


class InvivoWarning(UserWarning):
    """Something that worked, but probably not as meant."""
