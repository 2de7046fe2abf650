"""From a captured block to the payload that is sent."""

from __future__ import annotations

import re
import secrets
from functools import lru_cache

from ..envoy.envoy import RootEnvoy
from . import effects
from .block import FORMAT, Payload
from .capture import Captured, Site
from .check import check_names
from .codec import Encoded, Key, encode
from .common import Blobs
from .meets import no_module
from .steady import is_steady


def make_payload(site: Site, captured: Captured, model: RootEnvoy, seed: int) -> Payload:
    """The payload of a block that is a trace by itself.

    Raises:
        UnknownNameError: the block names a module that the model does not have.
        TransferError: it uses a variable that cannot travel.
    """
    return payload_of(site, captured, encode_values(site, captured, model), seed)


def encode_values(
    site: Site, captured: Captured, model: RootEnvoy, key: Key | None = None, blobs: Blobs | None = None
) -> Encoded:
    """The captured values as bytes, once the names in the block are checked.

    Args:
        site: the block.
        captured: what it reads.
        model: the model that is traced.
        key, blobs: as in `codec.encode`.

    Raises:
        UnknownNameError, TransferError: as in `make_payload`.
    """
    check_names(site, captured)
    return encode({"local": captured.locals, "global": captured.globals}, model, key, blobs)


def new_id() -> str:
    """An id for the trace of one block."""
    return secrets.token_hex(16)


def payload_of(site: Site, captured: Captured, encoded: Encoded, seed: int) -> Payload:
    """The payload of a block whose values are encoded."""
    return Payload(
        FORMAT,
        new_id(),
        site.block,
        encoded.data,
        encoded.tensors,
        seed,
        tuple(sorted(encoded.uses | _imported_random(site.block.source) | effects.of_source(site.tree))),
        no_module=no_module(site, captured),
        steady=is_steady(site, captured),
    )


@lru_cache(maxsize=256)
def _imported_random(source: str) -> frozenset[str]:
    """Random sources that the block itself imports."""
    return frozenset(name for name in ("random", "numpy") if re.search(rf"\b(import|from)\s+{name}\b", source))
