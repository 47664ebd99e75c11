"""Damages files, one bit at a time or in many ways at once, and takes digests away."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rbtool.core.format import fs

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
"""What git-lfs leaves in place of a file."""


def flip(path: Path, at: int, bit: int = 0) -> bytes:
    """Turn one bit of a file over; return what was in the file."""
    sound = path.read_bytes()
    _put(path, at, bytes([sound[at] ^ 1 << bit]))
    return sound


def _put(path: Path, at: int, data: bytes) -> None:
    mode = path.stat().st_mode
    if not mode & 0o200:  # a segment: root writes to it, and nobody else
        path.chmod(mode | 0o200)
    descriptor = fs.open_to_change(path)
    try:
        fs.pwrite(descriptor, memoryview(data), at, path)
    finally:
        os.close(descriptor)
        if not mode & 0o200:
            path.chmod(mode)


def flips(path: Path, *, places: int, seed: int = 0) -> Iterator[tuple[Path, int]]:
    """Turn one bit over, somewhere in every file of a folder or in the one file, and back when asked for the next.

    Each file is damaged in its middle and at `places - 1` other bytes: the first, the last, and some between.
    """
    draw = np.random.default_rng(seed)
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    for file in files:
        size = file.stat().st_size
        if not size:
            continue
        between = draw.integers(0, size, max(places - 3, 0)).tolist()
        for at in dict.fromkeys([size // 2, 0, size - 1, *between][:places]):
            sound = flip(file, at, int(draw.integers(8)))
            yield file, at
            _put(file, 0, sound)


def without_digests(folder: Path) -> Path:
    """Make a saved buffer or storage like one from before digests were noted; return it."""
    for path in [*folder.rglob("digests.json")]:
        path.unlink()
    metadata = folder / "buffer_metadata.json"
    if metadata.is_file():
        document = json.loads(metadata.read_text())
        document.pop("digests", None)
        fs.replace_file(metadata, json.dumps(document).encode())
    return folder
