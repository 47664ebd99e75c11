"""The parts of an H5 checkpoint: names in the file, the manifest in front of it, compression of datasets.

The manifest is text in the user block. HDF5 looks for its signature at byte 0, 512, 1024, 2048, … and never touches
what is before it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import CorruptDataError, FormatError, SchemaError, UsageError
from ..format.digest import open_regular
from ..format.documents import parse_json
from ..format.manifest import Manifest, is_canonical
from ..format.open_files import changed
from ..format.staging import is_ours
from ..ted.schema import Field, Key, file_stem

DATA = "data"
"""Name under which the manifest lists everything behind the user block."""
EPISODES = "episodes"
TEXT = "episodes_text"
SOURCE = "source"
STORAGE = "storage"


def h5_path(place: Key) -> str:
    """Name of a leaf inside the file; no part of a key can name another group."""
    return "/".join(map(file_stem, place))


HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_END_OF_FILE = {0: 40, 1: 44, 2: 28, 3: 28}
"""Where a header states the end of the file, by its version; addresses have 8 bytes in files that h5py writes."""
_HEADER = 52
_SMALLEST = 512
_ROOM = 1024
_FOR_PROVENANCE = 8192


def block_size(manifest: Manifest) -> int:
    """Size of a block that holds this manifest, and the same one with other digests and counts.

    HDF5 writes the size into its own data. So that equal data have equal digests, the size follows from what the
    manifest records of the data, with ample room for how they came to be, as long as that is enough.
    """
    needed = max(
        2 * len(replace(manifest, provenance=()).to_bytes()) + _FOR_PROVENANCE, len(manifest.to_bytes()) + _ROOM
    )
    return 1 << (needed - 1).bit_length()


def block_bytes(manifest: Manifest, size: int) -> bytes:
    """The whole block: the manifest, then spaces."""
    text = manifest.to_bytes()
    if len(text) > size:
        raise SchemaError(f"a manifest of {len(text):,} bytes does not fit into a user block of {size:,}")
    return text.ljust(size, b" ")


def read_block(path: Path, place: Path | None = None) -> tuple[Manifest, int]:
    """Read the manifest of an H5 checkpoint without HDF5; return it with the size of the block.

    `place` is where to open the file, and `path` what to call it. Raises FormatError for a file that rbtool did not
    write, CorruptDataError for one that was damaged.
    """
    block = _read(path, place or path)
    return Manifest.from_dict(parse_json(block, str(path)), str(path)), len(block)


def verify_block(path: Path, place: Path | None = None) -> None:
    """Raise CorruptDataError unless the block is byte for byte as it was written."""
    block = _read(path, place or path)
    text = block.rstrip(b" ")
    if not is_canonical(text):
        raise changed(path)


def _read(path: Path, place: Path) -> bytes:
    start = data_start(place)
    if not is_ours(place):
        if start is not None:
            _require_readable(path)
        what = "an HDF5 file that rbtool did not write" if start is not None else "not a dataset or checkpoint"
        raise FormatError(f"{path} is {what}")
    if start is None:
        raise CorruptDataError(f"{path} begins with a manifest, but no HDF5 data follow: it was cut or overwritten")
    with os.fdopen(open_regular(place), "rb") as file:
        return file.read(start)


def _require_readable(path: Path) -> None:
    """Raise CorruptDataError for an HDF5 file that was cut: it may well be of whom it does not seem to be."""
    from .h5_open import root_members  # loads h5py, which our own files do not need here

    try:
        root_members(path)
    except (OSError, RuntimeError, ValueError) as error:
        raise CorruptDataError(f"{path}: HDF5 cannot read the file: {error}") from error


def stated_bytes(path: Path) -> int | None:
    """Return how many bytes a file has by its own HDF5 header; None for one that does not begin with such a header.

    A file with fewer was cut: libhdf5 does not open it. OSError for a file that cannot be read.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        head = file.read(_HEADER)
    place = (
        _END_OF_FILE.get(head[len(HDF5_SIGNATURE)])
        if len(head) == _HEADER and head.startswith(HDF5_SIGNATURE)
        else None
    )
    return None if place is None else int.from_bytes(head[place : place + 8], "little")


def begins_as_h5(path: Path) -> bool:
    """Return whether a file begins with the signature of HDF5. OSError for one that cannot be read."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read(len(HDF5_SIGNATURE)) == HDF5_SIGNATURE


def data_start(path: Path) -> int | None:
    """Find where HDF5 begins."""
    size, offset = path.stat().st_size, 0
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        while offset + len(HDF5_SIGNATURE) <= size:
            file.seek(offset)
            if file.read(len(HDF5_SIGNATURE)) == HDF5_SIGNATURE:
                return offset
            offset = offset * 2 or _SMALLEST
    return None


_CHUNK_BYTES = 1 << 19
_FORM = re.compile(r"(?P<method>gzip|lzf)(?::(?P<level>[1-9]))?")
_DEFAULT_LEVEL = 4
_FLAGS = {"shuffle": True, "fletcher32": False}
_KNOWN = "known: compression='gzip' or 'lzf', compression_opts=0 to 9, shuffle, fletcher32 and chunks=True"


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
            raise UsageError(f"h5_kwargs has {name}={value!r}, which is unknown", hint=_KNOWN)
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
