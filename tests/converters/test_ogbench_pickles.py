"""OGBench files with arrays of Python objects, which --trust-pickle reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ogbench_files import random_columns, write

import rbtool
from rbtool.converters.ogbench.reader import OgbenchReader
from rbtool.core.errors import FormatError, UsageError

ROWS = 7
TRUST = {"trust_pickle": True}


def objects(rows: Any) -> Any:
    """The rows as an array of Python objects: each is an array, or a number."""
    found = np.empty(len(rows), object)
    for number, row in enumerate(rows):
        found[number] = row
    return found


def read(path: Path, **options: Any) -> tuple[list[Any], dict[str, str]]:
    with OgbenchReader(path, options=options) as reader:
        return list(reader.pieces()), {one.key: one.why for one in reader.facts().dropped_keys}


def test_the_rows_are_those_of_a_file_without_pickles(tmp_path: Path) -> None:
    columns: dict[str, Any] = random_columns((3, 2)) | {"qpos": np.arange(14.0).reshape(ROWS, 2)}
    plain, _ = read(write(tmp_path / "a-v0.npz", columns))
    pickled = write(tmp_path / "b-v0.npz", {name: objects(rows) for name, rows in columns.items()})
    found, dropped = read(pickled, **TRUST)
    assert not dropped
    assert len(found) == len(plain) == 2
    for one, other in zip(found, plain, strict=True):
        assert one.columns.keys() == other.columns.keys()
        for key, rows in other.columns.items():
            np.testing.assert_array_equal(one.columns[key], rows, strict=True)
        np.testing.assert_array_equal(one.truncated, other.truncated)


@pytest.mark.parametrize("name", ["observations", "actions", "terminals"])
def test_without_trust_a_column_that_is_needed_is_refused(name: str, tmp_path: Path) -> None:
    columns = random_columns((3, 2))
    path = write(tmp_path / "a-v0.npz", columns | {name: objects(columns[name])})
    with pytest.raises(UsageError, match=f"'{name}' is a pickle of Python objects, which can run anything") as caught:
        rbtool.convert(path, tmp_path / "out")
    assert "add --trust-pickle" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()
    assert rbtool.convert(path, tmp_path / "out", trust_pickle=True).steps == 5


def test_what_has_no_rows_of_one_type_is_named(tmp_path: Path) -> None:
    columns = random_columns((3, 2))
    others = {"none": objects([None] * ROWS), "text": objects(["a"] * ROWS), "flags": objects([True] * ROWS)}
    pieces, dropped = read(write(tmp_path / "a-v0.npz", columns | others), **TRUST)
    assert pieces[0].columns["info", "flags"].dtype == bool
    assert dropped.keys() == {"none", "text"}
    assert dropped["none"].startswith("it has elements of type NoneType")
    assert dropped["text"] == "it is text"
    ragged = objects([np.zeros(1), *[np.zeros(2)] * (ROWS - 1)])
    with pytest.raises(FormatError, match="'actions' cannot be read as rows: it has elements of different"):
        read(write(tmp_path / "b-v0.npz", columns | {"actions": ragged}), **TRUST)
