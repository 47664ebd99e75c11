"""Digests: xxh3-128, fast enough to take of everything that is written."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from .regular import open_regular

__all__ = [
    "FileRecord",
    "Hasher",
    "bytes_of",
    "digest_bytes",
    "digest_descriptor",
    "digest_file",
    "digest_files",
    "digest_of_stats",
    "digest_text",
]

PREFIX = "xxh3-128:"
_CHUNK = 1 << 20


class FileRecord(NamedTuple):
    """A file as the manifest lists it: its path inside the folder, its size in bytes, its digest."""

    path: str
    size: int
    digest: str


class Hasher:
    """Takes bytes as they are written and gives their digest."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: bytes | memoryview) -> None:
        """Add bytes."""
        self._state.update(data)

    @property
    def digest(self) -> str:
        """The digest of the bytes so far, as `xxh3-128:<32 hex digits>`."""
        return PREFIX + self._state.hexdigest()


def bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    """View the bytes of an array in row-major order; one that does not lie so is copied."""
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def digest_bytes(data: bytes) -> str:
    """Digest of some bytes."""
    hasher = Hasher()
    hasher.update(data)
    return hasher.digest


def digest_text(text: str) -> str:
    """Digest of text, also of text with paths that are not UTF-8, whose bytes lone surrogates stand for."""
    return digest_bytes(text.encode(errors="surrogatepass"))


def digest_file(path: Path, start: int = 0) -> str:
    """Digest of a file's bytes from `start` to its end."""
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        return digest_descriptor(file.fileno(), start)


def digest_descriptor(descriptor: int, start: int = 0) -> str:
    """Digest of an open file's bytes from `start` to its end."""
    hasher, buffer = Hasher(), memoryview(bytearray(_CHUNK))
    while got := os.preadv(descriptor, [buffer], start):
        hasher.update(buffer[:got])
        start += got
    return hasher.digest


def digest_of_stats(files: Iterable[Path]) -> str:
    """Tell one state of some files from another without reading them: by their names, sizes, times and inodes.

    Those that are not there do not count.
    """
    lines = []
    for file in files:
        if file.is_file():
            found = file.stat()
            lines.append(f"{file.resolve()}\0{found.st_size}\0{found.st_mtime_ns}\0{found.st_ino}\n")
    return "stat:" + digest_text("".join(lines))


def digest_files(files: Iterable[FileRecord]) -> str:
    """One digest over the sorted (path, size, digest) of many files."""
    lines = sorted(f"{file.path}\0{file.size}\0{file.digest}\n" for file in files)
    return digest_text("".join(lines))
