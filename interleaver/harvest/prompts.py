"""The prompts of a harvest: all of their tokens in one array, since there may be hundreds of millions."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator
from pathlib import Path

from ...envoy.errors import PromptError


class Prompts:
    """Token ids of many prompts, by number."""

    def __init__(self) -> None:
        self._ids = array("i")
        self._ends = array("q", [0])

    def add(self, token_ids: list[int]) -> None:
        """Take in the next one."""
        self._ids.extend(token_ids)
        self._ends.append(len(self._ids))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int) -> list[int]:
        return self._ids[self._ends[number] : self._ends[number + 1]].tolist()

    @property
    def tokens(self) -> int:
        """Tokens of all prompts."""
        return len(self._ids)

    def length(self, number: int) -> int:
        """Tokens of one prompt."""
        return self._ends[number + 1] - self._ends[number]

    def encoded(self, number: int) -> bytes:
        """The tokens of one prompt as 32-bit numbers."""
        return self._ids[self._ends[number] : self._ends[number + 1]].tobytes()

    def digest(self) -> str:
        """A fingerprint of all tokens and of where prompts end."""
        found = hashlib.sha256(self._ends.tobytes())
        found.update(memoryview(self._ids))
        return found.hexdigest()


def read(path: Path, field: str) -> Iterator[object]:
    """The prompts in a file: lines of text (``.txt``), or of JSON (``.jsonl``).

    A line of JSON is an object with the prompt in `field`, or the prompt itself: a text, token ids or chat messages.

    Raises:
        PromptError: another kind of file, or a line that holds no prompt.
    """
    if path.suffix not in (".txt", ".jsonl"):
        raise PromptError(f"{path}: prompts are read from .txt (one in each line) and .jsonl files.")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            text = line.rstrip("\n")
            if not text.strip():
                continue
            yield text if path.suffix == ".txt" else _from_json(text, field, f"{path}:{number}")


def _from_json(text: str, field: str, where: str) -> object:
    try:
        record = json.loads(text)
    except ValueError as error:
        raise PromptError(f"{where}: not a line of JSON ({error}).") from error
    if not isinstance(record, dict):
        return record
    if field not in record:
        raise PromptError(f"{where}: no field {field!r}; it has {', '.join(map(repr, record)) or 'none'}.")
    return record[field]
