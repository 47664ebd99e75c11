"""Shards of Open X-Embodiment that are missing, cut, empty or hostile, and shards that are fetched in pieces."""

from __future__ import annotations

import io
import pickle
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import each
from conversions import refused
from damage import POINTER
from hypothesis import given
from hypothesis import strategies as st
from shard_files import add_member, random_openx, random_openx_episode, write_openx, write_openx_shard

import rbtool
from rbtool.cli import app
from rbtool.converters.openx import shards
from rbtool.converters.openx.reader import OpenXReader
from rbtool.core.errors import CorruptDataError

LAST: dict[str, Any] = {"trust_pickle": True, "rlds_last": "step", "final_step": "repeat"}


def four_shards(folder: Path) -> Path:
    return write_openx(folder / "toy", [random_openx((3, 4), side=32) for _ in range(4)])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 3 // 5])


DAMAGE: list[tuple[Callable[[Path], Any], str, int]] = [
    (Path.unlink, "a shard is missing: toy_00001.tar", 6),
    (cut, "toy_00001.tar is cut", 7),
    (lambda path: path.write_bytes(b""), "toy_00001.tar is an empty file", 6),
    (lambda path: path.write_bytes(bytes(20 << 10)), "toy_00001.tar is not a tar archive", 6),
    (lambda path: path.write_bytes(POINTER), "toy_00001.tar is a git-lfs pointer", 6),
    (lambda path: path.write_bytes(b"<html>" * 200), "toy_00001.tar is not a tar archive", 6),
]


@each(("change", "said", "left"), DAMAGE)
def test_a_shard_that_is_not_whole_is_named_and_skip_bad_goes_on(
    change: Callable[[Path], Any], said: str, left: int, tmp_path: Path
) -> None:
    folder = four_shards(tmp_path)
    change(folder / "toy_00001.tar")
    assert refused(folder, said, CorruptDataError, **LAST).hint
    result = rbtool.convert(folder, tmp_path / "out", skip_bad=True, **LAST)
    assert result.episodes == left
    assert any(said in note for note in result.notes)


@each("change", [change for change, *_ in DAMAGE])
def test_a_survey_by_several_threads_finds_the_same(change: Callable[[Path], Any], tmp_path: Path) -> None:
    folder = four_shards(tmp_path)
    other = random_openx_episode(4, seed=9, side=32)
    other["steps"][2]["action"] = 3.0
    sound = [random_openx_episode(length, side=32) for length in (5, 2)]
    write_openx_shard(folder / "toy_00002.tar", [sound[0], b"\x80\x04no steps", other, {"steps": []}, sound[1]])
    change(folder / "toy_00001.tar")
    found = []
    for workers in (0, 3):
        with OpenXReader(folder, options={"trust_pickle": True}) as reader:
            reader.survey_workers = workers
            facts, state = reader.stated(), reader.survey_state()
        wrong = {number: str(error) for number, error in state.damaged.items()}
        found.append((facts, state.episodes, wrong, [str(error) for error in state.problems]))
    assert found[0] == found[1]
    assert len(wrong) == 2


def test_many_missing_shards_are_counted(tmp_path: Path) -> None:
    folder = write_openx(tmp_path / "toy", [random_openx((3,))])
    (folder / "toy_00000.tar").rename(folder / "toy_00009.tar")
    refused(folder, r"9 shards are missing: toy_00000.tar, .* and 4 more", CorruptDataError, **LAST)


def test_empty_shards_and_episodes_without_steps_are_no_errors(tmp_path: Path) -> None:
    folder = write_openx(tmp_path / "toy", [[], [], [], [], [{"steps": []}, random_openx_episode(3)], []])
    result = rbtool.convert(folder, tmp_path / "out", **LAST)
    assert (result.episodes, result.steps) == (1, 3)
    assert "1 episode without steps left out" in result.notes


def test_a_dataset_without_steps_is_refused(tmp_path: Path) -> None:
    refused(write_openx(tmp_path / "toy", [[{"steps": []}]]), "has no steps", **LAST)


@each(
    ("name", "header"),
    [
        ("../x.data.pickle", {}), ("/etc/x.data.pickle", {}), ("a/../../x.pickle", {}),
        ("x.data.pickle", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}),
        ("x.data.pickle", {"type": tarfile.LNKTYPE, "linkname": "toy_00000.data.pickle"}),
        ("x.data.pickle", {"type": tarfile.FIFOTYPE}), ("x.data.pickle", {"type": tarfile.CHRTYPE}),
    ],
)  # fmt: skip
def test_hostile_members_refuse_the_archive(tmp_path: Path, name: str, header: dict[str, Any]) -> None:
    file = tmp_path / "toy" / "toy_00000.tar"
    file.parent.mkdir()
    with tarfile.open(file, "w") as archive:
        add_member(archive, "toy_00000.data.pickle", pickle.dumps(random_openx_episode(3)))
        add_member(archive, name, b"", **header)
    for options in ({}, {"skip_bad": True}):
        refused(file, r"leads out of the archive|is a link|neither a file nor a folder", **LAST, **options)


