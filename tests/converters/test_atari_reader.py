"""`AtariReader`: the contract of readers, rows as a plain reading has them, and checkpoints joined and cut."""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import POINTER
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_files import ATARI_NAMES, Rows, load_gzip, random_rows, steps_of, write_checkpoint, write_rings, write_run

import rbtool
from rbtool.converters.atari.reader import AtariReader
from rbtool.core.errors import CorruptDataError, FormatError
from rbtool.core.format.contracts import StepReader
from rbtool.core.format.converter import Reader
from rbtool.core.open_steps import open_steps
from rbtool.core.ted.episodes import Final
from rbtool.core.testing.readers import ReaderTests

DATA = Path(__file__).parents[1] / "data" / "atari"


def small(path: Path) -> AtariReader:
    return type("Small", (AtariReader,), {"piece_bytes": 200})(path)


class _Contract(ReaderTests):
    @pytest.fixture(autouse=True)
    def made(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.folder = self.write(tmp_path_factory.mktemp("atari"))

    def write(self, folder: Path) -> Path:
        return write_run(folder, random_rows((5, 1, 7), tail=4), (3, 9))

    def reader(self) -> type[Reader]:
        return AtariReader

    def source(self) -> Path:
        return self.folder

    def with_small_pieces(self) -> Reader:
        return small(self.source())


class TestReader(_Contract):
    """Checkpoints cut inside episodes."""


class TestReaderOfRings(_Contract):
    """Checkpoints of a ring with blank rows, as Dopamine writes them."""

    def write(self, folder: Path) -> Path:
        return write_rings(folder, random_rows((9, 4, 17), tail=14, blanks=3), 10)


def assert_equal_steps(reader: StepReader, expected: list[dict[str, Any]]) -> None:
    assert reader.manifest.steps == len(expected)
    columns = {field.name: reader.read(field.key, 0, len(expected)) for field in reader.fields}
    numbers = np.unique([row["episode"] for row in expected], return_inverse=True)[1]
    for at, row in enumerate(expected):
        for name in ("observation", "action", "next.observation"):
            assert columns[name][at].tobytes() == row[name].tobytes(), (name, at)
        for name in ("next.reward", "next.terminated", "next.truncated"):
            assert columns[name][at, 0] == row[name], (name, at)
        assert columns["next.done"][at, 0] == (row["next.terminated"] or row["next.truncated"])
    places = np.repeat(np.arange(len(reader.episodes)), reader.episodes.length)
    assert places.tolist() == numbers.tolist()


def convert(source: Path, folder: Path, **options: Any) -> tuple[Any, StepReader]:
    result = rbtool.convert(source, folder / "out", **options)
    return result, open_steps(result.path)


def test_the_rows_of_the_real_frames_are_those_of_a_plain_reading(tmp_path: Path) -> None:
    logs = DATA / "Pong" / "1" / "replay_logs"
    rows = Rows(
        *(np.concatenate([load_gzip(logs / f"$store$_{name}_ckpt.{k}.gz") for k in (0, 1)]) for name in ATARI_NAMES)
    )
    result, reader = convert(DATA / "Pong" / "1", tmp_path)
    with reader:
        assert_equal_steps(reader, steps_of(rows))
        assert {field.name: (field.dtype, field.shape) for field in reader.fields}["observation"] == ("uint8", (84, 84))
        finals = reader.episodes.final.tolist()
    assert (result.layout, result.request["id"], result.notes) == ("packed", "Pong/1", ())
    assert finals == [Final.REPEATED] * (len(finals) - 1) + [Final.DROPPED]
    assert rbtool.check(DATA / "Pong" / "1").errors == 0


LENGTHS = st.lists(st.integers(1, 7), min_size=0, max_size=5)


@settings(max_examples=25)
@given(
    lengths=LENGTHS, tail=st.integers(0, 4), stops=st.lists(st.integers(0, 30), max_size=4),
    layout=st.sampled_from(["ted", "packed"]), piece=st.sampled_from([1, 200, 1 << 20]), seed=st.integers(0, 9),
)  # fmt: skip
def test_runs_cut_anywhere_come_back(
    lengths: list[int], tail: int, stops: list[int], layout: str, piece: int, seed: int
) -> None:
    """Ragged checkpoints, empty ones among them, are joined."""
    rows = random_rows([*lengths, 2], tail=tail, seed=seed)
    with tempfile.TemporaryDirectory() as made:
        folder = write_run(Path(made) / "in", rows, sorted(min(stop, len(rows)) for stop in stops))
        _, reader = convert(folder, Path(made), layout=layout)
        with reader:
            assert_equal_steps(reader, steps_of(rows))
        with type("Pieces", (AtariReader,), {"piece_bytes": piece})(folder) as raw:
            frames = [frame.tobytes() for part in raw.pieces() for frame in part.rows_before(("observation",))]
        assert frames == [row["observation"].tobytes() for row in steps_of(rows)]


@settings(max_examples=20)
@given(
    lengths=LENGTHS, tail=st.integers(1, 30), capacity=st.integers(7, 12), blanks=st.sampled_from([0, 3]),
    seed=st.integers(0, 9),
)  # fmt: skip
def test_rings_as_dopamine_logs_them_come_back(
    lengths: list[int], tail: int, capacity: int, blanks: int, seed: int
) -> None:
    """The oldest row, in the last slot, comes after the checkpoint before; the blank rows are not steps."""
    rows = random_rows([6, *lengths], tail=tail, seed=seed, blanks=blanks)
    whole = (len(rows) + 1) // capacity * capacity - 1
    if whole < 7:
        return
    logged = rows.part(0, whole)
    with tempfile.TemporaryDirectory() as made:
        folder = write_rings(Path(made) / "in", rows, capacity)
        result, reader = convert(folder, Path(made))
        with reader:
            assert_equal_steps(reader, without_blanks(logged, blanks))
        assert any("blank rows" in note for note in result.notes) == bool(blanks)


def without_blanks(rows: Rows, blanks: int) -> list[dict[str, Any]]:
    """Read the steps, and leave out the blank rows after each reset."""
    if not blanks:
        return steps_of(rows)
    keep, since = np.ones(len(rows), bool), 0
    for at in range(len(rows)):
        keep[at] = since >= blanks
        since = 0 if rows.terminal[at] else since + 1
    return steps_of(Rows(*(getattr(rows, name)[keep] for name in ATARI_NAMES)))


def test_checkpoints_that_do_not_follow_are_cut(tmp_path: Path) -> None:
    rows = random_rows((4, 6), tail=5)
    logs = tmp_path / "in" / "replay_logs"
    write_checkpoint(logs, 0, rows.part(0, 7), 7)
    write_checkpoint(logs, 1, rows.part(7, 15), 20)
    result, reader = convert(tmp_path / "in", tmp_path)
    with reader:
        assert_equal_steps(reader, steps_of(rows, cuts=(7,)))
    assert result.notes == (
        "checkpoint 1 does not follow checkpoint 0 and is not joined to it: add_count is 7, then 20 with 8 rows",
        "1 episode begins after a cut, in the middle of a game",
    )


def test_without_add_count_nothing_is_joined(tmp_path: Path) -> None:
    rows = random_rows((4, 6), tail=5)
    logs = tmp_path / "in" / "replay_logs"
    write_checkpoint(logs, 0, rows.part(0, 7), 7)
    write_checkpoint(logs, 1, rows.part(7, 15), None, None)
    result, reader = convert(tmp_path / "in", tmp_path)
    with reader:
        assert_equal_steps(reader, steps_of(rows, cuts=(7,)))
    assert "add_count is 7, then not stated" in result.notes[0]


def test_rows_that_invalid_range_names_are_left_out_where_nothing_joins_them(tmp_path: Path) -> None:
    """At the start of a run and over a joint they are whole: what they lack is there, or was never."""
    rows = random_rows((4, 20), tail=6)
    logs = tmp_path / "in" / "replay_logs"
    write_checkpoint(logs, 0, rows.part(0, 10), 10, (8, 9, 0, 1, 2))
    write_checkpoint(logs, 1, rows.part(10, 20), 20, (8, 9, 0, 1, 2))
    result, reader = convert(tmp_path / "in", tmp_path / "joined")
    with reader:
        assert_equal_steps(reader, steps_of(rows.part(0, 20)))
    write_checkpoint(logs, 1, rows.part(10, 20), 40, (5, 0, 1, 2))
    result, reader = convert(tmp_path / "in", tmp_path / "cut")
    kept = Rows(*(np.delete(getattr(rows.part(0, 20), name), [10, 11, 12, 15], axis=0) for name in ATARI_NAMES))
    with reader:
        assert_equal_steps(reader, steps_of(kept, cuts=(10, 12)))
    assert "4 rows are left out, because invalid_range names them and the rows before them are missing" in result.notes


def test_a_missing_checkpoint_is_named_and_skipped_where_that_is_asked_for(tmp_path: Path) -> None:
    rows = random_rows((4, 6, 5, 8), tail=5)
    folder = write_run(tmp_path / "in", rows, (7, 14, 21))
    for file in (folder / "replay_logs").glob("*_ckpt.1.gz"):
        file.unlink()
    with pytest.raises(FormatError, match="checkpoint 1 is missing between 0 and 2") as caught:
        rbtool.convert(folder, tmp_path / "out")
    assert caught.value.hint == "add --skip-bad to convert the episodes that are sound"
    result, reader = convert(folder, tmp_path, skip_bad=True)
    kept = Rows(*(np.delete(getattr(rows, name), range(7, 14), axis=0) for name in ATARI_NAMES))
    with reader:
        assert_equal_steps(reader, steps_of(kept, cuts=(7,)))
    assert any("checkpoint 1 is missing" in note for note in result.notes)
    report = rbtool.check(folder)
    assert report.errors == 1
    assert "checkpoint 1 is missing" in report.findings[0].message


@pytest.mark.parametrize("name", ATARI_NAMES)
def test_another_checksum_is_found_whatever_the_column(name: str, tmp_path: Path) -> None:
    """Of a checkpoint whose frames are damaged no episode is taken; one whose flags are has no episodes."""
    rows = random_rows((4, 3, 5, 6), tail=5)
    folder = write_run(tmp_path / "in", rows, (7, 14))
    file = folder / "replay_logs" / f"$store$_{name}_ckpt.1.gz"
    data = bytearray(file.read_bytes())
    data[-8] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptDataError, match=r"ckpt\.1\.gz is damaged"):
        rbtool.convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    result, reader = convert(folder, tmp_path, skip_bad=True)
    with reader:
        found = reader.read(("observation",), 0, result.steps)
    clean = [row["observation"].tobytes() for row in steps_of(rows)]
    assert [frame.tobytes() for frame in found[:7]] == clean[:7]
    assert all(frame.tobytes() in clean[:7] + clean[12:] for frame in found)
    assert any("ckpt.1.gz" in note for note in result.notes)


