"""Compression of the bytes of single tensors."""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import zstandard

from ..errors import CorruptDataError, FormatError, UsageError

_MOST_PER_BYTE = 1 << 16
"""Upper bound for the bytes that one compressed byte can stand for: zstd reaches 2^15, zlib 2^10."""

_DTYPES = {
    str(dtype): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
        torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
        torch.complex128, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
    )
}  # fmt: skip


def dtype_named(name: object) -> torch.dtype:
    """Return the element type of a name such as `torch.float32`; FormatError for any other text.

    The name is looked up in a table, not in torch, so that text in a file cannot name anything else.
    """
    if isinstance(name, torch.dtype):
        return name
    found = _DTYPES.get(name) if isinstance(name, str) else None
    if found is None:
        raise FormatError(f"{name!r} is not an element type of torch")
    return found


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the elements of a tensor as bytes in C order, without a copy if they are contiguous on the CPU."""
    return bytes_behind(tensor.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg().contiguous())


def bytes_behind(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as bytes, which can be read and written."""
    if not tensor.numel():  # torch may be unable to view it as bytes, because of its strides
        return memoryview(bytearray())
    # A single element counts as contiguous with any stride, but torch only views stride 1 as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def tensor_from_bytes(data: Any, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Make a tensor that owns a copy of these bytes; their number must match dtype and shape."""
    if not len(data):
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(tuple(shape))


def to_bytestream(data_to_bytestream: Any) -> bytes:
    """Return the elements of a tensor or an array as bytes in C order; bytes are returned as they are.

    Raises:
        TypeError: it has another type; TorchRL would pickle it.
    """
    data = data_to_bytestream
    if isinstance(data, torch.Tensor):
        return bytes(tensor_bytes(data))
    if isinstance(data, np.ndarray | np.generic) and not data.dtype.hasobject:
        return data.tobytes()
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    raise TypeError(f"a {type(data).__name__} cannot be converted to bytes; tensors, arrays and bytes can")


@dataclass(frozen=True)
class Codec(ABC):
    """A lossless compression of bytes. The level only affects compression, not decompression."""

    level: int = 3

    name: ClassVar[str]
    levels: ClassVar[range]

    def __post_init__(self) -> None:
        if self.level not in self.levels:
            known = f"{self.levels[0]} to {self.levels[-1]}"
            raise UsageError(f"{self.name} has no compression level {self.level}, only {known}")

    @abstractmethod
    def compress(self, data: memoryview) -> bytes:
        """Compress."""

    @abstractmethod
    def _expand(self, data: bytes, size: int) -> bytes:
        """Undo `compress`, but return at most `size + 1` bytes: with one too many, the caller refuses the data."""

    @staticmethod
    def refuse_too_few(data: bytes, size: int) -> None:
        """Raise CorruptDataError, before memory is allocated, if compressed bytes cannot expand to this size."""
        if size > len(data) * _MOST_PER_BYTE:
            raise CorruptDataError(f"{len(data):,} compressed bytes cannot hold the {size:,} expected")

    def decompress(self, data: bytes, size: int) -> bytes:
        """Undo `compress`, using no more memory than `size`; CorruptDataError if the result is not `size` bytes."""
        self.refuse_too_few(data, size)
        try:
            found = self._expand(data, size)
        except (zlib.error, zstandard.ZstdError, MemoryError) as error:
            raise CorruptDataError(f"compressed bytes are cut or damaged: {error}") from error
        if len(found) != size:
            raise CorruptDataError(f"compressed bytes hold {len(found):,} or more, expected {size:,}")
        return found


class Zlib(Codec):
    """Deflate with a checksum: the codec that TorchRL uses on Python versions before 3.14."""

    name = "zlib"
    levels = range(-1, 10)

    def compress(self, data: memoryview) -> bytes:
        return zlib.compress(data, self.level)

    def _expand(self, data: bytes, size: int) -> bytes:
        stream = zlib.decompressobj()
        found = stream.decompress(data, size + 1)  # one byte more, to notice a stream that is too long
        if len(found) == size and not stream.eof:
            raise zlib.error("the stream is incomplete")
        if stream.unused_data:
            raise zlib.error("there are bytes after the stream")
        return found


class Zstd(Codec):
    """Zstandard with a checksum: smaller and faster than zlib."""

    name = "zstd"
    levels = range(-(1 << 17), 23)

    def compress(self, data: memoryview) -> bytes:
        return zstandard.ZstdCompressor(level=self.level, write_checksum=True).compress(data)

    def _expand(self, data: bytes, size: int) -> bytes:
        announced = zstandard.frame_content_size(data)
        if announced not in (-1, size):
            raise zstandard.ZstdError(f"the frame announces {announced:,} bytes, expected {size:,}")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=max(size, 1), allow_extra_data=False)


CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (Zlib, Zstd)}
"""The codecs, by the names recorded in checkpoints."""


def codec_of_bytes(data: bytes) -> str:
    """Return the codec of compressed bytes, detected by their first bytes; FormatError if it is not in `CODECS`."""
    if data[:4] == b"\x28\xb5\x2f\xfd":
        return "zstd"
    if len(data) > 1 and data[0] & 0x0F == 8 and int.from_bytes(data[:2]) % 31 == 0:
        return "zlib"
    raise FormatError(
        f"the codec of {len(data):,} bytes is not recorded, and they begin neither like zlib nor like zstd",
        hint="create the storage with the decompression_fn that reads them",
    )


def byte_count(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Count the bytes of a tensor."""
    return dtype.itemsize * math.prod(shape)
