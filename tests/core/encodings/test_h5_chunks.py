"""What compressed chunks of an HDF5 file unpack to is bounded before memory is taken."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from rbtool.core.encodings.h5_open import absurd_size, open_h5
from rbtool.core.errors import CorruptDataError


def with_chunk(path: Path, chunk: bytes, shape: int, **how: Any) -> Path:
    """Write a file with one compressed chunk of these stored bytes."""
    with h5py.File(path, "w") as h5:
        data = h5.create_dataset("x", (shape,), "u1", chunks=(shape,), **how)
        data.id.write_direct_chunk((0,), chunk)
    return path


def test_a_chunk_that_unpacks_to_more_than_its_size_is_refused(tmp_path: Path) -> None:
    bomb = zlib.compress(np.random.default_rng(1).bytes(2 << 20) + bytes(4 << 20), 1)
    with pytest.raises(CorruptDataError, match="more than the 3,145,728 bytes of a chunk"):
        open_h5(with_chunk(tmp_path / "x.h5", bomb, 3 << 20, compression="gzip"))
    with pytest.raises(CorruptDataError, match=r"a chunk of 2,[\d,]+ stored bytes that hold 1,000"):
        open_h5(with_chunk(tmp_path / "y.h5", bomb, 1000, compression="gzip"))


@pytest.mark.parametrize(
    ("libver", "chunks", "node"),
    [("earliest", 200, "TREE"), ("latest", 2000, "EADB"), ("latest", 2000, "EASB")],
)
def test_a_damaged_index_hides_no_chunk(libver: str, chunks: int, node: str, tmp_path: Path) -> None:
    """libhdf5 reads a chunk in front of the damage: more than its size then comes out of it."""
    with h5py.File(tmp_path / "whole.h5", "w", libver=libver) as h5:
        data = h5.create_dataset("x", (chunks << 16,), "u1", chunks=(1 << 16,), maxshape=(None,), compression="gzip")
        plain = zlib.compress(bytes(1 << 16))
        for number in range(1, chunks):
            data.id.write_direct_chunk((number << 16,), plain)
        data.id.write_direct_chunk((0,), zlib.compress(np.random.default_rng(1).bytes(2 << 20), 1))
    damaged = bytearray((tmp_path / "whole.h5").read_bytes())
    damaged[damaged.rfind(node.encode())] ^= 1
    (tmp_path / "x.h5").write_bytes(damaged)
    with pytest.raises(CorruptDataError, match=r"/x has (an index of chunks that cannot be read|a chunk of 2,\d+,)"):
        open_h5(tmp_path / "x.h5")


def test_chunks_too_large_to_read_at_a_time_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptDataError, match="compressed in chunks of 1,073,741,824 bytes"):
        open_h5(with_chunk(tmp_path / "x.h5", b"x", 1 << 30, compression="gzip"))


def test_two_methods_at_once_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as h5:
        made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        made.set_chunk((10,))
        made.set_deflate(4)
        made.set_deflate(4)
        h5py.h5d.create(h5.id, b"x", h5py.h5t.NATIVE_UINT8, h5py.h5s.create_simple((10,)), made)
    with pytest.raises(CorruptDataError, match="compressed by two methods"):
        open_h5(tmp_path / "x.h5")


@pytest.mark.parametrize(
    "how",
    [{"compression": "gzip"}, {"compression": "lzf"}, {"compression": "gzip", "shuffle": True, "fletcher32": True}],
)
def test_chunks_as_people_write_them_are_taken(how: dict[str, Any], tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as h5:
        h5.create_dataset(
            "x", data=np.frombuffer(np.random.default_rng(1).bytes(3 << 20), "u1"), chunks=(3 << 20,), **how
        )
    open_h5(tmp_path / "x.h5").close()


def test_a_dataset_that_states_far_more_than_is_stored_is_absurd(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as h5:
        empty = h5.create_dataset("x", (1 << 40,), "u1", chunks=(1 << 20,))
        assert "states 1,099,511,627,776 bytes of data, of which 0 bytes" in absurd_size(empty.id)
        assert not absurd_size(h5.create_dataset("y", (1 << 20,), "u1", chunks=(1 << 10,)).id)
