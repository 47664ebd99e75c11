"""Folders with a file per episode: the order of names with numbers in them, and files with the same bytes."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path

from ...core.format.files import digest_file, open_regular


def natural_order(name: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts names as people count: `seed2` comes before `seed10`.

    >>> sorted(["seed10", "seed2", "seed"], key=natural_order)
    ['seed', 'seed2', 'seed10']
    """
    parts = re.split(r"(\d+)", name)
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]


_HEAD = 64 << 10
_SHOWN = 5


def notes_on_identical(files: Iterable[Path]) -> Iterator[str]:
    """Yield a sentence that names files with identical contents, none where all differ.

    Only files of equal size are read, and beyond their first 64 KB only those that begin alike.
    """
    same = _alike(_alike(_alike([list(files)], lambda file: file.stat().st_size), _head), digest_file)
    if same:
        shown = "; ".join(" = ".join(file.name for file in group[:_SHOWN]) for group in same[:_SHOWN])
        more = ", …" if len(same) > _SHOWN or any(len(group) > _SHOWN for group in same) else ""
        extra = sum(len(group) - 1 for group in same)
        have = "file has" if extra == 1 else "files have"
        yield f"{extra:,} {have} the same contents as another, and all of them are converted: {shown}{more}"


def _alike(groups: Iterable[Sequence[Path]], value_of: Callable[[Path], Hashable]) -> list[list[Path]]:
    """Split groups of files by a value, and keep groups of several files."""
    found: list[list[Path]] = []
    for group in groups:
        by_value: dict[Hashable, list[Path]] = {}
        for file in group:
            by_value.setdefault(value_of(file), []).append(file)
        found += [files for files in by_value.values() if len(files) > 1]
    return found


def _head(file: Path) -> int:
    descriptor = open_regular(file)
    try:
        return zlib.crc32(os.pread(descriptor, _HEAD, 0))
    finally:
        os.close(descriptor)
