"""Writes that the next dump in segments could miss: none is."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rbtool.core.buffers.base import ReplayBuffer
from rbtool.core.checkpointers import segments
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.storages.write_log import WriteLog

ROWS = 64


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have segments of a few rows."""
    monkeypatch.setattr(segments, "_FEWEST_BYTES", 128)


def steps(count: int, first: int = 0) -> TensorDict:
    return TensorDict({"a": torch.arange(first, first + count)}, [count])


def ring() -> ReplayBuffer:
    buffer = ReplayBuffer(storage=LazyTensorStorage(ROWS))
    buffer.extend(steps(ROWS))
    return buffer


def rows_of(buffer: ReplayBuffer) -> list[int]:
    return buffer.storage.get(torch.arange(ROWS))["a"].tolist()


def loaded(path: Path) -> list[int]:
    buffer = ring()
    buffer.loads(path)
    return rows_of(buffer)


def write_by_number(buffer: ReplayBuffer, index: torch.Tensor, data: TensorDict) -> None:
    buffer.storage.set(index, data)


def write_at_places(buffer: ReplayBuffer, index: torch.Tensor, data: TensorDict) -> None:
    buffer[index] = data


@pytest.mark.parametrize("write", [write_by_number, write_at_places])
def test_an_index_that_is_used_again_changes_nothing(tmp_path: Path, write: Callable[..., None]) -> None:
    """The log held the caller's index: filled with other rows before the dump, the rows of before were not written."""
    buffer, path, index = ring(), tmp_path / "saved", torch.tensor([30, 27])
    buffer.dumps(path)
    write(buffer, index, steps(2, 300))
    index.zero_()
    buffer.dumps(path)
    assert loaded(path) == rows_of(buffer)


def write_a_step(buffer: ReplayBuffer) -> None:
    buffer[torch.tensor([30])] = steps(1, 300)


def append_steps(buffer: ReplayBuffer) -> None:
    buffer.extend(steps(5, 300))


@pytest.mark.parametrize(("method", "write"), [("changed", write_a_step), ("wrote", append_steps)])
def test_a_write_that_is_interrupted_before_it_is_counted_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, write: Callable[[ReplayBuffer], None]
) -> None:
    buffer, path = ring(), tmp_path / "saved"
    buffer.dumps(path)
    count, interrupts = getattr(WriteLog, method), iter([KeyboardInterrupt])

    def interrupted(*arguments: Any) -> None:
        for interrupt in interrupts:
            raise interrupt
        count(*arguments)

    monkeypatch.setattr(WriteLog, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(buffer)
    buffer.dumps(path)
    assert loaded(path) == rows_of(buffer)


def test_files_are_closed_where_another_one_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, made, kept = ring(), list[Any](), segments.LeafFile

    def make(*arguments: Any, **options: Any) -> Any:
        if len(made) == 3:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        made.append(kept(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(segments, "LeafFile", make)
    with pytest.raises(OSError, match="Too many open files"):
        buffer.dumps(tmp_path / "saved")
    assert [one.descriptor for one in made] == [-1] * 3
