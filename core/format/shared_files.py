"""Files of a new dataset that are equal to files of its source: they take room on the disk once.

Where the file system can share blocks (Btrfs, XFS), the kernel compares the two files and lets them share what is
equal. Each can be written to later, and the other stays as it is. Elsewhere a file becomes a hard link, if the source's
is one that nobody writes to: no permission to write, for anybody, and owned by the user of this process. A file that
may be written to is never linked, since both datasets would change. Where neither is possible, the file stays a copy.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

from ..errors import RbtoolError
from . import fs
from .contracts import StepReader
from .digest import FileRecord, digest_file, open_folder, open_regular
from .manifest import Manifest

_LEAST = 4096
"""The bytes of a block. Smaller files are not worth it: they take one in any case."""
_AT_ONCE = 16 << 20  # file systems share no more at a time
_FIDEDUPERANGE = 0xC0189436
_RANGE = struct.Struct("=QQHHIqQQiI")  # struct file_dedupe_range, with one struct file_dedupe_range_info


def share_files(folder: Path, made: Manifest, sources: Iterable[StepReader], *, links: bool = False) -> int:
    """Let the files of a dataset, which is whole but not published yet, share room with equal ones of its sources.

    Equal are files whose sizes and digests are; their bytes are compared again before they are shared. Of a file that
    has no equal, the first blocks may be those of the file of that name in the first source, as after a merge. `links`
    allows hard links, between datasets in layout `ted`: files of others may be continued in place. Returns the bytes
    shared. What cannot be shared stays as it is, without an error.
    """
    known: dict[tuple[int, str], list[tuple[Path, bool]]] = {}
    named: dict[str, list[tuple[Path, bool]]] = {}
    for source in sources:
        manifest = source.manifest
        stays = links and manifest.kind == "dataset" and manifest.layout == made.layout == "ted"
        for file in manifest.files if source.path.is_dir() else ():
            if file.size >= _LEAST:
                known.setdefault((file.size, file.digest), []).append((source.path / file.path, stays))
                named.setdefault(file.path, [(source.path / file.path, False)])
    shared = 0
    for file in made.files:
        for place, stays in known.get((file.size, file.digest), []) or named.get(file.path, []):
            found = share_blocks(place, folder / file.path)
            if not found and stays and _link(place, folder / file.path, file):
                found = file.size
            shared += found
            if found:
                break
    return shared


def share_blocks(source: Path, file: Path) -> int:
    """Let a file share its blocks with another one of the same bytes; return how many bytes do.

    The kernel compares both while nobody can change them, and shares nothing of a range that differs anywhere.
    """
    shared = 0
    if sys.platform == "linux":
        with (
            contextlib.suppress(OSError, RbtoolError),  # another file system, or one that cannot
            contextlib.ExitStack() as stack,
            fs.announced("share", file),
        ):
            one = open_regular(source)
            stack.callback(os.close, one)
            other = fs.open_to_change(file)
            stack.callback(os.close, other)
            sizes = {os.fstat(one).st_size, os.fstat(other).st_size}
            size = min(sizes) if len(sizes) == 1 else min(sizes) // _LEAST * _LEAST  # of the shorter, whole blocks
            while shared < size and (found := _share_range(one, other, shared, min(_AT_ONCE, size - shared))):
                shared += found
    return shared


def _share_range(one: int, other: int, start: int, size: int) -> int:
    about = bytearray(_RANGE.pack(start, size, 1, 0, 0, other, start, 0, 0, 0))
    fcntl.ioctl(one, _FIDEDUPERANGE, about, True)
    found, status = _RANGE.unpack(about)[7:9]
    return int(found) if status == 0 else 0


def is_read_only(found: os.stat_result) -> bool:
    """Whether a file is one that nobody writes to, root aside: none has the permission, and this user gives it."""
    return stat.S_ISREG(found.st_mode) and not found.st_mode & 0o222 and found.st_uid == os.geteuid()


def may_be_shared(found: os.stat_result) -> bool:
    """Whether a file may be that of another dataset, too, and must not be written to."""
    return found.st_nlink > 1 or not found.st_mode & 0o222


def _link(place: Path, file: Path, listed: FileRecord) -> bool:
    """Put a hard link to `place` where `file` is, if that is read-only and has the listed bytes."""
    aside = file.with_name(f".{file.name}.shared")
    try:
        folder = open_folder(place.parent)
        try:
            if not is_read_only(os.stat(place.name, dir_fd=folder, follow_symlinks=False)):
                return False
            fs.link_to(Path(place.name), aside, among=folder)
        finally:
            os.close(folder)
        # What was linked decides, not what had the name before.
        equal = is_read_only(aside.lstat()) and digest_file(aside) == listed.digest
        if equal:
            fs.rename(aside, file)
        return equal
    except (OSError, RbtoolError):  # another file system, too many links, none at all there
        return False
    finally:
        fs.remove(aside)