@pytest.mark.parametrize("cut", [0, 1, 10, 0.5, -9, -4])
def test_a_cut_file_is_named(cut: float, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "in", random_rows((40,), tail=5), (7,))
    file = folder / "replay_logs" / "$store$_observation_ckpt.1.gz"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * cut) if 0 < cut < 1 else int(cut)])
    with pytest.raises(FormatError, match=r"observation_ckpt\.1\.gz"):
        rbtool.convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_pointer_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "in", random_rows((40,), tail=5), (7,))
    (folder / "replay_logs" / "$store$_action_ckpt.1.gz").write_bytes(POINTER)
    with pytest.raises(CorruptDataError, match=r"action_ckpt\.1\.gz is a git-lfs pointer"):
        rbtool.convert(folder, tmp_path / "out")


def write_one(folder: Path, **changed: Any) -> Path:
    rows = random_rows((4,), tail=5)
    write_checkpoint(folder, 0, Rows(**{name: changed.get(name, getattr(rows, name)) for name in ATARI_NAMES}), 9)
    return folder


ODD = {
    "terminal of 2": ({"terminal": np.full(9, 2, np.uint8)}, "terminal is 2 in row 0"),
    "another length": ({"reward": np.zeros(8, np.float32)}, "columns of different lengths: observation 9, action 9"),
    "flat frames": ({"observation": np.zeros((9, 4), np.uint8)}, r"has the shape \[9, 4\]"),
    "wide rewards": ({"reward": np.zeros((9, 2), np.float32)}, r"has the shape \[9, 2\]"),
    "text": ({"action": np.full(9, "a")}, "expected numbers"),
    "dates": ({"action": np.zeros(9, "M8[s]")}, "expected numbers"),
}


