"""Recordings: whole episodes survive whatever stops the recorder or damages a file; `repair` keeps the rest."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import rbtool
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.datasets.load_dataset import load_dataset
from rbtool.core.encodings.compact import compare_steps
from rbtool.core.errors import CorruptDataError, DatasetNotFoundError, FormatError, SchemaError, UsageError
from rbtool.core.format.manifest import Manifest
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.format.packed import recording as writing
from rbtool.core.format.packed.recording import COMMITS, COMMITS_COPY, PackedRecorder
from rbtool.core.open_steps import open_steps
from rbtool.core.recording.repair import read_fields, repair
from rbtool.core.storages.packed import PackedRecording, PackedStorage
from rbtool.core.ted.schema import Field
from rbtool.core.testing.datasets import ODD_LEAVES, DatasetPlan, write_plan, write_walks
from rbtool.core.verbs.check import check
from rbtool.core.verbs.convert import convert
from rbtool.core.verbs.inspect import inspect

LOG, COPY, FIELDS, SCHEMA = ".rbtool/commits.bin", ".rbtool/commits_copy.bin", ".rbtool/recording.json", "schema.json"
PLAN = DatasetPlan(
    (5, 1, 7, 3), ("terminated", "both", "truncated", "both"), (False, False, True, False), ODD_LEAVES, "set"
)
EPISODES = 4


def record(reader: TedReader, recorder: PackedRecorder, rows: range = range(EPISODES)) -> None:
    table = reader.episodes
    for row in rows:
        start, stop = int(table.start[row]), int(table.start[row] + table.length[row])
        columns = {field.key: reader.read(field.key, start, stop) for field in reader.fields}
        seed = int(table.seed[row]) if table.has_seed[row] else None
        recorder.add_episode(columns, episode=int(table.episode[row]), seed=seed)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows in layout `ted`, and four episodes of them recorded, of which no dataset was made."""
    work = tmp_path_factory.mktemp("recorded")
    write_plan(PLAN, work / "ted")
    with TedReader(work / "ted") as reader:
        recorder = PackedRecorder(work / "recording", reader.fields)
        record(reader, recorder)
        recorder.close()
    return work


@pytest.fixture
def recording(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original / "recording", tmp_path / "recording"))


def bytes_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def require_refused(recording: Path, match: str, **ask: bool) -> str:
    """Require that a repair is refused and changes nothing; return the hint."""
    before = bytes_of(recording)
    with pytest.raises(CorruptDataError, match=match) as caught:
        repair(recording, **ask)
    assert bytes_of(recording) == before
    return caught.value.hint


def require_beginning(original: Path, recording: Path) -> int:
    """Require that the dataset begins like the original one; return how many episodes it has."""
    with TedReader(original / "ted") as expected, open_steps(recording) as found:
        found.verify_files()
        episodes, steps = found.manifest.episodes, found.manifest.steps
        assert found.episodes.length.tolist() == list(PLAN.lengths[:episodes])
        for field in expected.fields:
            assert found.read(field.key, 0, steps).tobytes() == expected.read(field.key, 0, steps).tobytes()
    return episodes


def differences(original: Path, recording: Path) -> list[object]:
    with TedReader(original / "ted") as expected, open_steps(recording) as found:
        found.verify_files()
        assert found.manifest.ranges == expected.manifest.ranges
        return [*compare_steps(expected, found)]


def test_a_finished_recording_is_the_dataset(original: Path, tmp_path: Path) -> None:
    with TedReader(original / "ted") as reader, PackedRecorder(tmp_path / "recording", reader.fields) as recorder:
        record(reader, recorder)
        for field in reader.fields:
            assert recorder.read(field.key, 2, 15).tobytes() == reader.read(field.key, 2, 15).tobytes()
    assert differences(original, tmp_path / "recording") == []


def test_repair_makes_the_same_dataset_of_what_was_not_finished(original: Path, recording: Path) -> None:
    for use in (open_steps, inspect, load_dataset, lambda path: convert(path, path.parent / "converted")):
        with pytest.raises(CorruptDataError, match="is a recording that was not finished"):
            use(recording)
    planned = repair(recording, dry_run=True)
    assert (planned.steps, planned.episodes, planned.repaired) == (16, 4, False)
    result = repair(recording)
    assert (result.steps, result.episodes, result.lost_episodes, result.cut_bytes) == (16, 4, 0, 0)
    assert not repair(recording).repaired
    assert differences(original, recording) == []
    assert Manifest.load(recording).content_digest == result.content_digest


