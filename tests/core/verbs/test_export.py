"""`export`: each format read back by the library that others would take, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import minari
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from processes import run_forked
from tensordict import TensorDict

import rbtool
from rbtool.core.errors import (
    CorruptDataError,
    DatasetNotFoundError,
    FormatError,
    OutOfSpaceError,
    SchemaError,
    UsageError,
)
from rbtool.core.format import fs
from rbtool.core.format.converter import Chosen
from rbtool.core.format.episodes import EPISODES as TABLE
from rbtool.core.format.episodes import EpisodeTable
from rbtool.core.format.manifest import Manifest, content_digest
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.open_steps import open_steps
from rbtool.core.results import to_document
from rbtool.core.ted.episodes import Final
from rbtool.core.ted.rules import Finding
from rbtool.core.testing.datasets import ODD_LEAVES, DatasetPlan, write_plan, write_walks
from rbtool.core.verbs.checkpoint import save
from rbtool.core.verbs.convert import convert
from rbtool.core.verbs.export import export

EPISODES = [(3, "terminated"), (2, "truncated"), (4, "open"), (1, "both")]

DATA = Path(__file__).parents[2] / "data" / "minari"
NAMES = {"h5": "out.h5", "npz": "out.npz", "parquet": "out", "minari": "out"}
FORMATS = list(NAMES)


def rows_of(path: Path, key: tuple[str, ...], rows: Any) -> Any:
    with TedReader(path) as reader:
        return reader.read(key, 0, reader.manifest.steps)[rows]


def read_h5(path: Path, key: tuple[str, ...]) -> Any:
    with h5py.File(path) as file:
        return file["steps/" + "/".join(key)][()]


def read_npz(path: Path, key: tuple[str, ...]) -> Any:
    with np.load(path, allow_pickle=False) as file:
        return file[".".join(key)]


def read_parquet(path: Path, key: tuple[str, ...]) -> Any:
    return np.array(pq.read_table(path / "steps.parquet")[".".join(key)].to_pylist())


READ = {"h5": read_h5, "npz": read_npz, "parquet": read_parquet}


@pytest.mark.parametrize("to", list(READ))
@pytest.mark.parametrize("episodes", [None, "1,3"])
def test_every_value_is_there(to: str, episodes: str | None, walks: Path, tmp_path: Path) -> None:
    rows = np.arange(10) if episodes is None else np.array([3, 4, 9])
    result = export(walks, tmp_path / NAMES[to], to=to, episodes=episodes)
    assert (result.kind, result.steps, result.layout, result.source) == ("export", len(rows), to, walks)
    with TedReader(walks) as reader:
        for field in reader.fields:
            found, expected = READ[to](tmp_path / NAMES[to], field.key), rows_of(walks, field.key, rows)
            np.testing.assert_array_equal(found, expected.reshape(found.shape))
            assert to == "parquet" or found.dtype == expected.dtype


@pytest.mark.parametrize("to", ["h5", "npz", "parquet"])
def test_every_oddity_is_there_or_refused(to: str, tmp_path: Path) -> None:
    plan = DatasetPlan((4, 1, 3), ("terminated", "open", "both"), (True, False, False), ODD_LEAVES, text=True)
    write_plan(plan, tmp_path / "odd")
    with pytest.raises(SchemaError, match="bfloat16"):
        export(tmp_path / "odd", tmp_path / "x", to=to)
    known = [leaf for leaf in ODD_LEAVES if leaf.dtype != "bfloat16"]
    if to == "parquet":
        write_plan(DatasetPlan((2,), ("both",), (False,), tuple(known)), tmp_path / "complex")
        with pytest.raises(SchemaError, match="complex"):
            export(tmp_path / "complex", tmp_path / "x", to=to)
        known = [leaf for leaf in known if "complex" not in leaf.dtype]
    known = [leaf for leaf in known if to != "npz" or leaf.key[0] != "episodes"]  # it is called so itself
    plan = DatasetPlan(plan.lengths, plan.endings, plan.jumps, tuple(known), text=True, documents=True)
    write_plan(plan, tmp_path / "most")
    export(tmp_path / "most", tmp_path / "out", to=to)
    names = [leaf for leaf in known if leaf.key[0] not in ("a/b: c", "episodes")]
    for key in [(*(["next"] if leaf.kind == "after" else []), *leaf.key) for leaf in names]:
        found, expected = READ[to](tmp_path / "out", key), rows_of(tmp_path / "most", key, slice(None))
        np.testing.assert_array_equal(found.reshape(expected.shape), expected)


def _with_finals(folder: Path, finals: list[Final]) -> EpisodeTable:
    """Let the episode table of a dataset state what is known of the observations after the last steps."""
    with TedReader(folder) as reader:
        table = replace(reader.episodes, final=np.array(finals, np.uint8))
    shutil.rmtree(folder / TABLE)
    manifest = Manifest.load(folder)
    kept = [file for file in manifest.files if not file.path.startswith(f"{TABLE}/")]
    files = tuple(sorted([*kept, *table.save(folder)]))
    made = replace(manifest, files=files, content_digest=content_digest(files), boundary=table.counts())
    made.save(folder, at_once=True)
    return table


def _found(path: Path) -> list[Finding]:
    """What `check` finds, without the commands that mend it, which have the path."""
    return [replace(one, mend="") for one in rbtool.check(path).findings]


@pytest.mark.parametrize(("to", "name"), [("h5", "x.h5"), ("npz", "x.npz"), ("parquet", "x"), ("parquet", "x.parquet")])
def test_an_export_is_opened_like_the_dataset(to: str, name: str, tmp_path: Path) -> None:
    leaves = [leaf for leaf in ODD_LEAVES if leaf.dtype != "bfloat16" and leaf.key[0] != "episodes"]
    leaves = [leaf for leaf in leaves if to != "parquet" or "complex" not in leaf.dtype]
    endings = ("terminated", "open", "both", "truncated")
    plan = DatasetPlan((4, 1, 3, 2), endings, (True, False, False, True), tuple(leaves), text=True, documents=True)
    write_plan(plan, tmp_path / "odd")
    table = _with_finals(tmp_path / "odd", [Final.OBSERVED, Final.DROPPED, Final.OBSERVED, Final.DROPPED])
    path = export(tmp_path / "odd", tmp_path / name, to=to).path
    known = rbtool.inspect(tmp_path / "odd")
    found = rbtool.inspect(path)
    assert (found.type, found.layout, found.steps, found.episodes) == ("dataset", to, known.steps, known.episodes)
    for part in ("ends", "length", "returns", "spaces", "renamed_keys"):
        assert getattr(found, part) == getattr(known, part), part
    assert [(one.key, one.dtype, one.shape, one.role) for one in found.fields] == [
        (one.key, one.dtype, one.shape, one.role) for one in known.fields
    ]
    assert repr(rbtool.inspect(path, episode=13).episode) == repr(
        rbtool.inspect(tmp_path / "odd", episode=13).episode
    )  # NaN
    assert _found(path) == _found(tmp_path / "odd")
    again = convert(path, tmp_path / "again")
    assert again.content_digest == known.content_digest
    assert again.boundary == table.counts().to_dict()
    assert _found(again.path) == _found(tmp_path / "odd")
    for one in (path, again.path):
        assert rbtool.diff(one, tmp_path / "odd").equal
    assert repr(rbtool.stats(path).fields) == repr(rbtool.stats(tmp_path / "odd").fields)
    with open_steps(path) as reader, open_steps(tmp_path / "odd") as steps:
        assert reader.episode_text == steps.episode_text
        assert to != "h5" or reader.documents() == steps.documents()
        copies = pickle.loads(pickle.dumps(reader)), reader.again()
        for key in [field.key for field in steps.fields]:
            for one in (reader, *copies):
                for start, stop in ((0, 10), (3, 7), (9, 10), (2, 2), (0, 1)):
                    expected = steps.read(key, start, stop)
                    rows = one.read(key, start, stop)
                    assert (rows.dtype, rows.shape, rows.tobytes()) == (
                        expected.dtype,
                        expected.shape,
                        expected.tobytes(),
                    )
        for one in copies:
            one.close()


def test_one_parquet_file_may_have_the_steps_alone(walks: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("rbtool.converters.export.parquet._MOST_TABLE", 10)
    result = export(walks, tmp_path / "x.parquet", episodes="0,2,3")
    assert "has the steps alone, because its table of episodes is too large for the metadata" in result.notes[-1]
    found = rbtool.inspect(result.path)
    assert (found.episodes, found.steps, [one.episode for one in [found]]) == (3, 8, [None])
    assert "the episode table is derived from the rows" in found.notes[0]
    made = convert(result.path, tmp_path / "made").path
    with TedReader(made) as reader, TedReader(walks) as whole:
        rows = np.array([0, 2, 3])
        for name in ("episode", "length", "total_reward", "terminated", "truncated"):
            assert getattr(reader.episodes, name).tolist() == getattr(whole.episodes, name)[rows].tolist(), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.sort_by([("episode_index", "descending")]), "the episodes begin at other rows"),
        (lambda table: table.slice(1), "the episodes begin at other rows"),
        (lambda table: _with_table(table, b"?"), "is damaged or was cut"),
        (lambda table: _with_table(table, b"QUJD"), "is damaged or was cut"),
    ],
)
def test_a_parquet_file_that_others_changed_is_refused(change: Any, message: str, walks: Path, tmp_path: Path) -> None:
    path = export(walks, tmp_path / "x.parquet").path
    pq.write_table(change(pq.read_table(path)), path)
    with pytest.raises(CorruptDataError, match=message):
        convert(path, tmp_path / "made")


def _with_table(table: Any, packed: bytes) -> Any:
    return table.replace_schema_metadata(table.schema.metadata | {b"rbtool.episodes": packed})


def test_an_export_is_a_table_on_request(walks: Path, tmp_path: Path) -> None:
    path = export(walks, tmp_path / "x.h5").path
    options = {
        "map": ["observation=steps/observation", "action=steps/action", "reward=steps/next/reward"],
        "ends": "steps/next/done,-",
    }
    for found in (
        rbtool.check(path, format="table", **options),
        convert(path, tmp_path / "t", format="table", **options),
    ):
        assert found.steps == 10
    assert rbtool.inspect(path, format="table", **options).type == "source"


def test_an_export_of_some_episodes_is_opened(walks: Path, tmp_path: Path) -> None:
    for to in READ:
        path = export(walks, tmp_path / NAMES[to], to=to, episodes="1,3").path
        assert rbtool.check(path).errors == 0
        assert len(rbtool.load_dataset(path)) == 3


def _about(path: Path, **changes: object) -> None:
    with h5py.File(path, "r+") as file:
        file.attrs["about"] = json.dumps(json.loads(file.attrs["about"]) | changes)


def _set(name: str, place: int, value: float) -> Any:
    def change(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            file[name][place] = value

    return change


def _drop(name: str) -> Any:
    def change(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            del file[name]

    return change


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda path: _about(path, version=2), FormatError, "has version 2, this rbtool reads up to 1"),
        (lambda path: _about(path, steps=11), CorruptDataError, r"float32 \[10, 2\] for action, expected rows"),
        (lambda path: _about(path, fields=3), CorruptDataError, "has 3 as fields, expected a list"),
        (lambda path: _about(path, episodes=3), CorruptDataError, "as the description states: 3 with 10 steps"),
        (_set("episodes/length", 0, 2), CorruptDataError, "has 4 episodes and 9 steps"),
        (_set("episodes/start", 1, 2), CorruptDataError, "expected consecutive episodes"),
        (_drop("steps/next/reward"), CorruptDataError, "has nothing for next.reward, expected rows of"),
    ],
)
def test_a_damaged_export_is_described(damage: Any, error: Any, message: str, walks: Path, tmp_path: Path) -> None:
    path = export(walks, tmp_path / "out.h5", to="h5").path
    damage(path)
    for opened in (rbtool.inspect, rbtool.load_dataset, lambda path: convert(path, tmp_path / "made")):
        with pytest.raises(error, match=message):
            opened(path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("to", ["h5", "npz", "parquet"])
def test_a_cut_export_is_not_taken_for_a_whole_one(to: str, walks: Path, tmp_path: Path) -> None:
    path = export(walks, tmp_path / NAMES[to], to=to).path
    file = path / "steps.parquet" if to == "parquet" else path
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(FormatError):  # a CorruptDataError is one
        convert(path, tmp_path / "made")


def test_a_changed_npz_export_has_another_checksum(walks: Path, tmp_path: Path) -> None:
    path = export(walks, tmp_path / "out.npz", to="npz").path
    data = path.read_bytes()
    with TedReader(walks) as reader:
        at = data.index(reader.read(("action",), 0, 10).tobytes())
    path.write_bytes(data[:at] + b"\x01" + data[at + 1 :])
    with pytest.raises(CorruptDataError, match="action"):
        convert(path, tmp_path / "made")
    assert rbtool.check(path).errors


@pytest.mark.parametrize("name", ["steps.parquet", "episodes.parquet"])
def test_changed_bytes_of_a_parquet_export_are_damage(name: str, walks: Path, tmp_path: Path) -> None:
    path = export(walks, tmp_path / "out", to="parquet").path
    data = (path / name).read_bytes()
    seen = 0
    for at in range(4, len(data), len(data) // 60):
        (path / name).write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        try:
            convert(path, tmp_path / "made", force=True)
        except FormatError:
            seen += 1
    assert seen > 5


def test_text_is_text(tmp_path: Path) -> None:
    convert(DATA / "griddict/random-infos-v0", tmp_path / "grid")
    with TedReader(tmp_path / "grid") as reader:
        text = next(f for f in reader.fields if f.role == "text" and f.dtype == "uint8" and f.key[0] != "next")
        length = reader.read((*text.key[:-1], text.key[-1] + "_length"), 0, 181)
        expected = [
            row[:size].tobytes().decode() for row, size in zip(reader.read(text.key, 0, 181), length, strict=True)
        ]
        said = reader.episode_text
    for to in ("h5", "parquet", "npz"):
        export(tmp_path / "grid", tmp_path / to, to=to)
    assert [row.decode() for row in read_h5(tmp_path / "h5", text.key)] == expected
    assert read_parquet(tmp_path / "parquet", text.key).tolist() == expected
    assert "metadata.json" in h5py.File(tmp_path / "h5")["source"]
    with np.load(tmp_path / "npz") as file:
        assert [json.loads(row) for row in file["episodes.text"]] == said
    episodes = pq.read_table(tmp_path / "parquet/episodes.parquet")
    assert [json.loads(row) for row in episodes["text"].to_pylist()] == said


def test_the_episode_table_says_where_rows_lie(walks: Path, tmp_path: Path) -> None:
    for to in READ:
        export(walks, tmp_path / NAMES[to], to=to, episodes="0,2:4")
    steps = pq.read_table(tmp_path / "out/steps.parquet")
    assert steps["episode_index"].to_pylist() == [0] * 3 + [1] * 4 + [2]
    assert steps["step"].to_pylist() == [0, 1, 2, 0, 1, 2, 3, 0]
    table = pq.read_table(tmp_path / "out/episodes.parquet").to_pydict()
    with h5py.File(tmp_path / "out.h5") as h5, np.load(tmp_path / "out.npz") as npz:
        for name, expected in {
            "episode": [0, 2, 3],
            "start": [0, 3, 7],
            "length": [3, 4, 1],
            "seed": [7, 9, 10],
        }.items():
            assert table[name] == h5["episodes"][name][:].tolist() == npz[f"episodes.{name}"].tolist() == expected
        about = json.loads(h5.attrs["about"])
        assert about == json.loads(str(npz["about"]))
    assert (about["steps"], about["episodes"], about["format"]) == (8, 3, "rbtool export")


def test_checkpoints_and_chunks(walks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export(walks, tmp_path / "whole.npz", to="npz")
    save(walks, tmp_path / "saved", form="flat")
    monkeypatch.setattr("rbtool.core.format.converter._CHUNK_BYTES", 30)
    monkeypatch.setattr("rbtool.converters.export.parquet._GROUP_BYTES", 200)
    export(tmp_path / "saved", tmp_path / "cut.npz", to="npz")
    assert (tmp_path / "cut.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()
    export(walks, tmp_path / "table", to="parquet")
    assert pq.ParquetFile(tmp_path / "table/steps.parquet").num_row_groups > 2
    expected = rows_of(walks, ("observation",), slice(None))
    np.testing.assert_array_equal(read_parquet(tmp_path / "table", ("observation",)), expected)


@pytest.mark.parametrize("to", FORMATS)
def test_only_an_export_is_replaced(to: str, walks: Path, tmp_path: Path) -> None:
    place = tmp_path / NAMES[to]
    if to in ("parquet", "minari"):
        place.mkdir()  # an empty folder is no hindrance
    export(walks, place, to=to, episodes="0")
    with pytest.raises(UsageError, match="already exists"):
        export(walks, place, to=to)
    assert export(walks, place, to=to, force=True).steps == 10
    if place.is_dir():
        (place / "mine").write_text("x")
    else:
        place.write_bytes(b"mine")
    with pytest.raises(UsageError, match="left unchanged"):
        export(walks, place, to=to, force=True)
    with pytest.raises(UsageError, match="overlap"):
        export(walks, walks / "inside", to=to)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("to", FORMATS)
def test_a_dry_run_writes_nothing(to: str, walks: Path, tmp_path: Path) -> None:
    result = export(walks, tmp_path / "out", to=to, dry_run=True)
    assert result.dry_run
    assert result.bytes > 0
    assert json.loads(json.dumps(to_document(result)))["kind"] == "export"
    assert not (tmp_path / "out").exists()


def test_bad_requests(walks: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no format 'csv'"):
        export(walks, tmp_path / "x", to="csv")
    with pytest.raises(UsageError, match="asks for episode 9"):
        export(walks, tmp_path / "x", to="npz", episodes="9")
    with pytest.raises(DatasetNotFoundError):
        export(tmp_path / "nothing", tmp_path / "x", to="npz")
    file = next(path for path in (walks / "next").rglob("*.memmap"))
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CorruptDataError, match="was changed"):
        export(walks, tmp_path / "x", to="npz")
    assert not (tmp_path / "x").exists()


def test_names_that_would_be_one(tmp_path: Path) -> None:
    write_plan(DatasetPlan((2,), ("both",), (False,), (*ODD_LEAVES[5:6], ODD_LEAVES[13])), tmp_path / "clash")
    with pytest.raises(SchemaError, match=r"both be called 'episodes\.start'"):
        export(tmp_path / "clash", tmp_path / "x", to="npz")
    export(tmp_path / "clash", tmp_path / "x", to="h5")


def test_spans_join_what_lies_together(walks: Path) -> None:
    with TedReader(walks) as reader:
        assert list(Chosen(reader, np.array([0, 1, 3])).spans()) == [(0, 5), (9, 10)]
        assert list(Chosen(reader, np.array([], int)).spans()) == []


def test_too_little_space_is_seen_before(walks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fs, "free_space", lambda path: 100)
    with pytest.raises(OutOfSpaceError):
        export(walks, tmp_path / "x", to="h5")


SCRIPT = """
import resource, sys
from pathlib import Path
import rbtool
from rbtool.core.verbs.export import export

