"""`GenDgrlReader`: the contract of readers, true lengths, pickles that need trust, and hostile or cut archives."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import each
from conversions import WrittenReaderTests, columns_of, refused
from damage import flip
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_files import TRUST, add_member, name_of, npy_of, random_dgrl, write_dgrl, write_dgrl_folder

import rbtool
from rbtool.converters.gen_dgrl.reader import GenDgrlReader
from rbtool.core.errors import CorruptDataError, RbtoolError, UsageError
from rbtool.core.format.memmap.reader import TedReader

DATA = Path(__file__).parents[1] / "data" / "gen_dgrl" / "1M" / "level_200" / "expert" / "bigfish.tar.xz"


class TestReader(WrittenReaderTests):
    kind, options, piece_bytes = GenDgrlReader, TRUST, 300

    def write(self, folder: Path) -> Path:
        return write_dgrl(folder / "a.tar.xz", random_dgrl((5, 1, 7, 4)))


def assert_equal_rows(path: Path, episodes: list[dict[str, Any]], numbers: list[int] | None = None) -> None:
    with TedReader(path) as reader:
        columns = columns_of(reader)
        assert reader.episodes.length.tolist() == [len(one["rewards"]) for one in episodes]
        assert reader.episodes.episode.tolist() == (numbers or list(range(len(episodes))))
    expected = {
        "observation": np.concatenate([one["observations"][:-1] for one in episodes]),
        "next.observation": np.concatenate([one["observations"][1:] for one in episodes]),
        "action": np.concatenate([one["actions"] for one in episodes]),
        "next.reward": np.concatenate([one["rewards"].reshape(-1, 1) for one in episodes]),
        "next.terminated": np.concatenate([one["dones"].reshape(-1, 1) != 0 for one in episodes]),
    }
    for name, rows in expected.items():
        assert (columns[name].dtype, columns[name].shape) == (rows.dtype, rows.shape), name
        assert columns[name].tobytes() == rows.tobytes(), name
    assert (columns["next.done"] == (columns["next.terminated"] | columns["next.truncated"])).all()


def test_the_rows_are_those_of_a_plain_reading(tmp_path: Path) -> None:
    with tarfile.open(DATA) as archive:
        held = [io.BytesIO(archive.extractfile(member).read()) for member in archive]  # type: ignore[union-attr]
        names = archive.getnames()
    episodes = [np.load(file, allow_pickle=True).item() for file in held]
    result = rbtool.convert(DATA, tmp_path / "out", **TRUST)
    assert_equal_rows(result.path, episodes)
    assert (result.steps, result.request["id"], result.boundary["terminated"]) == (42, "bigfish-1M_E", 4)
    with TedReader(result.path) as reader:
        assert reader.episode_text == [{"file": Path(name).name} for name in names]
        assert reader.episodes.seed.tolist() == [0, 0, 0, 0]
    assert rbtool.check(DATA, **TRUST).errors == 0
    assert rbtool.inspect(DATA, **TRUST).steps == 42


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5), wide=st.booleans(), packed=st.booleans(),
    form=st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT]), seed=st.integers(0, 9),
)  # fmt: skip
def test_random_archives_come_back(lengths: list[int], wide: bool, packed: bool, form: int, seed: int) -> None:
    """Their length is that of their steps: nothing is cut, and nothing is filled up with zeros."""
    episodes = random_dgrl([*lengths, 3], wide=wide, seed=seed)
    with tempfile.TemporaryDirectory() as made:
        file = write_dgrl(Path(made) / ("a.tar.xz" if packed else "a.tar"), episodes, form=form)
        result = rbtool.convert(file, Path(made) / "out", **TRUST)
        there = [number for number, one in enumerate(episodes) if len(one["rewards"])]
        assert_equal_rows(result.path, [episodes[number] for number in there], there)
        assert any("without steps" in note for note in result.notes) == (0 in lengths)


def test_workers_and_chosen_episodes(tmp_path: Path) -> None:
    episodes = random_dgrl((5, 2, 6, 3, 4))
    file = write_dgrl(tmp_path / "a.tar.xz", episodes)
    assert_equal_rows(rbtool.convert(file, tmp_path / "two", num_workers=2, **TRUST).path, episodes)
    chosen = rbtool.convert(file, tmp_path / "part", episodes="1,3:5", **TRUST)
    assert_equal_rows(chosen.path, [episodes[1], *episodes[3:]], [1, 3, 4])


def test_long_names_floats_and_other_files(tmp_path: Path) -> None:
    episodes = random_dgrl((3, 4), done=False)
    stored = [{**one, "observations": one["observations"].astype("f4"), "extra": np.zeros(3)} for one in episodes]
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        add_member(archive, "bigfish", b"", type=tarfile.DIRTYPE)
        add_member(archive, "bigfish/README.md", b"hello")
        add_member(archive, f"{'d' * 150}/{name_of(0, 3)}", npy_of(stored[0]))
        add_member(archive, name_of(1, 4), npy_of(stored[1]))
    result = rbtool.convert(tmp_path / "a.tar", tmp_path / "out", **TRUST)
    assert_equal_rows(result.path, episodes)
    assert (result.boundary["end_of_file"], [one["key"] for one in result.dropped_keys]) == (2, ["extra"])
    assert any("1 file in the archive" in note for note in result.notes)


def test_without_trust_nothing_is_unpickled(tmp_path: Path) -> None:
    for call in (rbtool.inspect, rbtool.check, lambda path: rbtool.convert(path, tmp_path / "out")):
        with pytest.raises(UsageError, match="its episodes are pickles") as caught:
            call(DATA)
        assert "--trust-pickle" in caught.value.hint


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch evil",)


def test_a_pickle_that_runs_something_is_refused_and_the_others_are_taken(tmp_path: Path) -> None:
    episodes = random_dgrl((3, 4))
    file = write_dgrl(tmp_path / "a.tar.xz", [episodes[0], {"observations": Evil()}, episodes[1], [1, 2]])
    assert "--skip-bad" in refused(file, r"20230329T000001.*system", **TRUST).hint
    result = rbtool.convert(file, tmp_path / "out", skip_bad=True, **TRUST)
    assert_equal_rows(result.path, episodes, [0, 2])
    assert not (Path.cwd() / "evil").exists()


LINK = {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}


@each(
    ("name", "header", "sentence"),
    [
        ("../evil.npy", {}, "leads out of the archive"),
        ("/etc/evil.npy", {}, "leads out of the archive"),
        ("bigfish/link.npy", LINK, "is a link"),
        ("bigfish/link.npy", {"type": tarfile.LNKTYPE, "linkname": "x"}, "is a link"),
        ("bigfish/fifo.npy", {"type": tarfile.FIFOTYPE}, "neither a file nor a folder"),
        ("bigfish/null.npy", {"type": tarfile.CHRTYPE}, "neither a file nor a folder"),
    ],
)
def test_hostile_members_are_refused(name: str, header: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar.xz", "w:xz") as archive:
        add_member(archive, name_of(0, 3), npy_of(random_dgrl((3,))[0]))
        add_member(archive, name, b"", **header)
    for skip in (False, True):
        refused(tmp_path / "a.tar.xz", sentence, skip_bad=skip, **TRUST)
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar.xz"]


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    """A member of 2 GB of zeros, in an archive of some kilobytes."""
    member = tarfile.TarInfo(name_of(1, 3))
    member.size = 2 << 30
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        add_member(archive, name_of(0, 3), npy_of(random_dgrl((3,))[0]))
    data = (tmp_path / "a.tar").read_bytes().rstrip(b"\0")
    data += bytes(-len(data) % 512) + member.tobuf() + bytes(1 << 20)
    (tmp_path / "a.tar").write_bytes(data)
    refused(tmp_path / "a.tar", "2,147,483,648 bytes, at most", **TRUST)


@each("name", ["a.tar.xz", "a.tar"])
@each("part", [0.6, 0.8])
def test_of_a_cut_archive_the_episodes_before_the_cut_are_there(name: str, part: float, tmp_path: Path) -> None:
    episodes = random_dgrl([40] * 30)
    file = write_dgrl(tmp_path / name, episodes)
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * part)])
    refused(file, "is cut", CorruptDataError, **TRUST)
    result = rbtool.convert(file, tmp_path / "out", skip_bad=True, **TRUST)
    assert 5 < result.episodes < 30
    assert_equal_rows(result.path, episodes[: result.episodes])
    assert any("is cut" in note for note in result.notes)


def test_of_a_damaged_stream_nothing_is_taken(tmp_path: Path) -> None:
    file = write_dgrl(tmp_path / "a.tar.xz", random_dgrl([9] * 9))
    flip(file, file.stat().st_size // 2)
    for skip in (False, True):
        refused(file, "is damaged", CorruptDataError, skip_bad=skip, **TRUST)


EPISODE = random_dgrl((4,))[0]


@each(
    ("episode", "sentence"),
    [
        ({**EPISODE, "observations": EPISODE["observations"][:4]}, "observations have 4 rows, expected 5"),
        ({**EPISODE, "actions": np.zeros(5, int)}, "actions have 5 rows, expected 4"),
        ({**EPISODE, "dones": np.array([0, 1, 0, 1])}, "before the last step"),
        ({name: rows for name, rows in EPISODE.items() if name != "rewards"}, "no array 'rewards'"),
        ({**EPISODE, "actions": np.array(list("abcd"))}, "expected numbers"),
        ({**EPISODE, "observations": np.zeros((5, 3, 2, 2), "u1")}, "in other episodes"),
        ([1], "expected a pickled dictionary"),
    ],
)
def test_what_contradicts_itself_is_refused_and_the_others_are_taken(
    episode: Any, sentence: str, tmp_path: Path
) -> None:
    file = write_dgrl(tmp_path / "a.tar.xz", [EPISODE, episode, EPISODE])
    refused(file, sentence, **TRUST)
    result = rbtool.convert(file, tmp_path / "out", skip_bad=True, **TRUST)
    assert_equal_rows(result.path, [EPISODE, EPISODE], [0, 2])


def test_the_folder_of_an_unpacked_archive(tmp_path: Path) -> None:
    episodes = random_dgrl((5, 2, 0, *[3] * 9))
    folder = write_dgrl_folder(tmp_path / "1M" / "level_200" / "expert" / "bigfish", episodes)
    there = [number for number, one in enumerate(episodes) if len(one["rewards"])]
    for number, path in enumerate((folder, folder / "bigfish")):
        for workers in (0, 2):
            result = rbtool.convert(path, tmp_path / f"out{number}{workers}", num_workers=workers, **TRUST)
            assert_equal_rows(result.path, [episodes[one] for one in there], there)
            assert result.request["id"] == ("bigfish-1M_E" if path == folder else "bigfish")
    packed = write_dgrl(tmp_path / "a.tar.xz", episodes)
    assert rbtool.diff(rbtool.convert(packed, tmp_path / "packed", **TRUST).path, result.path).equal


@each("size", [0, 50, 900])
def test_a_cut_file_of_a_folder_is_one_episode(size: int, tmp_path: Path) -> None:
    episodes = random_dgrl((40, 30, 20))
    folder = write_dgrl_folder(tmp_path / "episodes", episodes)
    second = sorted(folder.rglob("*.npy"))[1]
    os.truncate(second, size)
    refused(folder, second.name, RbtoolError, **TRUST)
    result = rbtool.convert(folder, tmp_path / "out", skip_bad=True, **TRUST)
    assert_equal_rows(result.path, [episodes[0], episodes[2]], [0, 2])


def test_what_is_no_file_in_a_folder_is_refused(tmp_path: Path) -> None:
    folder = write_dgrl_folder(tmp_path / "episodes", random_dgrl((4, 3)))
    os.mkfifo(folder / "bigfish" / "fifo.npy")
    refused(folder, r"fifo\.npy", format="gen_dgrl", **TRUST)


@each("names", [("a.npy",), ("a.txt",), ()])
def test_a_folder_without_episodes_is_another_format(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        np.save(tmp_path / "array", np.zeros(3))
        (tmp_path / "array.npy").rename(tmp_path / name)
    assert not GenDgrlReader.recognises(tmp_path)
    message = "has no episodes" if "a.npy" not in names else "a pickled dictionary"
    refused(tmp_path, message, format="gen_dgrl", **TRUST)
