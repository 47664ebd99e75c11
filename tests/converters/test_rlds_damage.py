"""Damaged, cut and missing shards, and documents that are not what they seem: one sentence, and the rest is kept."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from damage import POINTER
from rlds_files import PLAIN, example, masked, random_episode, record, write_dataset, write_shard

import rbtool
from rbtool.core.errors import CorruptDataError, FormatError, RbtoolError
from rbtool.core.open_steps import open_steps

COUNTS = (3, 2, 4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Nine episodes in three shards."""
    records = [record(PLAIN, random_episode(4, seed=seed)) for seed in range(9)]
    return write_dataset(tmp_path / "toy" / "1.0.0", {"train": [records[:3], records[3:5], records[5:]]}, PLAIN)


def shard(folder: Path, number: int) -> Path:
    return folder / f"toy-train.tfrecord-{number:05}-of-00003"


def offsets(file: Path) -> list[int]:
    """Where each record begins."""
    data, at, found = file.read_bytes(), 0, []
    while at < len(data):
        found.append(at)
        at += 16 + struct.unpack_from("<Q", data, at)[0]
    return found


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)


def remove(folder: Path) -> None:
    shard(folder, 1).unlink()


def cut(folder: Path) -> None:
    file = shard(folder, 1)
    file.write_bytes(file.read_bytes()[: offsets(file)[1] + 20])


def cut_in_a_length(folder: Path) -> None:
    file = shard(folder, 1)
    file.write_bytes(file.read_bytes()[: offsets(file)[1] + 5])


def damage_data(folder: Path) -> None:
    flip(shard(folder, 1), offsets(shard(folder, 1))[1] + 40)


def damage_length(folder: Path) -> None:
    flip(shard(folder, 1), offsets(shard(folder, 1))[1] + 1)


def point(folder: Path) -> None:
    shard(folder, 1).write_bytes(POINTER)


def empty(folder: Path) -> None:
    shard(folder, 1).write_bytes(b"")


def no_example(folder: Path) -> None:
    first = record(PLAIN, random_episode(4, seed=3))
    write_shard(shard(folder, 1), [first, b"\xff" * 40])


def contradicting(folder: Path) -> None:
    episode = record(PLAIN, random_episode(4, seed=3))
    odd = example(
        {"steps/is_first": [1, 0], "steps/action": [0.0] * 5, "steps/observation": [0.0] * 6, "steps/reward": [0.0] * 2}
    )
    write_shard(shard(folder, 1), [episode, odd])


def two_episodes(folder: Path) -> None:
    one = random_episode(4, seed=3)
    one["steps"]["is_last"][1] = True
    write_shard(shard(folder, 1), [record(PLAIN, random_episode(4, seed=3)), record(PLAIN, one)])


DAMAGE: dict[Callable[[Path], None], tuple[str, list[int]]] = {
    remove: (r"00001-of-00003 is missing, which has 2 episodes", [3, 4]),
    cut: (r"00001-of-00003 is cut: it ends after \d+ bytes, inside record 1", [4]),
    cut_in_a_length: (r"is cut: it ends after \d+ bytes, inside record 1", [4]),
    damage_data: (r"the record at byte \d+ has another checksum than it states", [4]),
    damage_length: (r"the length of record 1, at byte \d+, has another checksum than it states", [4]),
    point: ("is a git-lfs pointer", [3, 4]),
    empty: ("has 0 records, and 2 are stated of it", [3, 4]),
    no_example: ("episode 4 in toy-train.tfrecord-00001-of-00003: no sound Example", [4]),
    contradicting: ("'steps/action' has 5 values for 2 steps, not 4", [4]),
    two_episodes: (r"is_last is set in step 1 of 4, expected one episode", [4]),
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_what_is_damaged_is_named_and_the_rest_can_be_kept(
    damage: Callable[[Path], None], folder: Path, tmp_path: Path
) -> None:
    damage(folder)
    said, lost = DAMAGE[damage]
    with pytest.raises(FormatError, match=said) as caught:
        rbtool.convert(folder, tmp_path / "out")
    assert (caught.value.exit_code, "\n" in caught.value.message) == (1, False)
    assert not (tmp_path / "out").exists()
    assert rbtool.check(folder).errors > 0
    result = rbtool.convert(folder, tmp_path / "rest", skip_bad=True, rlds_last="observation")
    with open_steps(result.path) as reader:
        assert reader.episodes.episode.tolist() == [number for number in range(9) if number not in lost]
    assert any("left out" in note for note in result.notes)


def test_more_records_than_stated_are_an_error(folder: Path, tmp_path: Path) -> None:
    more = [record(PLAIN, random_episode(4, seed=seed)) for seed in range(4)]
    write_shard(shard(folder, 1), more)
    with pytest.raises(FormatError, match="has more than the 2 records that are stated"):
        rbtool.convert(folder, tmp_path / "out")
    result = rbtool.convert(folder, tmp_path / "rest", skip_bad=True)
    assert result.episodes == 9


def test_without_dataset_info_records_are_counted(folder: Path, tmp_path: Path) -> None:
    (folder / "dataset_info.json").unlink()
    result = rbtool.convert(folder, tmp_path / "out")
    assert (result.episodes, result.request["id"]) == (9, "toy/1.0.0")
    shard(folder, 2).unlink()
    with pytest.raises(CorruptDataError, match="00002-of-00003 is missing") as caught:
        rbtool.convert(folder, tmp_path / "other")
    assert "--skip-bad" in caught.value.hint


@pytest.mark.parametrize("name", ["features.json", "dataset_info.json"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is an empty file"),
        (POINTER, "is a git-lfs pointer"),
        (b"{", "is not JSON"),
        (b"[]", "is no JSON object"),
        (b"{}", ""),
    ],
)
def test_documents_that_are_none(name: str, content: bytes, said: str, folder: Path, tmp_path: Path) -> None:
    (folder / name).write_bytes(content)
    for call in (rbtool.inspect, lambda path: rbtool.convert(path, tmp_path / "out")):
        with pytest.raises(FormatError, match=f"{name}.*{said}") as caught:
            call(folder)
        assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fileFormat": "riegeli"}, "the file format 'riegeli' is not read"),
        ({"fileFormat": ["tfrecord"]}, r"the file format .* is not read"),
        ({"fileFormat": {"a": 1}}, r"the file format .* is not read"),
        ({"name": "../toy"}, "name is '../toy', expected a plain name"),
        ({"splits": [{"name": "train", "shardLengths": ["x"]}]}, "a shard of 'x' records"),
        ({"splits": [{"name": "train", "shardLengths": ["1"], "filepathTemplate": "../{DATASET}"}]}, "leads out of"),
        ({"splits": [{"name": "a"}, {"name": "a"}]}, "names a split twice"),
        ({"splits": 3}, "splits are no list"),
    ],
)
def test_contradictions_of_dataset_info(change: dict[str, object], said: str, folder: Path) -> None:
    info = json.loads((folder / "dataset_info.json").read_text())
    (folder / "dataset_info.json").write_text(json.dumps(info | change))
    with pytest.raises(FormatError, match=said):
        rbtool.inspect(folder)


