"""What is missing from infos, or cannot be a file's name, is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gymnasium import spaces
from minari_oracle import make_episode, write_minari

from rbtool.converters.minari.arrow import at
from rbtool.core.errors import CorruptDataError, FormatError
from rbtool.core.verbs.convert import ConvertResult, convert

SPACE = spaces.Box(-np.inf, np.inf, (2,), np.float32)


def converted(folder: Path, infos: list[dict[str, Any]], data_format: str) -> ConvertResult:
    draw = np.random.default_rng(3)
    episodes = [make_episode(SPACE, SPACE, 3, draw, infos=info) for info in infos]
    source = write_minari(folder / "source", "made/holes-v0", SPACE, SPACE, episodes, data_format=data_format)
    return convert(source, folder / "made")


@pytest.mark.parametrize("data_format", ["arrow", "parquet"])
@pytest.mark.parametrize("values", [[None, 1.0, 2.0, 3.0], [0, None, 2, 3]])
def test_nulls_that_become_nan_are_noted(values: list[Any], data_format: str, tmp_path: Path) -> None:
    made = converted(tmp_path, [{"x": values}, {"x": values}], data_format)
    assert "info.x has no value in some rows of 2 of 2 episodes: NaN there" in made.notes


def with_nulls(source: Path, name: str) -> None:
    """Remove the first number of a column of the first episode."""
    file = next((source / "data" / "0").glob("part-*"))
    old = pa.ipc.open_file(file).read_all() if file.suffix == ".arrow" else pq.read_table(file)
    column = old.column(name).combine_chunks()
    leaf = column.flatten() if pa.types.is_fixed_size_list(column.type) else column
    leaf = pa.array([None, *leaf.to_pylist()[1:]], leaf.type)
    new = leaf if leaf.type == column.type else pa.FixedSizeListArray.from_arrays(leaf, column.type.list_size)
    table = old.set_column(old.schema.get_field_index(name), old.schema.field(name), new)
    opened = pq.ParquetWriter if file.suffix == ".parquet" else pa.ipc.new_file
    with opened(file, table.schema) as writer:
        writer.write_table(table)


def source_with_nulls(folder: Path, name: str, data_format: str) -> Path:
    draw = np.random.default_rng(3)
    episodes = [make_episode(SPACE, SPACE, 3, draw) for _ in range(2)]
    source = write_minari(folder / "source", "made/holes-v0", SPACE, SPACE, episodes, data_format=data_format)
    with_nulls(source, name)
    return source


@pytest.mark.parametrize("data_format", ["arrow", "parquet"])
@pytest.mark.parametrize(
    ("name", "key"), [("observations", "observation"), ("actions", "action"), ("rewards", "reward")]
)
def test_nulls_in_required_columns_are_noted(name: str, key: str, data_format: str, tmp_path: Path) -> None:
    made = convert(source_with_nulls(tmp_path, name, data_format), tmp_path / "made")
    assert made.notes == (f"{key} has no value in some rows of 1 of 2 episodes: NaN there",)


def test_nulls_of_episodes_that_are_not_taken_are_not_noted(tmp_path: Path) -> None:
    made = convert(source_with_nulls(tmp_path, "rewards", "arrow"), tmp_path / "made", episodes="1")
    assert not made.notes


@pytest.mark.parametrize("data_format", ["arrow", "parquet"])
@pytest.mark.parametrize("name", ["terminations", "truncations"])
def test_flags_without_a_value_are_refused(name: str, data_format: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptDataError, match=f"'{name}' of episode 0 has no value in 1 rows"):
        convert(source_with_nulls(tmp_path, name, data_format), tmp_path / "made")


@pytest.mark.parametrize("data_format", ["hdf5", "arrow"])
def test_a_name_too_long_for_a_file_is_dropped_and_named(data_format: str, tmp_path: Path) -> None:
    made = converted(tmp_path, [{"x" * 250: [1.0] * 4, "short": [1.0] * 4}], data_format)
    assert [(item["key"], item["why"]) for item in made.dropped_keys] == [
        (f"info.{'x' * 250}", "its name has more than the 240 bytes that a file's name has room for")
    ]


def test_a_column_that_is_there_twice_is_refused() -> None:
    column = pa.StructArray.from_arrays([pa.array([1.0]), pa.array([2.0])], names=["x", "x"])
    with pytest.raises(FormatError, match="'x' is there twice"):
        at(column, ("x",))
