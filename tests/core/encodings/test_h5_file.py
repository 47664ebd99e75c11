import errno
import os
from pathlib import Path

import h5py
import numpy as np
import pytest

from rbtool import OutOfSpaceError
from rbtool.core.encodings.streams import LatchedFile
from rbtool.core.format import fs


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


@pytest.mark.parametrize("failing", range(1, 12))
@pytest.mark.parametrize("operation", ["pwrite", "truncate"])
def test_the_first_failure_is_kept_and_hdf5_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int, operation: str
) -> None:
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


def test_an_interrupt_is_kept_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fs, "pwrite", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "file.h5")


def test_a_full_disk_inside_the_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OutOfSpaceError, match="no space is left"):
        write(tmp_path / "file.h5")


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
