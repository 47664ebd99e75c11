"""`TableReader`: the contract of readers, and every row of every kind of file against a plain reading."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import conversions
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import each
from conversions import WrittenReaderTests, column, columns_of, texts_of
from table_files import (
    BINARY,
    WRITERS,
    after_final_step,
    column_map,
    flat,
    named,
    plain_rows,
    random_episodes,
    write_csv,
    write_h5,
    write_parquet,
)

import rbtool
from rbtool.converters.table.reader import TableReader
from rbtool.core.errors import CorruptDataError, FormatError, RbtoolError, UsageError
from rbtool.core.format.locate import reader_class, reader_names
from rbtool.core.ted.episodes import EndReason, Final

LENGTHS = (5, 1, 7, 4, 3)
ENDS = ("terminal", "terminal", "timeout", "both", "none")
FLAGS = {"ends": "dead,late"}
converted = partial(conversions.converted, format="table")
refused = partial(conversions.refused, format="table")


class TestHdf5(WrittenReaderTests):
    """HDF5."""

    kind, form, following = TableReader, "hdf5", False

    def write(self, folder: Path) -> Path:
        self.options = {"map": column_map(self.form, following=self.following), **FLAGS}
        columns = flat(random_episodes(LENGTHS, ends=ENDS), following=self.following)
        return WRITERS[self.form](folder / "walk", named(columns))

    def test_it_recognises_its_format_by_content(self, tmp_path: Path) -> None:
        """A table is chosen by name: what columns mean is not in the file."""
        assert not any(reader_class(name).recognises(self.source()) for name in reader_names())


class TestHdf5WithNext(TestHdf5):
    """HDF5 with next observations."""

    following = True


class TestNpz(TestHdf5):
    """A compressed npz."""

    form = "npz"


class TestNpy(TestHdf5):
    """A folder of npy files."""

    form = "npy"


class TestParquet(TestHdf5):
    """Parquet, in row groups that do not begin where episodes do."""

    form = "parquet"


class TestCsv(TestHdf5):
    """CSV."""

    form = "csv"

    def test_a_cut_file_raises_an_error(self, tmp_path: Path) -> None:
        """Half of a CSV file is a CSV file: a row with too few cells is an error, one that is not ended a note."""
        data = self.path.read_bytes()
        half = tmp_path / "half.csv"
        half.write_bytes(data[: data.rindex(b",", 0, len(data) // 2)])
        with pytest.raises(CorruptDataError, match="cells"):
            self.reader()(half)
        half.write_bytes(data.rstrip())
        with self.reader()(half) as reader:
            assert any("the file may have been cut there" in note for note in reader.facts().notes)


class TestCsvWithNext(TestCsv):
    """CSV with next observations."""

    following = True


@each("kind", WRITERS)
@each("following", [False, True])
@each("dtype", ["float32", "float64"])
def test_every_row_equals_a_plain_reading(kind: str, following: bool, dtype: str, tmp_path: Path) -> None:
    columns = flat(random_episodes(LENGTHS, ends=ENDS, dtype=dtype), following=following)
    ends = np.flatnonzero(columns["terminals"] | columns["timeouts"]).tolist()
    expected = after_final_step(plain_rows(columns, ends))
    path = WRITERS[kind](tmp_path / "a", named(columns))
    with converted(path, tmp_path / "out", map=column_map(kind, following=following), **FLAGS) as reader:
        found = columns_of(reader)
        assert reader.manifest.steps == len(expected)
        for name, key in (("observation", "observation"), ("next", "next.observation"), ("action", "action")):
            there = np.array([row[name] for row in expected])
            assert np.array_equal(found[key], there.astype(found[key].dtype))
            assert found[key].dtype == ("float64" if kind == "csv" else there.dtype)
        assert np.array_equal(found["next.reward"][:, 0], [row["reward"] for row in expected])
        assert found["next.terminated"][:, 0].tolist() == [row["terminated"] for row in expected]
        cut = [row["timeout"] or row.get("cut", False) or (row["last"] and not row["terminated"]) for row in expected]
        assert found["next.truncated"][:, 0].tolist() == cut
        assert found["episode"].tolist() == [row["episode"] for row in expected]
        assert reader.manifest.request.source == "table"


@each("kind", WRITERS)
def test_an_episode_key_of_numbers_names_episodes(kind: str, tmp_path: Path) -> None:
    columns = named(flat(random_episodes((3, 2, 4)), following=True), traj=np.repeat([7, 3, 20], (3, 2, 4)))
    path = WRITERS[kind](tmp_path / "a", columns)
    pairs = column_map(kind, following=True)
    with converted(path, tmp_path / "out", map=pairs, episode_key="traj") as reader:
        assert reader.episodes.episode.tolist() == [7, 3, 20]
        assert reader.episodes.length.tolist() == [3, 2, 4]
        assert set(reader.episodes.end_reason.tolist()) == {EndReason.END_OF_FILE}
        assert {item.key for item in reader.manifest.dropped_keys} == {"dead", "late"}
    with converted(path, tmp_path / "few", map=pairs, episode_key="traj", episodes="20") as reader:
        assert reader.manifest.steps == 4


@each("kind", ["hdf5", "parquet", "csv", "npz", "npy"])
def test_an_episode_key_of_text_is_kept(kind: str, tmp_path: Path) -> None:
    names = np.repeat(np.array(["walk/1", "walk/2", "run, fast"]), (3, 2, 4))
    columns = named(flat(random_episodes((3, 2, 4)), following=True), demo=names)
    path = WRITERS[kind](tmp_path / "a", columns)
    with converted(path, tmp_path / "out", map=column_map(kind, following=True), episode_key="demo", **FLAGS) as reader:
        assert reader.episode_text == [{"demo": "walk/1"}, {"demo": "walk/2"}, {"demo": "run, fast"}]
        assert reader.episodes.episode.tolist() == [0, 1, 2]


@each("kind", WRITERS)
def test_an_episode_key_that_comes_again_is_refused_with_its_rows(kind: str, tmp_path: Path) -> None:
    columns = named(flat(random_episodes((3, 2, 4))), traj=np.repeat([1, 2, 1], (3, 2, 4)))
    path = WRITERS[kind](tmp_path / "a", columns)
    where = ("line 5", "line 7") if kind == "csv" else ("row 3", "row 5")
    message = rf"1 ends before {where[0]}, and is again in {where[1]}"
    assert "sort the table by traj" in refused(path, message, map=column_map(kind), episode_key="traj").hint


def test_a_truth_value_that_is_a_flag_is_zero_or_one(tmp_path: Path) -> None:
    with h5py.File(path := tmp_path / "a.h5", "w") as file:
        file["obs"], file["done"] = np.zeros(3), np.array([0, 2, 1], np.uint8).view(bool)
    message = "'done' has a truth value of 2, expected 0 or 1"
    refused(path, message, CorruptDataError, map=["observation=obs"], ends="done")


def test_flags_and_a_key_both_end_episodes(tmp_path: Path) -> None:
    columns = named(flat(random_episodes((3, 2, 4)), following=True), traj=np.repeat([0, 1], (3, 6)))
    path = write_h5(tmp_path / "a", columns)
    options: dict[str, Any] = {"map": column_map("hdf5", following=True), "episode_key": "traj", **FLAGS}
    with converted(path, tmp_path / "out", **options) as reader:
        assert reader.episodes.length.tolist() == [3, 2, 4]
        assert reader.episode_text == [{"traj": "0"}, {"traj": "1"}, {"traj": "1"}]
        assert any("1 more episodes than traj has values" in note for note in reader.manifest.notes)


@each(
    ("done", "ends", "terminated", "truncated", "note"),
    [
        ("dead", "dead", [1, 1], [0, 0], "counts as termination"),
        ("all", "done", [1, 1, 1], [0, 0, 0], "counts as termination"),
        ("all", "-,done", [0, 0, 0], [1, 1, 1], None),
        ("dead", "-", [0], [1], None),
        ("dead", "dead,late", [1, 0, 1], [0, 1, 0], None),
        ("dead", "late,dead", [0, 1, 0], [1, 0, 1], None),
        ("all", "done,late", [1, 0, 1], [0, 1, 0], "done is set wherever late is"),
        ("all", "dead,done", [1, 0, 1], [0, 1, 0], "done is set wherever dead is"),
        ("dead", "done,late", [1, 0, 1], [0, 1, 0], "episodes end at done and late"),
    ],
)
def test_the_first_of_the_ends_is_termination_and_done_may_mark_every_end(
    done: str, ends: str, terminated: list[int], truncated: list[int], note: str | None, tmp_path: Path
) -> None:
    """`done` is set at all ends, or only at terminations."""
    columns = named(flat(random_episodes((3, 2, 4), ends=("terminal", "timeout", "terminal")), following=True))
    columns["done"] = columns["dead"] | (columns["late"] if done == "all" else False)
    path = write_h5(tmp_path / "a", columns)
    with converted(path, tmp_path / "out", map=column_map("hdf5", following=True), ends=ends) as reader:
        assert reader.episodes.terminated.astype(int).tolist() == terminated
        assert reader.episodes.truncated.astype(int).tolist() == truncated
        stops = reader.episodes.start + reader.episodes.length - 1
        assert column(reader, "next.terminated")[stops, 0].astype(int).tolist() == terminated
        assert column(reader, "next.truncated")[stops, 0].astype(int).tolist() == truncated
        noted = [one for one in reader.manifest.notes if "counts as termination" in one or (note or "?") in one]
        assert bool(noted) == (note is not None)


@pytest.mark.parametrize(("ends", "own"), [("done,late", "terminated"), ("late,is_done", "truncated")])
def test_done_that_marks_some_of_the_other_ends_is_refused(ends: str, own: str, tmp_path: Path) -> None:
    columns = named(flat(random_episodes((3, 2, 4, 2), ends=("timeout", "timeout", "terminal", "timeout"))))
    done = (columns["dead"] | columns["late"]).astype(bool)
    done[4] = False  # the second of three time limits
    path = write_h5(tmp_path / "a", columns | {"done": done, "is_done": done})
    message = r"done is set in 2 of 3 rows with late \(in row 2, not in row 4\)"
    assert f"or else call it {own}" in str(refused(path, message, map=column_map("hdf5"), ends=ends).hint)


@pytest.mark.parametrize("kind", BINARY[:3])
def test_groups_and_vectors_of_several_columns(kind: str, tmp_path: Path) -> None:
    columns: dict[str, Any] = {
        "obs/pos": np.arange(8, dtype="f4").reshape(4, 2), "obs/cam/left": np.arange(16, dtype="u1").reshape(4, 2, 2),
        "v": np.arange(4, dtype="f8"), "w": np.arange(4, dtype="i4"), "after/pos": np.ones((4, 2), "f4"),
        "after/cam/left": np.zeros((4, 2, 2), "u1"), "reward": np.arange(4.0), "end": np.array([0, 0, 0, 1]),
    }  # fmt: skip
    path = WRITERS[kind](tmp_path / "a", columns)
    pairs = ["observation=obs.* next.observation=after/*, action=v,w, info.raw=w"]
    with converted(path, tmp_path / "out", map=[*pairs, "reward=reward"], ends="end") as reader:
        found = columns_of(reader)
        assert np.array_equal(found["observation.pos"], columns["obs/pos"])
        assert np.array_equal(found["next.observation.cam.left"], columns["after/cam/left"])
        assert found["action"].tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
        assert (found["info.raw"].dtype, found["observation.cam.left"].dtype) == (np.dtype("i4"), np.dtype("u1"))
        assert any("w is int32, and float64 in action" in note for note in reader.manifest.notes)
        assert reader.episodes.final.tolist() == [Final.OBSERVED]


def test_structs_of_parquet_are_groups(tmp_path: Path) -> None:
    state = pa.array([{"p": [1.0, 2.0], "q": {"v": 3}}, {"p": [4.0, 5.0], "q": {"v": 6}}])
    table = {"obs": state, "act": pa.array([0, 1], pa.int8()), "done": pa.array([False, True])}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    options = {"map": ["observation=obs.* action=act"], "ends": "done"}
    with converted(tmp_path / "a.parquet", tmp_path / "out", **options) as reader:
        assert column(reader, "observation.p").tolist() == [[1.0, 2.0], [4.0, 5.0]]
        assert column(reader, "observation.q.v").tolist() == [3, 6]
        assert column(reader, "action").dtype == np.int8


@each(
    ("names", "name"),
    [
        ({"a.b": [1.0, 2.0], "a": pa.array([{"b": 7.0}, {"b": 8.0}])}, "a.b"),
        ({"a": pa.array([{"b": 7.0}, {"b": 8.0}]), "a.b": [1.0, 2.0]}, "a.b"),
        ({"a": pa.array([{"b.c": 7.0, "b": {"c": 1.0}}, {"b.c": 8.0, "b": {"c": 2.0}}])}, "a.b.c"),
    ],
)
def test_a_name_of_two_columns_of_parquet_cannot_be_mapped(names: Any, name: str, tmp_path: Path) -> None:
    pq.write_table(pa.table(names | {"act": [0, 1], "done": [False, True]}), path := tmp_path / "a.parquet")
    with converted(path, tmp_path / "out", map=["observation=act"], ends="done") as reader:
        assert column(reader, "observation").tolist() == [0, 1]
    for pattern in (name, "a.*"):
        message = f"'{name}' cannot be mapped: another column has that name"
        refused(path, message, map=[f"observation={pattern}"], ends="-")


def test_a_map_may_be_a_file(tmp_path: Path) -> None:
    columns = named(flat(random_episodes((3, 2)), following=True))
    path = write_h5(tmp_path / "a", columns | {"my act": columns["act"]})
    saved = tmp_path / "map.toml"
    saved.write_text('observation = "obs"\naction = ["my act"]\nreward = "r"\n[next]\nobservation = "obs_after"\n')
    rbtool.convert(path, tmp_path / "one", format="table", map=[str(saved)], **FLAGS)
    pairs = ['action="my act"', "reward=r,observation=obs next.observation=obs_after"]
    given = {"observation": "obs", "action": ["my act"], "reward": ("r",), "next": {"observation": "obs_after"}}
    for same in (pairs, given):
        assert rbtool.convert(path, tmp_path / "one", format="table", map=same, **FLAGS).already_there
    saved.write_text('observation = "obs"\n')
    with pytest.raises(UsageError, match="already exists and is dataset"):
        rbtool.convert(path, tmp_path / "one", format="table", map=[str(saved)], **FLAGS)


def test_a_table_without_rewards_has_none(tmp_path: Path) -> None:
    columns = named(flat(random_episodes((3, 2)), following=True))
    del columns["r"]
    path = write_h5(tmp_path / "a", columns)
    with converted(path, tmp_path / "out", map=["observation=obs,action=act"], **FLAGS) as reader:
        assert ("next", "reward") not in {field.key for field in reader.fields}
    assert rbtool.inspect(tmp_path / "out").steps > 0


@each(
    ("pairs", "note"),
    [
        ("observation=obs", "no action and no reward is mapped: the dataset has none"),
        ("observation=obs action=act", "no reward is mapped: the dataset has none"),
        ("observation=obs reward=r fraction=r", "no action is mapped: the dataset has none"),
        ("observation=obs action.a=act next.reward=r", ""),
    ],
)
def test_what_the_map_has_not_is_noted(pairs: str, note: str, tmp_path: Path) -> None:
    path = write_h5(tmp_path / "a", named(flat(random_episodes((3, 2)))))
    for dry_run in (True, False):
        made = rbtool.convert(path, tmp_path / "out", format="table", map=[pairs], dry_run=dry_run, **FLAGS)
        assert [one for one in made.notes if "is mapped" in one] == [note] * bool(note)


@each("kind", WRITERS)
def test_columns_of_text_are_texts_of_the_steps(kind: str, tmp_path: Path) -> None:
    columns = named(flat(random_episodes((3, 2))))
    words, tasks = ["ä, b", "", "three\nlines", "ö" * 20, "x"], [f"do {row // 3}" for row in range(5)]
    path = WRITERS[kind](tmp_path / "a", columns | {"word": np.array(words), "task": np.array(tasks)})
    pairs = [*column_map(kind), "pixels.word=word language_instruction=task info.word=word"]
    with converted(path, tmp_path / "out", map=pairs, final_step="repeat", **FLAGS) as reader:
        for name, expected in (
            ("language_instruction", tasks), ("info.word", words), ("pixels.word", words),
            ("next.pixels.word", [*words[1:3], words[2], words[4], words[4]]),
        ):  # fmt: skip
            assert texts_of(reader, name) == expected
        assert column(reader, "next.pixels.word").shape[1] == 40
    assert not rbtool.check(tmp_path / "out").findings
    buffer = rbtool.load_dataset(tmp_path / "out", batch_size=5, transform=rbtool.DecodeText())
    assert buffer[:]["language_instruction"] == tasks


@pytest.mark.parametrize("folder", [False, True])
def test_cells_of_csv_stay_text_under_keys_of_text(folder: bool, tmp_path: Path) -> None:
    lines = ["1,007,12,01", "2,12,open,2", "3,0,nan,3", "4,true,,4"]
    path = tmp_path / "a.csv"
    if folder:
        path = tmp_path / "runs"
        path.mkdir()
        (path / "b.csv").write_text("x,task,mix,id\n" + "\n".join(lines[2:]) + "\n")
    ((path / "a.csv") if folder else path).write_text("x,task,mix,id\n" + "\n".join(lines[: 2 if folder else 4]) + "\n")
    pairs = ["observation=x language_instruction=task info.instruction=mix info.id=id"]
    with converted(path, tmp_path / "out", map=pairs, ends="-", final_step="repeat") as reader:
        notes = [one for one in reader.manifest.notes if "loses the leading zeros" in one]
        assert column(reader, "info.id").tolist() == [1, 2, 3, 4]
    assert [one.startswith("id is int64") and "line 2" in one for one in notes] == [True]
    rows = rbtool.load_dataset(tmp_path / "out", batch_size=4, transform=rbtool.DecodeText())[:]
    assert list(rows["language_instruction"]) == ["007", "12", "0", "true"]
    assert list(rows["info", "instruction"]) == ["12", "open", "nan", ""]


def split_files(kind: str, folder: Path, episodes: list[Any], **more: Any) -> dict[str, Any]:
    """Write episodes to a file each, `run_1`, `run_2`, …, `run_10`; return the columns of all."""
    folder.mkdir()
    columns = named(flat(episodes)) | {name: np.array(values) for name, values in more.items()}
    stops = np.cumsum([len(one.rewards) for one in episodes])
    for number, stop in enumerate(stops, 1):
        start = 0 if number == 1 else stops[number - 2]
        WRITERS[kind](folder / f"run_{number}", {name: values[start:stop] for name, values in columns.items()})
    return columns


@pytest.mark.parametrize("given", ["folder", "pattern", "option"])
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_files_of_a_folder_are_one_dataset_with_an_episode_each(kind: str, given: str, tmp_path: Path) -> None:
    lengths = [3, 2, 5, 2, 2, 4, 1, 2, 3, 6, 2]
    words = [f"w{row}" for row in range(sum(lengths))]
    columns = split_files(kind, tmp_path / "runs", random_episodes(lengths), word=words)
    path, options, out = tmp_path / "runs", dict[str, Any](final_step="repeat"), tmp_path / "out"
    if given != "folder":
        WRITERS[kind](tmp_path / "runs" / "other", named(flat(random_episodes((3,)))))
    if given == "pattern":
        path, out = tmp_path / "r*ns" / f"run_*.{kind}", tmp_path / "runs" / "out"
    if given == "option":
        options["files"] = "run_*"
    with converted(path, out, map=[*column_map(kind), "info.word=word"], **options) as reader:
        assert reader.episodes.length.tolist() == lengths
        inside = "runs/" * (given == "pattern")
        assert reader.episode_text == [{"file": f"{inside}run_{number}.{kind}"} for number in range(1, 12)]
        assert column(reader, "observation").tolist() == columns["obs"].tolist()
        assert texts_of(reader, "info.word") == words
        assert "each file is an episode" in reader.manifest.notes
    assert not rbtool.check(out).findings
    options |= {"num_workers": 2}
    pairs = [*column_map(kind), "info.word=word"]
    again = rbtool.convert(path, tmp_path / "two", format="table", map=pairs, **options)
    assert again.content_digest == rbtool.inspect(out).content_digest


@each("kind", ["csv", "parquet"])
@each(
    ("options", "lengths", "note"),
    [
        ({"ends": "-"}, [9], "all rows are one episode"),
        ({"ends": "dead"}, [2, 2, 1, 4], "2 of 4 episodes end where a file does, without a flag"),
        ({"episode_key": "-,key"}, [2, 3, 4], "1 file begins with the key that the file before ends with"),
        ({"episode_key": "-,key", "ends": "dead"}, [2, 3, 4], "episodes end where key changes"),
        ({"episode_key": "file,key"}, [2, 2, 1, 4], "episodes end where key changes, and episodes end where files do"),
        ({"episode_key": "file,key", "ends": "dead"}, [2, 2, 1, 4], "2 of 4 episodes end where a file does or key"),
    ],
)
def test_ends_and_keys_go_over_files(
    kind: str, options: dict[str, Any], lengths: list[int], note: str, tmp_path: Path
) -> None:
    more = {"key": [7, 7, 8, 8, 8, 9, 9, 9, 9], "dead": [0, 1, 0, 0, 1, 0, 0, 0, 0]}
    split_files(kind, tmp_path / "runs", random_episodes([4, 5]), **more)
    with converted(tmp_path / "runs", tmp_path / "out", map=column_map(kind), final_step="repeat", **options) as reader:
        assert reader.episodes.length.tolist() == lengths
        assert any(note in one for one in reader.manifest.notes)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("keys", "numbers"), [([0, 0, 1, 0, 0, 0, 1], [0, 1, 2, 3]), ([5, 5, 6, 7, 7, 7, 8], [5, 6, 7, 8])]
)
def test_each_file_may_count_its_own_episodes(kind: str, keys: list[int], numbers: list[int], tmp_path: Path) -> None:
    split_files(kind, tmp_path / "runs", random_episodes([3, 4]), key=keys)
    options = {"map": column_map(kind), "final_step": "repeat", "episode_key": "file,key"}
    with converted(tmp_path / "runs", tmp_path / "out", **options) as reader:
        assert reader.episodes.length.tolist() == [2, 1, 3, 1]
        assert reader.episodes.episode.tolist() == numbers
        texts = [{"file": f"run_{file}.{kind}", "key": key} for file, key in ((1, "0"), (1, "1"), (2, "0"), (2, "1"))]
        assert reader.episode_text == (texts if numbers[0] == 0 else None)


@each("kind", ["csv", "parquet"])
def test_types_are_those_of_all_files(kind: str, tmp_path: Path) -> None:
    files: list[dict[str, Any]] = [
        {"x": [1, 2], "w": [1, 2]},
        {"x": [0.5, 1.5], "w": np.array([(1 << 63) + 1, 3], np.uint64)},
        {"x": [1, (1 << 53) + 1], "w": [3, 4]},
    ]
    (tmp_path / "runs").mkdir()
    for number, one in enumerate(files):
        WRITERS[kind](tmp_path / "runs" / str(number), {name: np.array(values) for name, values in one.items()})
    pairs = ["observation=x", "info.w=w"][: 1 if kind == "parquet" else 2]
    with converted(tmp_path / "runs", tmp_path / "out", map=pairs, final_step="repeat") as reader:
        assert column(reader, "observation").tolist() == [1, 2, 0.5, 1.5, 1, float(1 << 53)]
        if kind == "csv":
            assert column(reader, "info.w").tolist() == [1, 2, (1 << 63) + 1, 3, 3, 4]
        place = "2.csv, line 3" if kind == "csv" else "2.parquet, row 1"
        assert [one.endswith(place) for one in reader.manifest.notes if "float64" in one] == [True]


ROW = "x,y\n1,2\n"


@each(
    ("files", "options", "error", "message"),
    [
        ({"a.csv": ROW, "b.csv": "x\n1\n"}, {}, FormatError, "'y' cannot be mapped: b.csv has no such column"),
        ({"a.csv": ROW, "b.csv": "x,y\n1,z\n"}, {}, FormatError, "b.csv: column 'y' has 'z' in line 2"),
        ({"a.csv": "x,y\n1,u\n", "b.csv": ROW}, {}, FormatError, "a.csv: column 'y' has 'u' in line 2"),
        ({"a.csv": ROW, "b.csv": "x,y\n1,\n"}, {}, FormatError, "b.csv: column 'y' is empty in line 2"),
        ({"a.csv": ROW, "b.csv": "x,y\n1,true\n"}, {}, FormatError, "it is int64 in a.csv and bool in b.csv"),
        ({"a.csv": ROW, "b.csv": "x,y\n"}, {}, FormatError, "b.csv has no steps"),
        ({"a.csv": ROW, "b.csv": "x,y\n1,2,3\n"}, {}, CorruptDataError, "b.csv: line 2 has 3 cells"),
        ({"a.csv": ROW}, {"files": "*.txt"}, UsageError, "matches no file"),
        ({"a.csv": ROW}, {"files": "../*.csv"}, UsageError, "expected a pattern of files in"),
        (
            {"a.csv": ROW, "b.csv": ROW}, {"episode_key": "y"}, FormatError,
            "1 file begins with the y that the file before ends with",
        ),
        ({"a.csv": f"{ROW}2,3\n", "b.csv": ROW}, {"episode_key": "y"}, FormatError, "occur again after"),
        (
            {"a.csv": f"{ROW}2,3\n3,2\n", "b.csv": ROW}, {"episode_key": "file,y"}, FormatError,
            "'?2'? ends before a.csv, line 3, and is again in a.csv, line 4",
        ),
        (
            {"a.csv": "x,y\n1,0\n", "b.csv": "x,y\n2,0\n3,1\n"}, {"episode_key": "y"}, FormatError,
            "the first with 0 in b.csv",
        ),
        ({"a.csv": ROW}, {"episode_key": "each,y"}, UsageError, "expected a column, file,COLUMN or -,COLUMN"),
        ({"a.csv": ROW, "b.parquet": "PAR1"}, {}, FormatError, "has CSV files and Parquet files: a.csv, b.parq"),
        ({"a.txt": ROW}, {}, FormatError, "is a folder without npy, CSV or Parquet files"),
    ],
)  # fmt: skip
def test_files_that_are_no_table_together_are_refused(
    files: dict[str, str], options: dict[str, Any], error: type[RbtoolError], message: str, tmp_path: Path
) -> None:
    (tmp_path / "runs").mkdir()
    for name, text in files.items():
        (tmp_path / "runs" / name).write_text(text)
    refused(tmp_path / "runs", message, error, map=["observation=x", "info.y=y"], **options)


def test_the_columns_of_a_folder_are_proposed(tmp_path: Path) -> None:
    split_files("csv", tmp_path / "runs", random_episodes([2, 3]), task=["do it"] * 5)
    found = rbtool.inspect(tmp_path / "runs")
    assert (found.kind, found.file, found.format) == ("columns", "folder of CSV or Parquet files", "table")
    assert "language_instruction=task" in found.options["map"]
    assert found.bytes == sum(one.stat().st_size for one in (tmp_path / "runs").iterdir())
    one = rbtool.inspect(tmp_path / "runs", files="run_1.csv")
    assert (one.options["files"], {column.rows for column in one.columns}) == ("run_1.csv", {2})


def write_strings(path: Path, columns: dict[str, Any]) -> Path:
    """HDF5 whose column `word` has strings of any length."""
    word = columns.pop("word").astype(h5py.string_dtype())
    with h5py.File(path := write_h5(path, columns), "a") as file:
        file["word"] = word
    return path


@each("write", [WRITERS["npz"], write_strings])
@each(("cell", "message"), [(b"\xff", "'word' is not UTF-8 text in row 3"), (b"x" * 65_537, "65,537 bytes in row 3")])
def test_texts_that_cannot_be_kept_are_named_with_their_row(
    cell: bytes, message: str, write: Callable[..., Path], tmp_path: Path
) -> None:
    columns = named(flat(random_episodes((3, 2)))) | {"word": np.array([b"a", b"b", b"c", cell, b"e"])}
    path = write(tmp_path / "a", columns)
    refused(path, message, map=["observation=obs word=word"], **FLAGS)


REFUSED: list[tuple[dict[str, Any], type[RbtoolError], str, str]] = [
    ({}, UsageError, "--map is missing, which states the columns", "columns are act, dead, few, late"),
    ({"map": ["observation=obz"]}, UsageError, "has no column 'obz'; did you mean 'obs'", "columns are act"),
    ({"map": ["observation=COLUMN"]}, UsageError, "COLUMN is a placeholder", "columns are act, dead, few"),
    ({"map": {"observation": 3}}, UsageError, "map: observation is 3, expected a column or a list", ""),
    ({"map": {1: "obs"}}, UsageError, "expected columns by key", ""),
    ({"map": ["observation=obs"], "ends": "TERMINATED,TRUNCATED"}, UsageError, "TERMINATED is a placeholder", "dead"),
    ({"map": ["action=act"]}, UsageError, "--map has no observation", "observation=COLUMN"),
    ({"map": ["observation"]}, UsageError, "is not of the form KEY=COLUMN", "pairs like"),
    ({"map": ["observation=obs observation=act"]}, UsageError, "'observation' twice", ""),
    ({"map": ["observation=obs observation.x=act"]}, UsageError, "one of which contains the other", ""),
    ({"map": ["observation=obs episode=r"]}, UsageError, "which rbtool makes", "--episode-key"),
    ({"map": ["observation=obs done=dead"]}, UsageError, "which rbtool makes", "--ends"),
    ({"map": ["observation=obs actions=act"]}, UsageError, "'actions'; did you mean 'action'", "write action=act"),
    ({"map": ["observation=obs Reward=r"]}, UsageError, "did you mean 'reward'", "write reward=r"),
    ({"map": ["observation=obs rewrd=r"]}, UsageError, "did you mean 'reward'", "info.rewrd=r"),
    ({"map": ["obs.x=obs"]}, UsageError, "'obs.x'; did you mean 'observation.x'", ""),
    ({"map": ["observation=obs next_obs=obs"]}, UsageError, "did you mean 'next.observation'", ""),
    ({"map": ["observation=obs Next.observation=obs"]}, UsageError, "did you mean 'next.observation'", ""),
    ({"map": ["observation=obs next.rewards=r"]}, UsageError, "did you mean 'next.reward'", ""),
    ({"map": ["observation=obs dones=dead"]}, UsageError, "but flags cannot be mapped", "--ends"),
    ({"map": ["observation=obs next.done=dead"]}, UsageError, "which rbtool makes", "--ends"),
    ({"map": ["observation=obs next.observation=act"]}, FormatError, "observation is float32", ""),
    ({"map": ["observation=obs next.state=act"]}, UsageError, "next.state and no state", ""),
    ({"map": ["observation=obs reward=act"]}, FormatError, "the reward must be one number per row", ""),
    ({"map": ["observation=obs,names"]}, FormatError, "'names' is text, and cannot be part of the vector", ""),
    ({"map": ["observation=obs reward=names"]}, FormatError, "'names' is text, and cannot be the reward", ""),
    ({"map": ["observation=obs x=names x_length=r"]}, UsageError, "'x_length', which is reserved for the", "another"),
    ({"map": ["observation=obs"], "ends": "names"}, FormatError, "'names' cannot be mapped: it is text", ""),
    ({"map": ["observation=obs action=few"]}, FormatError, "different numbers of rows .few 4, obs 5", ""),
    ({"map": ["observation=obs"], "ends": "deed"}, UsageError, "no column 'deed'; did you mean 'dead'", "columns"),
    ({"map": ["observation=obs"], "ends": "a,b,c"}, UsageError, "expected one or two columns", "write -"),
    ({"map": ["observation=obs"], "ends": "dead,dead"}, UsageError, "'dead' twice", ""),
    ({"map": ["observation=obs"], "ends": "r"}, FormatError, "r is .* in row 0, and a flag is 0 or 1", "episode-key"),
    ({"map": ["observation=obs"], "ends": "obs"}, FormatError, "a flag is one value", ""),
    ({"map": ["observation=obs"], "episode_key": "act"}, FormatError, "a key is one value", ""),
    ({"map": ["observation=obs"], "horizon": 3}, UsageError, "no option --horizon", ""),
]


@each(("options", "error", "message", "hint"), REFUSED)
def test_what_makes_no_sense_is_refused(
    options: dict[str, Any], error: type[RbtoolError], message: str, hint: str, tmp_path: Path
) -> None:
    columns = named(flat(random_episodes((3, 2))), names=np.array(list("abcde")), few=np.arange(4))
    path = write_h5(tmp_path / "a", columns)
    given = {"ends": "dead,late", **options} if "episode_key" not in options else options
    assert hint in refused(path, message, error, **given).hint


def test_where_episodes_end_has_to_be_stated(tmp_path: Path) -> None:
    path = write_h5(tmp_path / "a", named(flat(random_episodes((3, 2)))))
    message = "no option states where episodes end"
    assert "--ends -" in refused(path, message, UsageError, map=column_map("hdf5")).hint


@each(
    ("numbers", "message"), [((0, 2), "numbered from 0 to 2, and obs_1"), ((5, 6), "numbered from 5 to 6, and obs_0")]
)
def test_numbered_columns_have_no_gaps(numbers: tuple[int, ...], message: str, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a", {f"obs_{number}": np.arange(3) for number in numbers})
    refused(path, message, UsageError, map=["observation=obs_*"], ends="-")


def test_numbered_columns_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    columns = {f"o{number}": np.array([number, 100 + number]) for number in (10, 2, 1, 0, 3, 4, 5, 6, 7, 8, 9)}
    with converted(write_csv(tmp_path / "a", columns), tmp_path / "out", map=["observation=o*"], ends="-") as reader:
        assert column(reader, "observation").tolist() == [list(range(11))]


def test_lists_of_different_lengths_and_nulls_are_refused(tmp_path: Path) -> None:
    end = np.array([False, False, True])
    for values, message in (([[1.0, 2.0], [3.0], [4.0, 5.0]], "lists of 2 and of 1"), ([1.0, None, 2.0], "missing")):
        pq.write_table(pa.table({"x": values, "end": end}), tmp_path / "a.parquet")
        refused(tmp_path / "a.parquet", message, map=["observation=x"], ends="end")


def test_links_out_of_an_hdf5_file_are_refused(tmp_path: Path) -> None:
    columns = named(flat(random_episodes((3, 2))))
    write_h5(tmp_path / "other", columns)
    path = write_h5(tmp_path / "a", columns)
    with h5py.File(path, "a") as file:
        file["more"] = h5py.ExternalLink("other.h5", "/obs")
    refused(path, "link to another name or to another file", CorruptDataError, map=column_map("hdf5"), **FLAGS)


def test_pickles_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, obs=np.arange(3.0), info=np.array([{}, {}, {}], object), end=np.array([0, 0, 1]))
    result = rbtool.convert(path, tmp_path / "out", format="table", map=["observation=obs"], ends="end")
    assert [item["key"] for item in result.dropped_keys] == ["info"]
    message, pairs = "column 'info' is a pickle of Python objects", ["observation=obs action=info"]
    assert "--trust-pickle" in str(refused(path, message, UsageError, map=pairs, ends="end").hint)


def test_whole_numbers_that_floats_do_not_hold_are_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a", {"x": np.array([1, 2**53 + 1]), "y": np.array([0.5, 1.5])})
    refused(path, "whole numbers above 2", map=["observation=x,y"], ends="-")
