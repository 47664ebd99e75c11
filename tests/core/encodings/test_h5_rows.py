"""`H5Rows` gives what h5py gives, whichever way it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from rbtool.core.encodings.h5_open import open_h5
from rbtool.core.encodings.h5_rows import H5Rows
from rbtool.core.errors import CorruptDataError

DTYPES = ["<f4", ">f4", "<f8", ">i2", "u1", "i1", "<i8", "?", "<f2", "<c8"]


def assert_as_h5py(path: Path, *, direct: bool) -> None:
    file = h5py.File(open_h5(path))
    with file:
        dataset = file["group/rows"]
        rows = H5Rows(dataset, path)
        assert (rows._descriptor >= 0) == direct
        for start, stop in ((0, 40), (3, 17), (39, 40), (5, 5)):
            expected = np.empty((stop - start, *dataset.shape[1:]), dataset.dtype.newbyteorder("="))
            if expected.size:
                dataset.read_direct(expected, np.s_[start:stop])
            found = rows.read(start, stop)
            assert (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"chunks": (7, 3)}, {"compression": "gzip"}, {"fletcher32": True}])
def test_rows_of_any_type_and_layout(dtype: str, options: dict[str, Any], tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    values = (draw.normal(size=(40, 3)) * 50).astype(dtype)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("group/rows", data=values, **options)
    assert_as_h5py(tmp_path / "a.h5", direct=not options and not dtype.startswith(">"))


def test_a_file_with_a_block_of_its_user_in_front(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=1024) as file:
        file["group/rows"] = np.arange(80, dtype=np.float32).reshape(40, 2)
    assert_as_h5py(tmp_path / "a.h5", direct=True)


def test_rows_that_were_never_written_are_the_fill_value(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("group/rows", (40, 2), np.float32, fillvalue=3)
    assert_as_h5py(tmp_path / "a.h5", direct=False)


def test_numbers_of_another_precision_than_memory_has(tmp_path: Path) -> None:
    stored = h5py.h5t.NATIVE_INT32.copy()
    stored.set_precision(20)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        group = file.create_group("group")
        space = h5py.h5s.create_simple((40,))
        dataset = h5py.h5d.create(group.id, b"rows", stored, space)
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, np.arange(-20, 20, dtype=np.int32))
    assert_as_h5py(tmp_path / "a.h5", direct=False)


def test_compact_data_inside_the_structure(tmp_path: Path) -> None:
    made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    made.set_layout(h5py.h5d.COMPACT)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        group = file.create_group("group")
        dataset = h5py.h5d.create(group.id, b"rows", h5py.h5t.NATIVE_FLOAT, h5py.h5s.create_simple((40,)), made)
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, np.arange(40, dtype=np.float32))
    assert_as_h5py(tmp_path / "a.h5", direct=False)


def test_a_file_that_is_cut_while_it_is_open(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["rows"] = np.arange(4000, dtype=np.float32)
    with h5py.File(open_h5(tmp_path / "a.h5")) as file:
        rows = H5Rows(file["rows"], tmp_path / "a.h5")
        with (tmp_path / "a.h5").open("r+b") as other:
            other.truncate(5000)
        with pytest.raises(CorruptDataError, match="bytes before the rows of '/rows': it was cut"):
            rows.read(0, 4000)
