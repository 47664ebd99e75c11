"""Storages on datasets in layout `packed`: finished datasets, and recordings that are sampled while they grow.

Leaves are gathered from records, which hold all small fields of a step side by side, and from the files of fields that
are stored separately. `core/format/packed/schema.py` draws the layout.
"""

from __future__ import annotations

import mmap
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

from ..errors import CorruptDataError, SchemaError, UsageError, require_flags
from ..format.contracts import Array
from ..format.episodes import EpisodeTable
from ..format.manifest import Manifest
from ..format.open_files import ListedFiles
from ..format.packed.reader import PackedReader
from ..format.packed.recording import SYNC_SECONDS, PackedRecorder
from ..format.packed.schema import PackedField, RowCodec
from ..kernels.rows import PlainRecords, PlainRows, RecordColumn, RecordPlaces, fastest_records, fastest_rows
from ..options import PathLike
from ..ted.schema import (
    EPISODE,
    NEXT_DONE,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    Field,
    Key,
    Numbers,
    key_name,
    numbers_rows,
    role_of,
)
from .base import IndexedStorage
from .cursors import as_index, row_numbers, rows_of
from .dataset import Pages, exceeds_memory, read_runs, tensordict_of, tensors_at
from .pytree import TreeSpec, tree_spec_of
from .write_log import Change

_RECORDS, _EXPLICIT = "records.bin", "explicit_next.bin"
_LARGE = 4 << 20
"""Above this size of the records, importing the compiled loops pays off."""


