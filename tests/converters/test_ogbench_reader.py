"""`OgbenchReader`: the contract of readers, where trajectories end, what a file holds, and what is refused."""

from __future__ import annotations

import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import each
from conversions import WrittenReaderTests, column, columns_of, refused, with_options
from hypothesis import given
from hypothesis import strategies as st
from table_files import compact, plain_ogbench, random_ogbench, write_ogbench

import rbtool
from rbtool.converters.ogbench.reader import OgbenchReader
from rbtool.core.errors import CorruptDataError, RbtoolError, UsageError
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.ted.episodes import EndReason, Final

DATA = Path(__file__).parents[1] / "data"
NAME = "hoppermaze-medium-navigate-v0"
LENGTHS = (5, 1, 7, 4)


class TestReader(WrittenReaderTests):
    """A single file."""

    kind, piece_bytes, has_rewards = OgbenchReader, 300, False

    def write(self, folder: Path) -> Path:
        return write_ogbench(folder / "a-v0.npz", random_ogbench(LENGTHS, unfinished=True))


class TestReaderOfBothFiles(TestReader):
    """A folder with a file and its validation file, as a download is."""

    def write(self, folder: Path) -> Path:
        super().write(folder)
        return write_ogbench(folder / "a-v0-val.npz", random_ogbench((3, 2), seed=1)).parent


def assert_equal_rows(path: Path, expected: list[dict[str, Any]]) -> None:
    with TedReader(path) as reader:
        found, table = columns_of(reader), reader.episodes
    assert len(found["action"]) == len(expected)
    for at, row in enumerate(expected):
        for name in ("observation", "next.observation", "action", "info.qpos", "next.info.qpos"):
            assert found[name][at].tobytes() == row[name].tobytes(), (name, at)
        assert found["episode"][at] == row["episode"]
        assert found["next.truncated"][at, 0] == row["last"]
        assert not found["next.terminated"][at, 0]
    assert "next.reward" not in found
    ends = [row for row in expected if row["last"]]
    assert table.episode.tolist() == [row["episode"] for row in ends]
    reasons = [EndReason.TRUNCATED if row["flagged"] else EndReason.END_OF_FILE for row in ends]
    assert table.end_reason.tolist() == reasons
    assert set(table.final.tolist()) == {Final.OBSERVED}


def test_the_rows_of_a_file_are_those_of_a_plain_reading(tmp_path: Path) -> None:
    with np.load(DATA / "ogbench" / f"{NAME}.npz") as file:
        columns = dict(file)
    result = rbtool.convert(DATA / "ogbench" / f"{NAME}.npz", tmp_path / "out")
    assert_equal_rows(result.path, plain_ogbench(columns))
    assert (result.steps, result.episodes, result.boundary["truncated"]) == (98, 4, 4)
    assert result.renamed_keys["qpos"] == "info.qpos"
    assert any(f"{NAME}-val.npz is not read" in note for note in result.notes)


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any),
    unfinished=st.booleans(), visual=st.booleans(), packed=st.booleans(), flags=st.sampled_from(["f4", "?", "i8"]),
    piece=st.sampled_from([1, 300, 1 << 20]), seed=st.integers(0, 9), compacted=st.booleans(),
)  # fmt: skip
def test_random_trajectories_come_back(
    lengths: list[int], unfinished: bool, visual: bool, packed: bool, flags: str, piece: int, seed: int, compacted: bool
) -> None:
    columns = random_ogbench(lengths, unfinished=unfinished, visual=visual, flags=flags, seed=seed)
    expected = plain_ogbench(columns)
    with tempfile.TemporaryDirectory() as folder:
        file = write_ogbench(Path(folder) / "a-v0.npz", compact(columns) if compacted else columns, packed=packed)
        assert_equal_rows(rbtool.convert(file, Path(folder) / "out").path, expected)
        with with_options(OgbenchReader, piece)(file) as reader:
            facts, pieces = reader.facts(), list(reader.pieces())
        assert facts.steps == sum(map(len, pieces)) == len(expected)
        after = b"".join(row.tobytes() for one in pieces for row in one.rows_after(("observation",)))
        assert after == b"".join(row["next.observation"].tobytes() for row in expected)


