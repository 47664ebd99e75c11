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
from cases import each
from damage import flip
from processes import run_forked
from tensordict import TensorDict

import rbtool
from rbtool.core.errors import CorruptDataError, FormatError, SchemaError, UsageError
from rbtool.core.format.converter import Chosen
from rbtool.core.format.episodes import EPISODES as TABLE
from rbtool.core.format.episodes import EpisodeTable
from rbtool.core.format.manifest import Manifest, content_digest
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.open_steps import open_steps
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


@pytest.mark.parametrize("to", READ)
@pytest.mark.parametrize("episodes", [None, "1,3"])
def test_an_export_holds_every_value(to: str, episodes: str | None, walks: Path, tmp_path: Path) -> None:
    rows = np.arange(10) if episodes is None else np.array([3, 4, 9])
    result = export(walks, tmp_path / NAMES[to], to=to, episodes=episodes)
    assert (result.kind, result.steps, result.layout, result.source) == ("export", len(rows), to, walks)
    with TedReader(walks) as reader:
        for field in reader.fields:
            found, expected = READ[to](tmp_path / NAMES[to], field.key), rows_of(walks, field.key, rows)
            np.testing.assert_array_equal(found, expected.reshape(found.shape))
            assert to == "parquet" or found.dtype == expected.dtype


@pytest.mark.parametrize("to", READ)
def test_odd_leaves_are_exported_or_refused(to: str, tmp_path: Path) -> None:
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
    """Rewrite the episode table of a dataset with these entries in `final`."""
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
    """The findings of `check` without the commands that mend them, which contain the path."""
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
    one, other = (rbtool.inspect(place, episode=13).episode for place in (path, tmp_path / "odd"))
    assert repr(one) == repr(other)  # NaN differ
    assert _found(path) == _found(tmp_path / "odd")
    assert rbtool.check(path).notes[1:] == rbtool.check(tmp_path / "odd").notes  # besides that digests are missing
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
                    rows, expected = (found.read(key, start, stop) for found in (one, steps))
                    assert (rows.dtype, rows.shape) == (expected.dtype, expected.shape)
                    assert rows.tobytes() == expected.tobytes()
        for one in copies:
            one.close()


