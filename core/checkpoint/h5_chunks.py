"""Bounds what compressed chunks of HDF5 files unpack to, before libhdf5 takes memory for it.

libhdf5 unpacks a chunk to its end, however much more than the size of a chunk comes out, and only then compares.
"""

from __future__ import annotations

import math
import zlib

from h5py import h5d, h5p, h5z

__all__ = ["absurd_size", "unbounded_chunks"]

_LARGEST = 512 << 20
"""Bytes that one chunk may take in memory."""
_HARMLESS = 1100 << 20
"""Bytes that no chunk of up to 1 MiB, which h5py makes, unpacks to; it is not unpacked to see."""
_INFLATES = 1032
"""How many bytes one byte of zlib can stand for, at most."""
_PIECE = 1 << 20
_SLACK = 4096
"""What data that do not compress take beyond their size, with one percent of it."""
_NOT_PACKING = {h5z.FILTER_SHUFFLE, h5z.FILTER_FLETCHER32}


def unbounded_chunks(dataset: h5d.DatasetID, made: h5p.PropDCID) -> str:
    """Say what is wrong with the compressed chunks of a dataset, whose properties are `made`, or nothing.

    Raises libhdf5's error where the chunks cannot all be listed.
    """
    filters = [made.get_filter(number)[0] for number in range(made.get_nfilters())]
    packing = [kind for kind in filters if kind not in _NOT_PACKING]
    if not packing:
        return ""
    size = math.prod(made.get_chunk()) * dataset.get_type().get_size()
    if size > _LARGEST:
        return f"is compressed in chunks of {size:,} bytes, of which {_LARGEST:,} can be read at a time"
    if len(packing) > 1:
        return "is compressed by two methods at once"
    large: list[tuple[tuple[int, ...], int]] = []

    def look(chunk: h5d.StoreInfo) -> None:
        if chunk.size * _INFLATES > _HARMLESS:
            large.append((chunk.chunk_offset, chunk.size))

    # An index that is damaged in one place can state no size at all, and leads to the chunks before it all the same.
    if not 0 < dataset.get_storage_size() * _INFLATES <= _HARMLESS:
        dataset.chunk_iter(look)
    for place, stored in large:
        if stored > size + size // 100 + _SLACK:
            return f"has a chunk of {stored:,} stored bytes that hold {size:,}"
        if packing == [h5z.FILTER_DEFLATE] and _inflates_beyond(dataset, place, filters, size):
            return f"has a chunk that unpacks to more than the {size:,} bytes of a chunk"
    return ""


def absurd_size(dataset: h5d.DatasetID) -> str:
    """Say that a dataset states more data than its stored bytes can stand for, or nothing."""
    size = math.prod(dataset.shape) * dataset.get_type().get_size()
    if size <= _LARGEST or size <= (stored := dataset.get_storage_size()) * _INFLATES:
        return ""
    return f"states {size:,} bytes of data, of which {stored:,} bytes are stored"


def _inflates_beyond(dataset: h5d.DatasetID, place: tuple[int, ...], filters: list[int], size: int) -> bool:
    """Unpack a chunk piece by piece, and keep none, to see whether it ends in time."""
    skipped, left = dataset.read_direct_chunk(place)
    if skipped >> filters.index(h5z.FILTER_DEFLATE) & 1:
        return False
    inflate, total = zlib.decompressobj(), 0
    try:
        while left and not inflate.eof and total <= size + _SLACK:
            total += len(inflate.decompress(left, _PIECE))
            left = inflate.unconsumed_tail
    except zlib.error:  # libhdf5 refuses it too
        return False
    return total > size + _SLACK