def test_other_datasets_are_named(folder: Path) -> None:
    path = folder / "features.json"
    path.write_text(json.dumps({"pythonClassName": "x", "featuresDict": {"features": {"image": {"text": {}}}}}))
    with pytest.raises(FormatError, match="has no feature 'steps'"):
        rbtool.inspect(folder)
    path.unlink()
    with pytest.raises(FormatError, match=r"has no features\.json"):
        rbtool.inspect(folder)


def test_a_folder_of_several_versions_is_refused(folder: Path) -> None:
    records = [record(PLAIN, random_episode(4))]
    write_dataset(folder.parent / "2.0.0", {"train": [records]}, PLAIN)
    with pytest.raises(FormatError, match=r"has 2 datasets \(1\.0\.0, 2\.0\.0\)") as caught:
        rbtool.inspect(folder.parent)
    assert caught.value.hint == f"name one of them: {folder.parent / '2.0.0'}"


@pytest.mark.parametrize(("lengths", "is_sound"), [(None, True), ([2, 2], True), ([1, 3], False)])
def test_sequences_of_a_stated_length(lengths: list[int] | None, is_sound: bool, tmp_path: Path) -> None:
    """They are stored flat, or like those of any length."""
    steps = {**PLAIN, "pair": ("sequence", ("tensor", "int32", ()), 2)}
    lists = {
        "steps/is_first": [1, 0],
        "steps/reward": [0.0, 1.0],
        "steps/action": [0.5] * 4,
        "steps/observation": [0.5] * 6,
    }
    stored = {"ragged_flat_values": [7, 8, 9, 10], "ragged_row_lengths_0": lengths}
    lists |= (
        {f"steps/pair/{name}": values for name, values in stored.items()} if lengths else {"steps/pair": [7, 8, 9, 10]}
    )
    folder = write_dataset(tmp_path / "1.0.0", {"train": [[example(lists)]]}, steps)
    if not is_sound:
        with pytest.raises(CorruptDataError, match="its steps have sequences of several lengths"):
            rbtool.convert(folder, tmp_path / "out", rlds_last="observation")
        return
    result = rbtool.convert(folder, tmp_path / "out", rlds_last="observation")
    with open_steps(result.path) as reader:
        assert reader.read(("next", "pair"), 0, 1).tolist() == [[9, 10]]


@pytest.mark.parametrize("number", [1, 1 << 31, -1])
def test_values_that_do_not_fit_their_type_are_damage(number: int, tmp_path: Path) -> None:
    steps = {**PLAIN, "small": ("tensor", "uint8", ())}
    lists = {"steps/is_first": [1, 0], "steps/is_last": [0, 1], "steps/is_terminal": [0, 0], "steps/reward": [0.0, 1.0],
             "steps/action": [0.5] * 4, "steps/observation": [0.5] * 6, "steps/small": [number, 0]}  # fmt: skip
    folder = write_dataset(tmp_path / "1.0.0", {"train": [[example(lists)]]}, steps)
    if number == 1:
        assert rbtool.convert(folder, tmp_path / "out", rlds_last="observation").steps == 1
        return
    with pytest.raises(CorruptDataError, match=f"the value {number} does not fit uint8"):
        rbtool.convert(folder, tmp_path / "out", rlds_last="observation")


def test_a_record_of_a_stated_size_beyond_the_file_takes_no_memory(folder: Path) -> None:
    size = struct.pack("<Q", 1 << 40)
    shard(folder, 1).write_bytes(size + masked(size) + b"x" * 100)
    with pytest.raises(RbtoolError, match="record 0 has 1,099,511,627,776 bytes"):
        rbtool.convert(folder, folder.parent / "out")
