"""How the leaves of an H5 checkpoint are compressed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from ..ted import Field

__all__ = ["Compression"]

_CHUNK_BYTES = 1 << 19
_FORM = re.compile(r"(?P<method>gzip|lzf)(?::(?P<level>[1-9]))?")
_DEFAULT_LEVEL = 4
_FLAGS = {"shuffle": True, "fletcher32": False}
_KNOWN = "known are compression='gzip' or 'lzf', compression_opts=0 to 9, shuffle, fletcher32 and chunks=True"


@dataclass(frozen=True, slots=True)
class Compression:
    """A method HDF5 has everywhere, `gzip` with a level or `lzf`, after the bytes of like weight are brought together
    (`shuffle`). No method, no compression. `fletcher32` adds HDF5's own checksum to every chunk, `chunked` cuts data
    into chunks that are not compressed."""

    method: str | None = None
    level: int | None = None
    shuffle: bool = True
    fletcher32: bool = False
    chunked: bool = False

    @classmethod
    def parse(cls, text: str | None) -> Compression:
        """Read `gzip`, `gzip:1` to `gzip:9`, `lzf` or `none`; raise UsageError for anything else."""
        if text in {None, "none"}:
            return cls()
        match = _FORM.fullmatch(text or "")
        if match is None or (match["method"] == "lzf" and match["level"]):
            raise UsageError(f"--compression {text!r} is not known", hint="take gzip, gzip:1 to gzip:9, lzf or none")
        level = int(match["level"] or _DEFAULT_LEVEL) if match["method"] == "gzip" else None
        return cls(match["method"], level)

    @classmethod
    def from_h5_kwargs(cls, given: Mapping[str, Any] | None) -> Compression:
        """Read what h5py's `create_dataset` takes: compression, compression_opts, shuffle, fletcher32, chunks=True.

        UsageError for any other argument, and for a method that HDF5 would need a plug-in for.
        """
        left = dict(given or {})
        method, level = left.pop("compression", None), left.pop("compression_opts", None)
        if type(method) is int:  # h5py's short form of a level of gzip
            method, level = "gzip", method
        flags = {name: left.pop(name, default) for name, default in _FLAGS.items()}
        chunked = left.pop("chunks", None)
        odd = next((name for name, value in flags.items() if type(value) is not bool), None)
        if left or odd or chunked not in (None, True, False):
            name = min(left, default=odd or "chunks")
            value = {**flags, "chunks": chunked, **left}[name]
            raise UsageError(f"h5_kwargs has {name}={value!r}, which is not known", hint=_KNOWN)
        if method not in {None, "gzip", "lzf"} or (method != "gzip" and level is not None):
            raise UsageError(f"h5_kwargs has compression={method!r} with compression_opts={level!r}", hint=_KNOWN)
        if method == "gzip" and (type(level or 0) is not int or not 0 <= (level or 0) <= 9):
            raise UsageError(f"h5_kwargs has compression_opts={level!r}; gzip has the levels 0 to 9", hint=_KNOWN)
        level = _DEFAULT_LEVEL if method == "gzip" and level is None else level
        return cls(method, level, chunked=bool(chunked) or flags["fletcher32"], **flags)

    def __str__(self) -> str:
        return "none" if self.method is None else self.method + (f":{self.level}" if self.level else "")

    def chunk_rows(self, leaf: Field) -> int:
        """Rows of one chunk: about half a megabyte."""
        return max(1, _CHUNK_BYTES // max(1, leaf.row_bytes))

    def options(self, leaf: Field, rows: int) -> dict[str, Any]:
        """Keyword arguments for `create_dataset`; data without elements cannot be in chunks."""
        if (self.method is None and not self.chunked) or not rows or not math.prod(leaf.shape):
            return {}
        chunks = (min(rows, self.chunk_rows(leaf)), *leaf.shape)
        shuffle = self.shuffle and self.method is not None
        return {
            "chunks": chunks, "compression": self.method, "compression_opts": self.level, "shuffle": shuffle,
            "fletcher32": self.fletcher32,
        }  # fmt: skip
