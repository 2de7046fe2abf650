"""Shards: the file format, the bound on memory, errors of the disk, and what a killed writer leaves."""

from __future__ import annotations

import hashlib
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from invivo import MisuseError
from invivo.interleaver.harvest import layout, sink, writer
from invivo.interleaver.harvest.manifest import tables
from invivo.interleaver.harvest.plan import Column, Plan, chosen, wanted_dtype
from invivo.interleaver.harvest.writer import Writer


def plan(folder: Path, capacity: int = 8) -> Plan:
    return Plan("run", str(folder), (), (Column("a", "float32", (2,)),), (None, None, None), 0, capacity)


def add(into: Writer, prompt: int, rows: int) -> torch.Tensor:
    values = torch.rand(rows, 2) + prompt
    tokens = torch.arange(rows, dtype=torch.int32)
    with into.place(rows) as place:
        place.put(0, values)
        place.fill(prompt, tokens.numpy().tobytes(), tokens, tokens)
    return values


def test_the_files_are_what_safetensors_reads(tmp_path: Path) -> None:
    kinds = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool)
    tensors = {f"t.{kind}": torch.rand(3, 5).mul(9).to(kind) for kind in kinds}
    pieces = {name: [tensor[:1], tensor[1:]] for name, tensor in tensors.items()}
    size = layout.write(str(tmp_path / "x"), pieces, {"format": "pt"})
    assert size == (tmp_path / "x").stat().st_size
    found = load_file(tmp_path / "x")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) and found[name].dtype == tensors[name].dtype for name in tensors)


def test_prompts_are_whole_in_shards(tmp_path: Path) -> None:
    out = Writer(plan(tmp_path))
    given = {number: add(out, number, rows) for number, rows in enumerate((3, 4, 2, 8, 1))}
    out.close()
    shards = list(tables(tmp_path))
    assert [table.numbers for table in shards] == [[0, 1], [2], [3], [4]]
    for table in shards:
        found = load_file(tmp_path / table.file)
        assert torch.equal(found["a"], torch.cat([given[number] for number in table.numbers]))
        first = found["token_id"][: len(given[table.numbers[0]])]
        assert table.digests[0] == hashlib.sha256(first.numpy().tobytes()).digest()
    assert not list(tmp_path.glob(".*.part"))


def test_a_slow_disk_makes_the_model_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, real = threading.Event(), layout.write

    def slow(*args: Any) -> int:
        assert go.wait(60)
        return real(*args)

    monkeypatch.setattr(layout, "write", slow)
    out = Writer(plan(tmp_path, capacity=4))
    added: list[int] = []

    def fill() -> None:
        for number in range(20):
            add(out, number, 2)
            added.append(number)

    thread = threading.Thread(target=fill)
    thread.start()
    thread.join(0.5)
    assert len(added) == 6, "three buffers of two prompts each, and no more"
    go.set()
    thread.join(60)
    out.close()
    assert sorted(number for table in tables(tmp_path) for number in table.numbers) == list(range(20))


def test_the_next_writer_goes_on_and_removes_what_was_left(tmp_path: Path) -> None:
    first = Writer(plan(tmp_path))
    add(first, 0, 3)
    first.close()
    (tmp_path / ".shard-00001.safetensors.part").write_bytes(b"half a shar")
    second = Writer(plan(tmp_path))
    assert not list(tmp_path.glob(".*.part"))
    add(second, 1, 3)
    second.close()
    assert [table.file for table in tables(tmp_path)] == ["shard-00000.safetensors", "shard-00001.safetensors"]


def test_two_writers_of_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_LOCK_SECONDS", 0.2)
    first = Writer(plan(tmp_path))
    with pytest.raises(MisuseError, match="another harvest is writing into"):
        Writer(plan(tmp_path))
    first.close()
    Writer(plan(tmp_path)).close()


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(layout, "write", full)
    out = Writer(plan(tmp_path, capacity=2))
    with pytest.raises(MisuseError, match=r"No space left.*run the same harvest again to go on"):
        for number in range(9):
            add(out, number, 2)
    with pytest.raises(MisuseError, match="No space left"):
        out.close()
    assert not list(tables(tmp_path))


def test_rows_that_do_not_fit_are_not_stretched(tmp_path: Path) -> None:
    out = Writer(plan(tmp_path))
    for wrong in (torch.zeros(3, 1), torch.zeros(3, 2, 2), torch.zeros(4, 2)):
        with pytest.raises(MisuseError, match="`a` gave"):
            with out.place(3) as place:
                place.put(0, wrong)
    add(out, 7, 2)
    out.close()
    (table,) = tables(tmp_path)
    assert (table.numbers, table.rows) == ([7], 2)


def test_prompts_that_run_at_once(tmp_path: Path) -> None:
    """Places of one engine step are filled when all are given; some are given up."""
    out = Writer(plan(tmp_path, capacity=4))
    places = {number: out.place(2) for number in range(4)}
    for number, place in reversed(places.items()):
        with suppress(ZeroDivisionError), place:
            place.put(0, torch.full((2, 2), float(number)))
            if number == 2:
                raise ZeroDivisionError
            place.fill(number, b"", torch.tensor([5, 6]), torch.tensor([0, 1]))
    add(out, 4, 3)
    out.close()
    shards = {tuple(table.numbers): load_file(tmp_path / table.file) for table in tables(tmp_path)}
    assert sorted(shards) == [(0, 1), (3,), (4,)]
    assert shards[0, 1]["a"][:, 0].tolist() == [0, 0, 1, 1]
    assert shards[3,]["a"][:, 0].tolist() == [3, 3]
    assert shards[0, 1]["prompts.start"].tolist() == [0, 2]


def test_a_shard_cut_short_is_named(tmp_path: Path) -> None:
    out = Writer(plan(tmp_path))
    add(out, 0, 3)
    out.close()
    (shard,) = tmp_path.glob("shard-*")
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(MisuseError, match=r"shard-00000.safetensors cannot be read .* Remove it"):
        list(tables(tmp_path))


def test_a_prompt_that_comes_late(tmp_path: Path) -> None:
    assert sink.end("no such run") == ""
    with pytest.raises(MisuseError, match="has ended"):
        sink.take("no such run", 0, b"")


def test_arguments() -> None:
    assert (chosen("all"), chosen("last"), chosen(slice(2, None))) == (slice(None), slice(-1, None), slice(2, None))
    for wrong in ("first", 3, slice(None, None, -1)):
        with pytest.raises(MisuseError, match="`positions="):
            chosen(wrong)
    assert (wanted_dtype(torch.bfloat16), wanted_dtype("float16"), wanted_dtype(None)) == ("bfloat16", "float16", None)
    with pytest.raises(MisuseError, match="`dtype='int8'`"):
        wanted_dtype("int8")
