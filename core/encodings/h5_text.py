"""Text of variable length in HDF5 files, read without libhdf5: in a damaged heap that library can loop forever."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import h5py

from ..errors import CorruptDataError, FormatError
from ..format.digest import open_regular

_REFERENCE = struct.Struct("<IQI")
"""Length of a text, address of the collection of objects that it is in, and its number there."""
_COLLECTION = struct.Struct("<4sB3xQ")
_OBJECT = struct.Struct("<HH4xQ")
_LARGEST = 16 << 20
_MOST = 1 << 16


def stored_text(dataset: h5py.Dataset, path: Path) -> list[bytes]:
    """Return the texts of a dataset of variable-length text, in order, of the file at `path`.

    FormatError for a dataset that is not stored in one piece, CorruptDataError for damage.
    """
    offset, count = dataset.id.get_offset(), dataset.size or 0
    if offset is None or count > _MOST:
        raise FormatError(f"{path}: {dataset.name} is text that is not stored in one piece, or has too many values")
    descriptor = open_regular(path)
    try:
        collections: dict[int, dict[int, bytes]] = {}
        found = []
        for number in range(count):
            data = os.pread(descriptor, _REFERENCE.size, offset + number * _REFERENCE.size)
            if len(data) < _REFERENCE.size:
                raise _damaged(path, dataset)
            length, address, index = _REFERENCE.unpack(data)
            if not length:
                found.append(b"")
                continue
            if address not in collections:
                collections[address] = dict(_objects(descriptor, address))
            text = collections[address].get(index)
            if text is None or len(text) < length:
                raise _damaged(path, dataset)
            found.append(text[:length])
        return found
    except (OverflowError, struct.error) as error:
        raise _damaged(path, dataset) from error
    finally:
        os.close(descriptor)


def _objects(descriptor: int, address: int) -> list[tuple[int, bytes]]:
    """Return the objects of a collection in the global heap by their numbers; none for what is no collection."""
    head = os.pread(descriptor, _COLLECTION.size, address)
    if len(head) < _COLLECTION.size:
        return []
    signature, version, size = _COLLECTION.unpack(head)
    if signature != b"GCOL" or version != 1 or size > _LARGEST:
        return []
    data = os.pread(descriptor, size, address)
    found: list[tuple[int, bytes]] = []
    place = _COLLECTION.size
    while place + _OBJECT.size <= len(data):
        index, _, length = _OBJECT.unpack_from(data, place)
        place += _OBJECT.size
        if not index or place + length > len(data):
            break
        found.append((index, data[place : place + length]))
        place += -(-length // 8) * 8
    return found


def _damaged(path: Path, dataset: h5py.Dataset) -> CorruptDataError:
    return CorruptDataError(f"{path}: the text of {dataset.name} cannot be read, the file is damaged or was cut")