def test_both_files_are_one_dataset_with_splits(tmp_path: Path) -> None:
    train, val = random_ogbench((3, 5)), random_ogbench((2, 4, 1), seed=1)
    folder = tmp_path / "both"
    write_ogbench(folder / "a-v0.npz", train)
    write_ogbench(folder / "a-v0-val.npz", val)
    result = rbtool.convert(folder, tmp_path / "out")
    assert_equal_rows(result.path, plain_ogbench(train) + plain_ogbench(val, 2))
    assert "episodes 0:2 are a-v0.npz (train) and 2:5 are a-v0-val.npz (val)" in result.notes
    with TedReader(result.path) as reader:
        assert [text["split"] for text in reader.episode_text or ()] == ["train"] * 2 + ["val"] * 3
    chosen = rbtool.convert(folder, tmp_path / "val", filter_key="val")
    assert_equal_rows(chosen.path, plain_ogbench(val, 2))
    assert "episodes 2:5 are a-v0-val.npz (val)" in chosen.notes
    assert not any("a-v0.npz" in note or "(train)" in note for note in chosen.notes)
    assert_equal_rows(rbtool.convert(folder, tmp_path / "last", episodes="3:").path, plain_ogbench(val, 2)[2:])
    refused(folder, r"the splits of .* are train, val", UsageError, filter_key="test")
    refused(folder / "a-v0.npz", "one file without splits", UsageError, filter_key="train")


def test_rewards_are_absent_or_zero(tmp_path: Path) -> None:
    file = write_ogbench(tmp_path / "a-v0.npz", random_ogbench((3, 5)))
    absent, zero = rbtool.convert(file, tmp_path / "absent"), rbtool.convert(file, tmp_path / "zero", reward="zero")
    assert any("there are no rewards in the file" in note for note in absent.notes)
    assert any("rewards are 0, as --reward zero says" in note for note in zero.notes)
    with TedReader(zero.path) as reader:
        rewards = column(reader, "next.reward")
    assert (rewards.dtype, rewards.shape, rewards.any()) == (np.float32, (8, 1), False)
    refused(file, "expected zero", UsageError, reward="one")


def test_the_compact_form_is_read_with_its_rewards(tmp_path: Path) -> None:
    columns = random_ogbench((3, 5), unfinished=True)
    rewards = np.arange(10, dtype=np.float32)[:, None]
    file = write_ogbench(tmp_path / "a-v0.npz", compact(columns) | {"rewards": rewards, "masks": np.ones(10, "f4")})
    result = rbtool.convert(file, tmp_path / "out")
    assert (result.episodes, result.boundary["truncated"], result.boundary["end_of_file"]) == (2, 1, 1)
    assert any("episodes end where valids is 0" in note for note in result.notes)
    with TedReader(result.path) as reader:
        assert column(reader, "next.reward").tolist() == [[0], [1], [2], [4], [5], [6], [7], [8]]
        assert not column(reader, "next.terminated").any()
        assert column(reader, "info.masks").all()
    shown = rbtool.inspect(file)
    assert shown.returns is not None
    assert (shown.returns.min, shown.returns.max) == (3, 30)
    refused(file, "has rewards of its own", UsageError, reward="zero")


@each(
    ("change", "sentence"),
    [
        (lambda c: c["terminals"].__setitem__(2, 0), "terminals and valids contradict each other in row 2"),
        (lambda c: c["terminals"].__setitem__(0, 1), "terminals and valids contradict each other in row 0"),
        (lambda c: c["valids"].__setitem__(3, 1), "terminals and valids contradict each other in row 2"),
        (lambda c: c["valids"].__setitem__(3, 0.5), "valids is 0.5 in row 3, expected 0 or 1"),
        (lambda c: c.update(valids=c["valids"][:-1]), "different numbers of rows"),
        (lambda c: c.update(valids=np.array(["1"] * 10)), "'valids' cannot be read as rows"),
        (lambda c: c.update(rewards=np.zeros((10, 2))), r"'rewards' has rows of shape \[2\]"),
    ],
)
def test_a_compact_form_that_contradicts_itself_is_refused(tmp_path: Path, change: Any, sentence: str) -> None:
    columns = compact(random_ogbench((3, 5)))
    change(columns)
    refused(write_ogbench(tmp_path / "a-v0.npz", columns), sentence)


