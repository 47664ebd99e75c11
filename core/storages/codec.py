"""How the bytes of one tensor are compressed, and how they come back."""

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
"""More than one compressed byte can stand for: zstd reaches 2^15, zlib 2^10."""

_DTYPES = {
    str(dtype): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
        torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
        torch.complex128, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
    )
}  # fmt: skip


def dtype_named(name: object) -> torch.dtype:
    """Return the element type written `torch.float32` and so on; FormatError for any other text.

    A table decides: nothing is looked up by name or evaluated.
    """
    if isinstance(name, torch.dtype):
        return name
    found = _DTYPES.get(name) if isinstance(name, str) else None
    if found is None:
        raise FormatError(f"{name!r} is not an element type of torch")
    return found


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the elements of a tensor as bytes in C order, without a copy where they lie so on the CPU."""
    return bytes_behind(tensor.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg().contiguous())


def bytes_behind(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, to be read or written."""
    if not tensor.numel():  # whose strides may be such that torch cannot view it as bytes
        return memoryview(bytearray())
    # One element counts as contiguous whatever its strides are, and torch views only those of stride 1 as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def tensor_from_bytes(data: Any, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Make a tensor that owns a copy of these bytes, which must be as many as dtype and shape ask for."""
    if not len(data):
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(tuple(shape))


def to_bytestream(data: Any) -> bytes:
    """Return the elements of a tensor or an array as bytes in C order; bytes come back as they are.

    TypeError for anything else: its bytes would be a pickle.
    """
    if isinstance(data, torch.Tensor):
        return bytes(tensor_bytes(data))
    if isinstance(data, np.ndarray | np.generic) and not data.dtype.hasobject:
        return data.tobytes()
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    raise TypeError(f"a {type(data).__name__} has no bytes of its own; tensors, arrays and bytes have")


@dataclass(frozen=True)
class Codec(ABC):
    """A lossless compression of bytes at some level; the level matters for compressing only."""

    level: int = 3

    name: ClassVar[str]
    levels: ClassVar[range]

    def __post_init__(self) -> None:
        if self.level not in self.levels:
            known = f"{self.levels[0]} to {self.levels[-1]}"
            raise UsageError(f"compression level {self.level} is not known to {self.name}, which has {known}")

    @abstractmethod
    def compress(self, data: memoryview) -> bytes:
        """Compress."""

    @abstractmethod
    def _expand(self, data: bytes, size: int) -> bytes:
        """Undo `compress`; more than `size` bytes need not be produced."""

    @staticmethod
    def refuse_too_few(data: bytes, size: int) -> None:
        """Raise CorruptDataError for a size that compressed bytes cannot stand for, before memory is taken for it."""
        if size > len(data) * _MOST_PER_BYTE:
            raise CorruptDataError(f"{len(data):,} compressed bytes cannot hold the {size:,} expected")

    def decompress(self, data: bytes, size: int) -> bytes:
        """Undo `compress`, which must give `size` bytes; else CorruptDataError. No more memory than that is used."""
        self.refuse_too_few(data, size)
        try:
            found = self._expand(data, size)
        except (zlib.error, zstandard.ZstdError, MemoryError) as error:
            raise CorruptDataError(f"compressed bytes are cut or damaged: {error}") from error
        if len(found) != size:
            raise CorruptDataError(f"compressed bytes hold {len(found):,} or more, expected {size:,}")
        return found


class Zlib(Codec):
    """Deflate with a checksum: the codec of TorchRL below Python 3.14."""

    name = "zlib"
    levels = range(-1, 10)

    def compress(self, data: memoryview) -> bytes:
        return zlib.compress(data, self.level)

    def _expand(self, data: bytes, size: int) -> bytes:
        stream = zlib.decompressobj()
        found = stream.decompress(data, size + 1)  # one more than may be there: a longer stream shows
        if len(found) == size and not stream.eof:
            raise zlib.error("the stream has no end")
        if stream.unused_data:
            raise zlib.error("bytes follow the stream")
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
"""The codecs by the name that a checkpoint records."""


def codec_of_bytes(data: bytes) -> str:
    """Return the codec of compressed bytes, by their first bytes; FormatError if it is none of `CODECS`."""
    if data[:4] == b"\x28\xb5\x2f\xfd":
        return "zstd"
    if len(data) > 1 and data[0] & 0x0F == 8 and int.from_bytes(data[:2]) % 31 == 0:
        return "zlib"
    raise FormatError(
        f"the codec of {len(data):,} bytes is not recorded, and they begin neither like zlib nor like zstd",
        hint="give the storage the decompression_fn that reads them",
    )


def byte_count(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Count the bytes of a tensor."""
    return dtype.itemsize * math.prod(shape)
