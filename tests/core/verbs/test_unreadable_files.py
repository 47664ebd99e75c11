"""A file that is there and cannot be opened is not reported as missing."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import rbtool
from rbtool.core.errors import CorruptDataError
from rbtool.core.format import open_files
from rbtool.core.testing.datasets import write_walks


@pytest.fixture
def walks(tmp_path: Path) -> Path:
    write_walks(tmp_path / "walks", [(3, "terminated")])
    return tmp_path / "walks"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
@pytest.mark.parametrize("verb", [rbtool.inspect, rbtool.check, rbtool.stats, rbtool.load_dataset])
def test_the_error_of_the_system_names_the_file(
    walks: Path, number: int, verb: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_files.open_regular

    def failing(name: Any, **options: Any) -> int:
        if str(name).endswith("action.memmap"):
            raise OSError(number, os.strerror(number), str(name))
        return opened(name, **options)

    monkeypatch.setattr(open_files, "open_regular", failing)
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        verb(walks)
    assert (caught.value.errno, caught.value.filename) == (number, str(walks / "action.memmap"))


def test_a_file_that_is_not_there_is_missing(walks: Path) -> None:
    (walks / "action.memmap").unlink()
    assert "action.memmap is missing" in rbtool.check(walks).findings[0].message


def test_a_root_that_is_no_group_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "odd.h5"
    with h5py.File(path, "w", libver="earliest") as h5:
        h5["plain"], h5["text"] = np.arange(3.0), ["a", "b", "c"]
    data = bytearray(path.read_bytes())
    assert data[112:114] == b"\x11\0"  # the message of the root that makes it a group
    data[112:114] = b"\0\0"
    path.write_bytes(data)
    with pytest.raises(CorruptDataError, match="unable to determine object type"):
        rbtool.convert(path, tmp_path / "out", format="table", map=["observation=plain"], ends="-")
    with pytest.raises(CorruptDataError):
        rbtool.inspect(path)