def test_a_parquet_file_has_the_steps_alone_if_the_table_is_too_large(walks: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("rbtool.converters.export.parquet._MOST_TABLE", 10)
    result = export(walks, tmp_path / "x.parquet", episodes="0,2,3")
    assert "has the steps alone, because its table of episodes is too large for the metadata" in result.notes[-1]
    found = rbtool.inspect(result.path)
    assert (found.episodes, found.steps) == (3, 8)
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
def test_a_parquet_file_that_was_changed_is_refused(change: Any, message: str, walks: Path, tmp_path: Path) -> None:
    path = export(walks, tmp_path / "x.parquet").path
    pq.write_table(change(pq.read_table(path)), path)
    with pytest.raises(CorruptDataError, match=message):
        convert(path, tmp_path / "made")


def _with_table(table: Any, packed: bytes) -> Any:
    return table.replace_schema_metadata(table.schema.metadata | {b"rbtool.episodes": packed})


def test_an_export_is_read_as_a_plain_table_on_request(walks: Path, tmp_path: Path) -> None:
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


def _edit(change: Any) -> Any:
    """Make a damage of a change to the open HDF5 file."""

    def edit(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            change(file)

    return edit


def _about(**changes: object) -> Any:
    return _edit(lambda file: file.attrs.update(about=json.dumps(json.loads(file.attrs["about"]) | changes)))


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (_about(version=2), FormatError, "has version 2, this rbtool reads up to 1"),
        (_about(steps=11), CorruptDataError, r"float32 \[10, 2\] for action, expected rows"),
        (_about(fields=3), CorruptDataError, "has 3 as fields, expected a list"),
        (_about(episodes=3), CorruptDataError, "as the description states: 3 with 10 steps"),
        (_edit(lambda file: file["episodes/length"].__setitem__(0, 2)), CorruptDataError, "has 4 episodes and 9 steps"),
        (
            _edit(lambda file: file["episodes/start"].__setitem__(1, 2)),
            CorruptDataError,
            "expected consecutive episode",
        ),
        (_edit(lambda file: file.pop("steps/next/reward")), CorruptDataError, "has nothing for next.reward, expected"),
    ],
)
def test_a_damaged_h5_export_is_refused(damage: Any, error: Any, message: str, walks: Path, tmp_path: Path) -> None:
    path = export(walks, tmp_path / "out.h5", to="h5").path
    damage(path)
    for opened in (rbtool.inspect, rbtool.load_dataset, lambda path: convert(path, tmp_path / "made")):
        with pytest.raises(error, match=message):
            opened(path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("to", READ)
def test_a_cut_export_is_not_taken_for_a_whole_one(to: str, walks: Path, tmp_path: Path) -> None:
    path = export(walks, tmp_path / NAMES[to], to=to).path
    file = path / "steps.parquet" if to == "parquet" else path
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(FormatError):  # a CorruptDataError is one
        convert(path, tmp_path / "made")


def test_a_flipped_bit_of_an_npz_export_is_found(walks: Path, tmp_path: Path) -> None:
    path = export(walks, tmp_path / "out.npz", to="npz").path
    flip(path, path.read_bytes().index(rows_of(walks, ("action",), slice(None)).tobytes()))
    with pytest.raises(CorruptDataError, match="action"):
        convert(path, tmp_path / "made")
    assert rbtool.check(path).errors


@pytest.mark.parametrize("name", ["steps.parquet", "episodes.parquet"])
def test_a_flipped_bit_of_a_parquet_export_never_changes_the_data(name: str, walks: Path, tmp_path: Path) -> None:
    path = export(walks, tmp_path / "out", to="parquet").path
    expected, found = convert(path, tmp_path / "made").content_digest, 0
    size = (path / name).stat().st_size
    for at in range(4, size, size // 60):
        sound = flip(path / name, at, at % 8)
        try:
            assert convert(path, tmp_path / "made", force=True).content_digest == expected, at
        except FormatError:
            found += 1
        (path / name).write_bytes(sound)
    assert found > 20


def test_text_is_exported_as_text(tmp_path: Path) -> None:
    convert(DATA / "griddict/random-infos-v0", tmp_path / "grid")
    with TedReader(tmp_path / "grid") as reader:
        text = next(f for f in reader.fields if f.role == "text" and f.dtype == "uint8" and f.key[0] != "next")
        length = reader.read((*text.key[:-1], text.key[-1] + "_length"), 0, 181)
        rows = reader.read(text.key, 0, 181)
        expected = [row[:size].tobytes().decode() for row, size in zip(rows, length, strict=True)]
        said = reader.episode_text
    for to in READ:
        export(tmp_path / "grid", tmp_path / to, to=to)
    assert [row.decode() for row in read_h5(tmp_path / "h5", text.key)] == expected
    assert read_parquet(tmp_path / "parquet", text.key).tolist() == expected
    assert "metadata.json" in h5py.File(tmp_path / "h5")["source"]
    with np.load(tmp_path / "npz") as file:
        assert [json.loads(row) for row in file["episodes.text"]] == said
    episodes = pq.read_table(tmp_path / "parquet/episodes.parquet")
    assert [json.loads(row) for row in episodes["text"].to_pylist()] == said


def test_the_exported_episode_table_has_the_rows_of_each_episode(walks: Path, tmp_path: Path) -> None:
    for to in READ:
        export(walks, tmp_path / NAMES[to], to=to, episodes="0,2:4")
    steps = pq.read_table(tmp_path / "out/steps.parquet")
    assert steps["episode_index"].to_pylist() == [0] * 3 + [1] * 4 + [2]
    assert steps["step"].to_pylist() == [0, 1, 2, 0, 1, 2, 3, 0]
    table = pq.read_table(tmp_path / "out/episodes.parquet").to_pydict()
    with h5py.File(tmp_path / "out.h5") as h5, np.load(tmp_path / "out.npz") as npz:
        columns = {"episode": [0, 2, 3], "start": [0, 3, 7], "length": [3, 4, 1], "seed": [7, 9, 10]}
        for name, expected in columns.items():
            assert table[name] == h5["episodes"][name][:].tolist() == npz[f"episodes.{name}"].tolist() == expected
        about = json.loads(h5.attrs["about"])
        assert about == json.loads(str(npz["about"]))
    assert (about["steps"], about["episodes"], about["format"]) == (8, 3, "rbtool export")


def test_chunks_and_checkpoints_give_the_same_export(walks: Path, tmp_path: Path, monkeypatch) -> None:
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
    planned = export(walks, place, to=to, dry_run=True)
    assert (planned.dry_run, planned.bytes > 0, planned.kind) == (True, True, "export")
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
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_unknown_formats_and_episodes_are_refused(walks: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no format 'csv'"):
        export(walks, tmp_path / "x", to="csv")
    with pytest.raises(UsageError, match="asks for episode 9"):
        export(walks, tmp_path / "x", to="npz", episodes="9")


def test_leaves_whose_names_would_be_equal_are_refused(tmp_path: Path) -> None:
    write_plan(DatasetPlan((2,), ("both",), (False,), (*ODD_LEAVES[5:6], ODD_LEAVES[13])), tmp_path / "clash")
    with pytest.raises(SchemaError, match=r"both be called 'episodes\.start'"):
        export(tmp_path / "clash", tmp_path / "x", to="npz")
    export(tmp_path / "clash", tmp_path / "x", to="h5")


def test_spans_of_chosen_episodes_join_neighbours(walks: Path) -> None:
    with TedReader(walks) as reader:
        assert list(Chosen(reader, np.array([0, 1, 3])).spans()) == [(0, 5), (9, 10)]
        assert list(Chosen(reader, np.array([], int)).spans()) == []


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
def test_an_export_that_hits_a_limit_on_file_size_leaves_nothing(to: str, tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", [(3000, "terminated"), (2000, "truncated")])
    (tmp_path / "out").mkdir()
    done = run_forked(SCRIPT, tmp_path, to)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("shape", [(), (2,), (2, 2)])
def test_boolean_observations_without_a_space_go_to_minari_and_back(shape: tuple[int, ...], tmp_path: Path) -> None:
    seen = torch.arange(5 * max(1, int(np.prod(shape)))).reshape(5, *shape) % 3 == 0
    ends = torch.tensor([[False], [False], [False], [True]])
    after = {"observation": seen[1:], "reward": torch.ones(4, 1), "done": ends, "terminated": ends}
    data = TensorDict({"observation": seen[:-1], "action": seen[:-1], "next": after}, [4])
    data.clone().memmap(tmp_path / "tree")
    export(convert(tmp_path / "tree", tmp_path / "made").path, tmp_path / "out", to="minari")
    convert(tmp_path / "out", tmp_path / "again")
    assert np.array_equal(rows_of(tmp_path / "again", ("observation",), slice(None)), seen[:-1].numpy())
    assert minari.MinariDataset(tmp_path / "out" / "data").observation_space.dtype == np.bool_


@each(("name", "form"), [("a.h5", "h5"), ("a.HDF5", "h5"), ("a.npz", "npz"), ("a.parquet", "parquet")])
def test_the_suffix_of_the_destination_names_the_format(name: str, form: str, walks: Path, tmp_path: Path) -> None:
    result = export(walks, tmp_path / name)
    assert (result.layout, (tmp_path / name).is_file()) == (form, True)


def test_a_destination_without_a_known_suffix_needs_a_format(walks: Path, tmp_path: Path) -> None:
    known = "expected one of the suffixes .zarr, .zarr.zip, .h5, .hdf5, .npz, .parquet, .mcap, or --to"
    said = dict.fromkeys(("out", "out.v2", "out.h5/x", "h5"), "the format to export is unclear") | {"out.csv": known}
    for name, sentence in said.items():
        with pytest.raises(UsageError, match=re.escape(sentence)) as raised:
            export(walks, tmp_path / name)
        names = "minari, d4rl, robomimic, rlds, lerobot, lance, zarr, d3rlpy, sb3, h5, npz, parquet or mcap"
        assert raised.value.hint == f"add --to {names}"
    assert [path.name for path in tmp_path.iterdir()] == ["walks"]


def test_a_parquet_file_is_the_steps_of_the_folder(walks: Path, tmp_path: Path) -> None:
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


def test_huggingface_datasets_loads_a_parquet_export(walks: Path, tmp_path: Path) -> None:
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


def test_a_buffer_refuses_to_load_an_export(walks: Path, tmp_path: Path) -> None:
    path = export(walks, tmp_path / "x.h5").path
    ring = rbtool.ReplayBuffer(storage=rbtool.LazyTensorStorage(8), batch_size=2)
    with pytest.raises(FormatError, match="is an export to h5") as caught:
        ring.loads(path)
    assert "opens it" in (caught.value.hint or "")
    assert str(path) in str(caught.value)
