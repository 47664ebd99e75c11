"""`Vd4rlReader`: the contract of readers, the alignment of rows, shards cut anywhere, and what is refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from cases import each
from conversions import WrittenReaderTests, column, columns_of, converted, refused, with_options
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_files import plain_vd4rl, random_vd4rl, rows_of_shards, write_vd4rl, write_vd4rl_shards

import rbtool
from rbtool.converters.vd4rl.reader import Vd4rlReader
from rbtool.core.errors import CorruptDataError
from rbtool.core.open_steps import open_steps
from rbtool.core.ted.episodes import EndReason, Final

DATA = Path(__file__).parents[1] / "data"
LENGTHS = (5, 1, 7, 4)
TERMINAL = (False, True, False, True)


class TestReaderOfFiles(WrittenReaderTests):
    """Npz files of one episode each."""

    kind, piece_bytes = Vd4rlReader, 600

    def write(self, folder: Path) -> Path:
        return write_vd4rl(folder, random_vd4rl(LENGTHS, terminal=TERMINAL))


class TestReaderOfShards(TestReaderOfFiles):
    """HDF5 shards cut inside episodes."""

    def write(self, folder: Path) -> Path:
        rows = rows_of_shards(random_vd4rl(LENGTHS, terminal=TERMINAL, channel_first=True))
        return write_vd4rl_shards(folder, rows, (3, 9, 15), compression="gzip", chunks=True)


def assert_equal_rows(path: Path, expected: list[dict[str, Any]]) -> None:
    with open_steps(path) as reader:
        found, table = columns_of(reader), reader.episodes
    assert len(found["action"]) == len(expected)
    for at, row in enumerate(expected):
        for name, value in row.items():
            if name not in ("episode", "is_init", "last", "terminated"):
                assert found[name][at].tobytes() == value.tobytes(), (name, at)
        assert found["episode"][at] == row["episode"]
        assert found["is_init"][at, 0] == row["is_init"]
        assert found["next.terminated"][at, 0] == row["terminated"]
        assert found["next.truncated"][at, 0] == (row["last"] and not row["terminated"])
    assert set(table.final.tolist()) <= {Final.OBSERVED}
    assert table.episode.tolist() == [row["episode"] for row in expected if row["last"]]


def episodes_of(folder: Path) -> list[dict[str, np.ndarray]]:
    found = []
    for path in sorted(folder.iterdir()):
        with np.load(path) as file:
            found.append(dict(file))
    return found


def test_the_rows_of_the_files_are_those_of_a_plain_reading(tmp_path: Path) -> None:
    result = rbtool.convert(DATA / "vd4rl" / "64px", tmp_path / "out")
    assert_equal_rows(result.path, plain_vd4rl(episodes_of(DATA / "vd4rl" / "64px")))
    assert (result.steps, result.boundary["terminated"], result.boundary["truncated"]) == (20, 1, 1)
    assert result.renamed_keys == {"image": "pixels", "height": "state.height"}
    assert result.notes[0] == "the action, reward and discount of a step are those of the row after it"
    with open_steps(result.path) as reader:
        names = [text["file"] for text in reader.episode_text or ()]
    assert names == sorted(path.name for path in (DATA / "vd4rl" / "64px").iterdir())


def test_the_rows_of_the_shards_are_those_of_a_plain_reading(tmp_path: Path) -> None:
    with h5py.File(next((DATA / "vd4rl" / "84px").iterdir())) as file:
        rows = {name: values[:] for name, values in file.items()}
    starts = np.flatnonzero(rows["step_type"] == 0).tolist()
    episodes = [
        {"image" if name == "observation" else name: values[a:b] for name, values in rows.items()}
        for a, b in zip(starts, [*starts[1:], len(rows["reward"])], strict=True)
    ]
    result = rbtool.convert(DATA / "vd4rl" / "84px", tmp_path / "out")
    assert_equal_rows(result.path, plain_vd4rl(episodes))
    assert (result.episodes, result.boundary["truncated"]) == (4, 4)


EPISODES = st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=5)


@settings(max_examples=15)
@given(chosen=EPISODES, packed=st.booleans(), piece=st.sampled_from([1, 500, 1 << 20]), seed=st.integers(0, 9))
def test_random_files_come_back(chosen: list[tuple[int, bool]], packed: bool, piece: int, seed: int) -> None:
    episodes = random_vd4rl([length for length, _ in chosen], terminal=[ends for _, ends in chosen], seed=seed)
    with tempfile.TemporaryDirectory() as made:
        folder = write_vd4rl(Path(made) / "in", episodes, packed=packed)
        assert_equal_rows(rbtool.convert(folder, Path(made) / "out").path, plain_vd4rl(episodes))
        assert_pieces(folder, piece, plain_vd4rl(episodes))


@settings(max_examples=15)
@given(
    chosen=EPISODES, cuts=st.lists(st.integers(0, 30), max_size=4), packed=st.booleans(),
    piece=st.sampled_from([1, 500, 1 << 20]), seed=st.integers(0, 9),
)  # fmt: skip
def test_shards_cut_anywhere_come_back(
    chosen: list[tuple[int, bool]], cuts: list[int], packed: bool, piece: int, seed: int
) -> None:
    episodes = random_vd4rl(
        [length for length, _ in chosen], terminal=[ends for _, ends in chosen], seed=seed, channel_first=True
    )
    rows = rows_of_shards(episodes)
    expected = plain_vd4rl([{k: v for k, v in one.items() if k not in ("height", "orientations")} for one in episodes])
    stops = sorted(min(cut, len(rows["reward"])) for cut in cuts)
    options: dict[str, Any] = {"compression": "gzip", "chunks": True} if packed else {}
    with tempfile.TemporaryDirectory() as made:
        folder = write_vd4rl_shards(Path(made) / "in", rows, stops, **options)
        assert_equal_rows(rbtool.convert(folder, Path(made) / "out").path, expected)
        assert_pieces(folder, piece, expected)


def assert_pieces(folder: Path, size: int, expected: list[dict[str, Any]]) -> None:
    with with_options(Vd4rlReader, size)(folder) as reader:
        facts, pieces, table = reader.facts(), list(reader.pieces()), reader.episode_table()
    assert facts.steps == table.steps == sum(map(len, pieces)) == len(expected)
    after = b"".join(row.tobytes() for piece in pieces for row in piece.rows_after(("pixels",)))
    assert after == b"".join(row["next.pixels"].tobytes() for row in expected)
    actions = b"".join(piece.columns["action",].tobytes() for piece in pieces)
    assert actions == b"".join(row["action"].tobytes() for row in expected)


def test_shards_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    episodes = random_vd4rl([2] * 12, channel_first=True)
    rows = rows_of_shards(episodes)
    folder = write_vd4rl_shards(tmp_path / "in", rows, list(range(3, 36, 3)), name="walker_walk_84px_shard{}.hdf5")
    expected = np.concatenate([arrays["action"][1:] for arrays in episodes])
    with converted(folder, tmp_path / "out") as reader:
        assert column(reader, "action").tobytes() == expected.tobytes()


def test_a_missing_shard_is_named_and_nothing_is_joined_over_it(tmp_path: Path) -> None:
    rows = rows_of_shards(random_vd4rl((8, 8, 8), channel_first=True))
    folder = write_vd4rl_shards(tmp_path / "in", rows, (5, 14, 20))
    (folder / "1.hdf5").unlink()
    with converted(folder, tmp_path / "out") as reader:
        for note in (
            "shards 1 are missing: the rows around them are not joined",
            "episode 1 begins in the middle: the rows before are missing",
            "episode 0 ends without a flag: it is unfinished, and kept",
        ):
            assert note in reader.manifest.notes
        assert reader.episodes.length.tolist() == [4, 3, 8]
        reasons = [EndReason.END_OF_FILE, EndReason.TRUNCATED, EndReason.TRUNCATED]
        assert reader.episodes.end_reason.tolist() == reasons
        assert column(reader, "is_init")[:, 0].tolist() == [True, *[False] * 6, True, *[False] * 7]


@each("names", [("0.hdf5", "b.hdf5"), ("a1.hdf5", "b01.hdf5")])
def test_shards_without_an_order_are_refused(tmp_path: Path, names: tuple[str, str]) -> None:
    rows = rows_of_shards(random_vd4rl((4,), channel_first=True))
    for name in names:
        write_vd4rl_shards(tmp_path / "in", rows, name=name)
    refused(tmp_path / "in", r"no number in its name|have the same number")


def test_old_files_without_flags(tmp_path: Path) -> None:
    """Without is_terminal, a discount of 0 is a termination; without is_last, the end of the file is the end."""
    episodes = random_vd4rl((3, 4), terminal=(True, False))
    for arrays in episodes:
        del arrays["is_terminal"]
    plain = plain_vd4rl(episodes)
    assert_equal_rows(rbtool.convert(write_vd4rl(tmp_path / "a", episodes), tmp_path / "out").path, plain)
    for arrays in episodes:
        del arrays["is_first"], arrays["is_last"]
    result = rbtool.convert(write_vd4rl(tmp_path / "b", episodes), tmp_path / "older")
    assert_equal_rows(result.path, plain)
    assert (result.boundary["terminated"], result.boundary["end_of_file"]) == (1, 1)
    assert any("episode 1 ends without a flag" in note for note in result.notes)


def test_what_is_terminal_states_terminations_also_where_the_discount_is_0(tmp_path: Path) -> None:
    episodes = random_vd4rl((3,))
    episodes[0]["discount"][-1] = 0
    with converted(write_vd4rl(tmp_path / "a", episodes), tmp_path / "out") as reader:
        assert reader.episodes.end_reason.tolist() == [EndReason.TRUNCATED]


def test_a_first_row_with_an_action_is_reported(tmp_path: Path) -> None:
    episodes = random_vd4rl((3, 4))
    episodes[1]["action"][0] = 1
    shards = write_vd4rl_shards(tmp_path / "shards", rows_of_shards(episodes))
    for folder in (write_vd4rl(tmp_path / "files", episodes), shards):
        notes = rbtool.convert(folder, tmp_path / f"{folder.name}-out").notes
        assert any("the first row of 1 episode has an action that is not 0" in note for note in notes)


def broken(name: str, value: Any) -> Any:
    return lambda arrays: arrays.update({name: value(arrays[name])})


@each(
    ("change", "sentence"),
    [
        (broken("is_first", lambda rows: rows[::-1]), "is_first is set in rows 5, expected only row 0"),
        (broken("is_first", lambda rows: rows & False), "is_first is set in rows none, expected only row 0"),
        (broken("is_last", lambda rows: rows | True), "is_last is set in rows 0, 1, 2, 3, 4, …, expected only row 5"),
        (broken("is_terminal", lambda rows: np.arange(6) == 2), "is_terminal is set in rows 2, expected only row 5"),
        (broken("is_last", lambda rows: rows * 3), "is_last is 3 in row 5, expected 0 or 1"),
        (broken("reward", lambda rows: rows[:-1]), r"different numbers of rows \(image 6, action 6, reward 5"),
        (broken("reward", lambda rows: np.zeros((6, 2))), r"'reward' has rows of shape \[2\]"),
        (broken("action", lambda rows: rows[:, :1]), "have different arrays"),
        (broken("image", lambda rows: rows.astype(object)), "'image' cannot be read as rows"),
        (lambda arrays: arrays.pop("image"), "expected image or observation, action and reward"),
    ],
)
def test_a_bad_file_is_refused_by_name_and_left_out_with_skip_bad(tmp_path: Path, change: Any, sentence: str) -> None:
    episodes = random_vd4rl((4, 5, 3))
    change(episodes[1])
    folder = write_vd4rl(tmp_path / "in", episodes)
    assert "--skip-bad" in refused(folder, sentence).hint
    result = rbtool.convert(folder, tmp_path / "out", skip_bad=True)
    assert (result.episodes, result.steps) == (2, 7)
    assert any(note.startswith("episode 1 is left out") for note in result.notes)
    assert rbtool.convert(folder, tmp_path / "last", episodes="2").steps == 3


def test_a_file_with_a_single_row_has_no_steps(tmp_path: Path) -> None:
    episodes = random_vd4rl((4, 0, 3))
    result = rbtool.convert(write_vd4rl(tmp_path / "in", episodes), tmp_path / "out")
    assert (result.episodes, result.steps) == (2, 7)
    assert "episode 1 is left out: one row, which is not a step" in result.notes
    with open_steps(result.path) as reader:
        assert reader.episodes.episode.tolist() == [0, 2]


def test_arrays_that_are_no_rows_are_named(tmp_path: Path) -> None:
    episodes = random_vd4rl((4,))
    episodes[0] |= {"one": np.float32(1), "short": np.arange(3), "names": np.array(["a"] * 5)}
    result = rbtool.convert(write_vd4rl(tmp_path / "in", episodes), tmp_path / "out")
    assert {entry["key"] for entry in result.dropped_keys} == {"one", "short", "names"}


@each("share", [0.1, 0.5, 0.99])
def test_cut_files_are_named(tmp_path: Path, share: float) -> None:
    files = write_vd4rl(tmp_path / "files", random_vd4rl((4, 40, 3)))
    shards = write_vd4rl_shards(tmp_path / "shards", rows_of_shards(random_vd4rl((40, 40))), (20, 50))
    for folder in (files, shards):
        file = sorted(folder.iterdir())[1]
        file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])
        refused(folder, file.name, CorruptDataError)


def test_the_id_is_the_path_below_the_suite(tmp_path: Path) -> None:
    folder = tmp_path / "vd4rl" / "main" / "walker_walk" / "random" / "64px"
    shutil.copytree(DATA / "vd4rl" / "64px", folder)
    with Vd4rlReader(folder) as reader:
        assert reader.facts().id == "main/walker_walk/random/64px"


def test_both_kinds_in_one_folder_are_refused(tmp_path: Path) -> None:
    for kind in ("64px", "84px"):
        shutil.copytree(DATA / "vd4rl" / kind, tmp_path / "in", dirs_exist_ok=True)
    assert not Vd4rlReader.recognises(tmp_path / "in")
    refused(tmp_path / "in", "neither npz files nor HDF5 files, or both", format="vd4rl")


LARGE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (300 << 20,) * 2)
import rbtool
print(rbtool.convert(sys.argv[1], sys.argv[2]).steps)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["files", "shards"])
def test_two_gigabytes_convert_under_300_megabytes(kind: str, tmp_path: Path) -> None:
    rows, folder = 501, tmp_path / "in"
    one = random_vd4rl((rows - 1,))[0]
    if kind == "files":  # 350 episodes of 6 MB
        one["image"] = np.broadcast_to(np.arange(rows, dtype=np.uint8)[:, None, None, None], (rows, 64, 64, 3))
        write_vd4rl(folder, [one])
        first = next(folder.iterdir())
        for number in range(1, 350):
            shutil.copy(first, folder / first.name.replace("T000000", f"T{number:06d}"))
        steps = 350 * (rows - 1)
    else:  # 200 episodes of 10.6 MB, in two shards that are cut inside one
        one["image"] = np.broadcast_to(np.arange(rows, dtype=np.uint8)[:, None, None, None], (rows, 3, 84, 84))
        part = rows_of_shards([one])
        folder.mkdir()
        for shard, count in enumerate((100 * rows + 77, 100 * rows - 77)):
            with h5py.File(folder / f"{shard}.hdf5", "w") as file:
                for name, values in part.items():
                    chunks = (12, *values.shape[1:]) if values.ndim == 4 else None
                    made = file.create_dataset(
                        name, (count, *values.shape[1:]), values.dtype, chunks=chunks,
                        compression="gzip" if chunks else None, compression_opts=1 if chunks else None,
                    )  # fmt: skip
                    begin = shard * 77
                    for start in range(0, count, rows):
                        at = (np.arange(start, min(start + rows, count)) + begin) % rows
                        made[start : start + rows] = values[at]
        steps = 200 * (rows - 1)
    found = subprocess.run(
        [sys.executable, "-c", LARGE, str(folder), str(tmp_path / "out")], check=True, capture_output=True, text=True
    )
    assert found.stdout.strip() == str(steps)
    shutil.rmtree(tmp_path / "out")


def test_files_with_the_same_contents_are_named(tmp_path: Path) -> None:
    folder = write_vd4rl(tmp_path / "a", random_vd4rl([4, 4, 4]), packed=False)
    files = sorted(folder.iterdir())
    with Vd4rlReader(folder) as reader:
        assert not any("same contents" in note for note in reader.facts().notes)
    shutil.copy(files[0], folder / "20230101T000000-copy-5.npz")
    with Vd4rlReader(folder) as reader:
        notes = [note for note in reader.facts().notes if "same contents" in note]
        assert len(reader.facts().episode_numbers) == 4
    assert len(notes) == 1
    assert f"{files[0].name} = 20230101T000000-copy-5.npz" in notes[0]
    assert files[1].name not in notes[0]
