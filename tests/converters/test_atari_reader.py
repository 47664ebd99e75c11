"""`AtariReader`: the contract of readers, rows as a plain reading has them, and checkpoints joined and cut."""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from cases import each
from conversions import WrittenReaderTests, column, columns_of, converted, refused, with_options
from damage import POINTER, flip
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_files import ATARI_NAMES, Rows, load_gzip, random_rows, steps_of, write_checkpoint, write_rings, write_run

import rbtool
from rbtool.converters.atari.reader import AtariReader
from rbtool.core.errors import CorruptDataError
from rbtool.core.format.contracts import StepReader
from rbtool.core.ted.episodes import Final

DATA = Path(__file__).parents[1] / "data" / "atari"


class TestReader(WrittenReaderTests):
    """Checkpoints cut inside episodes."""

    kind = AtariReader

    def write(self, folder: Path) -> Path:
        return write_run(folder, random_rows((5, 1, 7), tail=4), (3, 9))


class TestReaderOfRings(TestReader):
    """Checkpoints of a ring with blank rows, as Dopamine writes them."""

    def write(self, folder: Path) -> Path:
        return write_rings(folder, random_rows((9, 4, 17), tail=14, blanks=3), 10)


def assert_equal_steps(reader: StepReader, expected: list[dict[str, Any]]) -> None:
    assert reader.manifest.steps == len(expected)
    columns = columns_of(reader)
    numbers = np.unique([row["episode"] for row in expected], return_inverse=True)[1]
    for at, row in enumerate(expected):
        for name in ("observation", "action", "next.observation"):
            assert columns[name][at].tobytes() == row[name].tobytes(), (name, at)
        for name in ("next.reward", "next.terminated", "next.truncated"):
            assert columns[name][at, 0] == row[name], (name, at)
        assert columns["next.done"][at, 0] == (row["next.terminated"] or row["next.truncated"])
    places = np.repeat(np.arange(len(reader.episodes)), reader.episodes.length)
    assert places.tolist() == numbers.tolist()


def assert_converted(source: Path, folder: Path, expected: list[dict[str, Any]], **options: Any) -> str:
    """Compare the rows of a conversion; return its notes."""
    with converted(source, folder / "out", **options) as reader:
        assert_equal_steps(reader, expected)
        return "\n".join(reader.manifest.notes)


def test_the_rows_of_the_real_frames_are_those_of_a_plain_reading(tmp_path: Path) -> None:
    logs = DATA / "Pong" / "1" / "replay_logs"
    rows = Rows(
        *(np.concatenate([load_gzip(logs / f"$store$_{name}_ckpt.{k}.gz") for k in (0, 1)]) for name in ATARI_NAMES)
    )
    with converted(DATA / "Pong" / "1", tmp_path / "out") as reader:
        assert_equal_steps(reader, steps_of(rows))
        assert {field.name: (field.dtype, field.shape) for field in reader.fields}["observation"] == ("uint8", (84, 84))
        finals, manifest = reader.episodes.final.tolist(), reader.manifest
    assert (manifest.layout, manifest.request.id, manifest.notes) == ("packed", "Pong/1", ())
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
        assert_converted(folder, Path(made), steps_of(rows), layout=layout)
        with with_options(AtariReader, piece)(folder) as raw:
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
        notes = assert_converted(folder, Path(made), without_blanks(logged, blanks))
        assert ("blank rows" in notes) == bool(blanks)


def without_blanks(rows: Rows, blanks: int) -> list[dict[str, Any]]:
    """Read the steps, and leave out the blank rows after each reset."""
    if not blanks:
        return steps_of(rows)
    keep, since = np.ones(len(rows), bool), 0
    for at in range(len(rows)):
        keep[at] = since >= blanks
        since = 0 if rows.terminal[at] else since + 1
    return steps_of(Rows(*(getattr(rows, name)[keep] for name in ATARI_NAMES)))


@each(
    ("count", "note"),
    [
        (20, "is not joined to it: add_count is 7, then 20 with 8 rows\n1 episode begins after a cut, in the middle"),
        (None, "add_count is 7, then not stated"),
    ],
)
def test_checkpoints_that_do_not_follow_are_cut(count: int | None, note: str, tmp_path: Path) -> None:
    rows = random_rows((4, 6), tail=5)
    logs = tmp_path / "in" / "replay_logs"
    write_checkpoint(logs, 0, rows.part(0, 7), 7)
    write_checkpoint(logs, 1, rows.part(7, 15), count, *([None] if count is None else []))
    assert note in assert_converted(tmp_path / "in", tmp_path, steps_of(rows, cuts=(7,)))


def test_rows_that_invalid_range_names_are_left_out_where_nothing_joins_them(tmp_path: Path) -> None:
    """At the start of a run and over a joint they are whole: what they lack is there, or was never."""
    rows = random_rows((4, 20), tail=6)
    logs = tmp_path / "in" / "replay_logs"
    write_checkpoint(logs, 0, rows.part(0, 10), 10, (8, 9, 0, 1, 2))
    write_checkpoint(logs, 1, rows.part(10, 20), 20, (8, 9, 0, 1, 2))
    assert_converted(tmp_path / "in", tmp_path / "joined", steps_of(rows.part(0, 20)))
    write_checkpoint(logs, 1, rows.part(10, 20), 40, (5, 0, 1, 2))
    kept = Rows(*(np.delete(getattr(rows.part(0, 20), name), [10, 11, 12, 15], axis=0) for name in ATARI_NAMES))
    notes = assert_converted(tmp_path / "in", tmp_path / "cut", steps_of(kept, cuts=(10, 12)))
    assert "4 rows are left out, because invalid_range names them and the rows before them are missing" in notes


