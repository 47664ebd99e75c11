"""The one module that changes the file system."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from rbtool.core.format import fs


@pytest.mark.parametrize("size", [1, 1 << 19, (1 << 19) + 1, 3 << 20])
def test_large_writes_arrive_whole(tmp_path: Path, size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    descriptor = fs.create(tmp_path / "file")
    try:
        fs.write(descriptor, memoryview(data), tmp_path / "file")
        fs.pwrite(descriptor, memoryview(data), size, tmp_path / "file")
        fs.start_syncing(descriptor, 0, size)
    finally:
        os.close(descriptor)
    assert (tmp_path / "file").read_bytes() == data + data


@pytest.mark.parametrize("below", ["", "x", "x/y"])
def test_a_file_where_a_folder_is_to_be_is_called_none(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError) as caught:
        fs.make_folder(tmp_path / "file" / below)
    assert caught.value.filename.startswith(str(tmp_path / "file"))
