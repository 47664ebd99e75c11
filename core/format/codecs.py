"""Compresses the rows of one field in chunks that can be read one by one, with zstandard, or with Arrow's LZ4."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import CorruptDataError, FormatError, UsageError
from ..ted import Field, Key, unknown_field
from .contracts import Array

__all__ = ["CODECS", "Codec", "named_codecs", "parse_codecs"]

CODECS = ("zstd", "lz4")
_FORM = re.compile(r"(?P<name>[a-z0-9]+)(?::(?P<level>-?\d+))?")
_LEVELS = range(1, 23)
_DEFAULT_LEVEL = 3
_CHUNK_BYTES = 16 << 10
_MOST_PER_BYTE = 1 << 15
"""More than one compressed byte can stand for."""


@dataclass(frozen=True)
class Codec:
    """A method by name, and how hard it tries: `zstd` takes a level of 1 to 22, `lz4` (its block format) none."""

    name: str
    level: int | None = None

    @classmethod
    def parse(cls, text: str) -> Codec:
        """Read `zstd`, `zstd:1` to `zstd:22` or `lz4`; FormatError for anything else."""
        match = _FORM.fullmatch(text)
        if match is None or match["name"] not in CODECS or (match["name"] == "lz4" and match["level"]):
            raise FormatError(f"the codec {text!r} is unknown; known are zstd, zstd:1 to zstd:22 and lz4")
        if match["name"] == "lz4":
            return cls("lz4")
        level = int(match["level"] or _DEFAULT_LEVEL)
        if level not in _LEVELS:
            raise FormatError(f"the codec {text!r} has the level {level}; zstd has the levels 1 to {_LEVELS[-1]}")
        return cls("zstd", level)

    def __str__(self) -> str:
        return self.name if self.level is None else f"{self.name}:{self.level}"

    @staticmethod
    def chunk_rows(field: Field) -> int:
        """Rows of one chunk, about 16 KiB: a random row costs little more than itself, and small rows share a chunk."""
        return max(1, _CHUNK_BYTES // max(1, field.row_bytes))

    @cached_property
    def _compressor(self) -> Callable[[Any], bytes]:
        if self.name == "zstd":
            import zstandard

            return zstandard.ZstdCompressor(level=self.level or _DEFAULT_LEVEL).compress
        import pyarrow  # half a second, which only those wait for who chose it

        return lambda data: pyarrow.Codec("lz4_raw").compress(data, asbytes=True)

    def compress(self, data: memoryview) -> bytes:
        """Compress one chunk."""
        return self._compressor(data)

    def decompress(self, chunks: Sequence[memoryview], sizes: Sequence[int], origin: str) -> Array:
        """Undo it for some chunks, whose original `sizes` in bytes are known; uint8, one after the other.

        Raises CorruptDataError for chunks that cannot be read, or have another size; no more memory is taken than for
        the sizes, and those must be such as the chunks can stand for.
        """
        if not chunks:
            return np.empty(0, np.uint8)
        for chunk, size in zip(chunks, sizes, strict=True):
            if size > len(chunk) * _MOST_PER_BYTE:
                raise CorruptDataError(
                    f"{origin} holds a chunk of {len(chunk):,} bytes, which cannot hold the {size:,} expected"
                )
        lengths = np.asarray(sizes, np.uint64)
        whole, start = np.empty(int(lengths.sum()), np.uint8), 0
        try:
            parts = _zstd_chunks(chunks, lengths) if self.name == "zstd" else _lz4_chunks(chunks, lengths)
            for part, length in zip(parts, lengths.tolist(), strict=True):
                whole[start : start + length] = np.frombuffer(part, np.uint8, length)
                start += length
        except Exception as error:  # each library raises its own
            if isinstance(error, MemoryError):
                raise
            raise CorruptDataError(f"{origin} holds a chunk that is no {self.name} data: {error}") from error
        return whole


def _zstd_chunks(chunks: Sequence[memoryview], lengths: Array) -> Iterable[Any]:
    import zstandard

    engine = zstandard.ZstdDecompressor()
    for chunk, size in zip(chunks, lengths.tolist(), strict=True):
        # zstandard takes memory for what a frame states, whatever it may put out at most.
        stated = zstandard.frame_content_size(chunk)
        if stated not in (-1, size):
            raise ValueError(f"a frame states {stated:,} bytes, {size:,} are expected")
    if len(chunks) > 1 and "multi_decompress_to_buffer" in zstandard.backend_features:  # one call for all of them
        found = engine.multi_decompress_to_buffer(list(chunks), decompressed_sizes=lengths.tobytes(), threads=1)
        return (found[number] for number in range(len(found)))
    pairs = zip(chunks, lengths.tolist(), strict=True)
    return [engine.decompress(chunk, max_output_size=max(size, 1), allow_extra_data=False) for chunk, size in pairs]


def _lz4_chunks(chunks: Sequence[memoryview], lengths: Array) -> Iterable[Any]:
    import pyarrow

    codec = pyarrow.Codec("lz4_raw")
    pairs = zip(chunks, lengths.tolist(), strict=True)
    return (codec.decompress(pyarrow.py_buffer(chunk), decompressed_size=size) for chunk, size in pairs)


def parse_codecs(asked: Sequence[str], fields: Sequence[Field]) -> Mapping[Key, Codec]:
    """Read `observation.image=zstd:3` and its like; UsageError for fields that are not there and unknown methods."""
    names = {field.name: field for field in fields}
    codecs = named_codecs(asked)
    for name in codecs:
        if name not in names:
            raise unknown_field(name, names)
    return {names[name].key: codec for name, codec in codecs.items()}


def named_codecs(asked: Sequence[str]) -> Mapping[str, Codec]:
    """Read `observation.image=zstd:3` and its like while it is not known which fields there are; UsageError."""
    found: dict[str, Codec] = {}
    for text in asked:
        name, sign, method = text.partition("=")
        if not sign:
            raise UsageError(f"--compress {text!r} names no method", hint="write it like observation.image=zstd:3")
        if name in found:
            raise UsageError(f"--compress names the field {name!r} twice")
        try:
            found[name] = Codec.parse(method)
        except FormatError as error:
            raise UsageError(f"--compress {text!r}: {error}") from error
    return found
