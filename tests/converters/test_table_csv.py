"""CSV files: types over the whole file, cells that are not numbers, and lines that are not rows."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import each
from hypothesis import given
from hypothesis import strategies as st

import rbtool
from rbtool.converters.table.text import CsvFile
from rbtool.core.errors import CorruptDataError, FormatError
from rbtool.core.format.memmap.reader import TedReader


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def column(path: Path, name: str, block_bytes: int = 64) -> Any:
    with CsvFile(path, block_bytes=block_bytes) as file:
        return file.read([name], 0, file.columns[name].rows)[name]


def test_types_are_those_of_the_whole_file(tmp_path: Path) -> None:
    rows = [f"{row},{row},{row},true,x" for row in range(500)] + ["1.5,500,word,False,"]
    path = written(tmp_path / "a.csv", "mixed,whole,late,flag,gaps\n" + "\n".join(rows) + "\n")
    with CsvFile(path, block_bytes=64) as file:
        kinds = {name: one.dtype for name, one in file.columns.items()}
    assert kinds == {"mixed": "float64", "whole": "int64", "late": "text", "flag": "bool", "gaps": "text"}
    assert column(path, "mixed").tolist() == [*range(500), 1.5]
    assert column(path, "flag").tolist() == [True] * 500 + [False]
    assert column(path, "whole").dtype == np.int64


@each("block_bytes", [4, 1 << 20])
@each(
    ("cells", "dtype", "note"),
    [
        (["9223372036854775813", "18446744073709551615"], "uint64", ""),
        (["1", "9223372036854775813", "0"], "uint64", ""),
        (["-9007199254740993", "9007199254740993"], "int64", ""),
        (["1.5", "9007199254740993"], "float64", "line 3"),
        (["4", "9007199254740993", "9007199254740995", "1.5"], "float64", "line 3"),
        (["-1", "18446744073709551615"], "float64", "line 3"),
        (["18446744073709551617", "2"], "float64", "line 2"),
        (["9007199254740992", "1e300", "1.5", "inf", "1" + "0" * 500], "float64", ""),
    ],
)
def test_whole_numbers_keep_their_digits_or_a_note_names_the_first_that_does_not(
    cells: list[str], dtype: str, note: str, block_bytes: int, tmp_path: Path
) -> None:
    path = written(tmp_path / "a.csv", "x,y\n" + "".join(f"{cell},1\n" for cell in cells))
    found = column(path, "x", block_bytes)
    expected = [float(cell) if dtype == "float64" else int(cell) for cell in cells]
    assert (found.dtype.name, found.tolist()) == (dtype, expected)
    with CsvFile(path, block_bytes=block_bytes) as file:
        assert [note in file.columns["x"].note, not file.columns["y"].note] == [True, True]
        assert bool(file.columns["x"].note) == bool(note)


def test_a_note_names_the_line_only_of_columns_that_are_mapped(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "x,y\n1.5,1\n9007199254740993,18446744073709551615\n")
    options: Any = {"format": "table", "ends": "-", "final_step": "repeat"}
    both = rbtool.convert(path, tmp_path / "both", map=["observation=x state=y"], **options)
    assert sum("line 3" in note for note in both.notes) == 1
    with TedReader(both.path) as reader:
        assert reader.read(("state",), 0, 2).tolist() == [1, 18446744073709551615]
    one = rbtool.convert(path, tmp_path / "one", map=["observation=y"], **options)
    assert not any("line 3" in note for note in one.notes)


@each(
    ("cell", "message"),
    [
        ("", r"column 'x' is empty in line 400"),
        ("nan", r"column 'x' is NaN in line 400"),
        ("word", r"column 'x' has 'word' in line 400"),
        ("true", r"column 'x' has 'true' in line 400"),
        ("2020-01-02", r"column 'x' has '2020-01-02' in line 400"),
        ('"1,5"', r"column 'x' has '1,5' in line 400"),
    ],
)
def test_a_cell_that_is_no_number_is_named_with_its_line(cell: str, message: str, tmp_path: Path) -> None:
    lines = [f"{row},0" for row in range(500)]
    lines[398] = f"{cell},0"
    path = written(tmp_path / "a.csv", "x,y\n" + "\n".join(lines) + "\n")
    with CsvFile(path, block_bytes=64) as file, pytest.raises(FormatError, match=message):
        file.require_numbers(file.columns["x"])
    result = rbtool.convert(path, tmp_path / "out", format="table", map=["observation=y"], ends="-")
    assert [item["key"] for item in result.dropped_keys] == ["x"]


def test_lines_are_counted_with_those_inside_quotes_and_empty_ones(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", 'x,note\n1,"two\nlines"\n\n2,"say ""so"""\n,last\n')
    with CsvFile(path, block_bytes=8) as file, pytest.raises(FormatError, match="'x' is empty in line 6"):
        file.require_numbers(file.columns["x"])
    assert column(path, "note", 8).tolist() == ["two\nlines", 'say "so"', "last"]