def test_a_missing_checkpoint_is_named_and_skipped_where_that_is_asked_for(tmp_path: Path) -> None:
    rows = random_rows((4, 6, 5, 8), tail=5)
    folder = write_run(tmp_path / "in", rows, (7, 14, 21))
    for file in (folder / "replay_logs").glob("*_ckpt.1.gz"):
        file.unlink()
    error = refused(folder, "checkpoint 1 is missing between 0 and 2")
    assert error.hint == "add --skip-bad to convert the episodes that are sound"
    kept = Rows(*(np.delete(getattr(rows, name), range(7, 14), axis=0) for name in ATARI_NAMES))
    notes = assert_converted(folder, tmp_path, steps_of(kept, cuts=(7,)), skip_bad=True)
    assert "checkpoint 1 is missing" in notes
    report = rbtool.check(folder)
    assert report.errors == 1
    assert "checkpoint 1 is missing" in report.findings[0].message


@each("name", ATARI_NAMES)
def test_another_checksum_is_found_whatever_the_column(name: str, tmp_path: Path) -> None:
    """Of a checkpoint whose frames are damaged no episode is taken; one whose flags are has no episodes."""
    rows = random_rows((4, 3, 5, 6), tail=5)
    folder = write_run(tmp_path / "in", rows, (7, 14))
    file = folder / "replay_logs" / f"$store$_{name}_ckpt.1.gz"
    flip(file, file.stat().st_size - 8)
    refused(folder, r"ckpt\.1\.gz is damaged", CorruptDataError)
    with converted(folder, tmp_path / "out", skip_bad=True) as reader:
        found, notes = column(reader, "observation"), reader.manifest.notes
    clean = [row["observation"].tobytes() for row in steps_of(rows)]
    assert [frame.tobytes() for frame in found[:7]] == clean[:7]
    assert all(frame.tobytes() in clean[:7] + clean[12:] for frame in found)
    assert any("ckpt.1.gz" in note for note in notes)


@each("cut", [0, 1, 10, 0.5, -9, -4])
def test_a_cut_file_is_named(cut: float, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "in", random_rows((40,), tail=5), (7,))
    file = folder / "replay_logs" / "$store$_observation_ckpt.1.gz"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * cut) if 0 < cut < 1 else int(cut)])
    refused(folder, r"observation_ckpt\.1\.gz")


def test_a_pointer_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "in", random_rows((40,), tail=5), (7,))
    (folder / "replay_logs" / "$store$_action_ckpt.1.gz").write_bytes(POINTER)
    refused(folder, r"action_ckpt\.1\.gz is a git-lfs pointer", CorruptDataError)


def write_one(folder: Path, **changed: Any) -> Path:
    rows = random_rows((4,), tail=5)
    write_checkpoint(folder, 0, Rows(**{name: changed.get(name, getattr(rows, name)) for name in ATARI_NAMES}), 9)
    return folder


@each(
    ("changed", "sentence"),
    [
        ({"terminal": np.full(9, 2, np.uint8)}, "terminal is 2 in row 0"),
        ({"reward": np.zeros(8, np.float32)}, "columns of different lengths: observation 9, action 9"),
        ({"observation": np.zeros((9, 4), np.uint8)}, r"has the shape \[9, 4\]"),
        ({"reward": np.zeros((9, 2), np.float32)}, r"has the shape \[9, 2\]"),
        ({"action": np.full(9, "a")}, "expected numbers"),
        ({"action": np.zeros(9, "M8[s]")}, "expected numbers"),
        ({"action": np.array([{}] * 9, object)}, "it is not unpacked"),
    ],
)
def test_columns_that_make_no_sense_are_refused(changed: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    refused(write_one(tmp_path / "in", **changed), sentence)


def test_a_header_that_states_more_than_the_file_can_hold_is_refused(tmp_path: Path) -> None:
    folder = write_one(tmp_path / "in")
    file = folder / "$store$_reward_ckpt.0.gz"
    data = gzip.decompress(file.read_bytes())
    file.write_bytes(gzip.compress(data.replace(b"(9,), }" + b" " * 9, b"(9999999999,), }")))
    refused(folder, "at most", CorruptDataError)


def test_the_folder_with_the_files_has_the_same_content(tmp_path: Path) -> None:
    whole = rbtool.convert(DATA / "Pong" / "1", tmp_path / "one")
    inner = rbtool.convert(DATA / "Pong" / "1" / "replay_logs", tmp_path / "two", num_workers=2)
    plain = rbtool.convert(DATA / "Pong" / "1", tmp_path / "three", layout="ted")
    assert whole.content_digest == inner.content_digest
    assert rbtool.diff(whole.path, plain.path).equal
    assert rbtool.inspect(DATA / "Pong" / "1").steps == whole.steps
