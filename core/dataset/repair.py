"""Restores the longest sound beginning of a recording that was cut short, or damaged since."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError
from ..ted import Field, Key
from . import fs
from .commits import COMMITS, Commit, episode_digest, file_widths, read_commits, read_fields
from .digest import FileRecord, Hasher, digest_file
from .leaf_writer import merge_ranges, range_of
from .locks import lock_folder
from .manifest import MANIFEST, FieldRange, Manifest, has_manifest
from .packed_reader import PackedReader
from .packed_schema import SCHEMA, PackedSchema
from .recorder import seal

__all__ = ["RecordingState", "examine_recording", "repair_recording"]

_CHUNK = 1 << 20


@dataclass(frozen=True)
class RecordingState:
    """What is in a recording: the episodes of its longest sound beginning, and how many more were promised.

    `surplus` counts bytes that belong to no sound episode; `sealed` says that the folder is a sound dataset as it is.
    """

    fields: tuple[Field, ...]
    schema: PackedSchema
    commits: tuple[Commit, ...]
    lost: int
    surplus: int
    sealed: bool

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each data file that the sound episodes take."""
        steps = self.commits[-1].steps if self.commits else 0
        explicit = self.commits[-1].explicit_stop if self.commits else 0
        rows = {"record": steps + len(self.commits), "step": steps, "explicit": explicit}
        return {name: width * rows[kind] for name, (width, kind) in file_widths(self.schema).items()}


def examine_recording(folder: Path, progress: Callable[[int], None] = lambda episodes: None) -> RecordingState:
    """Read all of a recording and find its longest sound beginning; changes nothing.

    `progress` hears of the episodes looked at. FormatError for a folder that nothing was recorded in.
    """
    fields = read_fields(folder)
    schema = PackedSchema.of(fields)
    promised, unsound = read_commits(folder)
    widths = file_widths(schema)
    commits: list[Commit] = []
    for number, commit in enumerate(promised):
        if not _is_sound(folder, widths, promised[number - 1] if number else None, commit, number):
            break
        commits.append(commit)
        progress(1)
    lost = len(promised) - len(commits) + unsound
    state = RecordingState(fields, schema, tuple(commits), lost, 0, sealed=False)
    surplus = sum(_size(folder / name) - size for name, size in state.sizes.items() if (folder / name).is_file())
    return RecordingState(fields, schema, tuple(commits), lost, surplus, sealed=not lost and _is_dataset(folder))


def repair_recording(folder: Path, state: RecordingState) -> Manifest:
    """Cut the files of a recording to the episodes that were found sound, and make a dataset of it.

    Cut short itself, it can be run again. UsageError while another process is recording there.
    """
    lock = lock_folder(folder)
    if lock < 0:
        raise UsageError(f"{folder} is being recorded to by another process", hint="wait until it is done")
    try:
        fs.remove(folder / MANIFEST)  # no dataset from here on, until it is whole again
        data = [record for name, size in state.sizes.items() if (record := _cut(folder, name, size))]
        _cut(folder, COMMITS, len(state.commits) * len(state.commits[0].to_bytes(0)) if state.commits else 0)
        if not (folder / SCHEMA).is_file() or (folder / SCHEMA).read_bytes() != state.schema.to_bytes():
            fs.remove(folder / SCHEMA)
            fs.write_file(folder / SCHEMA, state.schema.to_bytes())
        manifest = seal(folder, state.fields, state.commits, data, {})
        with PackedReader(folder) as reader:
            ranges = _ranges(reader)
        return seal(folder, state.fields, state.commits, data, ranges) if manifest.steps else manifest
    finally:
        os.close(lock)


def _is_sound(
    folder: Path, widths: Mapping[str, tuple[int, str]], before: Commit | None, commit: Commit, number: int
) -> bool:
    """Tell whether all bytes of an episode are there, as they were written."""
    steps = (before.steps if before else 0), commit.steps
    spans = {
        "step": steps,
        "record": (steps[0] + number, steps[1] + number + 1),
        "explicit": (before.explicit_stop if before else 0, commit.explicit_stop),
    }
    found = {}
    for name, (width, kind) in widths.items():
        start, stop = (row * width for row in spans[kind])
        if stop > start:
            if _size(folder / name) < stop:
                return False
            found[name] = _digest_of(folder / name, start, stop)
    return episode_digest(found) == commit.data


def _digest_of(path: Path, start: int, stop: int) -> str:
    hasher = Hasher()
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while start < stop:
            data = file.read(min(_CHUNK, stop - start))
            hasher.update(data)
            start += len(data)
    return hasher.digest


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _is_dataset(folder: Path) -> bool:
    if not has_manifest(folder):
        return False
    try:
        with PackedReader(folder) as reader:
            reader.verify_files()
    except (ValueError, OSError):
        return False
    return True


def _cut(folder: Path, name: str, size: int) -> FileRecord | None:
    """Cut a file; return it as a manifest lists it. One that no episode needs goes."""
    path = folder / name
    if not size and name != COMMITS and "explicit" in name:
        fs.remove(path)
        return None
    descriptor = fs.open_to_fill(path)
    try:
        if os.fstat(descriptor).st_size != size:
            fs.truncate(descriptor, size, path)
        fs.fsync(descriptor, path)
    finally:
        os.close(descriptor)
    return FileRecord(name, size, digest_file(path))


def _ranges(reader: PackedReader) -> dict[Key, FieldRange]:
    found: dict[Key, FieldRange] = {}
    for start, stop in reader.chunks(4 << 20):
        for field in reader.fields:
            ranged = range_of(reader.read(field.key, start, stop), field)
            found[field.key] = merge_ranges(found.get(field.key), ranged)
    return found