@pytest.mark.parametrize("case", ODD)
def test_what_contradicts_itself_is_refused_in_a_sentence(case: str, tmp_path: Path) -> None:
    changed, sentence = ODD[case]
    with pytest.raises(FormatError, match=sentence):
        rbtool.convert(write_one(tmp_path / "in", **changed), tmp_path / "out")


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    folder = write_one(tmp_path / "in", action=np.array([{}] * 9, object))
    with pytest.raises(FormatError, match="it is not unpacked"):
        rbtool.convert(folder, tmp_path / "out")


def test_a_header_that_states_more_than_the_file_can_hold_is_refused(tmp_path: Path) -> None:
    folder = write_one(tmp_path / "in")
    file = folder / "$store$_reward_ckpt.0.gz"
    data = gzip.decompress(file.read_bytes())
    file.write_bytes(gzip.compress(data.replace(b"(9,), }" + b" " * 9, b"(9999999999,), }")))
    with pytest.raises(CorruptDataError, match="at most"):
        rbtool.convert(folder, tmp_path / "out")


def test_the_folder_with_the_files_has_the_same_content(tmp_path: Path) -> None:
    whole = rbtool.convert(DATA / "Pong" / "1", tmp_path / "one")
    inner = rbtool.convert(DATA / "Pong" / "1" / "replay_logs", tmp_path / "two", num_workers=2)
    plain = rbtool.convert(DATA / "Pong" / "1", tmp_path / "three", layout="ted")
    assert whole.content_digest == inner.content_digest
    assert rbtool.diff(whole.path, plain.path).equal
    assert rbtool.inspect(DATA / "Pong" / "1").steps == whole.steps
