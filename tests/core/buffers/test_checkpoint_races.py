"""Buffers that are saved and loaded at one place by several processes at the same time."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from waiting import HANG

from rbtool.core.buffers.checkpoint import BufferFolder
from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.errors import CorruptDataError
from rbtool.core.storages.lazy_tensor import LazyTensorStorage

ROWS = 50
LOADS = 30


def ring() -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(ROWS))


def steps(count: int, first: int) -> TensorDict:
    return TensorDict({"a": torch.arange(first, first + count)}, [count])


def save_again_and_again(path: Path, saves: Any, ended: Any, errors: Any) -> None:
    """Save rings whose rows are consecutive numbers in the order of writes, and count the saves."""
    buffer, first = ring(), 0
    while not ended.is_set():
        buffer.extend(steps(7, first))
        first += 7
        try:
            buffer.dumps(path, durable="none")
        except Exception as error:
            errors.put(repr(error))
            return
        saves.value += 1
    errors.put("")


def require_one_state(buffer: ReplayBuffer) -> None:
    """The cursor of the writer and the rows are those of one save."""
    rows = buffer.storage.get(torch.arange(len(buffer)))["a"]
    cursor = buffer.writer._cursor % len(rows) if len(rows) == ROWS else 0
    assert (rows.roll(-cursor).diff() == 1).all()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("writers", [1, 2])
def test_a_checkpoint_that_is_replaced_is_loaded_whole(tmp_path: Path, writers: int) -> None:
    context, path = multiprocessing.get_context("fork"), tmp_path / "saved"
    first = ring()
    first.extend(steps(5, 0))
    first.dumps(path)
    ended, errors = context.Event(), context.Queue()
    saves = [context.RawValue("q") for _ in range(writers)]
    processes = [context.Process(target=save_again_and_again, args=(path, one, ended, errors)) for one in saves]
    for process in processes:
        process.start()
    try:
        loads = 0
        while (loads < LOADS or any(one.value < LOADS for one in saves)) and errors.empty():
            loaded = ring()
            loaded.loads(path)
            require_one_state(loaded)
            loads += 1
    finally:
        ended.set()
    assert [errors.get(timeout=HANG) for _ in processes] == [""] * writers
    for process in processes:
        process.join()


def test_a_load_of_parts_of_two_checkpoints_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another ring is saved between the load of the writer and that of the rows."""
    path, other, loads = tmp_path / "saved", ring(), 0
    other.extend(steps(20, 0))
    other.dumps(path)
    other.extend(steps(37, 20))
    loaded = ring()
    real = type(loaded.storage).loads

    def replaced_first(storage: Any, *arguments: Any, **options: Any) -> None:
        nonlocal loads
        loads += 1
        if loads == 1:
            other.dumps(path)
        real(storage, *arguments, **options)

    monkeypatch.setattr(LazyTensorStorage, "loads", replaced_first)
    loaded.loads(path)
    assert loads == 2
    require_one_state(loaded)
    assert loaded.writer._cursor == other.writer._cursor == 7


def test_a_place_that_is_always_replaced_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, buffer = tmp_path / "saved", ring()
    buffer.extend(steps(20, 0))
    buffer.dumps(path)
    monkeypatch.setattr(BufferFolder, "_in_place", lambda _: False)
    with pytest.raises(CorruptDataError, match="was replaced while it was loaded"):
        ring().loads(path)
