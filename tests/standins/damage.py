"""Damages files, one bit at a time or in many ways at once, and takes digests away.

What is read of a file with changed bytes are its rows or one of our errors, in bounded time.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from rbtool.core.errors import FormatError, RbtoolError
from rbtool.core.format import fs
from rbtool.core.format.converter import Reader

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
"""What git-lfs leaves in place of a file."""


def flip(path: Path, at: int, bit: int = 0) -> bytes:
    """Flip one bit of a file, counted from its end if `at` is negative; return what was in the file."""
    sound = path.read_bytes()
    _put(path, at % len(sound), bytes([sound[at] ^ 1 << bit]))
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


Change = Callable[[bytes, random.Random], bytes]
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


def strike(file: Path, read: Callable[[], object], count: int, change: Change = mutated, seed: str = "") -> int:
    """Read `count` mutations of a file, which then is as before; return how many of them one of our errors refused.

    Another error, one of more than a sentence, and lost time are failures.
    """
    data, chance, refused = file.read_bytes(), random.Random(f"{file.name} {count} {seed}"), 0
    for number in range(count):
        file.write_bytes(change(data, chance))
        started, what, said = processor_seconds(), f"{file.name}, mutation {number} {seed}", None
        try:
            read()
        except RbtoolError as error:
            said = error.message
        except Exception as error:
            raise AssertionError(f"{what}: {error!r}") from error
        refused += said is not None
        assert "\n" not in (said or ""), what
        assert processor_seconds() - started < LONGEST, what
    file.write_bytes(data)
    return refused


def read_whole(kind: type[Reader], path: Path, options: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Read all rows, if the reader recognises the dataset, and require that it has counted them."""
    if not kind.recognises(path):
        raise FormatError(f"{path} is not recognised")
    with kind(path, options=options) as reader:
        facts = reader.facts()
        steps = sum(map(len, reader.pieces()))
        assert steps == facts.steps == reader.episode_table().steps
