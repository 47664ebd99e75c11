"""Infos of every kind: with and without a row at reset, missing, nested, text; and what cannot be kept."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import each
from conversions import column, refused
from conversions import converted as opened
from gymnasium import spaces
from minari_oracle import assert_equals_minari, make_episode, write_minari

from rbtool.converters.minari.arrow import at
from rbtool.core.errors import CorruptDataError, FormatError
from rbtool.core.format.contracts import StepReader
from rbtool.core.verbs.convert import ConvertResult, convert

SPACE = spaces.Box(-np.inf, np.inf, (2,), np.float32)
LENGTHS = [4, 1, 6]
Infos = Callable[[int], dict[str, Any]]

KEPT: dict[str, Infos] = {
    "list of floats": lambda rows: {"x": [0.5 * row for row in range(rows)]},
    "list of bools": lambda rows: {"x": [row % 2 == 1 for row in range(rows)]},
    "array of two": lambda rows: {"x": np.arange(rows * 6, dtype=np.float32).reshape(rows, 2, 3)},
    "list of arrays": lambda rows: {"x": [np.arange(3) + row for row in range(rows)]},
    "list of scalars": lambda rows: {"x": [np.float32(row) for row in range(rows)]},
    "nested": lambda rows: {"a": {"b": list(range(rows)), "c": {"d": [float(row) for row in range(rows)]}}},
    "tuple": lambda rows: {"a": (list(range(rows)), [float(row) for row in range(rows)])},
    "ordered dicts": lambda rows: {"a": [OrderedDict(p=float(row), q=row) for row in range(rows)]},
    "constant text": lambda rows: {"s": ["héllo"] * rows},
    "text a step": lambda rows: {"s": [f"row {row}→" for row in range(rows)]},
}
HDF5_ONLY: dict[str, Infos] = {
    "vector": lambda rows: {"x": np.arange(rows, dtype=np.int16)},
    "complex": lambda rows: {"x": np.arange(rows) * (1 + 2j)},
    "half": lambda rows: {"x": np.arange(rows, dtype=np.float16)},
    "no row at reset": lambda rows: {"x": np.arange(1.0, rows), "y": np.arange(rows)},
    "text without a row at reset": lambda rows: {"s": [f"row {row}" for row in range(rows - 1)]},
    "empty group": lambda rows: {"e": {}, "x": np.arange(rows)},
    "slash": lambda rows: {"a/b": np.arange(rows)},
}
ARROW_ONLY: dict[str, Infos] = {
    "lists": lambda rows: {"x": [[row, 2 * row] for row in range(rows)]},
    "none at reset": lambda rows: {"x": [None, *(float(row) for row in range(1, rows))]},
    "no number at reset": lambda rows: {"x": [None, *range(1, rows)]},
}


def write(root: Path, infos: Infos | list[dict[str, Any] | None], data_format: str = "hdf5", **more: Any) -> Path:
    draw = np.random.default_rng(3)
    each = infos if isinstance(infos, list) else [infos(steps + 1) for steps in LENGTHS]
    episodes = [
        make_episode(SPACE, SPACE, steps, draw, infos=info, **more) for steps, info in zip(LENGTHS, each, strict=True)
    ]
    return write_minari(root, "made/infos-v0", SPACE, SPACE, episodes, data_format=data_format)


def edit(folder: Path, change: Callable[[h5py.File], None]) -> None:
    with h5py.File(folder / "data" / "main_data.hdf5", "r+") as file:
        change(file)


def converted(folder: Path, tmp_path: Path) -> StepReader:
    return opened(folder, tmp_path / "ted")


@each(
    ("name", "data_format"),
    [(name, one) for number, name in enumerate(KEPT) for one in ("hdf5", ("arrow", "parquet")[number % 2])],
)
def test_kinds_that_every_storage_has_are_those_of_minari(name: str, data_format: str, tmp_path: Path) -> None:
    assert_all_kept(KEPT[name], data_format, tmp_path)


@each("name", HDF5_ONLY)
def test_kinds_that_only_hdf5_has_are_those_of_minari(name: str, tmp_path: Path) -> None:
    assert_all_kept(HDF5_ONLY[name], "hdf5", tmp_path)


@each("data_format", ["arrow", "parquet"])
@each("name", ARROW_ONLY)
def test_kinds_that_only_arrow_has_are_those_of_minari(name: str, data_format: str, tmp_path: Path) -> None:
    assert_all_kept(ARROW_ONLY[name], data_format, tmp_path)


def assert_all_kept(infos: Infos, data_format: str, tmp_path: Path) -> None:
    folder = write(tmp_path, infos, data_format)
    result = convert(folder, tmp_path / "ted")
    assert assert_equals_minari(tmp_path / "ted", folder) > 0
    assert result.dropped_keys == ()


@each("data_format", ["arrow", "parquet"])
def test_an_arrow_vector_that_minari_itself_cannot_read_is_kept(data_format: str, tmp_path: Path) -> None:
    with converted(write(tmp_path, lambda rows: {"x": np.arange(rows)}, data_format), tmp_path) as reader:
        assert column(reader, "info.x")[:4].tolist() == [0, 1, 2, 3]
        assert column(reader, "next.info.x")[:4].tolist() == [1, 2, 3, 4]


def test_rows_after_steps_only_belong_to_next_and_are_counted(tmp_path: Path) -> None:
    infos = [{"x": np.arange(1, 5)}, {"x": np.arange(7, 9)}, {"x": np.arange(11, 17)}]
    with converted(write(tmp_path, infos), tmp_path) as reader:
        assert column(reader, "next.info.x").tolist() == [1, 2, 3, 4, 8, 11, 12, 13, 14, 15, 16]
        assert column(reader, "info.x").tolist() == [0, 1, 2, 3, 7, 0, 11, 12, 13, 14, 15]
        assert reader.manifest.notes == ("info.x has no value at reset in 2 of 3 episodes: zero rows there",)


def test_rows_missing_in_an_episode_are_zero_and_counted(tmp_path: Path) -> None:
    infos = [{"x": np.arange(1, 6)}, None, {"x": np.arange(1, 8), "s": [f"row {row}" for row in range(7)]}]
    with converted(write(tmp_path, infos), tmp_path) as reader:
        assert column(reader, "info.x")[3:6].tolist() == [4, 0, 1]
        assert column(reader, "next.info.s_length")[3:6].tolist() == [0, 0, 5]
        assert reader.manifest.notes == (
            "info.s is missing in 2 of 3 episodes: empty rows there",
            "info.x is missing in 1 of 3 episodes: zero rows there",
        )


def test_notes_count_the_episodes_chosen(tmp_path: Path) -> None:
    folder = write(tmp_path, [{"x": np.arange(5)}, None, {"x": np.arange(6)}])
    assert convert(folder, tmp_path / "two", episodes="1:").notes == (
        "info.x has no value at reset in 1 of 2 episodes: zero rows there",
        "info.x is missing in 1 of 2 episodes: zero rows there",
    )
    assert convert(folder, tmp_path / "one", episodes="0").notes == ()


@each(
    ("infos", "why"),
    [
        ([{"x": np.arange(5)}, {"x": np.arange(2.0)}, {}], "it is float64 [] in episode 1 and int64 [] in episode 0"),
        (
            [{"x": np.ones((5, 2))}, {"x": np.ones((2, 3))}, {}],
            "it is float64 [3] in episode 1 and float64 [2] in episode 0",
        ),
        ([{"x": np.arange(5)}, {"x": np.arange(7)}, {}], "it has 7 rows in episode 1, which has 1 steps"),
        ([{"x": 3}, {}, {}], "in episode 0 it is a single value, not one per step"),
        ([{"x": np.arange(5)}, {"x": ["a", "b"]}, {}], "it is text in episode 1 and int64 [] in episode 0"),
        (
            [{"x": np.arange(5)}, {"x": {"y": np.arange(2)}}, {}],
            "it is a column in some episodes and a group in others",
        ),
    ],
)
def test_what_cannot_be_kept_is_named_with_the_reason(infos: list[dict[str, Any]], why: str, tmp_path: Path) -> None:
    folder = write(tmp_path, infos)
    result = convert(folder, tmp_path / "ted")
    assert {"key": "info.x", "why": why} in result.dropped_keys
    with opened(folder, tmp_path / "ted") as reader:
        assert not [field for field in reader.fields if "info" in field.key]


def _ragged(file: h5py.File) -> None:
    rows = np.empty(5, object)
    rows[:] = [np.arange(row, dtype=np.int32) for row in range(5)]
    info(data=rows, dtype=h5py.vlen_dtype(np.int32))(file)


def info(**how: Any) -> Callable[[h5py.File], None]:
    """Add the info `x` to the first episode."""
    return lambda file: file["episode_0/infos"].create_dataset("x", **how)


@each(
    ("change", "why"),
    [
        (_ragged, "in episode 0 its rows are arrays of different lengths"),
        (info(shape=(5, 2), dtype=h5py.string_dtype()), "in episode 0 it holds strings in more than one dimension"),
        (
            info(shape=(5,), dtype=np.dtype([("a", "i4"), ("b", "f4")])),
            "in episode 0 its element type [('a', '<i4'), ('b', '<f4')] cannot be stored",
        ),
        (info(data=[b"caf\xe9"] * 5, dtype=h5py.string_dtype()), "'infos/x' of episode 0 is not UTF-8 text"),
        (info(shape=(5,), dtype=np.longdouble), "in episode 0 its element type float128 cannot be stored"),
        (
            lambda file: file["episode_0/infos"].__setitem__("x", np.dtype("f4")),
            "in episode 0 it is a type without data",
        ),
    ],
)
def test_hdf5_types_that_cannot_be_kept(change: Callable[[h5py.File], None], why: str, tmp_path: Path) -> None:
    folder = write(tmp_path, [{}, {}, {}])
    edit(folder, change)
    (dropped,) = convert(folder, tmp_path / "ted").dropped_keys
    assert dropped["key"] == "info.x"
    assert why in dropped["why"]


@each("data_format", ["arrow", "parquet"])
def test_arrow_types_that_cannot_be_kept(data_format: str, tmp_path: Path) -> None:
    infos = [{"l": [[1]] * rows, "b": [None, *[True] * (rows - 1)], "r": [[0] * row for row in range(rows)],
              "y": [b"\xff"] * rows, "n": [None] * rows} for rows in (5, 2, 7)]  # fmt: skip
    result = convert(write(tmp_path, infos, data_format), tmp_path / "ted")
    assert {dropped["key"]: dropped["why"] for dropped in result.dropped_keys} == {
        "info.b": "in episode 0 it has no value in some rows",
        "info.n": "in episode 0 it has no value in some rows",
        "info.r": "in episode 0 its rows are lists of different lengths",
        "info.y": "it holds byte strings",
    }


def test_text_that_is_constant_in_every_episode_belongs_to_the_episode(tmp_path: Path) -> None:
    infos = [{"task": ["open"] * 5}, {}, {"task": ["shut"] * 6}]
    with converted(write(tmp_path, infos), tmp_path) as reader:
        assert reader.episode_text == [{"info.task": "open"}, {}, {"info.task": "shut"}]
        assert not [field for field in reader.fields if "task" in field.key]


def test_a_group_beside_the_known_ones_is_kept_as_state(tmp_path: Path) -> None:
    folder = write(tmp_path, [{}, {}, {}])
    rows = {f"episode_{n}": np.random.default_rng(n).normal(size=(steps + 1, 3)) for n, steps in enumerate(LENGTHS)}

    def change(file: h5py.File) -> None:
        for name, data in rows.items():
            file.create_dataset(f"{name}/state/qpos", data=data)

    edit(folder, change)
    with converted(folder, tmp_path) as reader:
        np.testing.assert_array_equal(column(reader, "next.state.qpos")[5:], rows["episode_2"][1:])
        assert {field.role for field in reader.fields if field.key[-1] == "qpos"} == {"state"}


def test_names_that_are_taken_get_a_trailing_underscore(tmp_path: Path) -> None:
    names = ("shape", "device", "_type", "meta.json", "x.memmap")
    infos = [{name: np.arange(rows) + spot for spot, name in enumerate(names)} for rows in (5, 2, 7)]
    folder = write(tmp_path, infos)
    tops = ("next", "done", "reward", "observation", "info", "index")
    edit(folder, lambda file: [file.create_dataset(f"episode_0/{top}", data=np.arange(5)) for top in tops] and None)
    expected = {f"info.{name}": f"info.{name}_" for name in names} | {name: f"{name}_" for name in tops}
    with converted(folder, tmp_path) as reader:
        assert reader.manifest.renamed_keys == expected
        assert column(reader, "info.device_")[:3].tolist() == [1, 2, 3]
        assert column(reader, "next.next_")[:3].tolist() == [1, 2, 3]


def test_a_name_that_a_length_needs_is_renamed(tmp_path: Path) -> None:
    infos = [{"s": [f"{row}" for row in range(rows)], "s_length": np.arange(rows)} for rows in (5, 2, 7)]
    with converted(write(tmp_path, infos), tmp_path) as reader:
        assert reader.manifest.renamed_keys == {"info.s_length": "info.s_length_"}
        assert column(reader, "info.s_length_")[:4].tolist() == [0, 1, 2, 3]
        assert column(reader, "info.s_length")[:4].tolist() == [1, 1, 1, 1]


@each("data_format", ["hdf5", "arrow", "parquet"])
def test_seeds_and_options_are_kept(data_format: str, tmp_path: Path) -> None:
    options = {"a": 1, "deep": {"b": [1, 2], "c": "text"}}
    with converted(write(tmp_path, [{}] * 3, data_format, seed=2**63 + 5, options=options), tmp_path) as reader:
        assert reader.episodes.seed.tolist() == [2**63 + 5] * 3
        assert reader.episodes.has_seed.all()
        (text, *_) = reader.episode_text or []
    assert {name: json.loads(value) for name, value in text.items()} == {
        "options.a": 1, "options.deep.b": [1, 2], "options.deep.c": "text"
    }  # fmt: skip


def test_without_a_seed_there_is_none(tmp_path: Path) -> None:
    with converted(write(tmp_path, [{}, {}, {}]), tmp_path) as reader:
        assert not reader.episodes.has_seed.any()
        assert reader.episode_text is None


def test_other_attributes_of_an_episode_are_kept_as_json(tmp_path: Path) -> None:
    folder = write(tmp_path, [{}, {}, {}])

    def change(file: h5py.File) -> None:
        file["episode_1"].attrs["solved"] = np.bool_(True)
        file["episode_2"].attrs["seed"] = -4

    edit(folder, change)
    with converted(folder, tmp_path) as reader:
        assert reader.episode_text == [{}, {"attributes.solved": "true"}, {"attributes.seed": "-4"}]
        assert reader.episodes.has_seed.tolist() == [False] * 3


def test_texts_whose_dotted_names_are_one_are_all_kept(tmp_path: Path) -> None:
    infos = {"a.b": ["ONE"] * 5, "a": {"b": ["TWO"] * 5}, "a.b_": ["THREE"] * 5}
    with converted(write(tmp_path, [infos, {}, {}]), tmp_path) as reader:
        assert (reader.episode_text or [])[0] == {"info.a.b": "TWO", "info.a.b_": "THREE", "info.a.b__": "ONE"}
        assert reader.manifest.renamed_keys == {"infos/a.b": "info.a.b__", "infos/a.b_": "info.a.b_"}


def test_attributes_whose_dotted_names_are_one_or_a_columns_are_all_kept(tmp_path: Path) -> None:
    folder = write(tmp_path, [{}, {}, {}])

    def change(file: h5py.File) -> None:
        file.create_dataset("episode_1/options/k", data=["column"] * 2)
        for name in ("options/k", "a/b", "a.b"):
            file["episode_1"].attrs[name] = name

    edit(folder, change)
    with converted(folder, tmp_path) as reader:
        assert (reader.episode_text or [])[1] == {
            "options.k": "column", "options.k_": '"options/k"', "attributes.a.b": '"a/b"', "attributes.a.b_": '"a.b"'
        }  # fmt: skip
        assert reader.manifest.renamed_keys == {"options/k": "options.k_", "attributes/a.b": "attributes.a.b_"}


def test_options_of_arrow_whose_dotted_names_are_one_are_all_kept(tmp_path: Path) -> None:
    folder = write(tmp_path, [{}, {}, {}], "arrow", options={"a.b": 1, "a": {"b": 2}})
    with converted(folder, tmp_path) as reader:
        assert (reader.episode_text or [])[2] == {"options.a.b": "2", "options.a.b_": "1"}


@each(
    ("first", "second", "both"),
    [
        ("int32", "float64", "float64"), ("int64", "int32", "int64"), ("float32", "float64", "float64"),
        ("bool", "int16", "int16"), ("uint8", "int8", "int16"), ("uint16", "float32", "float32"),
        ("int32", "float32", "float64"), ("float32", "complex64", "complex64"),
    ],
)  # fmt: skip
def test_types_that_differ_are_widened_and_counted(first: str, second: str, both: str, tmp_path: Path) -> None:
    rows = [np.array([[0, 1]] * 5, first), np.array([[1, 0]] * 2, second), np.array([[1, 1]] * 6, second)]
    with converted(write(tmp_path, [{"x": row} for row in rows]), tmp_path) as reader:
        found = column(reader, "next.info.x")
        assert (found.dtype, found.real.tolist()) == (both, [[0, 1]] * 4 + [[1, 0]] + [[1, 1]] * 6)
        counts = ", ".join(f"{name} in {count}" for name, count in sorted([(first, 1), (second, 2)]))
        assert reader.manifest.notes[0] == f"info.x is {counts} episodes; {both} holds them all"
        assert reader.manifest.dropped_keys == ()


@each("data_format", ["arrow", "parquet"])
def test_arrow_types_that_differ_are_widened(data_format: str, tmp_path: Path) -> None:
    infos = [{"x": [[row % 2 == 1] * 2 for row in range(5)]}, {"x": [[3, 2**62 + 1]] * 2}, {}]
    with converted(write(tmp_path, infos, data_format), tmp_path) as reader:
        rows = column(reader, "info.x")[:5].tolist()
        assert rows == [[0, 0], [1, 1], [0, 0], [1, 1], [3, 2**62 + 1]]
        assert reader.manifest.notes[0] == "info.x is bool in 1, int64 in 1 episodes; int64 holds them all"


def test_the_episode_that_stands_in_the_way_of_widening_is_named(tmp_path: Path) -> None:
    infos = [{"x": np.arange(rows, dtype=dtype)} for rows, dtype in ((5, "i4"), (2, "f4"), (7, "i8"))]
    (dropped,) = convert(write(tmp_path, infos), tmp_path / "ted").dropped_keys
    assert dropped == {"key": "info.x", "why": "it is int64 [] in episode 2 and float32 [] in episode 1"}


def converted_values(folder: Path, infos: list[dict[str, Any]], data_format: str) -> ConvertResult:
    draw = np.random.default_rng(3)
    episodes = [make_episode(SPACE, SPACE, 3, draw, infos=info) for info in infos]
    source = write_minari(folder / "source", "made/holes-v0", SPACE, SPACE, episodes, data_format=data_format)
    return convert(source, folder / "made")


@each("data_format", ["arrow", "parquet"])
@each("values", [[None, 1.0, 2.0, 3.0], [0, None, 2, 3]])
def test_nulls_that_become_nan_are_noted(values: list[Any], data_format: str, tmp_path: Path) -> None:
    made = converted_values(tmp_path, [{"x": values}, {"x": values}], data_format)
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


@each("data_format", ["arrow", "parquet"])
@each(("name", "key"), [("observations", "observation"), ("actions", "action"), ("rewards", "reward")])
def test_nulls_in_required_columns_are_noted(name: str, key: str, data_format: str, tmp_path: Path) -> None:
    made = convert(source_with_nulls(tmp_path, name, data_format), tmp_path / "made")
    assert made.notes == (f"{key} has no value in some rows of 1 of 2 episodes: NaN there",)


def test_nulls_of_episodes_that_are_not_taken_are_not_noted(tmp_path: Path) -> None:
    made = convert(source_with_nulls(tmp_path, "rewards", "arrow"), tmp_path / "made", episodes="1")
    assert not made.notes


@each("data_format", ["arrow", "parquet"])
@each("name", ["terminations", "truncations"])
def test_flags_without_a_value_are_refused(name: str, data_format: str, tmp_path: Path) -> None:
    source = source_with_nulls(tmp_path, name, data_format)
    refused(source, f"'{name}' of episode 0 has no value in 1 rows", CorruptDataError)


@each("data_format", ["hdf5", "arrow"])
def test_a_name_too_long_for_a_file_is_dropped_and_named(data_format: str, tmp_path: Path) -> None:
    made = converted_values(tmp_path, [{"x" * 250: [1.0] * 4, "short": [1.0] * 4}], data_format)
    assert [(item["key"], item["why"]) for item in made.dropped_keys] == [
        (f"info.{'x' * 250}", "its name is longer than 240 bytes, the limit for the name of a file")
    ]


def test_a_column_that_is_there_twice_is_refused() -> None:
    column = pa.StructArray.from_arrays([pa.array([1.0]), pa.array([2.0])], names=["x", "x"])
    with pytest.raises(FormatError, match="'x' exists twice"):
        at(column, ("x",))
