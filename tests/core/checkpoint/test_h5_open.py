"""HDF5 files that the same process has open already."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from rbtool import UsageError
from rbtool.core.checkpoint import Compression, H5Reader, compare_steps, open_steps, save_checkpoint
from rbtool.core.dataset import TedReader


@contextlib.contextmanager
def at_the_lowest_level(path: Path) -> Iterator[None]:
    held = h5py.h5f.open(str(path).encode(), h5py.h5f.ACC_RDONLY)  # another close degree than h5py.File has
    yield
    held.close()


HOLDERS: dict[str, Callable[[Path], contextlib.AbstractContextManager[Any]]] = {
    "default": lambda path: h5py.File(path),
    "locked": lambda path: h5py.File(path, locking=True),
    "unlocked": lambda path: h5py.File(path, locking=False),
    "low": at_the_lowest_level,
}


@pytest.fixture(params=[None, "gzip"])
def saved(odd: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    with open_steps(odd) as reader:
        save_checkpoint(reader, tmp_path / "saved.h5", "h5", compression=Compression.parse(request.param))
    return tmp_path / "saved.h5"


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_is_open_here_already_is_read(odd: Path, saved: Path, holder: str) -> None:
    with HOLDERS[holder](saved), H5Reader(saved) as reader, TedReader(odd) as dataset:
        reader.verify_files()
        assert compare_steps(dataset, reader) == []


def test_what_is_written_to_here_is_said_to_be_open(saved: Path) -> None:
    with h5py.File(saved, "r+"), H5Reader(saved) as reader, pytest.raises(UsageError, match="is open for writing"):
        reader.read(("next", "reward"), 0, 1)


def test_the_file_is_closed_with_its_reader(saved: Path) -> None:
    with h5py.File(saved), H5Reader(saved) as reader:
        np.testing.assert_array_equal(reader.read(("next", "reward"), 0, 0).shape, (0, 1))
    with h5py.File(saved, "r+") as file:  # which libhdf5 refuses while another holds it
        assert "reward" in file
