"""Runs of rows, and the pieces in which a leaf is written."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rbtool.core.format import fs
from rbtool.core.format.digest import digest_file
from rbtool.core.format.memmap import tree
from rbtool.core.format.memmap.tree import LeafWriter, range_of
from rbtool.core.format.row_runs import RowRuns, RowSpans, as_array
from rbtool.core.ted.schema import Field

LENGTHS = st.lists(st.integers(0, 200), min_size=1, max_size=6)


@given(lengths=LENGTHS, width=st.sampled_from([(), (2,), (5,)]))
def test_runs_take_the_rows_that_are_in_them(lengths: list[int], width: tuple[int, ...]) -> None:
    stops = np.cumsum(lengths)
    starts = stops - np.array(lengths) // 2
    array = np.arange(int(stops[-1]) * 2 * int(np.prod(width)), dtype=np.int32).reshape(-1, *width)
    expected = [array[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True) if b > a]
    runs = RowSpans(starts, stops)
    if not expected:
        assert len(runs) == 0
        return
    rows = runs.of(array)
    found = as_array(rows)
    assert found.tobytes() == np.concatenate(expected).tobytes()
    assert (len(rows), rows.shape, rows.dtype) == (len(found), found.shape, found.dtype)
    assert not np.shares_memory(found, array)


def test_only_long_runs_of_wide_rows_are_put_off() -> None:
    wide, narrow, some = np.zeros((400, 5)), np.zeros(400), np.array([1, 200])
    assert isinstance(RowSpans(some, some + 100).of(wide), RowRuns)
    assert isinstance(RowSpans(some, some + 100).of(narrow), np.ndarray)
    assert isinstance(RowSpans(some, some + 10).of(wide), np.ndarray)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 70), max_size=12), runs=st.booleans(), dtype=st.sampled_from(["float32", "int8"]),
    expected=st.sampled_from([0, 1, 200]), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_leaf_is_what_was_appended_however_it_was_cut(
    sizes: list[int], runs: bool, dtype: str, expected: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    field, path = Field(("a",), dtype, (3,), "info"), tmp_path_factory.mktemp("leaf") / "a.memmap"
    draw, parts = np.random.default_rng(seed), list[Any]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "_PIECE", 96)
        patch.setattr(tree, "_LUMP", 300)
        writer = LeafWriter(path, field, rows=expected)
        for size in sizes:
            parts.append(draw.integers(-99, 99, (size, 3)).astype(field.numpy))
            here = np.array([0, size // 3, size // 2])
            cut = RowSpans(here, np.array([size // 3, size // 2, size]))
            writer.append(RowRuns(parts[-1], cut) if runs and size else parts[-1])
        writer.finish()
    whole = np.concatenate([np.zeros((0, 3), field.numpy), *parts])
    assert path.read_bytes() == whole.tobytes()
    assert (writer.rows, writer.file.digest, writer.range) == (len(whole), digest_file(path), range_of(whole, field))


def test_pieces_begin_at_multiples_of_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    write = fs.write

    def noting(descriptor: int, data: memoryview, path: Path) -> None:
        written.append(len(data))
        write(descriptor, data, path)

    monkeypatch.setattr(fs, "write", noting)
    monkeypatch.setattr(tree, "_PIECE", 64)
    writer = LeafWriter(tmp_path / "a.memmap", Field(("a",), "int8", (), "info"))
    for size in (10, 60, 200, 3, 300):
        writer.append(np.ones(size, np.int8))
    writer.finish()
    assert (set(written[:-1]), sum(written)) == ({64}, 573)
    assert 0 < written[-1] <= 64


def test_room_that_was_not_needed_is_given_back(tmp_path: Path) -> None:
    writer = LeafWriter(tmp_path / "a.memmap", Field(("a",), "int8", (), "info"), rows=64 << 20)
    writer.append(np.ones(1000, np.int8))
    assert (tmp_path / "a.memmap").stat().st_size == 0
    writer.finish()
    here = (tmp_path / "a.memmap").stat()
    assert here.st_size == 1000
    assert here.st_blocks * 512 < 1 << 20
