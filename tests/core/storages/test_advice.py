"""When the system is told how files are read: where they do not fit into memory."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from rbtool.core.storages import dataset, packed
from rbtool.core.storages.dataset import Pages, available_memory, exceeds_memory
from rbtool.core.storages.packed import PackedStorage


class Heard:
    """A map that remembers what it was told."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.said: list[tuple[int, ...]] = []

    def __len__(self) -> int:
        return self._size

    def madvise(self, *words: int) -> None:
        self.said.append(words)


def test_the_memory_that_there_is() -> None:
    available = available_memory()
    assert available is not None
    assert 1 << 20 < available < 1 << 50
    assert exceeds_memory(1 << 60)
    assert not exceeds_memory(1)


def test_the_limit_of_the_control_group_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs" / "mine").mkdir(parents=True)
    (tmp_path / "jobs" / "memory.max").write_text("4096\n")
    (tmp_path / "jobs" / "mine" / "memory.max").write_text("max\n")
    monkeypatch.setattr(dataset, "_GROUPS", tmp_path)
    monkeypatch.setattr(Path, "read_text", _with_group(Path.read_text))
    assert available_memory() == 4096


def _with_group(read_text: object) -> object:
    def read(path: Path, *arguments: object, **named: object) -> str:
        if str(path) == "/proc/self/cgroup":
            return "0::/jobs/mine\n"
        return read_text(path, *arguments, **named)  # type: ignore[operator, no-any-return]

    return read


def test_neighbouring_pages_are_asked_for_together() -> None:
    page, heard = mmap.PAGESIZE, Heard(20 * mmap.PAGESIZE - 5)
    pages = Pages(heard)  # type: ignore[arg-type]
    starts = np.array([9 * page + 1, 0, page - 2, 4 * page, 19 * page])
    pages.expect(starts, 10)
    need = mmap.MADV_WILLNEED
    assert heard.said[0] == (mmap.MADV_RANDOM,)
    assert heard.said[1:] == [
        (need, 0, 2 * page),
        (need, 4 * page, page),
        (need, 9 * page, page),
        (need, 19 * page, page - 5),
    ]
    pages.expect(np.array([], np.int64), 10)
    assert len(heard.said) == 5


@pytest.mark.parametrize("large", [False, True])
def test_only_what_exceeds_memory_is_told_of(tmp_path: Path, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from rbtool.core.testing.datasets import write_walks
    from rbtool.core.verbs.convert import convert

    made: list[object] = []
    monkeypatch.setattr(packed, "Pages", lambda pages: made.append(pages) or Pages(pages))
    write_walks(tmp_path / "ted", [(5, "open")])
    convert(tmp_path / "ted", tmp_path / "packed", layout="packed")
    monkeypatch.setattr("rbtool.core.storages.packed.exceeds_memory", lambda size: large)
    assert len(PackedStorage(tmp_path / "packed")[:]) == 5
    assert bool(made) is large