class Bomb:
    """What runs a command where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def test_a_pickle_that_runs_something_is_refused(tmp_path: Path) -> None:
    bad = pickle.dumps({"steps": [{"action": Bomb(tmp_path / "ran")}]})
    folder = write_openx(tmp_path / "toy", [[random_openx_episode(3), bad]])
    refused(folder, "is a pickle of more than data", **LAST)
    assert rbtool.convert(folder, tmp_path / "out", skip_bad=True, **LAST).episodes == 1
    assert not (tmp_path / "ran").exists()


def test_a_pickle_that_unfolds_to_much_memory_is_refused(tmp_path: Path) -> None:
    values: list[Any] = [0.5] * 1000
    for _ in range(6):
        values = [values] * 1000
    odd = {"steps": [{"action": values, "is_first": True}]}
    folder = write_openx(tmp_path / "toy", [[random_openx_episode(3), odd]])
    refused(folder, r"toy_00001.data.pickle: .* must be in all episodes", **LAST)


def test_other_files_in_archives_and_folders_are_counted_or_left(tmp_path: Path) -> None:
    folder = four_shards(tmp_path)
    (folder / "README.md").write_text("x")
    with tarfile.open(folder / "toy_00003.tar", "a") as archive:
        add_member(archive, "toy_00099.json", b"{}")
    result = rbtool.convert(folder, tmp_path / "out", **LAST)
    assert result.episodes == 8
    assert "1 file in the archives that are not episodes" in result.notes


def test_shards_of_two_datasets_or_two_of_one_number_are_refused(tmp_path: Path) -> None:
    folder = four_shards(tmp_path)
    shutil.copy(folder / "toy_00000.tar", folder / "toy_0.tar")
    refused(folder, "two shards with the number 0", **LAST)
    (folder / "toy_0.tar").rename(folder / "other_00000.tar")
    refused(folder, "shards of several datasets: 'other', 'toy'", **LAST)


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("inspect {}", 2, "its episodes are pickles"),
        ("check {} --trust-pickle", 0, ""),
        ("convert {} OUT --trust-pickle --images all", 2, "--images is 'all', expected decode or skip"),
        ("convert {} OUT --trust-pickle --rlds-last all", 2, "--rlds-last is 'all'"),
        ("convert {} OUT --trust-pickle --horizon 3", 2, "has no option --horizon"),
    ],
)
def test_exit_codes(line: str, code: int, said: str, tmp_path: Path, capsys: Any) -> None:
    file = write_openx_shard(tmp_path / "toy" / "toy_00000.tar", random_openx((3, 4)))
    words = [{"{}": str(file), "OUT": str(tmp_path / "out")}.get(word, word) for word in line.split()]
    assert app._run(words) == code
    assert said in capsys.readouterr().err


BLOCK = 512
MEMBERS = st.lists(st.tuples(st.sampled_from(["plain", "long"]), st.integers(0, 4000), st.booleans()), max_size=9)


def archive(members: list[tuple[str, int, bool]], kind: int = tarfile.GNU_FORMAT) -> bytes:
    """A tar archive of members with long names or not; some hold what looks like a header."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w", format=kind) as file:
        for number, (name, size, deceptive) in enumerate(members):
            info = tarfile.TarInfo(f"{'n' * 150 * (name == 'long')}_{number:05}.data.pickle")
            info.size = size
            lure = tarfile.TarInfo("lure_00000.data.pickle").tobuf() * deceptive
            file.addfile(info, io.BytesIO((lure + bytes([number + 1]) * size)[:size]))
    return held.getvalue()


def cut_pieces(data: bytes, folder: Path, span: tuple[int, int]) -> list[tuple[str, bytes]]:
    """The episodes of a part, with their bytes."""
    path = folder / "part.tar"
    path.unlink(missing_ok=True)

    def fetch(start: int, stop: int, write: Callable[[memoryview, int], None]) -> None:
        write(memoryview(data)[start:stop], start)

    if not shards.fetch_piece(fetch, len(data), span, path, "the archive"):
        assert not path.exists()
        return []
    with tarfile.open(path) as file:
        return [(one.name, file.extractfile(one).read()) for one in file if one.name != "before"]  # type: ignore[union-attr]


@given(MEMBERS, st.sampled_from([512, 1024, 2048, 5120]), st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
def test_parts_have_every_member_once(members: list[tuple[str, int, bool]], size: int, kind: int) -> None:
    members = [(name, count, False) for name, count, _ in members]
    data = archive(members, kind)
    with tempfile.TemporaryDirectory() as folder:
        found = [
            one
            for start in range(0, len(data), size)
            for one in cut_pieces(data, Path(folder), (start, min(start + size, len(data))))
        ]
    with tarfile.open(fileobj=io.BytesIO(data)) as file:
        assert found == [(one.name, file.extractfile(one).read()) for one in file]  # type: ignore[union-attr]


def test_a_header_inside_of_an_episode_is_none(tmp_path: Path) -> None:
    data = archive([("plain", 3000, True), ("plain", 100, False)])
    names = [name for start in range(0, len(data), 512) for name, _ in cut_pieces(data, tmp_path, (start, start + 512))]
    assert names == ["_00000.data.pickle", "_00001.data.pickle"]


@pytest.mark.parametrize("damage", ["header", "cut", "more"])
def test_damage_is_named(tmp_path: Path, damage: str) -> None:
    data = bytearray(archive([("plain", 1000, False)] * 4))
    if damage == "header":
        data[3 * BLOCK + 5] ^= 1
    elif damage == "cut":
        del data[4000:]
    else:
        data[-1] = 1
    with pytest.raises(CorruptDataError, match=r"the archive is (damaged|cut)"):
        cut_pieces(bytes(data), tmp_path, (0, len(data)))
