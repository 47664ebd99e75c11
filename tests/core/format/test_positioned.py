from __future__ import annotations

import itertools
import os
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rbtool.core.errors import OutOfSpaceError, SchemaError
from rbtool.core.format import fs
from rbtool.core.format.digest import digest_file
from rbtool.core.format.memmap import builder as ted_builder
from rbtool.core.format.memmap.builder import PositionedTree, RowFiles
from rbtool.core.format.memmap.tree import TreeWriter, leaf_path, read_tree
from rbtool.core.format.open_files import OpenFiles
from rbtool.core.ted.schema import Field

FIELDS = (
    Field(("a",), "float32", (2,), "observation"),
    Field(("next", "b"), "bfloat16", (), "observation"),
    Field(("deep", "none"), "int8", (0,), "info"),
)
ROWS = 23


def columns(start: int = 0, stop: int = ROWS) -> dict:
    numbers = np.arange(ROWS * 2).reshape(ROWS, 2)
    whole = {FIELDS[0].key: numbers.astype(np.float32), FIELDS[1].key: numbers[:, 0].astype(np.uint16)}
    return {key: array[start:stop] for key, array in (whole | {FIELDS[2].key: np.empty((ROWS, 0), np.int8)}).items()}


@settings(max_examples=20, deadline=None)
@given(cuts=st.sets(st.integers(1, ROWS - 1), max_size=5), seed=st.integers(0, 9))
def test_rows_in_any_order_make_the_same_files_as_in_sequence(
    cuts: set[int], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("trees")
    expected = TreeWriter(folder / "expected", FIELDS)
    expected.append(columns())
    records = expected.finish((ROWS,))
    (folder / "found").mkdir()
    bounds = [0, *sorted(cuts), ROWS]
    parts = list(itertools.pairwise(bounds))
    with (
        mock.patch.multiple(ted_builder, _CHUNK=24, _BUFFER=10),
        PositionedTree(folder / "found", FIELDS, ROWS, reserve=seed > 4) as tree,
    ):
        files = RowFiles(folder / "found", FIELDS)
        done: set[int] = set()
        for number in np.random.default_rng(seed).permutation(len(parts)).tolist():
            files.write(columns(*parts[number]), parts[number][0])
            done.add(number)
            front = next((parts[n][0] for n in range(len(parts)) if n not in done), ROWS)
            tree.settle(front)
        files.close()
        assert tree.finish() == records
    assert read_tree(OpenFiles(folder / "found")) == read_tree(OpenFiles(folder / "expected"))
    assert all(digest_file(folder / "found" / record.path) == record.digest for record in records)


def test_rows_are_read_back_and_ranges_merged(tmp_path: Path) -> None:
    with PositionedTree(tmp_path, FIELDS, ROWS) as tree:
        files = RowFiles(tmp_path, FIELDS)
        files.write(columns(5, 9), 5)
        for key, array in columns(6, 9).items():
            assert np.array_equal(tree.read(key, 6, 9), array)
        tree.merge_ranges({("a",): (1.0, 2.0), ("next", "b"): None})
        tree.merge_ranges({("a",): (-3.0, 1.5), ("next", "b"): (7, 8)})
        assert tree.ranges == {("a",): (-3.0, 2.0), ("next", "b"): (7, 8)}
        files.close()


def test_want_of_space_is_seen_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(OutOfSpaceError, match="are needed"):
        PositionedTree(tmp_path, FIELDS, 10**15)
    assert list(tmp_path.iterdir()) == []


def test_keys_that_need_one_file_are_refused(tmp_path: Path) -> None:
    both = (
        Field(("a%",), "int8", (), "info"),
        Field(("a",), "int8", (), "info"),
        Field(("a", "b"), "int8", (), "info"),
    )
    with pytest.raises(SchemaError, match="need the same file"):
        PositionedTree(tmp_path, both, 3)


def _open_on(descriptor: int, path: Path) -> bool:
    """Tell whether the descriptor is open on that file, and not closed or taken for something else since."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def test_a_file_that_cannot_be_made_closes_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "next").mkdir()
    (tmp_path / "next" / "b.memmap").touch()
    made = []
    create = fs.create
    monkeypatch.setattr(fs, "create", lambda path: made.append(create(path)) or made[-1])
    with pytest.raises(FileExistsError):
        PositionedTree(tmp_path, FIELDS, ROWS)
    assert not _open_on(made[0], tmp_path / leaf_path(("a",)))