sys.dont_write_bytecode = True  # under the limit, Python would cut a compiled module, and read it ever after
work, to = Path(sys.argv[1]), sys.argv[2]
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
for limit in (0, 100, 5000, 100_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        export(work / "walks", work / "out" / "x", to=to)
    except rbtool.OutOfSpaceError as error:
        assert error.exit_code == 6
    else:
        raise SystemExit(f"{limit} did not stop it")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert list((work / "out").iterdir()) == [], limit
export(work / "walks", work / "out" / "x", to=to)
"""


@pytest.mark.parametrize("to", FORMATS)
def test_a_limit_on_file_size(to: str, tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", [(3000, "terminated"), (2000, "truncated")])
    (tmp_path / "out").mkdir()
    done = run_forked(SCRIPT, tmp_path, to)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("shape", [(), (2,), (2, 2)])
def test_flags_as_observations_without_a_space_go_to_minari_and_back(shape: tuple[int, ...], tmp_path: Path) -> None:
    seen = torch.arange(5 * max(1, int(np.prod(shape)))).reshape(5, *shape) % 3 == 0
    ends = torch.tensor([[False], [False], [False], [True]])
    after = {"observation": seen[1:], "reward": torch.ones(4, 1), "done": ends, "terminated": ends}
    data = TensorDict({"observation": seen[:-1], "action": seen[:-1], "next": after}, [4])
    data.clone().memmap(tmp_path / "tree")
    export(convert(tmp_path / "tree", tmp_path / "made").path, tmp_path / "out", to="minari")
    convert(tmp_path / "out", tmp_path / "again")
    assert np.array_equal(rows_of(tmp_path / "again", ("observation",), slice(None)), seen[:-1].numpy())
    assert minari.MinariDataset(tmp_path / "out" / "data").observation_space.dtype == np.bool_


@pytest.mark.parametrize(
    ("name", "form"), [("a.h5", "h5"), ("a.HDF5", "h5"), ("a.npz", "npz"), ("a.parquet", "parquet")]
)
def test_the_suffix_of_the_destination_names_the_format(name: str, form: str, walks: Path, tmp_path: Path) -> None:
    result = export(walks, tmp_path / name)
    assert (result.layout, (tmp_path / name).is_file()) == (form, True)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("out", "the format to export is unclear"),
        ("out.v2", "the format to export is unclear"),
        ("out.h5/x", "the format to export is unclear"),
        ("h5", "the format to export is unclear"),
        ("out.csv", "expected one of the suffixes .zarr, .zarr.zip, .h5, .hdf5, .npz, .parquet, .mcap, or --to"),
    ],
)
def test_without_a_suffix_of_a_format_it_has_to_be_named(name: str, said: str, walks: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(said)) as raised:
        export(walks, tmp_path / name)
    names = "minari, d4rl, robomimic, rlds, lerobot, lance, zarr, d3rlpy, sb3, h5, npz, parquet or mcap"
    assert raised.value.hint == f"add --to {names}"
    assert [path.name for path in tmp_path.iterdir()] == ["walks"]


def test_a_parquet_file_has_the_steps(walks: Path, tmp_path: Path) -> None:
    result = export(walks, tmp_path / "out.parquet", episodes="0,2")
    export(walks, tmp_path / "folder", to="parquet", episodes="0,2")
    assert pq.read_table(tmp_path / "out.parquet").equals(pq.read_table(tmp_path / "folder/steps.parquet"))
    assert "a folder (--to parquet) has it as a file" in result.notes[-1]
    with pytest.raises(UsageError, match="already exists"):
        export(walks, tmp_path / "out.parquet")
    assert export(walks, tmp_path / "out.parquet", force=True).steps == 10
    (tmp_path / "mine.parquet").write_bytes((tmp_path / "folder/episodes.parquet").read_bytes())
    with pytest.raises(UsageError, match="not an export in this format"):
        export(walks, tmp_path / "mine.parquet", force=True)


LOAD = """
import sys
from datasets import load_dataset
for name in ([], ["steps"], ["episodes"]):
    (split, rows), = load_dataset(sys.argv[1], *name).items()
    print(split, rows.num_rows, *rows.column_names)
rows = load_dataset(sys.argv[1])["train"]
print(rows["observation"] == rows.data["observation"].to_pylist(), rows[5]["next.reward"], rows[5]["episode_index"])
"""


def test_datasets_loads_the_folder_as_it_is(walks: Path, tmp_path: Path) -> None:
    export(walks, tmp_path / "out", to="parquet")
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "out")], env=os.environ | offline, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    default, steps, episodes, values = done.stdout.splitlines()
    assert default == steps
    assert steps.startswith("train 10 episode_index step action")
    assert episodes.startswith("train 4 episode start length return")
    expected = rows_of(walks, ("next", "reward"), np.arange(10))
    assert values.split() == ["True", str(float(expected[5].item())), "2"]


def test_an_export_is_no_saved_buffer(tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", [(3, "terminated"), (2, "truncated")])
    path = rbtool.export(tmp_path / "walks", tmp_path / "x.h5").path
    ring = rbtool.ReplayBuffer(storage=rbtool.LazyTensorStorage(8), batch_size=2)
    with pytest.raises(FormatError, match="is an export to h5") as caught:
        ring.loads(path)
    assert "opens it" in (caught.value.hint or "")
    assert str(path) in str(caught.value)
