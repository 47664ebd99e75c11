"""Trees of memory maps: their leaves, in which pieces these are written, and plain folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import each
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rbtool import CorruptDataError, FormatError, SchemaError
from rbtool.core.format import fs, syncing
from rbtool.core.format.files import digest_file
from rbtool.core.format.memmap import tree
from rbtool.core.format.memmap.reader import PlainReader, TedReader
from rbtool.core.format.memmap.tree import (
    LeafWriter,
    MappedLeaf,
    RowRuns,
    RowSpans,
    TreeWriter,
    as_array,
    leaf_path,
    range_of,
    read_tree,
)
from rbtool.core.format.open_files import OpenFiles
from rbtool.core.ted.schema import DTYPES, Field
from rbtool.core.testing.datasets import write_walks


@each("dtype", sorted(DTYPES))
@each("shape", [(), (3,), (2, 0), (1, 2, 2)])
def test_tensordict_reads_every_type_and_shape(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    field = Field(("a", "b c"), dtype, shape, "info")
    rows = (np.arange(5 * np.prod(shape, dtype=int)) % 2).reshape(5, *shape).astype(DTYPES[dtype])
    path = tmp_path / f"{dtype}-{len(shape)}"
    writer = TreeWriter(path, [field])
    writer.append({field.key: rows[:2]})
    writer.append({field.key: rows[2:]})
    writer.finish((5,))
    found = TensorDict.load_memmap(path)[field.key]
    assert found.shape == (5, *shape)
    assert found.dtype == getattr(torch, dtype)
    bits = found.view(torch.uint16).numpy() if dtype == "bfloat16" else found.numpy()
    np.testing.assert_array_equal(bits, rows)
    assert read_tree(OpenFiles(path)) == {field.key: MappedLeaf(dtype, (5, *shape))}


def test_trees_of_tensordict_are_read(tmp_path: Path) -> None:
    data = TensorDict({"x": torch.arange(6).view(3, 2), "n": {"y": torch.rand(3)}}, [3]).memmap(tmp_path / "td")
    assert read_tree(OpenFiles(tmp_path / "td")) == {
        ("x",): MappedLeaf("int64", (3, 2)),
        ("n", "y"): MappedLeaf("float32", (3,)),
    }
    assert data.batch_size == (3,)


def test_a_dataset_opens_in_tensordict_with_all_its_values(tmp_path: Path) -> None:
    write_walks(tmp_path / "data", [(4, "open"), (2, "terminated")])
    data = TensorDict.load_memmap(tmp_path / "data")
    with TedReader(tmp_path / "data") as reader:
        keys = {key if isinstance(key, tuple) else (key,) for key in data.keys(True, True)}
        assert keys == {field.key for field in reader.fields}
        for field in reader.fields:
            np.testing.assert_array_equal(data[field.key].numpy(), reader.read(field.key, 0, 6))


@each("keys", [[("a",), ("a",)], [("a", "b"), ("a",)], [("x.memmap", "b"), ("x",)]])
def test_keys_that_need_one_file_are_refused(tmp_path: Path, keys: list[tuple[str, ...]]) -> None:
    fields = [Field(key, "int8", (), "info") for key in keys]
    with pytest.raises(SchemaError, match="same file"):
        TreeWriter(tmp_path / "tree", fields).finish((0,))


def test_rows_of_another_type_or_shape_are_refused(tmp_path: Path) -> None:
    writer = TreeWriter(tmp_path / "tree", [Field(("a",), "float32", (2,), "info")])
    for rows in (np.zeros((3, 2)), np.zeros((3, 3), np.float32), np.zeros(3, np.float32)):
        with pytest.raises(SchemaError, match=r"rows of 'a' are .* expected float32 \[2\]"):
            writer.append({("a",): rows})
    writer.close()


def test_cut_and_missing_files_are_found(tmp_path: Path) -> None:
    write_walks(tmp_path / "data", [(4, "open")])
    path = tmp_path / "data" / leaf_path(("next", "reward"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptDataError, match=r"reward.memmap has 31 bytes, expected 32"):
        read_tree(OpenFiles(tmp_path / "data"))
    path.unlink()
    with pytest.raises(CorruptDataError, match="is missing"):
        read_tree(OpenFiles(tmp_path / "data"))


@each("meta", ["{}", "[]", "x", '{"_type": "t", "a": {"dtype": "torch.quint8", "shape": [1]}}'])
def test_a_folder_that_is_no_tensordict_is_refused(tmp_path: Path, meta: str) -> None:
    (tmp_path / "meta.json").write_text(meta)
    with pytest.raises(FormatError):
        read_tree(OpenFiles(tmp_path))


# Runs of rows, and the pieces in which a leaf is written.

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


def test_only_long_runs_of_wide_rows_are_copied_later() -> None:
    wide, narrow, some = np.zeros((400, 5)), np.zeros(400), np.array([1, 200])
    assert isinstance(RowSpans(some, some + 100).of(wide), RowRuns)
    assert isinstance(RowSpans(some, some + 100).of(narrow), np.ndarray)
    assert isinstance(RowSpans(some, some + 10).of(wide), np.ndarray)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 70), max_size=12), runs=st.booleans(), dtype=st.sampled_from(["float32", "int8"]),
    expected=st.sampled_from([0, 1, 200]), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_leaf_has_the_appended_rows_in_any_pieces(sizes, runs, dtype, expected, seed, tmp_path_factory) -> None:
    field, path = Field(("a",), dtype, (3,), "info"), tmp_path_factory.mktemp("leaf") / "a.memmap"
    draw, parts = np.random.default_rng(seed), list[Any]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "_PIECE", 96)
        patch.setattr(syncing, "_LUMP", 300)
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


@each(
    ("dtype", "known", "values", "wanted"),
    [
        ("uint8", (0, 255), [3], (0, 255)), ("uint8", (1, 255), [0], (0, 255)),
        ("int16", (0, 255), [-3, 300], (-3, 300)),
        ("float32", (0, 255), [np.nan, 256.5], (0, 256.5)), ("float32", (1.0, 2.0), [np.nan], (1.0, 2.0)),
    ],
)  # fmt: skip
def test_a_range_extends_the_known_one(dtype: str, known: Any, values: list[float], wanted: Any) -> None:
    assert range_of(np.array(values, dtype), Field(("a",), dtype, (), "info"), known) == wanted


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


def test_space_that_was_not_needed_is_released(tmp_path: Path) -> None:
    writer = LeafWriter(tmp_path / "a.memmap", Field(("a",), "int8", (), "info"), rows=64 << 20)
    writer.append(np.ones(1000, np.int8))
    assert (tmp_path / "a.memmap").stat().st_size == 0
    writer.finish()
    here = (tmp_path / "a.memmap").stat()
    assert here.st_size == 1000
    assert here.st_blocks * 512 < 1 << 20


EPISODES = [(4, "terminated"), (1, "truncated"), (3, "both")]


@pytest.mark.parametrize("drop", [(), ("episode",)])
def test_episodes_are_found_without_a_manifest(tmp_path: Path, drop: tuple[str, ...]) -> None:
    write_walks(tmp_path / "data", EPISODES)
    TensorDict.load_memmap(tmp_path / "data").exclude(*drop).clone().memmap(tmp_path / "plain")
    with TedReader(tmp_path / "data") as sound, PlainReader(tmp_path / "plain") as plain:
        assert plain.episodes.episode.tolist() == [0, 1, 2]
        assert plain.episodes.end_reason.tolist() == [0, 1, 2]
        np.testing.assert_array_equal(plain.episodes.length, sound.episodes.length)
        np.testing.assert_array_equal(plain.episodes.total_reward, sound.episodes.total_reward)
        for field in plain.fields:
            np.testing.assert_array_equal(plain.read(field.key, 2, 7), sound.read(field.key, 2, 7))


def test_plain_folders_without_steps_are_refused(tmp_path: Path) -> None:
    TensorDict({"a": torch.zeros(3), "b": torch.zeros(4)}, []).memmap(tmp_path / "odd")
    with pytest.raises(FormatError, match="not one row a step"):
        PlainReader(tmp_path / "odd")
    TensorDict({"a": torch.zeros(3)}, [3]).memmap(tmp_path / "bare")
    with pytest.raises(FormatError, match=r"neither 'episode' nor 'next.done'"):
        _ = PlainReader(tmp_path / "bare").episodes


@each("shape", [1.5, "3", [-1], [1.5], {"a": 1}])
def test_an_odd_batch_is_refused(shape: object, tmp_path: Path) -> None:
    TensorDict({"a": torch.zeros(3)}, [3]).memmap(tmp_path)
    meta = tmp_path / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"shape": shape}))
    with pytest.raises(FormatError, match="as shape"):
        PlainReader(tmp_path)
