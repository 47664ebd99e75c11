"""The front of an H5 checkpoint: its manifest as text, in the space HDF5 leaves to the user.

HDF5 looks for its own beginning at byte 0, 512, 1024, 2048, …; what lies before it, it never touches.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from ..errors import CorruptDataError, FormatError, SchemaError
from ..format import Manifest, changed, is_canonical, is_ours, open_regular, parse_json

__all__ = ["block_bytes", "block_size", "data_start", "read_block", "verify_block"]

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_SMALLEST = 512
_ROOM = 1024
_FOR_PROVENANCE = 8192


def block_size(manifest: Manifest) -> int:
    """Size of a block that holds this manifest, and the same one with other digests and counts.

    HDF5 writes the size into its own data. So that equal data have equal digests, the size follows from what the
    manifest says of the data, with ample room for how they came to be, as long as that is enough.
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
        what = "an HDF5 file that rbtool did not write" if start is not None else "no dataset and no checkpoint"
        raise FormatError(f"{path} is {what}: it does not begin with a manifest")
    if start is None:
        raise CorruptDataError(f"{path} begins with a manifest, but no HDF5 data follow: it was cut or overwritten")
    with os.fdopen(open_regular(place), "rb") as file:
        return file.read(start)


def _require_readable(path: Path) -> None:
    """Raise CorruptDataError for an HDF5 file that was cut: it may well be of whom it does not seem to be."""
    from .h5_open import root_members  # loads h5py, which our own files do not need here

    try:
        root_members(path)
    except (OSError, RuntimeError) as error:
        raise CorruptDataError(f"{path}: HDF5 cannot read the file: {error}") from error


def data_start(path: Path) -> int | None:
    """Find where HDF5 begins."""
    size, offset = path.stat().st_size, 0
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        while offset + len(_SIGNATURE) <= size:
            file.seek(offset)
            if file.read(len(_SIGNATURE)) == _SIGNATURE:
                return offset
            offset = offset * 2 or _SMALLEST
    return None
