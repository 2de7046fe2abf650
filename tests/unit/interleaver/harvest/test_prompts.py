"""Prompts kept as one array, and prompts read from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from invivo import PromptError
from invivo.interleaver.harvest.prompts import Prompts, read


def made(*prompts: list[int]) -> Prompts:
    found = Prompts()
    for prompt in prompts:
        found.add(prompt)
    return found


def test_prompts_by_number() -> None:
    prompts = made([1, 2, 3], [4], [5, 6])
    assert (len(prompts), prompts.tokens, prompts[1], prompts[2], prompts.length(0)) == (3, 6, [4], [5, 6], 3)
    assert prompts.encoded(2) == (5).to_bytes(4, "little") + (6).to_bytes(4, "little")


def test_the_fingerprint_knows_where_prompts_end() -> None:
    assert made([1, 2], [3]).digest() == made([1, 2], [3]).digest()
    assert made([1, 2], [3]).digest() != made([1], [2, 3]).digest()


def test_files(tmp_path: Path) -> None:
    text, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text("one\n\n two \n")
    lines.write_text('{"text": "one", "n": 1}\n"two"\n[3, 4]\n{"text": [{"role": "user", "content": "x"}]}\n')
    assert list(read(text, "text")) == ["one", " two "]
    assert list(read(lines, "text")) == ["one", "two", [3, 4], [{"role": "user", "content": "x"}]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"body": "x"}\n', r"a.jsonl:1: no field 'text'; it has 'body'"),
        ("a.jsonl", '"x"\n{oh\n', r"a.jsonl:2: not a line of JSON"),
        ("a.csv", "x\n", r"\.txt .* and \.jsonl"),
    ],
)
def test_wrong_files(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(PromptError, match=message):
        list(read(tmp_path / name, "text"))
