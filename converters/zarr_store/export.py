"""Exports to the Zarr stores of Diffusion Policy: format 2, in a folder, or in a zip file where the name ends in .zip.

    data/NAME            all rows of a leaf, chunked in time: action, observation.NAME and info.NAME as NAME, the reward
                         as reward; the attribute rbtool holds the key
    meta/episode_ends    int64, the exclusive end row of each episode
    meta/NAME            one text per episode; if the dataset was converted from Zarr, values in their original type

The `ReplayBuffer` of Diffusion Policy opens these stores.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ...core.encodings.output_files import LatchedFile
from ...core.errors import FormatError, RbtoolError, SchemaError
from ...core.format import fs
from ...core.format.contracts import Array
from ...core.format.documents import dump_json, parse_json
from ...core.format.files import no_match
from ...core.progress import counted
from ...core.ted.episodes import Final
from ...core.ted.schema import (
    ACTION,
    EPISODE,
    FLAGS,
    NEXT,
    Key,
    Timing,
    field_named,
    file_stem,
    state_keys,
)
from ..files.exports import RowSink
from ..files.hdf5 import MARK
from .store import (
    ARRAY_2,
    ATTRIBUTES_2,
    DATA,
    ENDS,
    GROUP_2,
    META,
    META_TYPES,
    OURS,
    StoreFiles,
    is_store,
    made_codec,
)

_FORMAT = "zarr"
_CHUNK_BYTES = 2 << 20
_BLOSC = {"id": "blosc", "cname": "zstd", "clevel": 5, "shuffle": 2, "blocksize": 0}
"""The compressor that Diffusion Policy calls `disk`: Zstandard after a bit shuffle."""
_EPOCH = (1980, 1, 1, 0, 0, 0)  # a fixed date, so that equal data gives equal zip files


class _Target(Protocol):
    """Where the files of a store are put."""

    def put(self, name: str, data: bytes) -> None:
        """Write a file."""


class _Folder:
    """A store in a folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folders = {path}
        fs.make_folder(path)

    def put(self, name: str, data: bytes) -> None:
        """Write a file, and create the folders above it."""
        path = self._path / name
        if path.parent not in self._folders:
            fs.make_folder(path.parent)
            self._folders |= {path.parent, *path.parent.parents}
        fs.write_file(path, data)

    def finish(self) -> None:
        """Sync all folders, so that the names of the files are on the disk, too."""
        for folder in sorted(self._folders):
            if folder.is_relative_to(self._path):
                fs.sync_folder(folder)


class _Zip:
    """A store in a zip file. Members are not deflated: the chunks are compressed already."""

    def __init__(self, file: LatchedFile, archive: zipfile.ZipFile) -> None:
        self._file, self._archive = file, archive

    def put(self, name: str, data: bytes) -> None:
        """Write a member."""
        self._archive.writestr(zipfile.ZipInfo(name, _EPOCH), data)
        self._file.check()