class PackedLeaves:
    """The leaves of a packed dataset, in read-only maps.

    Args:
        reader: the dataset.
        fields: the leaves, in the order in which they are returned.
        advise: whether the kernel is advised which rows are read, because the files exceed memory.
    """

    def __init__(self, reader: PackedReader, fields: Sequence[Field], *, advise: bool) -> None:
        self._schema, numbers = reader.schema, reader.numbers
        self._advise = advise
        self._fields = list(fields)
        size = self._schema.record_bytes
        self._records = _MappedFile(reader.listed, _RECORDS, numbers.records * size, advise)
        self._explicit = _MappedFile(reader.listed, _EXPLICIT, numbers.explicit_records * size, advise)
        self.places = RecordPlaces(
            self._records.bytes.reshape(-1, size), self._explicit.bytes.reshape(-1, size),
            numbers.starts, numbers.explicit_starts,
        )  # fmt: skip
        found = [self._schema.place(field) for field in fields]
        self.columns = {
            number: RecordColumn(one.offset, field.numpy, field.shape, after)
            for number, (field, (one, after)) in enumerate(zip(fields, found, strict=True))
            if one.offset is not None
        }
        self._make = fastest_records if len(self._records.bytes) >= _LARGE else PlainRecords
        self._gatherer = self._make(self.places, list(self.columns.values()), self._schema.state_bytes)
        self._some: dict[tuple[int, ...], PlainRecords] = {}
        self._layout = self._strided()
        self._without_elements = [number for number, field in enumerate(fields) if not field.row_bytes]
        self._halves = [number for number, field in enumerate(fields) if field.dtype == "bfloat16"]
        self._own = {one.field.key: _OwnField(reader, one, advise) for one, _ in found if one.stem is not None}
        self._apart = {
            number: (self._own[one.field.key], after)
            for number, (one, after) in enumerate(found)
            if one.stem is not None
        }

    def gather(self, numbers: Numbers) -> list[torch.Tensor]:
        """Read each leaf at these steps, `[n, *shape]`.

        Negative numbers count from the end; IndexError for steps that do not exist.
        """
        self._expect(numbers)
        found = self._empty(len(numbers))
        for number, rows in zip(self.columns, self._gatherer.gather(numbers), strict=True):
            found[number] = rows
        self._gather_apart(numbers, found, self._apart)
        return self._typed(found)

    def gather_some(self, chosen: Sequence[int], numbers: Numbers) -> list[torch.Tensor]:
        """Read the leaves with these numbers at these steps; see `gather`."""
        found = self._empty(len(numbers))
        recorded = tuple(number for number in chosen if number in self.columns)
        apart = {number: self._apart[number] for number in chosen if number in self._apart}
        self._expect(numbers, records=bool(recorded), fields={own for own, _ in apart.values()})
        if recorded:
            if recorded not in self._some:
                columns = [self.columns[number] for number in recorded]
                self._some[recorded] = self._make(self.places, columns, self._schema.state_bytes)
            for number, rows in zip(recorded, self._some[recorded].gather(numbers), strict=True):
                found[number] = rows
        self._gather_apart(numbers, found, apart)
        found = self._typed(found)
        return [found[number] for number in chosen]

    def gather_views(self, numbers: Numbers, device: torch.device) -> list[torch.Tensor]:
        """Like `gather`, but fields of the records are strided views of one tensor on `device`."""
        self._expect(numbers)
        spans = self._gatherer.spans(numbers)
        spans = spans if device.type == "cpu" else spans.to(device)
        found, bases = self._empty(len(numbers)), {}
        for number, dtype, lead, strides, offset in self._layout:
            if dtype not in bases:
                bases[dtype] = spans.view(dtype)
            found[number] = bases[dtype].as_strided((len(numbers), *lead), strides, offset)
        self._gather_apart(numbers, found, self._apart)
        return [rows if rows.device == device else rows.to(device) for rows in self._typed(found)]

    def _strided(self) -> list[tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...], int]]:
        """Return where each leaf of the records is in a span: its number, type, shape, strides, offset in elements."""
        size, found = self._schema.record_bytes, []
        for number, column in self.columns.items():
            width = column.dtype.itemsize
            inner = tuple(stride // width for stride in np.empty((1, *column.shape), column.dtype).strides[1:])
            strides = ((size + self._schema.state_bytes) // width, *inner)
            dtype = getattr(torch, self._fields[number].dtype)
            found.append((number, dtype, column.shape, strides, (column.offset + size * column.after) // width))
        return found

    def _empty(self, count: int) -> list[torch.Tensor]:
        """Return a list with a place for each leaf; leaves without elements have their tensors already."""
        found = [_NOTHING] * len(self._fields)
        for number in self._without_elements:
            field = self._fields[number]
            found[number] = torch.empty((count, *field.shape), dtype=getattr(torch, field.dtype))
        return found

    def _typed(self, found: list[torch.Tensor]) -> list[torch.Tensor]:
        for number in self._halves:
            if found[number].dtype != torch.bfloat16:
                found[number] = found[number].view(torch.bfloat16)
        return found

    def _gather_apart(
        self, numbers: Numbers, found: list[torch.Tensor], apart: Mapping[int, tuple[_OwnField, bool]]
    ) -> None:
        if not apart:
            return
        places = self.places
        steps, episodes, records = places.find(numbers)
        explicit = places.explicit_of(steps, episodes)
        wanted: dict[_OwnField, dict[bool, int]] = {}
        for number, (own, after) in apart.items():
            wanted.setdefault(own, {})[after] = number
        for own, leaves in wanted.items():
            for number, rows in zip(leaves.values(), own.gather(steps, records, list(leaves), explicit), strict=True):
                found[number] = torch.from_numpy(rows)

    def _expect(self, numbers: Numbers, *, records: bool = True, fields: Iterable[_OwnField] | None = None) -> None:
        """Advise the kernel which rows are read next, in the records and in the files of `fields`, by default all."""
        if not self._advise:
            return
        places, size = self.places, self._schema.record_bytes
        steps, episodes, places_of_records = places.find(numbers)
        _, explicit = places.explicit_of(steps, episodes)
        if records:
            self._records.expect(places_of_records * size, size + self._schema.state_bytes)
            self._explicit.expect(explicit * size, self._schema.state_bytes)
        for own in self._own.values() if fields is None else fields:
            own.expect(steps, places_of_records, explicit)


_NOTHING = torch.empty(0)


class _MappedFile:
    """A file of known size, mapped read-only. Callers of a storage never get a view of its bytes."""

    def __init__(self, files: ListedFiles, name: str, size: int, advise: bool) -> None:
        self._pages: Pages | None = None
        self.bytes: Array = np.empty(0, np.uint8)
        if not size:
            return
        path, descriptor = files.root / name, files.descriptor(name)
        found = os.fstat(descriptor).st_size
        if found != size:  # reading beyond the end of a mapped file would kill the process
            raise CorruptDataError(f"{path} has {found:,} bytes, expected {size:,}: it was cut or overwritten")
        pages = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
        self.bytes = np.frombuffer(pages, np.uint8)
        self._pages = Pages(pages) if advise else None

    def expect(self, starts: Numbers, lengths: int | Numbers) -> None:
        if self._pages is not None:
            self._pages.expect(starts, lengths)


class _OwnField:
    """A field that is stored in a separate file, and the file with its explicit next rows."""

    def __init__(self, reader: PackedReader, one: PackedField, advise: bool) -> None:
        self._state = one.state
        self._rows = _rows_of(reader, one, advise, explicit=False)
        self._explicit = _rows_of(reader, one, advise, explicit=True) if one.state else None

    def gather(
        self, steps: Numbers, records: Numbers, leaves: Sequence[bool], explicit: tuple[Numbers, Numbers]
    ) -> list[Array]:
        """Read the rows of the steps for False in `leaves`, and the rows that follow them for True."""
        if not self._state:
            return [self._rows.take(steps)]
        found = self._rows.take_all([records + after for after in leaves])
        chosen, places = explicit
        if len(chosen) and True in leaves and self._explicit is not None:
            found[list(leaves).index(True)][chosen] = self._explicit.take(places)
        return found

    def expect(self, steps: Numbers, records: Numbers, explicit: Numbers) -> None:
        """Advise the kernel which rows are read next."""
        self._rows.expect(np.concatenate((records, records + 1)) if self._state else steps)
        if self._explicit is not None:
            self._explicit.expect(explicit)


class _Uncompressed:
    """The rows of a field in an uncompressed file."""

    def __init__(self, file: _MappedFile, field: Field, rows: int) -> None:
        self._file = file
        self._width = field.row_bytes
        self._count = rows
        array = file.bytes.view(field.numpy).reshape(rows, *field.shape)
        self._gatherer: PlainRows = (fastest_rows if array.nbytes >= _LARGE else PlainRows)([array])

    def take(self, rows: Numbers) -> Array:
        return self._gatherer.gather(rows, self._count)[0].numpy()

    def take_all(self, wanted: Sequence[Numbers]) -> list[Array]:
        return [self.take(rows) for rows in wanted]

    def expect(self, rows: Numbers) -> None:
        self._file.expect(rows * self._width, self._width)


class _Chunked:
    """The rows of a field in a file of compressed chunks, each with `per` rows."""

    def __init__(self, file: _MappedFile, field: Field, rows: int, codec: RowCodec, per: int, offsets: Numbers) -> None:
        self._file = file
        self._field = field
        self._count = rows
        self._codec = codec
        self._per = per
        self._offsets = offsets
        self._data = memoryview(file.bytes.data) if len(file.bytes) else memoryview(b"")

    def take(self, rows: Numbers) -> Array:
        return self.take_all([rows])[0]

    def take_all(self, wanted: Sequence[Numbers]) -> list[Array]:
        """Read several sets of rows; a chunk that they share is decompressed once."""
        per, offsets = self._per, self._offsets
        rows = np.concatenate(wanted)
        chunks, which = np.unique(rows // per, return_inverse=True)
        bounds = zip(offsets[chunks].tolist(), offsets[chunks + 1].tolist(), strict=True)
        data = [self._data[start:stop] for start, stop in bounds]
        held = np.minimum(self._count - chunks * per, per)
        whole = self._codec.decompress(data, (held * self._field.row_bytes).tolist(), "a compressed field")
        items = whole.view(self._field.numpy).reshape(-1, *self._field.shape)
        places = which * per + rows % per  # only the very last chunk can be shorter
        found, start = [], 0
        for lot in wanted:
            found.append(items[places[start : start + len(lot)]])
            start += len(lot)
        return found

    def expect(self, rows: Numbers) -> None:
        chunks = np.unique(rows // self._per)
        self._file.expect(self._offsets[chunks], self._offsets[chunks + 1] - self._offsets[chunks])


def _rows_of(reader: PackedReader, one: PackedField, advise: bool, *, explicit: bool) -> _Uncompressed | _Chunked:
    numbers = reader.numbers
    rows = numbers.explicit_records if explicit else numbers.records if one.state else numbers.steps
    name = one.file(explicit=explicit)
    if one.codec is None:
        return _Uncompressed(_MappedFile(reader.listed, name, rows * one.field.row_bytes, advise), one.field, rows)
    offsets = reader.offsets(one, explicit) if rows else np.zeros(1, np.int64)
    file = _MappedFile(reader.listed, name, int(offsets[-1]), advise)
    return _Chunked(file, one.field, rows, one.codec, one.chunk_rows, offsets)


_INDEX = ("index",)
_UNLIMITED = (1 << 63) - 1
_FEW = 4
_FLAGS = (NEXT_DONE, NEXT_TERMINATED, NEXT_TRUNCATED)


class PackedRecording(IndexedStorage):
    """Records TED rows into a packed dataset; whole episodes survive a crash.

    Rows are appended one or many at a time, by `set` or through a buffer. `("next", "done")` ends an episode, which is
    then written to files. The rows of the current episode are in memory: if the process dies, only these rows are lost,
    and `rbtool repair` makes a dataset of all episodes that had ended. `finish` makes a dataset of everything, with an
    unfinished episode marked as truncated at its last step; afterwards the recording can be read but not written. Reads
    return fresh copies.

    The first episode that ends at least `sync_seconds` after the last sync starts the next one, so that a power failure
    loses at most the episodes that ended in between. `sync()`, `finish()`, `close()` and a buffer's checkpoint also
    sync.

    The first rows determine keys, element types and shapes. `"index"`, which a buffer's writer adds, is not recorded.
    `"episode"` is the number of each row's episode; without it, episodes are numbered from 0. Missing flags among done,
    terminated and truncated under `next` are derived from the others, as done means terminated or truncated; if only
    `terminated` is given, no step is truncated.

    Args:
        path: the folder of the recording, which must not exist.
        max_size: the largest number of rows; default no limit.
        sync_seconds: how many seconds of ended episodes a power failure may lose; 0 syncs each episode when it ends.

    Raises:
        UsageError: `path` exists, or `sync_seconds` is negative.
        SchemaError: (a RuntimeError) when written: the flags do not determine why an episode ends; `"episode"` changes
            inside an episode; keys, types or shapes differ from the first rows; or rows are not appended at the end, or
            exceed `max_size`. Nothing is changed.
    """

    def __init__(
        self,
        path: PathLike,
        *,
        max_size: int = _UNLIMITED,
        sync_seconds: float = SYNC_SECONDS,
        checkpointer: Any = None,
    ) -> None:
        super().__init__(max_size, checkpointer)
        if not sync_seconds >= 0:
            raise UsageError(f"sync_seconds is {sync_seconds}, expected a number from 0")
        self._sync_seconds = sync_seconds
        self.path = Path(path).absolute()
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise UsageError(f"{self.path} already exists, a recording needs a new folder")
        self.device = torch.device("cpu")
        self._recorder: PackedRecorder | None = None
        self._source: PackedRecorder | PackedReader | None = None  # reads the rows on disk
        self._numbered = False
        self._held: list[dict[Key, Array]] = []  # rows of the unfinished episode
        self._held_rows = 0
        self._lengths: list[int] = []
        self._finished = False

    def __len__(self) -> int:
        return (self._recorder.steps if self._recorder else 0) + self._held_rows

    @property
    def episodes(self) -> int:
        """The number of episodes that have ended, all of which are in files."""
        return len(self._recorder.commits) if self._recorder else 0

    def episode_lengths(self) -> Numbers:
        """Return the lengths of the episodes that have ended; further rows belong to the unfinished one."""
        return np.array(self._lengths, np.int64)

    # Writing ---------------------------------------------------------------------------------------

    def write_at(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> slice:
        """Append rows; `cursor` must be the rows behind the last one."""
        if self._finished:
            raise SchemaError(f"the recording {self.path} is finished: nothing can be added")
        index = as_index(cursor, 1)
        single = isinstance(index, int)
        data = data.unsqueeze(0) if single and is_tensor_collection(data) else data
        columns = self._columns(data)
        count = len(columns[NEXT_DONE])
        if len(self) + count > self.max_size:
            raise SchemaError(
                f"{count:,} rows do not fit: {self.path} holds {len(self):,} of {self.max_size:,} (max_size) already",
                hint="set a larger max_size, or none",
            )
        rows = rows_of(index, len(self), self.max_size) if not isinstance(index, tuple) else None
        if rows != slice(len(self), len(self) + count):
            raise SchemaError(
                f"the write is at {_shown(cursor)}, expected at the end, row {len(self)}: a recording only grows"
            )
        if EPISODE in columns:
            self._require_numbers(columns)
        if self._recorder is None:
            self._begin(columns, data)
        if self._numbered:
            columns[EPISODE] = self._numbers_of(columns[NEXT_DONE])
        self._require_alike(columns)
        before = len(self)
        try:
            self._append(columns, count)
        except BaseException:  # for example a full disk: earlier episodes stay
            self.log.wrote(slice(before, len(self)), self.max_size)
            raise
        return slice(before, before + count)

    def _columns(self, data: Any) -> dict[Key, Array]:
        if not isinstance(data, TensorDictBase):
            raise SchemaError(f"a recording takes tensordicts, found a {type(data).__name__}")
        found: dict[Key, Array] = {}
        structure = tree_spec_of(data)
        for path, value in zip(structure.paths(), structure.flatten(data), strict=True):
            if path != _INDEX:
                found[path] = array_of(value)
        return found | missing_flags(found)

    def _begin(self, columns: Mapping[Key, Array], data: TensorDictBase) -> None:
        """Take keys, types and shapes from the first rows."""
        kinds = {key: data.get(key, None) for key in columns}  # flags that were filled in are not in the data
        types = {key: "bool" if kind is None else str(kind.dtype).removeprefix("torch.") for key, kind in kinds.items()}
        shapes = {key: array.shape[1:] for key, array in columns.items()}
        if EPISODE not in columns:
            types[EPISODE], shapes[EPISODE], self._numbered = "int64", (), True
        fields = [Field(key, types[key], shapes[key], role_of(key)) for key in types]
        self._recorder = self._source = PackedRecorder(self.path, fields, sync_seconds=self._sync_seconds)

    def _require_alike(self, columns: Mapping[Key, Array]) -> None:
        fields = {field.key: field for field in self._recorder.fields} if self._recorder else {}
        if columns.keys() != fields.keys():
            odd = ", ".join(sorted(key_name(key) for key in columns.keys() ^ fields.keys()))
            raise SchemaError(f"rows differ from the first rows in the keys {odd}")
        for key, field in fields.items():
            if columns[key].dtype != field.numpy or columns[key].shape[1:] != field.shape:
                found = f"{columns[key].dtype} {list(columns[key].shape[1:])}"
                raise SchemaError(f"{field.name} is {found}, expected {field.dtype} {list(field.shape)}")

    def _require_numbers(self, columns: Mapping[Key, Array]) -> None:
        """Refuse numbers of episodes that are none, or that change where no episode ends."""
        given, done = columns[EPISODE], _ends(columns[NEXT_DONE])
        hint = 'leave out "episode": episodes are then numbered from 0'
        if not numbers_rows(given):
            found = f"{given.dtype} {list(given.shape[1:])}"
            raise SchemaError(f"{key_name(EPISODE)} is {found}, expected a whole number for each row", hint=hint)
        numbers = given.reshape(-1)
        if self._held_rows:  # the unfinished episode
            numbers, done = np.append(self._held[-1][EPISODE].reshape(-1)[-1:], numbers), np.append(False, done)
        changed = np.flatnonzero((numbers[1:] != numbers[:-1]) & ~done[:-1])
        if len(changed):
            row = len(self) - bool(self._held_rows) + int(changed[0]) + 1
            raise SchemaError(
                f"row {row:,} has the {key_name(EPISODE)} {numbers[changed[0] + 1]}, expected "
                f"{numbers[changed[0]]}: the episode of the row before it has not ended",
                hint=f'set ("next", "truncated") or ("next", "terminated") where an episode ends, or {hint}',
            )

    def _append(self, columns: Mapping[Key, Array], count: int) -> None:
        done = _ends(columns[NEXT_DONE])
        start = 0
        for stop in (*(np.flatnonzero(done) + 1).tolist(), count):
            if stop > start:
                self._held.append({key: array[start:stop].copy() for key, array in columns.items()})
                self._held_rows += stop - start
                if done[stop - 1]:
                    self._commit()
            start = stop

    def _commit(self, *, cut_off: bool = False) -> None:
        recorder = self._recorder
        if recorder is None or not self._held_rows:
            return
        columns = {key: np.concatenate([part[key] for part in self._held]) for key in self._held[0]}
        number = columns[EPISODE].reshape(-1)[:1]
        length, self._held, self._held_rows = self._held_rows, [], 0
        try:
            recorder.add_episode(columns, episode=int(number[0]) if len(number) else self.episodes, cut_off=cut_off)
        except BaseException:  # `repair` cuts what the files hold beyond the last complete episode
            self._finished = True
            raise
        self._lengths.append(length)

    def _numbers_of(self, done: Array) -> Numbers:
        """Return the episode number of each row: the number of episodes that have ended before it."""
        ended = np.cumsum(_ends(done), dtype=np.int64)
        return self.episodes + ended - _ends(done)

    def finish(self) -> Manifest:
        """Make a dataset of the recording. The last step of an unfinished episode is marked as truncated.

        Raises:
            SchemaError: nothing was recorded, or the recording is closed or finished already.
        """
        if self._recorder is None:
            raise SchemaError(f"nothing was recorded at {self.path}")
        if isinstance(self._source, PackedReader):
            raise SchemaError(f"the recording {self.path} is finished already")
        if self._source is None:
            raise SchemaError(f"the recording {self.path} is closed: nothing can be added", hint=self._repair_hint)
        if self._held_rows:
            for key in (NEXT_DONE, NEXT_TRUNCATED):
                self._held[-1][key][-1] = True
            self._commit(cut_off=True)
            self.mark_changed(Change(slice(len(self) - 1, len(self)), (NEXT_DONE, NEXT_TRUNCATED)))
        self._finished = True
        manifest = self._recorder.finish()
        self._source = PackedReader(self.path)
        return manifest

    def sync(self) -> None:
        """Flush all episodes that have ended to the disk."""
        if self._recorder is not None and not self._finished:
            self._recorder.sync()

    def close(self) -> None:
        """Stop recording without making a dataset: the unfinished episode is lost, and nothing can be read any more."""
        try:
            self.sync()
        finally:
            self._finished = True
            self._source = None
            if self._recorder is not None:
                self._recorder.close()

    @property
    def _repair_hint(self) -> str:
        return f"make a dataset of it: rbtool repair {shlex.quote(str(self.path))}"

    # Reading ---------------------------------------------------------------------------------------

    def read_at(self, index: Any) -> Any:
        """Read the rows at `index` into fresh tensors; IndexError for rows that do not exist."""
        if self._recorder is None:
            raise SchemaError("the recording is empty: nothing was ever written to it", hint="write to it first")
        if self._source is None:
            raise SchemaError(
                f"the recording {self.path} is closed and can no longer be read",
                hint=self._repair_hint,
            )
        numbers = row_numbers(as_index(index, 1), len(self))
        return tensordict_of(tensors_at(self._read, self._recorder.fields, numbers), numbers.shape)

    def entry(self, key: tuple[str, ...], index: Any) -> torch.Tensor | None:
        """Read one leaf of the rows at `index`; None if it does not exist."""
        fields = self._recorder.fields if self._recorder else ()
        field = next((field for field in fields if field.key == key), None)
        if field is None or self._source is None:
            return super().entry(key, index)  # raises the error
        return tensors_at(self._read, [field], row_numbers(as_index(index, 1), len(self)))[key]

    def _read(self, field: Field, rows: Array) -> Array:
        """Read sorted rows of one leaf: consecutive rows in one read, rows of the unfinished episode from memory."""
        assert self._recorder is not None  # the callers have checked both
        assert self._source is not None
        written = self._recorder.steps
        split = int(np.searchsorted(rows, written))
        found = read_runs(self._source.read, field, rows[:split])
        if split == len(rows):
            return found
        held = np.concatenate([part[field.key] for part in self._held])
        return np.concatenate((found, held[rows[split:] - written]))

    def editable(self, key: tuple[str, ...]) -> torch.Tensor:
        """Raise SchemaError: recorded rows do not change."""
        raise SchemaError(f"{self.path} is a recording: its rows cannot be changed")

    # State -----------------------------------------------------------------------------------------

    def save_state(self) -> dict[str, Any]:
        """Return the number of rows; the ended episodes are on disk."""
        self.sync()
        return {"path": str(self.path), "_len": len(self)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Check that the state belongs to this very recording; SchemaError otherwise."""
        if (state.get("path"), state.get("_len")) != (str(self.path), len(self)):
            raise SchemaError(f"the state belongs to other rows than {self.path} has")

    def clear_rows(self) -> None:
        """Raise SchemaError: recorded rows are not removed."""
        raise SchemaError(f"{self.path} is a recording: its rows cannot be removed")

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError(f"the recording {self.path} cannot be sent to another process", hint="finish it first")


def _shown(cursor: Any) -> str:
    """Describe the rows of a write in a message; for many rows, only the first and the last."""
    if isinstance(cursor, torch.Tensor) and cursor.dim() == 1 and cursor.dtype == torch.int64 and len(cursor) > _FEW:
        return f"rows {int(cursor[0])}, …, {int(cursor[-1])}"
    return str(cursor.tolist() if isinstance(cursor, torch.Tensor) else cursor)


def missing_flags(columns: Mapping[Key, Array]) -> dict[Key, Array]:
    """Derive the missing flags among done, terminated and truncated under `next` from the others.

    Raises:
        SchemaError: a flag is not bool, shapes differ, or the flags do not determine why an episode ends.
    """
    found = {key: columns[key] for key in _FLAGS if key in columns}
    odd = next((key for key, flag in found.items() if flag.dtype != np.bool_), None)
    if odd is not None:
        raise SchemaError(f"{key_name(odd)!r} is {found[odd].dtype}, expected bool: it marks where episodes end")
    if len(found) < len(_FLAGS) and len({flag.shape for flag in found.values()}) > 1:
        raise SchemaError(f"the flags {_names(found)} differ in shape, so the missing one cannot be derived")
    done, terminated, truncated = (found.get(key) for key in _FLAGS)
    if terminated is None and done is not None and truncated is not None:
        return {NEXT_TERMINATED: done & ~truncated}
    if terminated is None:
        raise SchemaError(
            f"the flags {_names(_FLAGS)} say where and why episodes end, but {_names(found) or 'none'} was found; "
            f"{key_name(NEXT_TERMINATED)!r}, or both others, are needed"
        )
    if truncated is None:
        truncated = np.zeros_like(terminated) if done is None else done & ~terminated
    return {NEXT_DONE: terminated | truncated, NEXT_TRUNCATED: truncated} | found


def _names(keys: Iterable[Key]) -> str:
    return ", ".join(repr(key_name(key)) for key in keys)


def array_of(value: torch.Tensor) -> Array:
    """Return the values of a tensor; for bfloat16 the bits, as uint16."""
    plain = value.detach().cpu().contiguous()
    return (plain.view(torch.uint16) if plain.dtype == torch.bfloat16 else plain).numpy()


def _ends(done: Array) -> NDArray[np.bool_]:
    """Return for each row whether its flag is set, bool `[rows]`."""
    return np.asarray(done.reshape(len(done), -1).any(1))


class PackedStorage(IndexedStorage):
    """The steps of a packed dataset, one a row, read from the disk when first touched. It is read-only.

    Rows are the same as in layout `ted`. Every batch is a fresh copy, also for an int or a slice, so that edits never
    reach the dataset. A pickle holds only the path, and opens the dataset again.

    Args:
        path: the dataset, or a reader that has it open.
        views: whether the leaves of a batch are strided views of one tensor. Such a batch is the fastest to make, and
            is moved to another device in one copy. Fields in separate files, such as images, are separate tensors.
        device: the device of batches.
        larger_than_memory: whether the files exceed memory, so that the kernel is advised that access is random, and
            which rows are read next. By default the sizes of the files are compared with the available memory.

    Raises:
        DatasetNotFoundError: nothing is at `path`.
        UsageError: (a ValueError) the dataset has no steps.
        FormatError: the dataset has another layout, or is not a dataset.
        CorruptDataError: files are missing or cut, or a pickle finds another dataset at the path.
    """

    def __init__(
        self,
        path: PathLike | PackedReader,
        *,
        views: bool = False,
        device: torch.device | str = "cpu",
        larger_than_memory: bool | None = None,
        checkpointer: Any = None,
    ) -> None:
        require_flags(views=views, larger_than_memory=larger_than_memory or False)
        reader = path if isinstance(path, PackedReader) else None
        self.path = (reader.path if reader is not None else Path(path)).absolute()  # type: ignore[arg-type]
        self.views = views
        self.device = torch.device(device)
        self.larger_than_memory = larger_than_memory
        if reader is None:
            self._open()
        else:
            self._take(reader)
        super().__init__(len(self), checkpointer)

    @staticmethod
    def create(path: PathLike, *, max_size: int | None = None, sync_seconds: float = SYNC_SECONDS) -> PackedRecording:
        """Start a recording at `path`: a storage to which episodes are appended, and which `finish` turns into a
        dataset.

        Args:
            path: the folder, which must not exist.
            max_size: the largest number of rows; default no limit.
            sync_seconds: how many seconds of ended episodes a power failure may lose, see `PackedRecording`. A process
                that is killed loses no ended episode.

        Raises:
            UsageError: `path` exists.
        """
        if max_size is None:
            return PackedRecording(path, sync_seconds=sync_seconds)
        return PackedRecording(path, max_size=max_size, sync_seconds=sync_seconds)

    def _open(self) -> None:
        with PackedReader(self.path) as reader:
            self._take(reader)

    def _take(self, reader: PackedReader) -> None:
        """Map the files of an open dataset."""
        manifest = reader.manifest
        if not manifest.steps:
            raise UsageError(f"{self.path} has no steps to sample")
        self.content_digest = manifest.content_digest
        self.fields: tuple[Field, ...] = reader.fields
        self.episodes: EpisodeTable = reader.episodes
        self._steps = manifest.steps
        self._structure, self._ordered = _structure(reader.fields)
        advise = self.larger_than_memory
        self._leaves = PackedLeaves(
            reader, self._ordered, advise=exceeds_memory(manifest.bytes) if advise is None else advise
        )

    def __len__(self) -> int:
        return self._steps

    def episode_lengths(self) -> Numbers:
        """Return the lengths of the episodes."""
        return self.episodes.length

    def read_at(self, index: Any) -> TensorDict:
        """Read the rows at `index` (an int, a slice, a list, a mask, a tensor) into fresh tensors.

        IndexError for rows that do not exist.
        """
        if type(index) is not torch.Tensor or index.dtype is not torch.int64:
            index = as_index(index, 1)
        if type(index) is torch.Tensor and index.dim() == 1 and index.dtype is torch.int64:
            return self._rows((index if index.is_cpu else index.cpu()).numpy(), index.shape)
        numbers = row_numbers(index, len(self))
        return self._rows(np.ascontiguousarray(numbers.reshape(-1)), torch.Size(numbers.shape))

    def _rows(self, numbers: Array, batch: torch.Size) -> TensorDict:
        if self.views:
            found = self._leaves.gather_views(numbers, self.device)
        else:
            found = self._leaves.gather(numbers)
            if self.device.type != "cpu":
                found = [leaf.to(self.device) for leaf in found]
        if len(batch) != 1:
            found = [leaf.reshape((*batch, *leaf.shape[1:])) for leaf in found]
        built: TensorDict = self._structure.unflatten(iter(found), batch)
        return built

    @property
    def entry_keys(self) -> Sequence[Key]:
        """The leaves."""
        return [field.key for field in self.fields]

    def entry(self, key: tuple[str, ...], index: Any) -> torch.Tensor | None:
        """Read one leaf of the rows at `index` into a fresh tensor; None if it does not exist."""
        return self.read_entries([key], index)[0] if key in self.entry_keys else None

    def read_entries(self, keys: Sequence[Key], index: Any) -> list[torch.Tensor | None]:
        """Read these leaves of the rows at `index` into fresh tensors."""
        places = {field.key: number for number, field in enumerate(self._ordered)}
        numbers = row_numbers(as_index(index, 1), len(self))
        found = self._leaves.gather_some([places[key] for key in keys], np.ascontiguousarray(numbers.reshape(-1)))
        return [rows.reshape((*numbers.shape, *rows.shape[1:])).to(self.device) for rows in found]

    def write_at(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> NoReturn:
        """Raise SchemaError: datasets are never edited."""
        raise SchemaError(f"{self.path} is read-only: datasets in layout packed are never edited in place")

    def editable(self, key: tuple[str, ...]) -> torch.Tensor:
        """Raise SchemaError: datasets are never edited."""
        raise SchemaError(f"{self.path} is read-only: datasets in layout packed are never edited in place")

    def save_state(self) -> dict[str, Any]:
        """Return the digest of the contents, which are on disk."""
        return {"content_digest": self.content_digest, "_len": len(self)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Check that the state belongs to the same contents; SchemaError otherwise."""
        if state.get("content_digest") != self.content_digest:
            raise SchemaError(f"the state belongs to other data than {self.path}")

    def clear_rows(self) -> None:
        """Raise SchemaError: datasets are never edited."""
        raise SchemaError(f"{self.path} is read-only: datasets in layout packed are never edited in place")

    @property
    def shared(self) -> bool:
        """True: other processes see the same rows, because they cannot change."""
        return True

    def share(self) -> None:
        """Do nothing: other processes read the same files."""

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        left_out = {"_leaves", "_structure", "_ordered", "fields", "episodes"}
        return {name: value for name, value in state.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        digest = self.content_digest
        self._open()
        if digest != self.content_digest:
            raise CorruptDataError(
                f"{self.path} has the content {self.content_digest}, expected {digest}: it was replaced since"
            )


def _structure(fields: tuple[Field, ...]) -> tuple[TreeSpec, list[Field]]:
    """Return the tree spec of a batch, and the fields in the order of its leaves."""
    by_path = {field.key: field for field in fields}
    nothing = {key: torch.empty((0, *field.shape)) for key, field in by_path.items()}
    structure = tree_spec_of(tensordict_of(nothing, (0,)), 1)
    return structure, [by_path[path] for path in structure.paths()]
