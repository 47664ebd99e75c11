"""Output files: rows that threads write arrive in order, and the first failure of the disk is the one raised."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import h5py
import numpy as np
import pytest
from cases import each
from hypothesis import given, settings
from hypothesis import strategies as st

from rbtool import OutOfSpaceError
from rbtool.core.encodings.output_files import Blocks, LatchedFile, Stream
from rbtool.core.format import fs


class Kept(Stream):
    """Keeps what it is given; fails at some block."""

    def __init__(self, fails_at: int = 0) -> None:
        self.data = b""
        self.blocks = 0
        self.finished = False
        self.fails_at = fails_at

    def write(self, parts: list[memoryview]) -> None:
        self.blocks += 1
        if self.blocks == self.fails_at:
            raise OSError("no more")
        assert not self.finished
        self.data += b"".join(parts)

    def finish(self) -> None:
        self.finished = True


@given(st.lists(st.lists(st.integers(0, 30), max_size=8), max_size=4), st.integers(1, 40))
@settings(deadline=None)
def test_every_stream_gets_its_bytes_in_order(sizes: list[list[int]], block: int) -> None:
    with pytest.MonkeyPatch.context() as patch, Blocks() as blocks:
        patch.setattr("rbtool.core.encodings.output_files._BLOCK", block)
        patch.setattr("rbtool.core.encodings.output_files._MOST_PARTS", 3)
        streams = [Kept() for _ in sizes]
        arrays = [[np.random.default_rng(n).integers(0, 99, (n, 2), np.int16) for n in part] for part in sizes]
        for stream, parts in zip(streams, arrays, strict=True):
            blocks.begin(stream)
            for rows in parts:
                blocks.append(rows)
        blocks.finish()
    assert [stream.data for stream in streams] == [b"".join(rows.tobytes() for rows in parts) for parts in arrays]
    assert all(stream.finished for stream in streams)
    stream, apart = Kept(), np.arange(24).reshape(4, 6)[:, ::2]  # rows that do not lie together are copied
    with Blocks() as blocks:
        blocks.begin(stream)
        blocks.append(apart)
        blocks.finish()
    assert stream.data == apart.tobytes()


def write_nine(stream: Stream) -> None:
    with Blocks() as blocks:
        blocks.begin(stream)
        for _ in range(9):
            blocks.append(np.zeros(8, np.uint8))
        blocks.finish()


@pytest.mark.parametrize("fails_at", [1, 3, 9])
def test_failures_in_the_background_are_raised(monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
    monkeypatch.setattr("rbtool.core.encodings.output_files._BLOCK", 8)
    before = threading.active_count()
    with pytest.raises(OSError, match="no more"):
        write_nine(Kept(fails_at))
    assert threading.active_count() == before


def write(path: Path) -> None:
    with LatchedFile(path) as file:
        with h5py.File(file, "w", userblock_size=512) as h5:
            for name in "abc":
                h5[f"group/{name}"] = np.arange(1000)
        file.check()


def test_hdf5_reads_what_was_written(tmp_path: Path) -> None:
    write(tmp_path / "file.h5")
    with h5py.File(tmp_path / "file.h5") as h5:
        assert h5["group/c"][:].tolist() == list(range(1000))


@pytest.mark.parametrize(
    ("module", "error", "raised"),
    [
        (fs, KeyboardInterrupt(), KeyboardInterrupt),
        (os, OSError(errno.ENOSPC, "No space left on device"), OutOfSpaceError),
    ],
)
def test_an_interrupt_and_a_full_disk_are_kept(tmp_path: Path, monkeypatch, module, error, raised) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(module, "pwrite", fail)
    with pytest.raises(raised):
        write(tmp_path / "file.h5")


@each("failing", range(1, 12))
@each("operation", ["pwrite", "truncate"])
def test_the_first_failure_is_kept_and_hdf5_closes(tmp_path: Path, monkeypatch, failing: int, operation: str) -> None:
    sound, calls = getattr(fs, operation), 0

    def fail(*arguments: object) -> None:
        nonlocal calls
        calls += 1
        if calls >= failing:
            raise OutOfSpaceError(f"number {calls}")
        sound(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(fs, operation, fail)
        if operation == "pwrite" or failing <= 2:
            with pytest.raises(OutOfSpaceError, match=f"number {failing}$"):
                write(tmp_path / "file.h5")
            assert calls == failing
        else:
            write(tmp_path / "file.h5")
    write(tmp_path / "after.h5")


def test_reading_behind_the_end_gives_zeros(tmp_path: Path) -> None:
    with LatchedFile(tmp_path / "file") as file:
        file.write(memoryview(b"abcdef"))
        assert file.seek(-2, os.SEEK_END) == 4
        assert file.read(4) == b"ef\0\0"
        assert (file.tell(), file.seek(-7, os.SEEK_CUR)) == (8, 1)
        buffer = bytearray(3)
        assert file.readinto(memoryview(buffer)) == 3
        assert buffer == b"bcd"
        file.seek(2)
        assert file.truncate() == 2
    assert (tmp_path / "file").read_bytes() == b"ab"