class ZarrExporter(RowSink):
    """Writes a dataset as a Zarr store, with about one chunk in memory."""

    @classmethod
    def made(cls, path: Path) -> bool:
        """Return whether `path` is a store that rbtool wrote, by the mark in its attributes."""
        try:
            if not is_store(path):
                return False
            with StoreFiles(path) as files:
                return ATTRIBUTES_2 in files.names and files.document(ATTRIBUTES_2).get(MARK) == _FORMAT
        except (RbtoolError, OSError) as error:
            return no_match(error)

    def prepare(self) -> None:
        """Choose the name of the array for each leaf, and note what the store cannot hold."""
        self.refuse({"bfloat16"}, "Zarr")
        chosen = self.chosen
        fields, manifest = chosen.fields, chosen.reader.manifest
        states = set(state_keys(fields))
        paths: dict[str, str] = {}
        if manifest.request.source == _FORMAT:
            paths = {key: name for name, key in manifest.renamed_keys.items()}
        self._names: dict[str, tuple[Key, Timing]] = {}
        for field in fields:
            key = field.key
            inner = key[1:] if key[0] == NEXT else key
            if key == EPISODE or inner in FLAGS or (key[0] == NEXT and inner in states):
                continue
            timing: Timing = "result" if key[0] == NEXT else "state" if key in states else "step"
            name = paths.get(field.name) or _name(inner)
            if name in self._names:
                raise SchemaError(
                    f"{field.name} and {'.'.join(self._names[name][0])} would both be called {name!r} in the store",
                    hint="rename one of them: rbtool preprocess SRC --dest DEST --rename OLD=NEW",
                )
            self._names[name] = inner, timing
        if not any(key == ACTION for key, _ in self._names.values()):
            self.notes.append("there is no action, which Diffusion Policy needs")
        whole = [(NEXT, *key) if timing == "result" else key for key, timing in self._names.values()]
        flags = [(NEXT, *flag) for flag in FLAGS]
        after = [(NEXT, *key) for key in states] if self.is_without_ends else []
        self.place(whole, [*flags, *after])
        self._note_ends()
        self._texts = self._episode_texts()
        self.note_unnumbered(kept=self._texts)

    def _note_ends(self) -> None:
        table = self.chosen.table
        if count := int(table.terminated.sum()):
            self.notes.append(f"{counted(count, 'episode')} that ended terminated: the store has no flags")
        if inside := self.flags_inside():
            self.notes.append(f"flags in {counted(inside, 'step')} inside episodes have no place there")
        if count := int((table.final != Final.REPEATED).sum()):
            self.notes.append(f"the observation after the last step of {counted(count, 'episode')} has no place there")
        if count := int(table.explicit_next.sum()):
            self.notes.append(f"{counted(count, 'episode')} with other observations after steps than before the next")

    def _episode_texts(self) -> dict[str, Array]:
        """Return an array `[episodes]` for each name of a text."""
        texts = self.chosen.text or []
        types = parse_json(self.chosen.reader.documents().get(META_TYPES, b"{}"), META_TYPES)
        found: dict[str, Array] = {}
        for name in dict.fromkeys(name for one in texts for name in one):
            values = [one.get(name, "") for one in texts]
            if name != ENDS.removeprefix(META):
                found[name] = _values(values, types.get(name) if isinstance(types, dict) else None)
        return found

    def write_rows(self, target: Path, progress: Callable[[int], None]) -> None:
        """Write the store, one array after the other."""
        if not self.name.endswith(".zip"):
            folder = _Folder(target)
            self._fill(folder, progress)
            folder.finish()
            return
        with LatchedFile(target) as file:
            # A LatchedFile has every method that ZipFile calls, and fewer than typing.IO declares
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:  # type: ignore[call-overload]
                self._fill(_Zip(file, archive), progress)
            file.check()
            fs.fsync(file.descriptor, target)

    def _fill(self, target: _Target, progress: Callable[[int], None]) -> None:
        parents = (name.split("/")[:end] for name in self._names for end in range(1, name.count("/") + 1))
        inner = dict.fromkeys(f"{DATA}{'/'.join(parts)}/" for parts in parents)
        for group in ("", DATA, META, *inner):
            target.put(f"{group}{GROUP_2}", _document({"zarr_format": 2}))
        target.put(ATTRIBUTES_2, _document({MARK: _FORMAT}))
        self._write(target, ENDS, np.cumsum(self.chosen.table.length).astype(np.int64), lambda count: None)
        for name, values in self._texts.items():
            self._write(target, f"{META}{file_stem(name)}", values, lambda count: None)
        for name, (key, timing) in self._names.items():
            field = field_named(self.chosen.fields, (NEXT, *key) if timing == "result" else key)
            rows = _even(self.chosen.chunks(field.key, field.row_bytes), _rows_of_chunk(field.row_bytes))
            shape = (self.chosen.steps, *field.shape)
            stated = {"key": list(key), "role": field.role, "timing": timing}
            target.put(f"{DATA}{name}/{ATTRIBUTES_2}", _document({OURS: stated}))
            _write_array(target, f"{DATA}{name}", field.numpy, shape, rows, progress)

    def _write(self, target: _Target, name: str, values: Array, progress: Callable[[int], None]) -> None:
        rows = _even(iter([values]), _rows_of_chunk(values.dtype.itemsize))
        _write_array(target, name, values.dtype, values.shape, rows, progress)


def _rows_of_chunk(row_bytes: int) -> int:
    return max(1, _CHUNK_BYTES // max(1, row_bytes))


def _even(parts: Iterator[Array], count: int) -> Iterator[Array]:
    """Regroup rows into arrays of `count` rows; the last one may be shorter."""
    held: list[Array] = []
    size = 0
    for part in parts:
        held.append(part)
        size += len(part)
        while size >= count:
            rows = np.concatenate(held) if len(held) > 1 else held[0]
            yield rows[:count]
            held, size = [rows[count:]], size - count
    if size:
        yield np.concatenate(held)


def _write_array(
    target: _Target, name: str, dtype: np.dtype[Any], shape: Sequence[int], rows: Iterator[Array],
    progress: Callable[[int], None],
) -> None:  # fmt: skip
    """Write the metadata of an array and its chunks; the last chunk is padded with zeros, as format 2 requires."""
    codec = made_codec(_BLOSC)
    count = min(_rows_of_chunk(dtype.itemsize * int(np.prod(shape[1:]))), max(1, shape[0]))
    chunks = [count, *(max(1, size) for size in shape[1:])]
    target.put(f"{name}/{ARRAY_2}", _document({
        "chunks": chunks, "compressor": _BLOSC, "dtype": dtype.str, "fill_value": "" if dtype.kind == "U" else 0,
        "filters": None, "order": "C", "shape": list(shape), "zarr_format": 2,
    }))  # fmt: skip
    zeros = ".0" * (len(shape) - 1)
    for number, part in enumerate(rows):
        if part.size:
            whole = part
            if len(part) < count:
                whole = np.zeros(chunks, dtype)
                whole[: len(part)] = part
            target.put(f"{name}/{number}{zeros}", bytes(codec.encode(np.ascontiguousarray(whole))))
        progress(part.nbytes)


def _name(key: Key) -> str:
    """Return the name of the array for a key, without dots: torch modules are named after arrays, and forbid dots."""
    parts = key[1:] if key[0] in ("observation", "info") and len(key) > 1 else key
    return "_".join(file_stem(part).replace(".", "_") for part in parts)


def _values(texts: Sequence[str], stated: Any) -> Array:
    """Return texts as an array: of their original type `stated` if all of them are values of it, else of strings."""
    if isinstance(stated, str):
        try:
            return np.array([parse_json(text, "a text") for text in texts], np.dtype(stated))
        except (FormatError, ValueError, TypeError, OverflowError):
            pass
    return np.array(texts, str if any(texts) else "<U1")


def _document(value: Any) -> bytes:
    return (dump_json(value, indent=4) + "\n").encode()
