"""What Arrow and Parquet files unpack to is bounded before pyarrow takes memory for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import each

from rbtool.converters.files.arrow import require_bounded_ipc, require_bounded_parquet
from rbtool.core.errors import CorruptDataError

ZEROS = np.zeros((80 << 20) // 8)


def ipc(path: Path, table: pa.Table, codec: str | None) -> Path:
    with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_table(table)
    return path


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_compressed_batch_that_states_too_much_is_refused(codec: str, tmp_path: Path) -> None:
    bomb = ipc(tmp_path / "part-0.arrow", pa.table({"x": ZEROS}), codec)
    with pytest.raises(CorruptDataError, match=r"a batch of .* that states 83,886,080 bytes"):
        require_bounded_ipc(bomb)


def test_a_compressed_dictionary_that_states_too_much_is_refused(tmp_path: Path) -> None:
    words = pa.DictionaryArray.from_arrays(pa.array([0]), pa.array(["x" * (80 << 20)]))
    with pytest.raises(CorruptDataError, match="that states 83,886"):
        require_bounded_ipc(ipc(tmp_path / "part-0.arrow", pa.table({"x": words}), "zstd"))


def test_a_page_that_states_too_much_is_refused(tmp_path: Path) -> None:
    bomb = tmp_path / "part-0.parquet"
    table = pa.table({"a": [1.0], "x": [bytes(80 << 20)]})
    pq.write_table(table, bomb, compression="zstd", use_dictionary=False, write_statistics=False)
    with pytest.raises(CorruptDataError, match=r"a page of .* that states 83,886"):
        require_bounded_parquet(bomb)


@pytest.mark.parametrize("codec", [None, "lz4", "zstd"])
def test_arrow_files_as_people_write_them_are_taken(codec: str | None, tmp_path: Path) -> None:
    rows = {"x": np.zeros(100_000), "y": ["a", None] * 50_000, "z": [{"a": [1.5]}] * 100_000}
    require_bounded_ipc(ipc(tmp_path / "part-0.arrow", pa.table(rows), codec))
    require_bounded_ipc(ipc(tmp_path / "part-1.arrow", pa.table({"x": []}), codec))
    require_bounded_ipc(ipc(tmp_path / "part-2.arrow", pa.table({"x": ZEROS}), None))


@each("version", ["1.0", "2.0"])
@each("codec", ["none", "snappy", "gzip", "zstd", "brotli", "lz4"])
def test_parquet_files_as_people_write_them_are_taken(codec: str, version: str, tmp_path: Path) -> None:
    rows = {
        "x": np.zeros(100_000),
        "y": ["a", None] * 50_000,
        "z": [{"a": [1.5]}] * 100_000,
        "long": ["x" * 99] * 100_000,
    }
    file = tmp_path / "part-0.parquet"
    pq.write_table(pa.table(rows), file, compression=codec, data_page_version=version, row_group_size=30_000)
    require_bounded_parquet(file)
    pq.write_table(pa.table({"x": []}), file)
    require_bounded_parquet(file)


def test_a_damaged_footer_does_not_end_the_process(tmp_path: Path) -> None:
    """pyarrow aborts where it is asked for a column whose statistics count other levels than its type has."""
    file = tmp_path / "part-0.parquet"
    pq.write_table(pa.table({"x": np.zeros(50)}), file, store_schema=False)
    counted, other = bytes([0x26, 0, 100]), bytes([0x16, 0xE4, 0])  # no null and 50 values, as Thrift writes lists
    file.write_bytes(file.read_bytes().replace(counted, other))
    require_bounded_parquet(file)


def test_files_that_do_not_end_as_parquet_are_refused_for_their_ends(tmp_path: Path) -> None:
    file = tmp_path / "part-0.parquet"
    pq.write_table(pa.table({"x": np.zeros(50)}), file)
    whole, odd = file.read_bytes(), "does not end as one"
    longer = (len(whole) - 11).to_bytes(4, "little")
    for data, why in (
        (whole[:-1], odd), (whole + b"\n", odd), (whole[:-4] + b"PARE", "is encrypted"),
        (whole[:-8] + longer + b"PAR1", odd), (whole[:-8] + b"\xff\xff\xff\xffPAR1", odd), (b"\x19" * 200, odd),
    ):  # fmt: skip
        file.write_bytes(data)
        with pytest.raises(ValueError, match=why):
            require_bounded_parquet(file)


@each("check", [require_bounded_ipc, require_bounded_parquet])
@each("data", [b"", b"ARROW1", b"\xff" * 64, b"\x19" * 200, bytes(64)])
def test_what_is_no_such_file_is_refused_or_left_to_pyarrow(
    check: Callable[[Path], None], data: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "part-0"
    file.write_bytes(data)
    with contextlib.suppress(ValueError):
        check(file)
