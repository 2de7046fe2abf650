"""What a name holds in the body around invokes after an invoke has assigned it: a value that is not here."""

from __future__ import annotations

from typing import Any, NoReturn

from ..envoy.errors import OutsideBlockError


class HandedOn:
    """Stands for the value that an invoke's block leaves under a name.

    It is bound where the invoke's `with` ends, as an assignment in its body would be. A later invoke that captures it
    takes the value from that block; if the body around has assigned the name again in between, it captures that.

    Args:
        trace: id of the trace.
        index: which of its invokes.
        name: the name in the block.
    """

    def __init__(self, trace: str, index: int, name: str) -> None:
        self.trace = trace
        self.index = index
        self.name = name

    @property
    def described(self) -> str:
        """For messages."""
        return f"`{self.name}` of invoke {self.index}"

    def __repr__(self) -> str:
        return f"<{self.described}: not here before the end of the trace>"

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise OutsideBlockError(
            f"`{self.name}` is assigned in invoke {self.index} of the trace, which runs next to the model once the "
            f"outer `with` has ended; the body around the invokes runs here, before that. Use `{self.name}` in a later "
            "invoke, or save it there and use it after the outer `with`."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    __bool__ = __len__ = __iter__ = __getitem__ = __setitem__ = __call__ = __contains__ = _refuse
    __int__ = __float__ = __index__ = __str__ = __format__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __matmul__ = __rmatmul__ = __neg__ = __pow__ = __mod__ = __enter__ = __exit__ = _refuse