def test_data_without_rewards_pass_through_the_house(tmp_path: Path) -> None:
    file = write_ogbench(tmp_path / "a-v0.npz", random_ogbench((30, 50)))
    path = rbtool.convert(file, tmp_path / "out").path
    for place in (file, path):
        checked = rbtool.check(place)
        assert (checked.errors, [finding.message for finding in checked.findings]) == (
            0, ["there are no rewards: no field is 'next.reward'"]
        )  # fmt: skip
        shown = rbtool.inspect(place, episode=1, head=1)
        assert shown.returns is None
        assert shown.episode is not None
        assert shown.episode.total_reward is None
    assert "no return: there is no field next.reward" in rbtool.inspect(path).notes
    assert ("observation",) in {entry.key for entry in rbtool.stats(path).fields}
    assert "next.reward" not in {entry.key for entry in rbtool.sample(path, n=8, seed=0).fields}
    buffer = rbtool.load_dataset(path, batch_size=8)
    assert ("next", "reward") not in buffer.sample().keys(include_nested=True)
    with pytest.raises(UsageError, match="names return, but no episode has one"):
        rbtool.preprocess(path, None, tmp_path / "none", operations={"filter": ["return > 0"]}, num_workers=0)
    chosen = rbtool.preprocess(path, None, tmp_path / "long", operations={"filter": ["length > 30"]}, num_workers=0)
    assert chosen.steps == 50
    packed = rbtool.convert(file, tmp_path / "packed", layout="packed")
    assert rbtool.check(packed.path).errors == 0


def test_rows_that_are_no_steps_and_the_unfinished_tail_are_named(tmp_path: Path) -> None:
    columns = random_ogbench((3, 0, 4, 2), unfinished=True)
    result = rbtool.convert(write_ogbench(tmp_path / "a-v0.npz", columns), tmp_path / "out")
    assert (result.episodes, result.steps, result.boundary["end_of_file"]) == (3, 9, 1)
    assert "episode 1 of a-v0.npz is left out: one row, which is not a step" in result.notes
    assert any("the last 3 rows of a-v0.npz end without a mark" in note for note in result.notes)
    refused(write_ogbench(tmp_path / "b-v0.npz", random_ogbench((0, 0))), "has no steps")


def test_every_other_column_with_a_row_is_a_state_and_the_rest_is_named(tmp_path: Path) -> None:
    columns: dict[str, Any] = random_ogbench((3, 2))
    columns |= {"button_states": np.arange(7), "extra/touch": np.arange(14.0).reshape(7, 2), "short": np.arange(3)}
    columns |= {"one": np.float32(1), "names": np.array(["a"] * 7), "objects": np.array([None] * 7)}
    result = rbtool.convert(write_ogbench(tmp_path / "a-v0.npz", columns), tmp_path / "out")
    with TedReader(result.path) as reader:
        assert column(reader, "info.button_states").tolist() == [0, 1, 2, 4, 5]
        assert column(reader, "next.info.button_states").tolist() == [1, 2, 3, 5, 6]
        assert column(reader, "info.extra.touch").shape == (5, 2)
    assert {entry["key"]: entry["why"].partition(";")[0] for entry in result.dropped_keys} == {
        "short": "it has 3 rows, but the observations have 7", "one": "it is a single value",
        "names": "element type <U1 cannot be stored",
        "objects": "it is a pickle of Python objects, which --trust-pickle reads",
    }  # fmt: skip


@each(
    ("change", "sentence"),
    [
        (lambda c: c.update(actions=c["actions"][:-1]), r"different numbers of rows \(observations 6, actions 5"),
        (lambda c: c.update(terminals=c["terminals"] * 2), "terminals is 2.0 in row 5, expected 0 or 1"),
        (lambda c: c.update(terminals=np.zeros((6, 2))), r"'terminals' has rows of shape \[2\]"),
        (lambda c: c.update(actions=np.array(["a"] * 6)), "'actions' cannot be read as rows"),
        (lambda c: c.update(observations=np.float32(1)), "'observations' cannot be read as rows: it is a single value"),
        (lambda c: c.update({name: values[:0] for name, values in c.items()}), "has no steps"),
    ],
)
def test_columns_that_contradict_each_other_are_refused(tmp_path: Path, change: Any, sentence: str) -> None:
    columns = random_ogbench((5,))
    change(columns)
    refused(write_ogbench(tmp_path / "a-v0.npz", columns), sentence)


