"""`Activations`: rows by number, slice and list, across shards; in workers of a DataLoader."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from invivo import Activations, MisuseError
from invivo.interleaver.harvest.manifest import Manifest, check_same, load, store
from invivo.interleaver.harvest.plan import Column, Plan
from invivo.interleaver.harvest.writer import Writer

LENGTHS = (3, 4, 2, 8, 1, 5)
COLUMNS = (Column("a", "float32", (2,)), Column("b", "bfloat16", (2, 3)))
MANIFEST = Manifest(
    model="toy",
    ports=("a", "b"),
    columns=COLUMNS,
    positions=(None, None, None),
    generate=0,
    sampling={},
    prompts=len(LENGTHS),
    tokens=sum(LENGTHS),
    prompts_sha256="",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    out = Writer(Plan("run", str(tmp_path), (), COLUMNS, (None, None, None), 0, 8))
    for number, rows in enumerate(LENGTHS):
        tokens = torch.arange(rows, dtype=torch.int32) + 100 * number
        a = tokens[:, None].float().expand(rows, 2)
        with out.place(rows) as place:
            place.put(0, a)
            place.put(1, torch.ones(rows, 2, 3))
            place.fill(number, tokens.numpy().tobytes(), tokens, tokens % 100)
    out.close()
    store(tmp_path, MANIFEST)
    return tmp_path


def ids() -> list[int]:
    return [100 * number + at for number, rows in enumerate(LENGTHS) for at in range(rows)]


def test_rows(folder: Path) -> None:
    rows = Activations(folder)
    assert len(rows) == sum(LENGTHS)
    assert rows.columns == ["a", "b"]
    assert [int(rows[at]["token_id"]) for at in range(len(rows))] == ids()
    assert int(rows[-1]["token_id"]) == ids()[-1]
    assert rows[4]["a"].tolist() == [101.0, 101.0]
    assert rows[4]["b"].shape == (2, 3)
    assert rows[4]["b"].dtype == torch.bfloat16
    for same in (np.int64(5), torch.tensor(5)):
        assert int(rows[same]["token_id"]) == ids()[5]
    with pytest.raises(IndexError, match="row 23 of 23"):
        rows[23]


@pytest.mark.parametrize(
    "where", [slice(None), slice(2, 19), slice(5, 6), slice(7, 7), slice(-4, None), slice(20, 3, -3)]
)
def test_slices(folder: Path, where: slice) -> None:
    found = Activations(folder)[where]
    assert found["token_id"].tolist() == ids()[where]
    assert found["a"].tolist() == [[float(token)] * 2 for token in ids()[where]]
    assert found["prompt"].tolist() == [token // 100 for token in ids()[where]]
    assert found["b"].shape == (len(ids()[where]), 2, 3)


@pytest.mark.parametrize("where", [[22, 0, 9, 9, -1], [], torch.tensor([4, 21]), np.array([7])])
def test_lists(folder: Path, where: Any) -> None:
    found = Activations(folder)[where]
    assert found["token_id"].tolist() == [ids()[int(at)] for at in where]


def test_prompts_and_columns(folder: Path) -> None:
    rows = Activations(folder, columns=["b"])
    assert rows.prompts == [0, 1, 2, 3, 4, 5]
    found = rows.of_prompt(3)
    assert found["position"].tolist() == list(range(8))
    assert set(found) == {"b", "prompt", "token_id", "position"}
    with pytest.raises(MisuseError, match="no rows of prompt 6 of 6"):
        rows.of_prompt(6)
    with pytest.raises(MisuseError, match=r"no column 'c'\. It has: a, b"):
        Activations(folder, columns=["c"])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader(folder: Path, workers: int) -> None:
    rows = Activations(folder)
    rows[0]  # opened here, and again in each worker
    loader = DataLoader(rows, batch_size=4, num_workers=workers, multiprocessing_context="spawn" if workers else None)
    batches = list(loader)
    assert torch.cat([batch["token_id"] for batch in batches]).tolist() == ids()
    assert batches[0]["a"].shape == (4, 2)


def test_a_copy_by_pickle_has_no_open_files(folder: Path) -> None:
    rows = Activations(folder)
    rows[0]
    data = pickle.dumps(rows)
    assert len(data) < 2000
    assert pickle.loads(data)[:]["token_id"].tolist() == ids()


def test_where_there_is_no_harvest(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(MisuseError, match=r"no manifest.json"):
            Activations(folder)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(MisuseError, match="is no manifest of a harvest"):
        Activations(tmp_path)


def test_another_manifest_is_told_by_what_differs(folder: Path) -> None:
    before = load(folder)
    assert before is not None
    check_same(before, MANIFEST, folder)
    other = Manifest(**{name: getattr(MANIFEST, name) for name in MANIFEST.__struct_fields__} | {"model": "other"})
    with pytest.raises(MisuseError, match=r"holds another harvest.* model: toy there, other now. Ask for the same"):
        check_same(before, other, folder)
