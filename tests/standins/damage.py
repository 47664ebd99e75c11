"""Damages files, one bit at a time or in many ways at once, and takes digests away.

What is read of a file with changed bytes are its rows or one of our errors, in bounded time.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from rbtool.core.errors import RbtoolError
from rbtool.core.format import fs
from rbtool.core.format.converter import Reader

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


LONGEST = 10.0
"""Seconds of the processor that a mutation may take."""


def processor_seconds() -> float:
    """The time that this process and the children that it has waited for have had, whatever else the machine does."""
    return sum(os.times()[:4])


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Change some bits or bytes, mostly in the structure at the start and the end, or cut or double a part."""
    changed = bytearray(data)
    kind = chance.random()
    if kind < 0.08:
        return bytes(changed[: chance.randrange(len(changed))])
    if kind < 0.16:
        at, to = sorted(chance.randrange(len(changed)) for _ in range(2))
        return bytes(changed[:at] + changed[to:])
    for _ in range(chance.choice([1, 1, 2, 8, 64])):
        at = chance.randrange(len(changed))
        place = chance.random()
        if place < 0.4:
            at = chance.randrange(min(len(changed), 4096))
        elif place < 0.6:
            at = len(changed) - 1 - chance.randrange(min(len(changed), 1024))
        changed[at] = chance.choice([0, 255, chance.randrange(256), changed[at] ^ (1 << chance.randrange(8))])
    return bytes(changed)


def strike(kind: type[Reader], source: Path, folder: Path, count: int, options: Mapping[str, Any]) -> int:
    """Read `count` mutations of a file with a reader; return how many of them were read to the end."""
    data, path, chance = source.read_bytes(), folder / source.name, random.Random(f"{source.name} {count}")
    whole = 0
    for number in range(count):
        path.write_bytes(mutated(data, chance))
        whole += _outcome(kind, path, options, f"{source.name}, mutation {number}")
    return whole


def strike_in_folder(
    kind: type[Reader],
    source: Path,
    names: Sequence[str],
    folder: Path,
    count: int,
    *,
    options: Mapping[str, Any] = MappingProxyType({}),
    change: Callable[[bytes, random.Random], bytes] = mutated,
    batch: int = 0,
) -> int:
    """Read `count` mutations of each of these files of a dataset; return how many datasets were read to the end.

    `change` makes a mutation of the bytes of a file; every `batch` has others.
    """
    copy, whole = folder / "struck" / source.name, 0
    shutil.copytree(source, copy)
    for name in names:
        data, chance = (source / name).read_bytes(), random.Random(f"{name} {count} {batch}")
        for number in range(count):
            (copy / name).write_bytes(change(data, chance))
            whole += _outcome(kind, copy, options, f"{name}, mutation {number} of batch {batch}")
        (copy / name).write_bytes(data)
    return whole


def _outcome(kind: type[Reader], path: Path, options: Mapping[str, Any], what: str) -> bool:
    """Read a mutation; return whether it was read to the end, and fail for anything but our errors in bounded time."""
    started, said, whole = processor_seconds(), "", False
    try:
        whole = _read(kind, path, options)
    except RbtoolError as error:
        said = error.message
    except Exception as error:
        raise AssertionError(f"{what}: {error!r}") from error
    assert "\n" not in said, what
    assert processor_seconds() - started < LONGEST, what
    return whole


def _read(kind: type[Reader], path: Path, options: Mapping[str, Any]) -> bool:
    if not kind.recognises(path):
        return False
    with kind(path, options=options) as reader:
        facts = reader.facts()
        steps = sum(map(len, reader.pieces()))
        assert steps == facts.steps == reader.episode_table().steps
    return True