def test_what_belongs_to_no_episode_is_cut(recording: Path) -> None:
    for name in ("records.bin", "explicit_next.bin", LOG, COPY):
        with open(recording / name, "ab") as file:
            file.write(b"torn")
    result = repair(recording)
    assert (result.episodes, result.lost_episodes, result.cut_bytes, result.remade) == (4, 0, 8, ())
    assert open_steps(recording).manifest.steps == 16


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize(("record_number", "kept"), [(0, 0), (6, 1), (8, 2), (17, 3)])
def test_a_changed_byte_costs_its_episode_and_those_after_it(original, recording, record_number, kept, sealed) -> None:
    if sealed:
        repair(recording)
    file = recording / "records.bin"
    data = bytearray(file.read_bytes())
    data[record_number * (len(data) // 20) + 9] ^= 4
    file.write_bytes(data)
    some = f"has 4 finished episodes, of which the first {kept} can be restored: number {kept + 1} is damaged"
    none = "not one of 4 finished episodes can be restored, because the first one is damaged; nothing was changed"
    require_refused(recording, some if kept else none, yes=not kept)
    if kept:
        result = repair(recording, yes=True)
        assert (result.episodes, result.lost_episodes) == (kept, 4 - kept)
        assert require_beginning(original, recording) == kept


def test_repair_leaves_alone_what_was_not_recorded(tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", [(3, "open")])
    with pytest.raises(FormatError, match="is not a recording"):
        repair(tmp_path / "walks")
    with pytest.raises(DatasetNotFoundError, match="absent not found"):
        repair(tmp_path / "absent")


def test_a_recording_that_goes_on_is_left_alone(original: Path, tmp_path: Path) -> None:
    with TedReader(original / "ted") as reader, PackedRecorder(tmp_path / "recording", reader.fields) as recorder:
        record(reader, recorder, range(2))
        with pytest.raises(UsageError, match="being recorded to by another process"):
            repair(tmp_path / "recording")
        with pytest.raises(UsageError, match="already exists"):
            PackedRecorder(tmp_path / "recording", reader.fields)
        with pytest.raises(SchemaError, match="other leaves"):
            recorder.add_episode({("action",): np.zeros((2, 2), np.float32)}, episode=0)
    assert Manifest.load(tmp_path / "recording").episodes == 2


def test_processes_that_were_forked_meanwhile_neither_unlock_a_recording_nor_keep_it_locked(
    original: Path, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("fork")
    with TedReader(original / "ted") as reader:
        recorder, ended = PackedRecorder(tmp_path / "recording", reader.fields), context.Event()
        record(reader, recorder)
    closing, holding = context.Process(target=recorder.close), context.Process(target=ended.wait)
    for process in (closing, holding):
        process.start()
    closing.join()
    with pytest.raises(UsageError, match="being recorded to by another process"):
        repair(tmp_path / "recording")
    recorder.close()
    assert holding.is_alive()
    assert repair(tmp_path / "recording").episodes == EPISODES
    ended.set()
    holding.join()


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
def test_flags_that_say_too_little_are_refused(tmp_path, left_out, changed, match) -> None:
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


def test_the_numbers_of_episodes_change_where_episodes_end(tmp_path: Path) -> None:
    storage = PackedStorage.create(tmp_path / "recording")
    for numbers in ([0.0, 0.0], [False, False], [[1, 2], [1, 2]]):
        with pytest.raises(SchemaError, match="expected a whole number for each row"):
            storage.set(range(2), rows(0, 2, done=True).set("episode", torch.tensor(numbers)))
    with pytest.raises(SchemaError, match="row 1 has the episode 4, expected 3"):
        storage.set(range(2), rows(0, 2, done=True).set("episode", torch.tensor([3, 4])))
    assert not (tmp_path / "recording").exists()
    storage.set(range(2), rows(0, 2, done=True).set("episode", torch.tensor([3, 3])))
    storage.set(range(2, 4), rows(2, 2, done=False).set("episode", torch.tensor([4, 4])))
    with pytest.raises(SchemaError, match="row 4 has the episode 5, expected 4"):
        storage.set(range(4, 6), rows(4, 2, done=True).set("episode", torch.tensor([5, 5])))
    storage.set(range(4, 6), rows(4, 2, done=True).set("episode", torch.tensor([4, 4])))
    storage.finish()
    assert (open_steps(tmp_path / "recording").episodes.episode.tolist(), len(storage)) == ([3, 4], 6)
    assert not check(tmp_path / "recording").errors


# What describes a recording is stored twice: one changed or missing file costs nothing.

HARM = ("missing", "empty", "cut", *(str(number / 23) for number in (0, 5, 11, 16, 22)))


def damage(path: Path, how: str) -> None:
    """Remove a file, empty it, cut its end, or change a byte at a part of its length."""
    data = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "cut":
        path.write_bytes(data[: len(data) * 2 // 3])
    else:
        data[int(len(data) * float(how))] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("name", [LOG, COPY, FIELDS, SCHEMA])
def test_one_damaged_file_costs_nothing(original: Path, recording: Path, name: str, sealed: bool) -> None:
    if sealed:
        repair(recording)
    for how in HARM[(sealed + (LOG, COPY, FIELDS, SCHEMA).index(name)) % 2 :: 2]:
        copy = Path(shutil.copytree(recording, recording.with_name(how)))
        damage(copy / name, how)
        result = repair(copy)
        assert (result.episodes, result.lost_episodes, result.repaired) == (EPISODES, 0, True), how
        if name != COPY or how[0].isdigit():  # the copy may end early
            assert result.remade == (name,), how
        assert differences(original, copy) == [], how
        assert not repair(copy).repaired


@pytest.mark.parametrize("how", ["missing", "cut", "0.5"])
def test_what_was_recorded_is_not_guessed(recording: Path, how: str) -> None:
    for name in (FIELDS, SCHEMA):
        damage(recording / name, how)
    require_refused(recording, r"does not describe its leaves: \S+json and \S+json are both", yes=True)


def test_the_files_of_another_recording_are_not_taken_for_ours(original: Path, recording: Path) -> None:
    write_plan(DatasetPlan((2,), ("both",), (False,), ODD_LEAVES[:3]), recording.parent / "other-ted")
    with TedReader(recording.parent / "other-ted") as reader:
        PackedRecorder(recording.parent / "other", reader.fields).close()
    shutil.copy(recording.parent / "other" / FIELDS, recording / FIELDS)
    assert repair(recording).remade == (FIELDS,)
    assert differences(original, recording) == []
    for name in (FIELDS, SCHEMA):
        shutil.copy(recording.parent / "other" / name, recording / name)
    with pytest.raises(CorruptDataError, match="of another recording"):
        repair(recording)


def test_a_newer_recording_is_refused(recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = read_fields(recording, None).fields
    with monkeypatch.context() as patch:
        patch.setattr(writing, "RECORDING_VERSION", 2)
        (recording / FIELDS).write_bytes(writing.fields_bytes(fields))
    with pytest.raises(FormatError, match="has version 2, this rbtool reads up to 1"):
        repair(recording)


# The log ---------------------------------------------------------------------------------------------


def cut_logs(recording: Path, records: float) -> None:
    for name in (LOG, COPY):
        size = (recording / name).stat().st_size // EPISODES
        os.truncate(recording / name, int(size * records))


@pytest.mark.parametrize("records", [0.5, 1.5, 3.5])
def test_a_torn_record_promised_nothing(recording: Path, records: float) -> None:
    """Its episode was under way; the rows of later ones cannot be there."""
    kept = int(records)
    named = repair(shutil.copytree(recording, recording.with_name("whole")), dry_run=True)
    cut_logs(recording, records)
    with open(recording / "records.bin", "rb+") as file:  # as many records as there were when it was torn
        lengths = PLAN.lengths[: kept + 1]
        file.truncate((sum(lengths) + len(lengths)) * (file.seek(0, 2) // (sum(PLAN.lengths) + EPISODES)))
    result = repair(recording)
    assert (result.episodes, result.lost_episodes, result.repaired) == (kept, 0, True)
    assert named.episodes == EPISODES


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize(("records", "total"), [(0, 3), (1, 3), (2, 3), (1.5, 3), (3, 4)])
def test_finished_episodes_that_no_log_names_are_not_cut_unasked(recording, records, total, sealed) -> None:
    if sealed:
        repair(recording)
        total = EPISODES
    cut_logs(recording, records)
    if total > 3 and not sealed:  # the last may be the one that was under way
        assert repair(recording).episodes == 3
        return
    kept = int(records)
    some = rf"has at least {total} finished episodes, of which the first {kept} can be restored: \S+ was cut"
    none = f"not one of at least {total} finished episodes can be restored, because .* do not list them"
    hint = require_refused(recording, some if kept else none, yes=not kept)
    assert ("--yes" in hint) == bool(kept)
    for name in (LOG, COPY):
        (recording / name).unlink()
    assert "--yes" not in require_refused(recording, none, yes=True)


def test_finished_episodes_that_no_log_names_are_given_up_when_asked(recording: Path) -> None:
    cut_logs(recording, 1)
    result = repair(recording, yes=True)
    assert (result.episodes, result.lost_episodes, result.repaired) == (1, 2, True)


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("ask", [{}, {"yes": True}, {"dry_run": True}])
def test_a_missing_data_file_is_named_and_nothing_is_cut(recording: Path, ask: dict[str, bool], sealed: bool) -> None:
    if sealed:
        repair(recording)
    (recording / "records.bin").unlink()
    said = f"records.bin is missing: not one of {EPISODES} finished episodes can be restored"
    assert "--yes" not in require_refused(recording, said, **ask)


def test_a_missing_folder_of_data_files_is_named(tmp_path: Path) -> None:
    leaves = (
        *(Field((name,), "uint8", (5000,), "state") for name in ("left", "right")),
        Field(("next", "done"), "bool", (1,), "done"),
    )
    with PackedRecorder(tmp_path / "recording", leaves) as recorder:
        recorder.add_episode({leaf.key: np.ones((3, *leaf.shape), leaf.numpy) for leaf in leaves}, episode=0)
    shutil.rmtree(tmp_path / "recording" / "fields")
    said = r"fields/left\.\S+ is missing: not one of 1 finished episode can"
    assert "fields/right." in require_refused(tmp_path / "recording", said, yes=True)


def test_without_its_log_and_a_data_file_it_is_not_emptied(recording: Path) -> None:
    for name in (LOG, COPY, "records.bin"):
        (recording / name).unlink()
    require_refused(recording, r"records.bin is missing: every episode needs it", yes=True)


def test_a_missing_file_of_explicit_rows_costs_only_what_is_in_it(recording: Path) -> None:
    (recording / "explicit_next.bin").unlink()
    require_refused(recording, r"of which the first 2 can be restored: explicit_next.bin is missing")
    result = repair(recording, yes=True)
    assert (result.episodes, result.lost_episodes, result.repaired) == (2, 2, True)


def test_an_episode_that_could_not_be_written_is_not_built_upon(original: Path, tmp_path: Path) -> None:
    with TedReader(original / "ted") as reader:
        recorder = PackedRecorder(tmp_path / "recording", reader.fields)
        columns = {field.key: reader.read(field.key, 0, 5) for field in reader.fields}
        recorder.add_episode(columns, episode=0)
        with pytest.raises(SchemaError, match="other leaves"):
            recorder.add_episode({("action",): np.zeros((2, 2), np.float32)}, episode=1)
        recorder.rows.files._records._file.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            recorder.add_episode(columns, episode=1)
        for go_on in (recorder.finish, lambda: recorder.add_episode(columns, episode=1)):
            with pytest.raises(SchemaError, match="stopped in the middle of an episode"):
                go_on()
        recorder.close()
    assert repair(tmp_path / "recording").episodes == 1


# When recordings are synced, and what a power failure between two syncs leaves.


def sizes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def lose(folder: Path, synced: dict[str, int], choose: random.Random) -> None:
    """Leave of each file what was synced, and any part of the rest: cut off, or never written to its blocks."""
    for name, size in sizes(folder).items():
        kept = choose.choice([synced.get(name, 0), size, choose.randint(synced.get(name, 0), size)])
        content = bytearray((folder / name).read_bytes())
        if choose.random() < 0.5:
            content[kept:] = bytes(size - kept)
        else:
            del content[kept:]
        (folder / name).write_bytes(content)
        if name not in synced and choose.random() < 0.3:
            (folder / name).unlink()


@pytest.mark.parametrize("safe", [1, *(pytest.param(safe, marks=pytest.mark.slow) for safe in (2, 3))])
def test_a_power_failure_loses_no_episode_that_was_synced(original: Path, tmp_path: Path, safe: int) -> None:
    with TedReader(original / "ted") as reader:
        recorder = PackedRecorder(tmp_path / "recording", reader.fields, sync_seconds=1e9)
        record(reader, recorder, range(safe))
        recorder.sync()
        synced = sizes(tmp_path / "recording")
        record(reader, recorder, range(safe, EPISODES))
        recorder.close()
    found = set()
    for number in range(30):
        left = Path(shutil.copytree(tmp_path / "recording", tmp_path / f"left-{number}"))
        lose(left, synced, random.Random(number))
        rbtool.repair(left, yes=True)
        found.add(require_beginning(original, left))
    assert safe <= min(found) < max(found) <= EPISODES


def episode(number: int) -> TensorDict:
    done = torch.tensor([[False], [True]])
    after = {"observation": torch.full((2, 1), number + 1.0), "reward": torch.ones(2, 1), "terminated": done}
    return TensorDict(
        {"observation": torch.full((2, 1), float(number)), "action": torch.ones(2, 1), "next": after}, [2]
    )


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Returns the names of the files that were synced since it was called last."""
    names: list[str] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        names.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    return lambda: [names.pop(0) for _ in names.copy()]


SYNCED_LOG, SYNCED_COPY = Path(COMMITS).name, Path(COMMITS_COPY).name


def test_episodes_of_a_second_are_synced_together(tmp_path: Path, taken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    recording = rbtool.PackedStorage.create(tmp_path / "recording")
    buffer = rbtool.TensorDictReplayBuffer(storage=recording, batch_size=2)
    buffer.extend(episode(0))
    assert taken()[-1] == SYNCED_LOG  # after the rows that it names
    now[0] += 0.9
    for number in range(1, 20):
        buffer.extend(episode(number))
    assert taken() == []
    now[0] += 0.2
    buffer.extend(episode(20))
    *rows, log = taken()
    assert log == SYNCED_LOG
    assert len(rows) == len(set(rows)) >= 1
    buffer.extend(episode(21))
    for save in (recording.sync, buffer.state_dict):
        save()
        assert taken() == [*rows, SYNCED_LOG]
    buffer.extend(episode(22))
    recording.close()
    assert taken() == [*rows, SYNCED_LOG]
    assert rbtool.repair(tmp_path / "recording").episodes == 23


def test_each_episode_is_synced_on_request(tmp_path: Path, taken: Callable[[], list[str]]) -> None:
    recording = rbtool.PackedStorage.create(tmp_path / "recording", sync_seconds=0)
    recording.set(slice(0, 2), episode(0))
    taken()
    recording.set(slice(2, 8), torch.cat([episode(number) for number in (1, 2, 3)]))
    assert taken().count(SYNCED_LOG) == 3
    recording.finish()
    assert {SYNCED_LOG, SYNCED_COPY} <= set(taken())


@pytest.mark.parametrize("seconds", [-1, float("nan")])
def test_seconds_below_nothing_are_refused(tmp_path: Path, seconds: float) -> None:
    with pytest.raises(ValueError, match="sync_seconds"):
        rbtool.PackedStorage.create(tmp_path / "recording", sync_seconds=seconds)


def test_a_sync_that_fails_stops_the_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = rbtool.PackedStorage.create(tmp_path / "recording", sync_seconds=0)
    recording.set(slice(0, 2), episode(0))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(OSError, match="Input/output"):
            recording.set(slice(2, 4), episode(1))
    assert (len(recording), recording.episodes) == (2, 1)
    with pytest.raises(RuntimeError, match="finished"):
        recording.set(slice(2, 4), episode(1))
    recording.close()
    assert rbtool.repair(tmp_path / "recording").episodes >= 1
