"""When recordings are synced, and what a power failure between two syncs leaves."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import rbtool
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.format.packed.recording import COMMITS, COMMITS_COPY, PackedRecorder
from rbtool.core.open_steps import open_steps
from rbtool.core.testing.datasets import ODD_LEAVES, DatasetPlan, write_plan

PLAN = DatasetPlan(
    (5, 1, 7, 3), ("terminated", "both", "truncated", "both"), (False, False, True, False), ODD_LEAVES, "set"
)


def add(recorder: PackedRecorder, reader: TedReader, rows: range) -> None:
    table = reader.episodes
    for row in rows:
        start, stop = int(table.start[row]), int(table.start[row] + table.length[row])
        columns = {field.key: reader.read(field.key, start, stop) for field in reader.fields}
        recorder.add_episode(columns, episode=int(table.episode[row]))


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
def test_a_power_failure_loses_no_episode_that_was_synced(tmp_path: Path, safe: int) -> None:
    write_plan(PLAN, tmp_path / "ted")
    with TedReader(tmp_path / "ted") as reader:
        recorder = PackedRecorder(tmp_path / "recording", reader.fields, sync_seconds=1e9)
        add(recorder, reader, range(safe))
        recorder.sync()
        synced = sizes(tmp_path / "recording")
        add(recorder, reader, range(safe, 4))
        recorder.close()
        found = set()
        for number in range(60):
            left = tmp_path / f"left-{number}"
            shutil.copytree(tmp_path / "recording", left)
            lose(left, synced, random.Random(number))
            rbtool.repair(left, yes=True)
            with open_steps(left) as restored:
                restored.verify_files()
                steps, episodes = restored.manifest.steps, restored.manifest.episodes
                assert safe <= episodes <= 4
                assert restored.episodes.length.tolist() == list(PLAN.lengths[:episodes])
                for field in reader.fields:
                    assert restored.read(field.key, 0, steps).tobytes() == reader.read(field.key, 0, steps).tobytes()
            found.add(episodes)
            shutil.rmtree(left)
    assert len(found) > 1


def episode(number: int) -> TensorDict:
    done = torch.tensor([[False], [True]])
    after = {"observation": torch.full((2, 1), number + 1.0), "reward": torch.ones(2, 1), "terminated": done}
    return TensorDict(
        {"observation": torch.full((2, 1), float(number)), "action": torch.ones(2, 1), "next": after}, [2]
    )


class Syncs:
    """The names of the files that were synced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        sync = os.fsync

        def noted(descriptor: int) -> None:
            self.names.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
            sync(descriptor)

        monkeypatch.setattr(os, "fsync", noted)

    def taken(self) -> list[str]:
        taken, self.names = self.names, []
        return taken


LOG, COPY = Path(COMMITS).name, Path(COMMITS_COPY).name


def test_episodes_of_a_second_are_synced_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs, now = Syncs(monkeypatch), [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    recording = rbtool.PackedStorage.create(tmp_path / "recording")
    buffer = rbtool.TensorDictReplayBuffer(storage=recording, batch_size=2)
    buffer.extend(episode(0))
    assert syncs.taken()[-1] == LOG  # after the rows that it names
    now[0] += 0.9
    for number in range(1, 20):
        buffer.extend(episode(number))
    assert syncs.taken() == []
    now[0] += 0.2
    buffer.extend(episode(20))
    *rows, log = syncs.taken()
    assert log == LOG
    assert len(rows) == len(set(rows)) >= 1
    buffer.extend(episode(21))
    for save in (recording.sync, buffer.state_dict):
        save()
        assert syncs.taken() == [*rows, LOG]
    buffer.extend(episode(22))
    recording.close()
    assert syncs.taken() == [*rows, LOG]
    assert rbtool.repair(tmp_path / "recording").episodes == 23


def test_each_episode_is_synced_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs = Syncs(monkeypatch)
    recording = rbtool.PackedStorage.create(tmp_path / "recording", sync_seconds=0)
    recording.set(slice(0, 2), episode(0))
    syncs.taken()
    recording.set(slice(2, 8), torch.cat([episode(number) for number in (1, 2, 3)]))
    assert syncs.taken().count(LOG) == 3
    recording.finish()
    assert {LOG, COPY} <= set(syncs.taken())


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