@each(
    ("changed", "sentence"),
    [
        ({"terminals": None}, "has no 'terminals'"), ({"rewards": np.zeros(6)}, "is not in OGBench's layout"),
        ({"next_observations": np.zeros((6, 3))}, "the following row is the next observation"),
    ],
)  # fmt: skip
def test_another_layout_is_not_recognised_and_refused_by_name(
    changed: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    columns = {name: values for name, values in (random_ogbench((5,)) | changed).items() if values is not None}
    file = write_ogbench(tmp_path / "a-v0.npz", columns)
    assert not OgbenchReader.recognises(file)
    refused(file, sentence, format="ogbench")


def test_files_with_other_columns_are_no_pair(tmp_path: Path) -> None:
    write_ogbench(tmp_path / "in" / "a-v0.npz", random_ogbench((3,)))
    write_ogbench(tmp_path / "in" / "a-v0-val.npz", {**random_ogbench((3,)), "actions": np.zeros((4, 5))})
    refused(tmp_path / "in", r"a-v0-val.npz and a-v0.npz have different columns: .* actions? float64 \[5\]")


@each("share", [0.1, 0.5, 0.99])
def test_a_cut_file_is_named(tmp_path: Path, share: float) -> None:
    file = write_ogbench(tmp_path / "a-v0.npz", random_ogbench((300, 300)))
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])
    assert OgbenchReader.recognises(file)
    refused(file, "it was cut", CorruptDataError)


def test_memory_is_that_of_pieces(tmp_path: Path) -> None:
    """A visual file of 60 MB in pieces of 1 MB."""
    rows = 20_000
    columns = random_ogbench((rows - 1,))
    columns["observations"] = np.broadcast_to(np.arange(rows, dtype=np.uint8)[:, None, None], (rows, 64, 48)).copy()
    file = write_ogbench(tmp_path / "a-v0.npz", columns)
    del columns
    with with_options(OgbenchReader, 1 << 20)(file) as reader:
        tracemalloc.start()
        try:
            steps = sum(len(piece) for piece in reader.pieces())
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert (steps, peak < 12 << 20) == (rows - 1, True), peak


def test_a_folder_of_several_datasets_is_not_one(tmp_path: Path) -> None:
    for name in ("a-v0", "a-v0-val", "b-v0"):
        write_ogbench(tmp_path / "in" / f"{name}.npz", random_ogbench((3,)))
    assert not OgbenchReader.recognises(tmp_path / "in")
    refused(tmp_path / "in", "", RbtoolError)


ROWS = 7
TRUST = {"trust_pickle": True}


def objects(rows: Any) -> Any:
    """The rows as an array of Python objects: each is an array, or a number."""
    found = np.empty(len(rows), object)
    for number, row in enumerate(rows):
        found[number] = row
    return found


def test_the_rows_are_those_of_a_file_without_pickles(tmp_path: Path) -> None:
    columns: dict[str, Any] = random_ogbench((3, 2)) | {"qpos": np.arange(14.0).reshape(ROWS, 2)}
    plain = rbtool.convert(write_ogbench(tmp_path / "a-v0.npz", columns), tmp_path / "plain")
    pickled = write_ogbench(tmp_path / "b-v0.npz", {name: objects(rows) for name, rows in columns.items()})
    found = rbtool.convert(pickled, tmp_path / "out", **TRUST)
    assert found.dropped_keys == ()
    assert found.content_digest == plain.content_digest


@each("name", ["observations", "actions", "terminals"])
def test_without_trust_a_column_that_is_needed_is_refused(name: str, tmp_path: Path) -> None:
    columns = random_ogbench((3, 2))
    path = write_ogbench(tmp_path / "a-v0.npz", columns | {name: objects(columns[name])})
    error = refused(path, f"'{name}' is a pickle of Python objects, which can run anything", UsageError)
    assert "add --trust-pickle" in str(error.hint)
    assert rbtool.convert(path, tmp_path / "out", trust_pickle=True).steps == 5


def test_what_has_no_rows_of_one_type_is_named(tmp_path: Path) -> None:
    columns = random_ogbench((3, 2))
    others = {"none": objects([None] * ROWS), "text": objects(["a"] * ROWS), "flags": objects([True] * ROWS)}
    result = rbtool.convert(write_ogbench(tmp_path / "a-v0.npz", columns | others), tmp_path / "out", **TRUST)
    with TedReader(result.path) as reader:
        assert column(reader, "info.flags").dtype == bool
    dropped = {one["key"]: one["why"] for one in result.dropped_keys}
    assert dropped.keys() == {"none", "text"}
    assert dropped["none"].startswith("it has elements of type NoneType")
    assert dropped["text"] == "it is text"
    ragged = objects([np.zeros(1), *[np.zeros(2)] * (ROWS - 1)])
    path = write_ogbench(tmp_path / "b-v0.npz", columns | {"actions": ragged})
    refused(path, "'actions' cannot be read as rows: it has elements of different", **TRUST)
