"""Compressed chunks take no more memory than the rows that they stand for."""

from __future__ import annotations

import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zstandard

from rbtool import CorruptDataError
from rbtool.core.format.packed.row_files import ChunkedRows, RowCodec

ROWS = b"rows" * 4


def _bomb(size: int, *, stated: bool = True) -> bytes:
    """A frame of `size` zeros, made piece by piece."""
    made = zstandard.ZstdCompressor().compressobj(size=size if stated else -1)
    return b"".join([*(made.compress(bytes(1 << 20)) for _ in range(size >> 20)), made.flush()])


def _unpack(*chunks: bytes, codec: str = "zstd") -> bytes:
    sizes = [len(ROWS)] * len(chunks)
    return bytes(RowCodec.parse(codec).decompress([memoryview(chunk) for chunk in chunks], sizes, "x.chunks"))


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("others", [0, 1])
def test_a_frame_is_held_to_the_size_of_its_rows(stated: bool, others: int) -> None:
    bomb, sound = _bomb(256 << 20, stated=stated), zstandard.ZstdCompressor().compress(ROWS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorruptDataError, match="not zstd data"):
        _unpack(*[sound] * others, bomb)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@pytest.mark.parametrize("stated", [2 << 30, 15, 0])
def test_a_frame_that_states_another_size_is_not_opened(stated: int) -> None:
    sound = zstandard.ZstdCompressor().compress(ROWS)
    header = bytes([0b1110_0000]) + stated.to_bytes(8, "little")  # one segment, size in eight bytes
    with pytest.raises(CorruptDataError, match=f"a frame states {stated:,} bytes, expected 16"):
        _unpack(sound[:4] + header + sound[6:])


def test_bytes_behind_a_frame_are_refused() -> None:
    with pytest.raises(CorruptDataError, match="not zstd data"):
        _unpack(zstandard.ZstdCompressor().compress(ROWS) + b"more")


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_size_that_no_chunk_can_stand_for_is_refused(codec: str) -> None:
    with pytest.raises(CorruptDataError, match="cannot hold the 1,099,511,627,776 expected"):
        RowCodec.parse(codec).decompress([memoryview(b"small")], [1 << 40], "x.chunks")


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
@pytest.mark.parametrize("count", [1, 3])
def test_sound_chunks_are_read(codec: str, count: int) -> None:
    assert _unpack(*[RowCodec.parse(codec).compressor()(memoryview(ROWS))] * count, codec=codec) == ROWS * count


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_files_of_one_codec_are_written_by_several_threads(tmp_path: Path, codec: str) -> None:
    """The parts of a split are; a compressor that two threads use at a time writes damaged chunks, or crashes."""
    shared = RowCodec.parse(codec)

    def write_and_read(number: int) -> bool:
        rows = np.random.default_rng(number).integers(0, 8, (1 << 17, 32), np.uint8)
        store = ChunkedRows(tmp_path / str(number), "rows", "index", 32, shared, 512)
        for start in range(0, len(rows), 1 << 13):
            store.append(rows[start : start + (1 << 13)])
        store.flush()
        same = np.array_equal(store.read(0, len(rows)), rows)
        store.close()
        return same

    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(write_and_read, range(6)))