@each(
    ("text", "error", "message"),
    [
        ("x,y\n1,2\n3\n", CorruptDataError, "line 3 has 1 cells"),
        ("x,y\n1,2\n3,4,5\n", CorruptDataError, "line 3 has 3 cells"),
        ("1.5,2\n3,4\n", FormatError, "its first line has numbers"),
        ("x,x\n1,2\n", FormatError, "two columns are called 'x'"),
        ("x,\n1,2\n", FormatError, "column 2 of 2 has no name"),
        ("x,y\n", FormatError, "has no steps"),
        ("x,y", FormatError, "no first line of text"),
        ("", FormatError, "no first line of text"),
        (b"x,y\n1,\xff\xfe\n", CorruptDataError, "UTF8"),
        (b"\xff\xfe,y\n1,2\n", FormatError, "not UTF-8 text"),
        (b"x\0,y\n1,2\n", FormatError, "is not a table"),
        ("x,y\r1,2\r3,4\n", FormatError, "its first line cannot be read"),
    ],
)
def test_lines_that_are_no_rows_are_refused(
    text: str | bytes, error: type[Exception], message: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "a.csv", text)
    with pytest.raises(error, match=message):
        rbtool.convert(path, tmp_path / "out", format="table", map=["observation=x action=y"], ends="-")


@pytest.mark.parametrize(
    "text", ["x\ty\r\n1\t2\r\n3\t4\r\n", "x;y\n1;2\n3;4\n", "\ufeffx, y\n 1, 2\n3 ,4", "x,y\n1,2\n\n\n3,4\n\n"]
)
def test_other_separators_and_line_ends(text: str, tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", text)
    assert (column(path, "x", 8).tolist(), column(path, "y", 8).tolist()) == ([1, 3], [2, 4])


def test_a_key_of_long_numbers_is_compared_exactly(tmp_path: Path) -> None:
    rows = [f"{row},{10**20 + row // 3}" for row in range(9)]
    path = written(tmp_path / "a.csv", "x,id\n" + "\n".join(rows) + "\n")
    result = rbtool.convert(path, tmp_path / "out", format="table", map=["observation=x"], episode_key="id")
    with TedReader(result.path) as reader:
        assert reader.episode_text == [{"id": str(10**20 + number)} for number in range(3)]


@pytest.mark.parametrize("rows", [1, 1 << 18])
def test_a_key_in_two_forms_is_refused(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rbtool.converters.table.reader._BLOCK_ROWS", rows)
    cells = ["007", "007", "08", " 08", "10"]
    for more, place in ([], None), (["010"], "'010' in line 7 after '10'"), (["11", "10"], "occur again"):
        keys = [*cells, *more]
        path = written(tmp_path / f"{len(keys)}.csv", "\n".join(["x,id", *(f"1,{cell}" for cell in keys), ""]))
        options: Any = {"format": "table", "map": ["observation=x"], "episode_key": "id", "final_step": "repeat"}
        if place is None:
            with TedReader(rbtool.convert(path, tmp_path / "out", **options).path) as reader:
                assert reader.episodes.episode.tolist() == [7, 8, 10]
            continue
        with pytest.raises(FormatError, match=place):
            rbtool.convert(path, tmp_path / "no", **options)


CELLS = st.text(st.sampled_from('ab",\n \r;'), max_size=4)


@given(
    rows=st.lists(st.tuples(st.integers(-9, 9), st.floats(allow_nan=False), CELLS), min_size=1, max_size=20),
    block=st.integers(1, 60), ends=st.sampled_from(["\n", "\r\n"]),
)  # fmt: skip
def test_every_cell_comes_back(
    rows: list[tuple[int, float, str]], block: int, ends: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator=ends, quoting=csv.QUOTE_NONNUMERIC)
        writer.writerow(["n", "f", "note"])
        writer.writerows([number, value, f"'{text}"] for number, value, text in rows)
    with CsvFile(path, block_bytes=block) as table:
        read = table.read(["n", "f", "note"], 0, len(rows))
        some = table.read(["f"], len(rows) // 2, len(rows))["f"]
        places = [table.place(row) for row in range(len(rows))]
    assert read["n"].tolist() == [row[0] for row in rows]
    assert np.asarray(read["f"], float).tolist() == [row[1] for row in rows]
    assert read["note"].tolist() == [f"'{row[2]}" for row in rows]
    assert np.asarray(some, float).tolist() == [row[1] for row in rows[len(rows) // 2 :]]
    assert places[0] == "line 2"
