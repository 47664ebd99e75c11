"""Writes what `example` and `records` read: the bytes of an Example, and of a TFRecord around it."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from ...core.format.contracts import Array
from .records import masked_crc

Listed: TypeAlias = Array | Sequence[bytes]
"""The values of a list: an array of floats or of whole numbers, or byte strings."""


def framed(data: bytes) -> list[memoryview]:
    """Return the parts of a TFRecord."""
    length = struct.pack("<Q", len(data))
    head = length + struct.pack("<I", masked_crc(length))
    return [memoryview(part) for part in (head, data, struct.pack("<I", masked_crc(data)))]


def example_bytes(lists: Mapping[str, Listed]) -> bytes:
    """Write an Example with these lists, in the order of their names: equal data have equal bytes."""
    entries = [
        _field(1, [*_field(1, [name.encode()]), *_field(2, _feature(lists[name]))]) for name in sorted(lists)
    ]  # fmt: skip
    return b"".join(_field(1, [part for entry in entries for part in entry]))


def _field(number: int, parts: Sequence[bytes]) -> list[bytes]:
    """The parts of a field with a length."""
    return [bytes([number << 3 | 2]), _varint(sum(map(len, parts))), *parts]


def _feature(values: Listed) -> list[bytes]:
    if not isinstance(values, np.ndarray):
        return _field(1, [part for value in values for part in _field(1, [value])])
    flat = np.ascontiguousarray(values).reshape(-1)
    if flat.dtype.kind == "f":
        return _field(2, _field(1, [flat.astype("<f4").tobytes()]))
    return _field(3, _field(1, [packed_varints(flat.astype(np.int64))]))


def _varint(number: int) -> bytes:
    made = bytearray()
    while number >= 0x80:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*made, number])


def packed_varints(values: Array) -> bytes:
    """Write int64 numbers as varints, all at once: one pass for each byte of the longest; negative ones have ten."""
    bits = values.view(np.uint64)
    lengths = np.ones(len(bits), np.int64)
    for byte in range(1, 10):
        longer = bits >= np.uint64(1 << 7 * byte)
        if not longer.any():
            break
        lengths += longer
    starts = np.cumsum(lengths) - lengths
    made = np.empty(int(lengths.sum()), np.uint8)
    for byte in range(int(lengths.max(initial=0))):
        which = np.flatnonzero(lengths > byte)
        group = (bits[which] >> np.uint64(7 * byte)).astype(np.uint8) & 0x7F
        made[starts[which] + byte] = group | ((lengths[which] > byte + 1).astype(np.uint8) << 7)
    return made.tobytes()
