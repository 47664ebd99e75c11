"""A process that is killed in the middle of a write to a shared buffer: the write is undone, whole."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.errors import OutOfSpaceError
from rbtool.core.storages import write_log
from rbtool.core.storages.columns import Columns
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.write_log import Counter

FORK = multiprocessing.get_context("fork")
CAPACITY = 10


def rows(value: int, count: int) -> TensorDict:
    leaves = {"a": torch.full((count, 3), float(value)), "b": torch.full((count,), value), "half": torch.zeros(count)}
    leaves["half"] = leaves["half"].bfloat16() + value
    return TensorDict(leaves, [count])


def ring(storage: Callable[[int], Any] = LazyMemmapStorage, **arguments: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=storage(CAPACITY), batch_size=4, shared=True, **arguments)
    buffer.extend(rows(0, 7))
    return buffer


def killed_in(act: Callable[[ReplayBuffer], Any], buffer: ReplayBuffer) -> None:
    """Run a write in another process, which is killed when the first column is written and the others are not."""
    process = FORK.Process(target=_write_half, args=(act, buffer))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def _write_half(act: Callable[[ReplayBuffer], Any], buffer: ReplayBuffer) -> None:
    torch.set_num_threads(1)
    counting = type(Counter(0)).value.fset  # type: ignore[attr-defined]

    def end(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def copy_run(columns: Columns, start: int, count: int, sources: Any, **_: Any) -> None:
        width = columns.widths[0]
        ctypes.memmove(columns.plain[0].data_ptr() + start * width, int(sources.addresses[0]), count * width)
        end()

    def write_rows(columns: Columns, numbers: torch.Tensor, values: Any) -> None:
        columns.plain[0][numbers] = values[0]
        end()

    def count(counter: Counter, value: int) -> None:
        counting(counter, value)
        if value == CAPACITY:  # the storage was just full
            end()

    Columns.copy_run, Columns.write_rows, Columns.write_cells = copy_run, write_rows, end  # type: ignore[method-assign]
    if act is fill_up:
        Columns.copy_run = lambda *_, **__: None  # type: ignore[method-assign]
        Counter.value = property(Counter.value.fget, count)  # type: ignore[attr-defined, method-assign]
    if act in (edit, edit_some):
        buffer.storage.put_back = end  # type: ignore[method-assign]
    act(buffer)


def fill_up(buffer: ReplayBuffer) -> None:
    buffer.extend(rows(9, 3))


def edit(buffer: ReplayBuffer) -> None:
    buffer.set_("b", torch.full((len(buffer),), 9))


def edit_some(buffer: ReplayBuffer) -> None:
    buffer.set_at_("b", torch.tensor([9, 9]), torch.tensor([1, 3]))


WRITES: dict[str, Callable[[ReplayBuffer], Any]] = {
    "fill up": fill_up,
    "extend": lambda buffer: buffer.extend(rows(9, 2)),
    "extend beyond the end": lambda buffer: buffer.extend(rows(9, 8)),
    "extend by more than there is room": lambda buffer: buffer.extend(rows(9, 25)),
    "add": lambda buffer: buffer.add(rows(9, 1)[0]),
    "a row": lambda buffer: buffer.__setitem__(2, rows(9, 1)[0]),
    "some rows": lambda buffer: buffer.__setitem__(torch.tensor([5, 1]), rows(9, 2)),
    "edit an entry": edit,
    "edit some of an entry": edit_some,
}


def state(buffer: ReplayBuffer) -> list[Any]:
    with buffer._guard.hold():  # the write that was killed had set the length already
        pass
    found = buffer[torch.arange(len(buffer))]
    return [len(buffer), buffer.write_count, buffer.writer.cursor, *(found[key].tolist() for key in ("a", "b", "half"))]


@pytest.mark.parametrize("storage", [LazyMemmapStorage, LazyTensorStorage])
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("more", [0, 3, 8])
def test_a_write_that_was_killed_never_happened(name: str, more: int, storage: Callable[[int], Any]) -> None:
    if name == "fill up" and more:
        return
    buffer = ring(storage)
    if more:
        buffer.extend(rows(1, more))
    before, changes = state(buffer), buffer.storage.log.now.irregular
    killed_in(WRITES[name], buffer)
    assert state(buffer) == before
    assert buffer.storage.log.now.irregular > changes, "samplers look at the rows again"
    assert buffer.extend(rows(2, 2)).tolist() == [before[2], (before[2] + 1) % CAPACITY]
    assert buffer.write_count == before[1] + 2


def test_several_killed_writes() -> None:
    buffer = ring()
    buffer.extend(rows(1, 9))
    before = state(buffer)
    for _ in range(3):
        killed_in(WRITES["extend beyond the end"], buffer)
        killed_in(WRITES["some rows"], buffer)
    assert state(buffer) == before


def test_a_load_that_was_killed_leaves_the_buffer_empty(tmp_path: Path) -> None:
    buffer, other = ring(), ring()
    other.extend(rows(5, 6))
    other.dumps(tmp_path / "saved")
    killed_in(lambda buffer: buffer.loads(tmp_path / "saved"), buffer)
    assert (buffer._guard.read(lambda _: len(buffer), None), buffer.write_count, buffer.writer.cursor) == (0, 0, 0)
    buffer.loads(tmp_path / "saved")
    assert state(buffer) == state(other)


@pytest.fixture
def full_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write_log.fs, "write_parts", refuse)
    return


def test_a_write_without_memory_for_the_old_rows_changes_nothing(full_memory: None) -> None:
    buffer = ring()
    buffer.extend(rows(1, 3))
    before = state(buffer)
    with pytest.raises(OutOfSpaceError, match="not enough memory"):
        buffer.extend(rows(2, 2))
    assert state(buffer) == before


def test_a_buffer_that_is_not_shared_keeps_nothing() -> None:
    buffer = ring()
    assert buffer.storage.journal is not None
    buffer.share(False)
    assert buffer.storage.journal is None
