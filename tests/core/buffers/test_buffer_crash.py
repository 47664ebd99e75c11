"""A dump that is killed at any step leaves the older checkpoint or the new one, and the next one sweeps the rest."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from strikes import course_of, forked, kill
from tensordict import TensorDict

from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.samplers.prioritized import PrioritizedSampler
from rbtool.core.samplers.uniform import SamplerWithoutReplacement
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage

OLD, NEW = 3, 8


def made(rows: int = 0, prioritised: bool = False) -> TensorDictReplayBuffer:
    sampler = PrioritizedSampler(10, 1.0, 1.0) if prioritised else SamplerWithoutReplacement()
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10), sampler=sampler, batch_size=2, generator=torch.Generator()
    )
    if rows:
        buffer.extend(TensorDict({"a": torch.arange(rows)}, [rows]))
        buffer.sample()
        if prioritised:
            buffer.update_priority(torch.arange(rows), 1.0 + torch.arange(rows))
    return buffer


def sampler_is_whole(buffer: TensorDictReplayBuffer) -> bool:
    """Tell whether the sampler's state is the one that belongs to this many rows."""
    sampler, rows = buffer.sampler, len(buffer)
    if isinstance(sampler, SamplerWithoutReplacement):
        return sampler._sample_list is not None and len(sampler._sample_list) == rows - 2
    batch = buffer.sample()
    return bool(torch.allclose(batch["priority_weight"] * (1 + batch["a"]), torch.ones(2)))


def places(buffer: TensorDictReplayBuffer, older: TensorDictReplayBuffer | None, folder: Path) -> Iterator[int]:
    """The operations of a dump before which files change; behind them every third, for what sweeping adds."""
    folder.mkdir()
    if older is not None:
        older.dumps(folder / "saved")
    course = course_of(buffer.dumps, folder, folder / "saved")
    assert course.status == 0
    yield from course.changes
    yield from range(course.operations + 1, 1000, 3)


@pytest.mark.slow
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("prioritised", [False, True])
def test_a_dump_killed_where_files_change(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, prioritised: bool, there: bool
) -> None:
    path, old, new = tmp_path / "saved", made(OLD, prioritised), made(NEW, prioritised)
    found = set()
    for number, at in enumerate(places(new, old if there else None, tmp_path_factory.mktemp("undisturbed") / "made")):
        if there and number % 7 == 0:
            old.dumps(path)
        status, _ = forked(new.dumps, tmp_path, path, kill, at)
        if not os.WIFSIGNALED(status):
            break
        if path.exists():
            other = made(0, prioritised)
            other.loads(path)
            assert other["a"].tolist() == list(range(len(other)))
            assert sampler_is_whole(other)
            found.add(len(other))
    assert number > 30
    assert os.waitstatus_to_exitcode(status) == 0
    assert found == ({OLD, NEW} if there else {NEW})
    new.dumps(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


def test_a_dump_in_the_middle_of_writing_is_of_one_instant(tmp_path: Path) -> None:
    buffer, stop = TensorDictReplayBuffer(storage=LazyMemmapStorage(10)), threading.Event()

    def write() -> None:
        rows = torch.arange(4)
        while not stop.is_set():
            buffer.extend(TensorDict({"a": rows, "b": -rows}, [4]))
            rows += 4

    buffer.extend(TensorDict({"a": torch.arange(10) - 10, "b": 10 - torch.arange(10)}, [10]))
    thread = threading.Thread(target=write)
    thread.start()
    counts: set[int] = set()
    number = 0
    while len(counts) < 3:
        number += 1
        buffer.dumps(tmp_path / str(number))
        other = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
        other.loads(tmp_path / str(number))
        assert torch.equal(other["a"], -other["b"])
        in_order = other["a"].roll(-other.writer._cursor)
        assert torch.equal(in_order, torch.arange(other.write_count - 20, other.write_count - 10))
        counts.add(other.write_count)
    stop.set()
    thread.join()
