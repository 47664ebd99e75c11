"""Recordings: whole episodes survive whatever stops the recorder; repair keeps the longest sound beginning."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.datasets.load_dataset import load_dataset
from rbtool.core.encodings.rows import compare_steps
from rbtool.core.errors import CorruptDataError, DatasetNotFoundError, FormatError, SchemaError, UsageError
from rbtool.core.format.manifest import Manifest
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.format.packed.recording import PackedRecorder
from rbtool.core.open_steps import open_steps
from rbtool.core.storages.packed import PackedRecording, PackedStorage
from rbtool.core.testing.datasets import ODD_LEAVES, DatasetPlan, write_plan, write_walks
from rbtool.core.verbs.check import check
from rbtool.core.verbs.convert import convert
from rbtool.core.verbs.inspect import inspect
from rbtool.core.verbs.repair import repair

PLAN = DatasetPlan(
    (5, 1, 7, 3), ("terminated", "both", "truncated", "both"), (False, False, True, False), ODD_LEAVES, "set"
)


def record(reader: TedReader, recorder: PackedRecorder, episodes: int) -> None:
    table = reader.episodes
    for row in range(episodes):
        start, stop = int(table.start[row]), int(table.start[row] + table.length[row])
        columns = {field.key: reader.read(field.key, start, stop) for field in reader.fields}
        seed = int(table.seed[row]) if table.has_seed[row] else None
        recorder.add_episode(columns, episode=int(table.episode[row]), seed=seed)


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    """Four episodes recorded, and no dataset made of them."""
    write_plan(PLAN, tmp_path / "ted")
    with TedReader(tmp_path / "ted") as reader:
        recorder = PackedRecorder(tmp_path / "recording", reader.fields)
        record(reader, recorder, 4)
        recorder.close()
    return tmp_path / "recording"


def test_a_finished_recording_is_the_dataset(tmp_path: Path) -> None:
    write_plan(PLAN, tmp_path / "ted")
    with TedReader(tmp_path / "ted") as reader:
        with PackedRecorder(tmp_path / "recording", reader.fields) as recorder:
            record(reader, recorder, 4)
            for field in reader.fields:
                assert recorder.read(field.key, 2, 15).tobytes() == reader.read(field.key, 2, 15).tobytes()
        with open_steps(tmp_path / "recording") as found:
            found.verify_files()
            assert compare_steps(reader, found) == []
            assert found.manifest.ranges == reader.manifest.ranges


def test_repair_makes_the_same_dataset_of_what_was_not_finished(unfinished: Path) -> None:
    for use in (open_steps, inspect, load_dataset, lambda path: convert(path, path.parent / "converted")):
        with pytest.raises(CorruptDataError, match="is a recording that was not finished"):
            use(unfinished)
    planned = repair(unfinished, dry_run=True)
    assert (planned.steps, planned.episodes, planned.repaired) == (16, 4, False)
    result = repair(unfinished)
    assert (result.steps, result.episodes, result.lost_episodes, result.cut_bytes) == (16, 4, 0, 0)
    assert not repair(unfinished).repaired
    with open_steps(unfinished) as found, TedReader(unfinished.parent / "ted") as expected:
        assert compare_steps(expected, found) == []
        assert found.manifest.ranges == expected.manifest.ranges
        assert found.manifest.content_digest == result.content_digest


def test_what_belongs_to_no_episode_is_cut(unfinished: Path) -> None:
    for name in ("records.bin", "explicit_next.bin", ".rbtool/commits.bin", ".rbtool/commits_copy.bin"):
        with open(unfinished / name, "ab") as file:
            file.write(b"torn")
    result = repair(unfinished)
    assert (result.episodes, result.lost_episodes, result.cut_bytes, result.remade) == (4, 0, 8, ())
    assert open_steps(unfinished).manifest.steps == 16


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize(("record_number", "kept"), [(0, 0), (6, 1), (8, 2), (17, 3)])
def test_a_changed_byte_costs_its_episode_and_those_after_it(
    unfinished: Path, record_number: int, kept: int, sealed: bool
) -> None:
    if sealed:
        repair(unfinished)
    file = unfinished / "records.bin"
    data = bytearray(file.read_bytes())
    data[record_number * (len(data) // 20) + 9] ^= 4
    file.write_bytes(data)
    before = {path: path.read_bytes() for path in unfinished.rglob("*") if path.is_file()}
    damage = f"has 4 finished episodes, of which the first {kept} can be restored: number {kept + 1} is damaged"
    damage = damage if kept else "not one of 4 finished episodes can be restored, because the first one is damaged"
    with pytest.raises(CorruptDataError, match=damage):
        repair(unfinished, yes=not kept)
    assert before == {path: path.read_bytes() for path in unfinished.rglob("*") if path.is_file()}
    if not kept:
        return
    result = repair(unfinished, yes=True)
    assert (result.episodes, result.lost_episodes) == (kept, 4 - kept)
    with open_steps(unfinished) as found, TedReader(unfinished.parent / "ted") as expected:
        found.verify_files()
        steps = result.steps
        for field in expected.fields:
            assert found.read(field.key, 0, steps).tobytes() == expected.read(field.key, 0, steps).tobytes()


def test_repair_leaves_alone_what_was_not_recorded(tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", [(3, "open")])
    with pytest.raises(FormatError, match="is no recording"):
        repair(tmp_path / "walks")
    with pytest.raises(DatasetNotFoundError, match="there is nothing"):
        repair(tmp_path / "absent")


def test_a_recording_that_goes_on_is_left_alone(tmp_path: Path) -> None:
    write_plan(PLAN, tmp_path / "ted")
    with TedReader(tmp_path / "ted") as reader, PackedRecorder(tmp_path / "recording", reader.fields) as recorder:
        record(reader, recorder, 2)
        with pytest.raises(UsageError, match="being recorded to by another process"):
            repair(tmp_path / "recording")
        with pytest.raises(UsageError, match="already exists"):
            PackedRecorder(tmp_path / "recording", reader.fields)
        with pytest.raises(SchemaError, match="other leaves"):
            recorder.add_episode({("action",): np.zeros((2, 2), np.float32)}, episode=0)
    assert Manifest.load(tmp_path / "recording").episodes == 2


# As a storage ----------------------------------------------------------------------------------------


def rows(start: int, count: int, *, done: bool) -> TensorDict:
    states = torch.arange(start, start + count + 1.0)[:, None] * 10
    last = (torch.arange(count) == count - 1)[:, None] & done
    after = {"observation": states[1:], "reward": torch.ones(count, 1), "done": last, "terminated": last}
    after["truncated"] = torch.zeros_like(last)
    now = {"observation": states[:-1], "action": torch.arange(float(start), start + count)}
    return TensorDict({**now, "next": TensorDict(after, [count])}, [count])


def test_a_buffer_records_and_draws(tmp_path: Path) -> None:
    buffer = TensorDictReplayBuffer(storage=PackedStorage.create(tmp_path / "recording"), batch_size=32)
    for start, done in ((0, True), (10, False), (14, True), (20, False)):
        buffer.extend(rows(start, 4, done=done))
    storage = buffer._storage
    assert isinstance(storage, PackedRecording)
    assert (len(buffer), storage.episodes) == (16, 2)
    batch = buffer.sample()
    assert torch.equal(batch["next", "observation"], batch["observation"] + 10)
    assert torch.equal(storage[-1]["action"], torch.tensor(23.0))
    manifest = storage.finish()
    assert (manifest.steps, manifest.episodes, manifest.boundary.end_of_file) == (16, 3, 1)
    found = PackedStorage(tmp_path / "recording")
    assert found.episodes.length.tolist() == [4, 8, 4]
    assert found[:]["episode"].tolist() == [0] * 4 + [1] * 8 + [2] * 4
    assert found[15]["next", "done"].item()
    assert found[15]["next", "truncated"].item()
    assert not check(tmp_path / "recording").errors


def test_an_episode_goes_on_over_many_writes(tmp_path: Path) -> None:
    storage = PackedStorage.create(tmp_path / "recording")
    for row in range(3):
        storage.set(row, rows(row, 1, done=row == 2)[0])
    assert (storage.episodes, storage.episode_lengths().tolist()) == (1, [3])
    storage.finish()
    with pytest.raises(SchemaError, match="is finished: nothing can be added"):
        storage.set(3, rows(3, 1, done=True)[0])
    with pytest.raises(SchemaError, match="is finished already"):
        storage.finish()
    closed = PackedStorage.create(tmp_path / "closed")
    closed.set(range(2), rows(0, 2, done=False))
    closed.close()
    with pytest.raises(SchemaError, match="is closed: nothing can be added"):
        closed.finish()


FLAGS = [("next", "done"), ("next", "terminated"), ("next", "truncated")]
FIRST = {"done": [0, 1, 1, 0], "terminated": [0, 1, 0, 0], "truncated": [0, 0, 1, 0]}


@pytest.mark.parametrize("given", [("done", "terminated"), ("done", "truncated"), ("terminated", "truncated")])
def test_a_missing_flag_follows_from_the_others(tmp_path: Path, given: tuple[str, ...]) -> None:
    """The second episode is truncated by its environment, the third by the end of the recording."""
    storage = PackedStorage.create(tmp_path / "recording")
    data = rows(0, 4, done=False).exclude(*FLAGS)
    for name in given:
        data["next", name] = torch.tensor(FIRST[name], dtype=torch.bool)[:, None]
    TensorDictReplayBuffer(storage=storage).extend(data)
    for finished, end in ((False, 0), (True, 1)):
        expected = FIRST | {"truncated": [0, 0, 1, end], "done": [0, 1, 1, end]}
        assert {name: storage[:]["next", name].int().reshape(-1).tolist() for name in FIRST} == expected
        if not finished:
            manifest = storage.finish()
    assert (manifest.boundary.terminated, manifest.boundary.truncated, manifest.boundary.end_of_file) == (1, 1, 1)
    assert not check(tmp_path / "recording").errors


def test_where_nothing_is_said_of_truncation_only_the_end_truncates(tmp_path: Path) -> None:
    storage = PackedStorage.create(tmp_path / "recording")
    data = rows(0, 4, done=False).exclude(FLAGS[0], FLAGS[2])
    data[FLAGS[1]] = torch.tensor([0, 1, 0, 0], dtype=torch.bool)[:, None]
    storage.set(range(4), data)
    storage.finish()
    assert storage[:][FLAGS[2]].reshape(-1).tolist() == [False, False, False, True]
    assert storage[:][FLAGS[0]].reshape(-1).tolist() == [False, True, False, True]
    assert not check(tmp_path / "recording").errors


@pytest.mark.parametrize(
    ("left_out", "changed", "match"),
    [
        (FLAGS, {}, r"none was found; 'next\.terminated', or both others, are needed"),
        (FLAGS[1:], {}, r"'next\.done' was found; 'next\.terminated', or both others, are needed"),
        (FLAGS[:2], {}, r"'next\.truncated' was found; 'next\.terminated', or both others, are needed"),
        ([], {FLAGS[0]: torch.ones(2, 1)}, r"'next\.done' is float32, expected bool"),
        (FLAGS[2:], {FLAGS[0]: torch.ones(2, 3, 1, dtype=torch.bool)}, "differ in shape"),
    ],
)
def test_flags_that_say_too_little_are_refused(
    tmp_path: Path, left_out: list[tuple[str, str]], changed: dict[tuple[str, str], torch.Tensor], match: str
) -> None:
    storage = PackedStorage.create(tmp_path / "recording")
    with pytest.raises(SchemaError, match=match):
        storage.set(range(2), rows(0, 2, done=True).exclude(*left_out).update(changed))
    assert (len(storage), (tmp_path / "recording").exists()) == (0, False)


def test_rows_are_added_at_the_end_and_alike(tmp_path: Path) -> None:
    storage = PackedStorage.create(tmp_path / "recording", max_size=6)
    with pytest.raises(SchemaError, match="nothing was ever written"):
        storage[0]
    storage.set(range(2), rows(0, 2, done=True))
    for cursor, data, match in (
        (range(2), rows(0, 2, done=True), "expected at the end, row 2"),
        (range(2, 4), rows(0, 2, done=True).exclude("action"), "differ from the first rows in the keys action"),
        (range(2, 4), rows(0, 2, done=True).set("action", torch.zeros(2).double()), "action is float64"),
        (range(2, 9), rows(0, 7, done=True), r"7 rows do not fit: .* holds 2 of 6 \(max_size\) already"),
        (torch.arange(5) % 3, rows(0, 2, done=True), "at rows 0, …, 1, expected at the end, row 2"),
    ):
        with pytest.raises(SchemaError, match=match):
            storage.set(cursor, data)
    assert len(storage) == 2
    storage.set(2, rows(5, 1, done=True)[0])
    storage.close()
    with pytest.raises(SchemaError, match="is finished"):
        storage.set(3, rows(5, 1, done=True)[0])
    shutil.copytree(tmp_path / "recording", tmp_path / "copy")
    assert repair(tmp_path / "copy").episodes == 2
