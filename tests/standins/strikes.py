"""Runs a job in a forked child and strikes it at its n-th change of the file system, by SIGKILL or with a full disk."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import signal
import stat
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rbtool

__all__ = ["Course", "Fault", "Job", "course_of", "filling", "forked", "kill", "spread"]

Job = Callable[[Path], object]
Fault = Callable[[], None]
WATCHED = {"rbtool.fs", "open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link"}
_FOLDERS = {"os.remove": 1, "os.rmdir": 1, "os.rename": 2, "os.link": 2, "os.mkdir": 2}
"""Where among the arguments of an event the folders begin that its paths count from, -1 for none."""
_RECORD = struct.Struct("<I8s")
"""What the child sends of each operation: its number, and a digest of all files before it."""


@dataclass(frozen=True)
class Course:
    """What an undisturbed run of a job does.

    `changes` are the operations before which the files are others than before the operation before. A process that
    ends at any other operation leaves what it leaves at the last one of these: `rbtool.fs` announces each operation,
    Python does once more, and a sync changes no file.
    """

    status: int
    operations: int
    changes: tuple[int, ...]


def forked(job: Job, out: Path, dest: Path, fault: Fault | None, at: int, who: str = "") -> tuple[int, int]:
    """Run the job in a child, with the fault at operation `at`; return its status and how many it counted."""
    status, records = _run(job, out, dest, fault, at, who, digests=False)
    return status, max((number for number, _ in records), default=0)


def course_of(job: Job, out: Path, dest: Path, who: str = "") -> Course:
    """Run the job in a child and note its operations."""
    status, records = _run(job, out, dest, None, 0, who, digests=True)
    operations = max((number for number, _ in records), default=0)
    if who == "worker":  # each one counts for itself
        return Course(status, operations, tuple(range(1, operations + 1)))
    earlier = (b"", *(digest for _, digest in records))
    changes = sorted({number for (number, digest), before in zip(records, earlier, strict=False) if digest != before})
    return Course(status, operations, tuple(changes))


def spread(places: tuple[int, ...], count: int | None) -> list[int]:
    """Choose so many of the places, evenly, the last of them always; all of them without a count."""
    count = count or len(places)
    return sorted({places[round((number + 1) * len(places) / count) - 1] for number in range(count)})


def kill() -> None:
    """End this process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def filling(filler: Path) -> Fault:
    """Make a fault that leaves not one free block."""

    def fill() -> None:
        descriptor = os.open(filler, os.O_WRONLY | os.O_CREAT)
        for size in (1 << 20, 1 << 12):
            with contextlib.suppress(OSError):
                while os.write(descriptor, bytes(size)) == size:
                    pass
        os.close(descriptor)

    return fill


def _run(
    job: Job, out: Path, dest: Path, fault: Fault | None, at: int, who: str, *, digests: bool
) -> tuple[int, list[tuple[int, bytes]]]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        code = 1
        try:
            _hear(fault, at, out, writing, who, digests=digests)
            job(dest)
            code = 0
        except rbtool.OutOfSpaceError as error:
            code = error.exit_code
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        records = list(_RECORD.iter_unpack(pipe.read()))
    _, status = os.waitpid(child, 0)
    return status, records


def _hear(fault: Fault | None, at: int, watch: Path, pipe: int, who: str, *, digests: bool) -> None:
    """Count the operations below `watch`, a record into the pipe each, and call the fault at the n-th.

    `who` `parent` counts those of this process alone; `worker` those of the processes it forks, of which the first to
    get there is struck.
    """
    numbers, prefix, parent, struck = itertools.count(1), str(watch), os.getpid(), watch.parent / "struck"

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in WATCHED or not _changes(event, arguments, prefix):
            return
        if who and (who == "parent") != (os.getpid() == parent):
            return
        if who == "worker" and struck.exists():
            return
        number = next(numbers)  # in one step: a download has several threads
        os.write(pipe, _RECORD.pack(number, _digest(watch) if digests else b""))
        if number == at and fault is not None:
            if who == "worker":
                struck.touch()
            fault()

    sys.addaudithook(hook)


def _changes(event: str, arguments: tuple[Any, ...], prefix: str) -> bool:
    """Tell whether an event changes something below the watched folder."""
    if event == "open":
        path, _, flags = arguments
        return str(path).startswith(prefix) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    paths = [os.fsdecode(part) for part in arguments if isinstance(part, str | bytes | os.PathLike)]
    return any(path.startswith(prefix) for path in paths) or _is_below(event, arguments, prefix)


def _is_below(event: str, arguments: tuple[Any, ...], prefix: str) -> bool:
    """Tell whether a path of the event counts from a folder below the watched one that is open: rmtree works so."""
    folders = arguments[_FOLDERS[event] :] if event in _FOLDERS else ()
    return any(folder >= 0 and str(Path(f"/proc/self/fd/{folder}").readlink()).startswith(prefix) for folder in folders)


def _digest(folder: Path) -> bytes:
    """Digest of all files: names, kinds, permissions and bytes, and where links point."""
    found = hashlib.blake2b(digest_size=8)
    for path, mode in _files(str(folder)):
        with contextlib.suppress(FileNotFoundError):  # of another thread or process
            if stat.S_ISLNK(mode):
                content = bytes(Path(path).readlink())
            else:
                content = Path(path).read_bytes() if stat.S_ISREG(mode) else b""
            found.update(repr((path, mode, len(content))).encode() + content)
    return found.digest()


def _files(folder: str) -> Iterator[tuple[str, int]]:
    """All paths below the folder and their modes, in order."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda one: one.name):
            with contextlib.suppress(FileNotFoundError):
                yield entry.path, entry.stat(follow_symlinks=False).st_mode
                if entry.is_dir(follow_symlinks=False):
                    yield from _files(entry.path)
