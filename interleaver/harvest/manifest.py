"""`manifest.json` of a harvest: what was asked for, by which another run knows whether it may go on.

Which prompts are there is not written into it but read from the shards, each of which says that itself; so a run that
was killed at any moment leaves a folder that is right.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from safetensors import SafetensorError, safe_open

from ...envoy.errors import MisuseError
from .plan import Column
from .writer import PATTERN

FORMAT = 1
FILE = "manifest.json"
RESERVED = ("prompt", "token_id", "position", "prompts.number", "prompts.start", "prompts.sha256")
"""Tensors of a shard that are no columns: three with a value per row, three with one per prompt."""


class Shard(msgspec.Struct, frozen=True):
    """A file of rows."""

    file: str
    rows: int
    prompts: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a harvest is.

    Attributes:
        format: version of this form.
        model: name or path of the model.
        ports: the ports, in the order in which they fire.
        columns: the tensors that they make.
        positions: which tokens of a prompt have rows (start, stop, step).
        generate: how many generated tokens have rows as well.
        sampling: sampling arguments, where tokens are generated.
        prompts: how many there are.
        tokens: of all prompts.
        prompts_sha256: a fingerprint of their tokens.
        complete: all prompts are there.
        rows: of all shards; filled in when a run ends, as `shards` is.
        shards: the files.
        versions: of what wrote it.
    """

    format: int = FORMAT
    model: str
    ports: tuple[str, ...]
    columns: tuple[Column, ...]
    positions: tuple[int | None, int | None, int | None]
    generate: int
    sampling: dict[str, str]
    prompts: int
    tokens: int
    prompts_sha256: str
    complete: bool = False
    rows: int = 0
    shards: tuple[Shard, ...] = ()
    versions: dict[str, str] = {}


_SAME = ("format", "model", "ports", "columns", "positions", "generate", "sampling", "prompts", "prompts_sha256")


def load(folder: Path) -> Manifest | None:
    """The manifest in a folder, if there is one. Raises `MisuseError` if it cannot be read."""
    path = folder / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise MisuseError(f"{path} is no manifest of a harvest ({error}).") from error


def store(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, whole or not at all."""
    part = folder / f".{FILE}.part"
    part.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    os.replace(part, folder / FILE)


def check_same(before: Manifest, now: Manifest, folder: Path) -> None:
    """Raise `MisuseError` if the harvest in a folder is another one than that which is to go on there."""
    differences = [
        f"{name}: {_brief(old)} there, {_brief(new)} now"
        for name in _SAME
        if (old := getattr(before, name)) != (new := getattr(now, name))
    ]
    if differences:
        raise MisuseError(
            f"{folder} holds another harvest, so this one cannot go on there. " + "; ".join(differences) + ". Ask for "
            "the same again, or choose another folder."
        )


class Table(NamedTuple):
    """Whose rows are in a shard.

    Attributes:
        file: its name.
        rows: how many it has.
        numbers: of its prompts.
        starts: the first row of each.
        digests: sha256 of the tokens of each.
    """

    file: str
    rows: int
    numbers: list[int]
    starts: list[int]
    digests: list[bytes]


def tables(folder: Path) -> Iterator[Table]:
    """The tables of all shards of a folder, in order.

    Raises:
        MisuseError: a file that is no shard.
    """
    for path in sorted(path for path in folder.iterdir() if PATTERN.fullmatch(path.name)):
        try:
            with safe_open(path, "pt") as file:
                rows = file.get_slice("prompt").get_shape()[0]
                numbers, starts = (file.get_tensor(f"prompts.{name}").tolist() for name in ("number", "start"))
                digests = file.get_tensor("prompts.sha256").numpy().tobytes()
                each = [digests[at : at + 32] for at in range(0, len(digests), 32)]
                yield Table(path.name, rows, numbers, starts, each)
        except (SafetensorError, OSError) as error:
            raise MisuseError(
                f"{path} cannot be read ({error}): the machine may have gone down before it was on the disk. Remove "
                "it, and run the same harvest again for its prompts."
            ) from error


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) < 200 else f"{text[:150]} ... ({len(text)} characters)"
