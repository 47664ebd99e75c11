"""Reads the HDF5 files of Tianshou's `ReplayBuffer.save_hdf5`. tianshou is never imported.

A file is a dump of the buffer object: `_meta` has arrays with a row for each place of the buffer, written or not. A
plain buffer is one ring. A manager (`VectorReplayBuffer` and others) has several rings, one after the other:
`_extend_offset` has their edges, `_lengths` the number of written rows of each, `last_index` the newest row of each;
its `_size` and `_insertion_idx` stay 0.

Values that HDF5 cannot hold are pickles, stored as arrays of int8 with the attribute `__data_type__`: arrays of Python
objects in `info`, and attributes of the object, such as its generator, which are not needed.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ...core.encodings.hdf5_files import H5Rows, HeapValues, absurd_size, datasets_in, open_h5
from ...core.errors import CorruptDataError, FormatError, RbtoolError, SchemaError
from ...core.format.contracts import Array, SourceFacts
from ...core.format.converter import require_trust
from ...core.format.documents import json_file
from ...core.format.files import no_match
from ...core.format.manifest import Dropped
from ...core.progress import counted
from ...core.ted.schema import (
    LONGEST_ROW,
    REWARD,
    Field,
    Key,
    Role,
    Timing,
    dtype_name,
    encode_text,
    inexact_as_float,
    safe_part,
    text_fields,
)
from ..files.hdf5 import names_in, plain_value, require_whole_h5
from ..files.pickles import PickledArray, PickledList, PickleReader, Value, is_pickle_of
from ..files.readers import (
    ColumnEpisode,
    ColumnReader,
    EndMeaning,
    EpisodeColumn,
    RowBlocks,
    blocks,
    meaning_of_ends,
    reading,
    refuse_ends,
    zero_or_one,
)

_META, _INDICES, _LAST = "_meta", "_indices", "last_index"
_EDGES, _OFFSET, _LENGTHS = "_extend_offset", "_offset", "_lengths"
_TERMINATED, _TRUNCATED, _DONE = "terminated", "truncated", "done"
_FLAGS = (_TERMINATED, _TRUNCATED, _DONE)
_TIME_LIMIT = "info/TimeLimit.truncated"
_OF_THE_OBJECT = frozenset(
    {
        *(_META, _INDICES, _LAST, _EDGES, _OFFSET, _LENGTHS, "options", "_random_state", "buffers", "weight"),
        *("main_buffer", "cached_buffers", "_ep_return", "_ep_len", "_ep_start_idx", "compute_reward_fn"),
        *("_original_meta", "_altered_indices"),
    }
)
"""Parts of the buffer object that are not read as data: they follow from the rows, or are only needed for sampling."""
_PLACES: dict[str, tuple[str, Role, Timing]] = {
    "obs": ("observation", "observation", "state"),
    "act": ("action", "action", "step"),
    "info": ("info", "info", "result"),
    "policy": ("policy", "info", "step"),
}
_CLASS = rb"tianshou\.data"
_MOST_RINGS = 1 << 20
_TEXTS = 1 << 14
"""The number of texts that are in memory at a time."""
_DOCUMENT = "tianshou.json"
_REQUIRED = ("obs", "act", "rew")
_TEXT = "text"
_UNTRUSTED = "it is a pickle of Python objects: --trust-pickle reads it"


@dataclass(frozen=True, slots=True)
class _Ring:
    """A ring of `size` places from `first` on, with `rows` written rows, the oldest at place `first + oldest`."""

    first: int
    size: int
    rows: int
    oldest: int = 0

    @property
    def is_full(self) -> bool:
        return 0 < self.size == self.rows

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield the places that were written, in the order of time."""
        if self.oldest:
            yield self.first + self.oldest, self.first + self.size
        yield self.first, self.first + (self.oldest or self.rows)


class _Rows:
    """The written rows of all rings, ring after ring, and in each ring in the order of time."""

    def __init__(self, rings: Sequence[_Ring]) -> None:
        self.spans = [span for ring in rings for span in ring.spans() if span[0] < span[1]]
        self._stops: Array = np.cumsum([stop - start for start, stop in self.spans])
        self.total = int(self._stops[-1]) if self.spans else 0

    def read(self, read: Callable[[int, int], Array], start: int, stop: int) -> Array:
        """Read rows `[start, stop)` in this order; `read` reads a range of places in the file."""
        parts = list[Array]()
        number = int(np.searchsorted(self._stops, start, side="right"))
        while start < stop or not parts:
            begin, end = self.spans[number]
            before = int(self._stops[number]) - (end - begin)
            until = min(stop, int(self._stops[number]))
            parts.append(read(begin + start - before, begin + until - before))
            start, number = until, number + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


@dataclass(frozen=True, slots=True)
class _Stored:
    """An array: its element type (`_TEXT` for texts), the shape of a row, and a function that reads rows in order."""

    dtype: str
    shape: tuple[int, ...]
    rows: Callable[[int, int], Array] = lambda start, stop: np.zeros(0)
    texts: Callable[[int, int], list[bytes]] = lambda start, stop: []


class TianshouReader(ColumnReader):
    """Reads a file that `save_hdf5` of any buffer of Tianshou wrote.

    `obs` becomes `observation`, and `obs_next` the observation under `next`, also where it differs from the following
    row; `act` becomes `action`, `rew` becomes `next.reward`, `info/NAME` becomes `next.info.NAME`, `policy/NAME`
    becomes `policy.NAME`, and any other array becomes `info.NAME`. Groups stay nested, and texts are stored for each
    step. Rewards of several agents are `next.agents.reward`.

    Rows that were never written are left out. Each ring is a stream of episodes from its oldest row on; if its newest
    row has no flag, it ends an unfinished episode.

    Options: `trust_pickle` allows reading arrays of Python objects. `ends` states what `done` means in files of old
    versions, which have no other flag: `terminated` (the default) or `truncated`.

    Raises FormatError for a file whose parts contradict each other, for pickles of buffers, and for other files that
    Tianshou writes, CorruptDataError for damaged files.
    """

    option_names = frozenset({"ends", "trust_pickle"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether the file is HDF5 with the parts of a buffer, or begins like the pickle of one."""
        try:
            if not path.is_file():
                return False
            names = set(names_in(path))
            return (_META in names and not names.isdisjoint({_INDICES, _LAST})) or is_pickle_of(path, _CLASS)
        except (RbtoolError, OSError) as error:
            return no_match(error)

    def on_open(self) -> None:
        """Open the file, and find the rings and the episodes."""
        if is_pickle_of(self.path, _CLASS):
            raise FormatError(
                f"{self.path} is the pickle of a buffer of Tianshou, which cannot be read",
                hint="load it with Tianshou, and write it with buffer.save_hdf5(path)",
            )
        require_whole_h5(self.path)
        with reading("the structure", self.path):
            self._file = h5py.File(open_h5(self.path))
        self._values = HeapValues(self._file.id)
        self._root = self._file["/"].id
        self._notes: list[str] = []
        self._dropped: list[Dropped] = []
        try:
            with reading("the structure", self.path):
                self._look_over()
        except BaseException:
            self.on_close()
            raise

    def _look_over(self) -> None:
        meta = self._file.get(_META)
        if not isinstance(meta, h5py.Group):
            raise FormatError(
                f"{self.path} has no group {_META!r}, which Tianshou's save_hdf5 writes",
                hint="--from table --map reads arrays at the root, which to_hdf5 writes",
            )
        self._arrays = {name: item for name, item in datasets_in(meta) if isinstance(item, h5py.Dataset)}
        self._size = self._number("maxsize", "_maxsize")
        for name in self._arrays:
            self._require_no_absurdity(name, self._arrays[name])
        self._pickled = {name for name, item in self._arrays.items() if self._is_pickle(item)}
        self._rings = list(self._find_rings())
        self._written = _Rows(self._rings)
        if not self._written.total:
            raise FormatError(f"{self.path} has no steps: nothing was added to the buffer")
        for name in _REQUIRED:
            if not any(one == name or one.startswith(f"{name}/") for one in self._arrays):
                raise FormatError(f"{self.path} has no {name!r} in {_META}")
        self.episodes, self._starts = self._find_episodes()
        self.columns = list(self._lay_out())
        for name in map(str, self._file):
            if name not in _OF_THE_OBJECT:
                self._dropped.append(Dropped(name, "Tianshou's buffers have no such part"))

    # The rings -----------------------------------------------------------------------------------

    def _number(self, *names: str) -> int:
        """Return an attribute of the buffer, which may have one of several names in different versions."""
        for name in names:
            if name in self._file.attrs:
                value = np.asarray(self._values.attribute(self._root, name))
                if value.shape not in ((), (1,)) or value.dtype.kind not in "iu" or int(value.reshape(())) < 0:
                    raise FormatError(f"{self.path}: {name} is {str(value)[:40]}, expected a whole number")
                return int(value.reshape(()))
        raise FormatError(f"{self.path} has no attribute {names[0]!r}, which a buffer of Tianshou has")

    def _numbers(self, name: str, count: int | None = None) -> list[int]:
        """Return a list of whole numbers at the root."""
        found = self._file.get(name)
        if not isinstance(found, h5py.Dataset) or found.ndim != 1 or found.dtype.kind not in "iu":
            raise FormatError(f"{self.path} has no list of whole numbers {name!r}, which a buffer of Tianshou has")
        self._require_no_absurdity(name, found)
        if len(found) > _MOST_RINGS or (count is not None and len(found) != count):
            raise FormatError(f"{self.path}: {name} has {len(found):,} numbers for {count or 0:,} buffers")
        return [int(number) for number in found[()]]

    def _require_no_absurdity(self, name: str, dataset: h5py.Dataset) -> None:
        if dataset.shape is None:
            raise FormatError(f"{self.path}: {name} has no data")
        if why := absurd_size(dataset.id):
            raise CorruptDataError(f"{self.path}: {name} {why}")

    def _find_rings(self) -> Iterator[_Ring]:
        if _LENGTHS not in self._file:
            yield self._single_ring()
            return
        edges = self._numbers(_EDGES) if _EDGES in self._file else [*self._numbers(_OFFSET), self._size]
        sizes = np.diff(edges).tolist()
        if edges[:1] != [0] or edges[-1] != self._size or any(size < 0 for size in sizes):
            raise FormatError(
                f"{self.path}: its buffers begin at {edges[:-1]}, which does not fit its {self._size:,} places"
            )
        lengths, newest = self._numbers(_LENGTHS, len(sizes)), self._numbers(_LAST, len(sizes))
        for number, (first, size, rows, last) in enumerate(zip(edges[:-1], sizes, lengths, newest, strict=True)):
            at = last - first
            if not 0 <= rows <= size or (rows and not 0 <= at < size) or (0 < rows < size and at != rows - 1):
                raise FormatError(
                    f"{self.path}: buffer {number} has {rows:,} of {size:,} rows, but its newest row is {at:,}"
                )
            yield _Ring(first, size, rows, (at + 1) % size if rows and rows == size else 0)

    def _single_ring(self) -> _Ring:
        if "buffer_num" in self._file.attrs:
            raise FormatError(
                f"{self.path} has several buffers, but no {_LENGTHS}, which states how many rows each of them has"
            )
        rows, following = self._number("_size"), self._number("_insertion_idx", "_index")
        if rows > self._size or following not in (range(self._size) if rows == self._size else (rows,)):
            raise FormatError(f"{self.path} has {rows:,} of {self._size:,} rows, but row {following:,} is written next")
        if _LAST in self._file and rows:
            newest = self._numbers(_LAST, 1)[0]
            made_of_arrays = not following and not newest  # from_data sets neither
            if newest != (following - 1) % self._size and not made_of_arrays:
                raise FormatError(f"{self.path}: its newest row is {newest:,}, but row {following:,} is written next")
        return _Ring(0, self._size, rows, following if rows == self._size else 0)

    # The episodes --------------------------------------------------------------------------------

    def _read_rows(self, name: str) -> Callable[[int, int], Array]:
        held = H5Rows(self._arrays[name], self.path)

        def read(start: int, stop: int) -> Array:
            with reading(repr(name), self.path):
                return self._written.read(held.read, start, stop)

        return read

    def _flag(self, name: str) -> Array:
        item = self._arrays[name]
        if name in self._pickled or item.dtype.kind not in "biuf" or item.shape not in ((self._size,), (self._size, 1)):
            raise FormatError(f"{self.path}: {name} is {item.dtype} {list(item.shape)}, expected one flag per row")
        return zero_or_one(self._read_rows(name)(0, self._written.total), f"{self.path}: {name}")

    def _find_flags(self) -> tuple[Array, Array]:
        """Return `terminated` and `truncated` of all rows; each of them marks the last row of an episode."""
        flags = {name: self._flag(name) for name in _FLAGS if name in self._arrays}
        none = np.zeros(self._written.total, bool)
        if _TERMINATED in flags or _TRUNCATED in flags:
            refuse_ends(self.path, self.options, "has terminated and truncated, which state how episodes end")
            terminated, truncated = flags.get(_TERMINATED, none), flags.get(_TRUNCATED, none)
            ends = terminated | truncated
            done = flags.get(_DONE, ends)
            if odd := int((done & ~ends).sum()):
                self._notes.append(f"done is set in {counted(odd, 'step')} without another flag: taken as terminated")
            if odd := int((ends & ~done).sum()):
                self._notes.append(f"done is not set in {counted(odd, 'step')} with another flag: they end episodes")
            return terminated | (done & ~ends), truncated
        if _DONE not in flags:
            raise FormatError(f"{self.path} has neither terminated, truncated nor done in {_META}")
        done, limits = flags[_DONE], none
        if _TIME_LIMIT in self._arrays and _TIME_LIMIT not in self._pickled:
            limits = self._flag(_TIME_LIMIT) & done
        if limits.any():
            refuse_ends(self.path, self.options, "has info/TimeLimit.truncated, which states what ends episodes")
            meaning = EndMeaning(terminated=True)
        else:
            meaning = meaning_of_ends(self.options, "terminated", "only done is stored, which time limits set too")
        self._notes += [meaning.note] if meaning.note else []
        truncated = limits if meaning.terminated else done
        return done & ~truncated, truncated

    def _find_episodes(self) -> tuple[list[ColumnEpisode], list[int]]:
        """Return the episodes, with the first row of each."""
        terminated, truncated = self._find_flags()
        ends = terminated | truncated
        episodes, starts, first = list[ColumnEpisode](), list[int](), 0
        cached = "cached_buffer_num" in self._file.attrs
        for number, ring in enumerate(self._rings):
            stops = (np.flatnonzero(ends[first : first + ring.rows]) + first + 1).tolist()
            if ring.rows and (not stops or stops[-1] != first + ring.rows):
                stops.append(first + ring.rows)
            environment = number - cached  # the first ring of a cached buffer collects episodes of all environments
            text = {"environment": str(environment)} if len(self._rings) > 1 and environment >= 0 else None
            for stop in stops:
                flags = bool(terminated[stop - 1]), bool(truncated[stop - 1])
                episodes.append(ColumnEpisode(stop - first, *flags, text=text))
                starts.append(first)
                first = stop
        return episodes, starts

    # The columns ---------------------------------------------------------------------------------

    def _is_pickle(self, item: h5py.Dataset) -> bool:
        if item.dtype != np.int8 or item.ndim != 1 or "__data_type__" not in item.attrs:
            return False
        kind = self._values.attribute(item.id, "__data_type__")
        return (kind.decode("utf-8", "replace") if isinstance(kind, bytes) else kind) not in ("ndarray", "Tensor")

    def _lay_out(self) -> Iterator[EpisodeColumn]:
        names = [name for name in self._arrays if name not in _FLAGS]
        states = {name.partition("/")[2] for name in names if _top(name) == "obs"}
        after = {name.partition("/")[2] for name in names if _top(name) == "obs_next"}
        if after and after != states:
            odd = ", ".join(part or "no part" for part in sorted(after ^ states)[:5])
            raise FormatError(f"{self.path}: obs and obs_next have different parts: {odd}")
        if not after:
            self._notes.append("obs_next is not stored: the observation after the last step of an episode is not known")
        taken: set[Key] = set()
        for name in names:
            if _top(name) == "obs_next":
                continue
            try:
                found = list(self._columns_of(name, has_after=bool(after)))
            except FormatError as error:
                if _top(name) in _REQUIRED or isinstance(error, CorruptDataError):
                    raise
                self._dropped.append(Dropped(name.replace("/", "."), error.message.removeprefix(f"{self.path}: ")))
                continue
            if any(column.field.key in taken for column in found):
                self._dropped.append(Dropped(name.replace("/", "."), "another array has the same name"))
                continue
            taken |= {column.field.key for column in found}
            yield from found

    def _key_of(self, name: str) -> tuple[Key, Role, Timing]:
        top, *parts = name.split("/")
        stem, role, timing = _PLACES.get(top, ("info", "info", "step"))
        rest = parts if top in _PLACES else [top, *parts]
        return (stem, *map(safe_part, rest)), role, timing

    def _columns_of(self, name: str, *, has_after: bool) -> Iterator[EpisodeColumn]:
        """Yield the column of an array, or two for texts; FormatError, which says why, if it cannot be a column."""
        key, role, timing = self._key_of(name)
        stored = self._stored(name)
        following = None
        if timing == "state" and has_after:
            other = f"obs_next{name.removeprefix('obs')}"
            following = self._stored(other)
            if (following.dtype, following.shape) != (stored.dtype, stored.shape):
                raise FormatError(f"{self.path}: {name} and {other} have rows of different forms")
        shape = stored.shape
        if name == "rew":
            if int(np.prod(shape)) == 1:
                key, role, timing, shape = REWARD, "reward", "result", ()
            else:
                key, role, timing = ("agents", "reward"), "info", "result"
                self._notes.append(f"rewards are {list(shape)}, one for each agent: they become next.agents.reward")
        if stored.dtype == _TEXT:
            yield from self._texts(key, timing, stored, following)
            return
        after = None if following is None else self._of_episode(following.rows, shape)
        yield EpisodeColumn(Field(key, stored.dtype, shape, role), timing, self._of_episode(stored.rows, shape), after)

    def _stored(self, name: str) -> _Stored:
        """Return how an array is stored and read."""
        item = self._arrays[name]
        if name in self._pickled:
            return self._unpickled(name)
        if not item.shape or len(item) != self._size:
            raise FormatError(
                f"{self.path}: {name} has shape {list(item.shape)}, expected a row for each of {self._size:,} places"
            )
        if h5py.check_string_dtype(item.dtype) is not None and item.ndim == 1:
            return _Stored(_TEXT, (), texts=partial(self._read_texts, name))
        try:
            dtype = dtype_name(item.dtype)
        except (SchemaError, TypeError, ValueError) as error:
            raise FormatError(f"{self.path}: {name} has elements that are not numbers ({item.dtype})") from error
        size = max(1, item.dtype.itemsize * int(np.prod(item.shape[1:])))
        kept = RowBlocks(self._read_rows(name), self._written.total, self.piece_bytes // size)
        return _Stored(dtype, tuple(item.shape[1:]), kept.read)

    def _of_episode(
        self, rows: Callable[[int, int], Array], shape: tuple[int, ...]
    ) -> Callable[[int, int, int], Array]:
        def read(number: int, start: int, stop: int) -> Array:
            first = self._starts[number]
            return rows(first + start, first + stop).reshape(stop - start, *shape)

        return read

    # Texts and arrays of Python objects ----------------------------------------------------------

    def _texts(self, key: Key, timing: Timing, stored: _Stored, following: _Stored | None) -> Iterator[EpisodeColumn]:
        """Yield the two columns of a text with a value for each step."""
        width = 1
        for start, stop in blocks(self._written.total, _TEXTS):
            for one in (stored, following):
                width = width if one is None else max(width, *map(len, one.texts(start, stop)))
        if width > LONGEST_ROW:
            raise FormatError(f"{self.path} has a text of {width:,} bytes, expected at most {LONGEST_ROW:,}")

        def encoded(texts: Callable[[int, int], list[bytes]], part: int) -> Callable[[int, int, int], Array]:
            field = text_fields(key, width)[part]
            return self._of_episode(lambda start, stop: encode_text(texts(start, stop), width)[part], field.shape)

        for part, field in enumerate(text_fields(key, width)):
            after = None if following is None else encoded(following.texts, part)
            yield EpisodeColumn(field, timing, encoded(stored.texts, part), after)

    def _read_texts(self, name: str, start: int, stop: int) -> list[bytes]:
        def stored(begin: int, end: int) -> Array:
            return np.array(self._values.dataset(f"{_META}/{name}", begin, end)[begin:end], object)

        with reading(repr(name), self.path):
            return [bytes(text) for text in self._written.read(stored, start, stop)]

    def _unpickled(self, name: str) -> _Stored:
        """Read an array of Python objects, which have to be numbers, arrays of one form, or texts."""
        trusted = self.options.get("trust_pickle")
        if _top(name) in _REQUIRED:
            require_trust(self.path, trusted, f"{name} is the pickle of Python objects, which can run anything")
        elif not trusted:
            raise FormatError(_UNTRUSTED)
        values, what = self._objects(name), name.replace("/", ".")
        holes = np.array([value is None for value in values])
        missing = f"it is None in {counted(int(holes.sum()), 'step')} of {len(holes):,}"
        if holes.all():
            raise FormatError(f"{self.path}: {name} is None in all steps")
        if all(isinstance(value, str) for value in values if value is not None):
            texts = [value.encode("utf-8", "surrogatepass") if isinstance(value, str) else b"" for value in values]
            if holes.any():
                self._notes.append(f"{what}: {missing}, which becomes an empty text")
            return _Stored(_TEXT, (), texts=lambda start, stop: texts[start:stop])
        rows = self._stacked(name, values)
        if holes.any():
            if not (rows.dtype.kind == "f" or (rows.dtype.kind in "iu" and not inexact_as_float(rows).any())):
                raise FormatError(f"{self.path}: {name}: {missing}, which {rows.dtype} cannot represent")
            rows = rows if rows.dtype.kind == "f" else rows.astype(np.float64)
            rows[holes] = np.nan
            self._notes.append(f"{what}: {missing}, which becomes NaN")
        return _Stored(dtype_name(rows.dtype), rows.shape[1:], lambda start, stop: rows[start:stop])

    def _objects(self, name: str) -> list[Value | Array]:
        """Unpickle the objects of the written rows, in order; arrays and numbers of NumPy become arrays."""
        with reading(repr(name), self.path):
            data = self._arrays[name][()].tobytes()
        with PickleReader(f"{self.path}: {name}", len(data)) as reader:
            found = reader.load(io.BytesIO(data), len(data))
            if not isinstance(found, PickledList) or found.shape != (self._size,):
                raise FormatError(f"{self.path}: {name} is a pickle without a row for each place")
            values: list[Value | Array] = []
            for start, stop in self._written.spans:
                values += reader.items(found, start, stop)
            arrays = [at for at, value in enumerate(values) if isinstance(value, PickledArray)]
            parts = reader.parts([value for value in values if isinstance(value, PickledArray)])
        for at, part in zip(arrays, parts, strict=True):
            assert isinstance(part, np.ndarray)
            values[at] = part
        return values

    def _stacked(self, name: str, values: Sequence[Value | Array]) -> Array:
        """Stack numbers, or arrays of one form, to an array, with zeros for None."""
        given = [value for value in values if value is not None]
        found = [np.asarray(value) for value in given if isinstance(value, bool | int | float | np.ndarray)]
        if len(found) != len(given) or any(one.dtype.kind not in "biuf" for one in found):
            raise FormatError(f"{self.path}: {name} holds Python objects that are neither numbers nor texts")
        if len({(one.shape, one.dtype.kind == "b") for one in found}) != 1:
            raise FormatError(f"{self.path}: {name} has rows of different forms")
        dtype = np.result_type(*{one.dtype for one in found})
        if dtype.kind == "f" and any(inexact_as_float(one).any() for one in found):
            raise FormatError(f"{self.path}: {name} has rows of different types")
        empty = np.zeros(found[0].shape, dtype)
        return np.stack([empty if value is None else np.asarray(value, dtype) for value in values])

    # The facts -----------------------------------------------------------------------------------

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Return the facts; the episodes were found when the file was opened."""
        progress(len(self.episodes))
        full = [ring for ring in self._rings if ring.is_full]
        notes = list(self._notes)
        if full:
            some = f"{counted(len(full), 'buffer')} of {len(self._rings):,} in it {'was' if len(full) == 1 else 'were'}"
            which = "the buffer was" if len(self._rings) == 1 else some
            notes.append(f"{which} full: the first episode there may lack its beginning")
        names = sorted(name for name in self._file.attrs if isinstance(name, str))  # damaged names are bytes
        attributes = {name: value for name in names if (value := self._plain(name)) is not None}
        stacked = attributes.get("stack_num", 1)
        if isinstance(stacked, int) and stacked > 1:
            notes.append(
                f"stack_num is {stacked}: Tianshou stacks that many observations when it samples, but stores single "
                f"ones; {_DOCUMENT} has the number"
            )
        documents = {_DOCUMENT: json_file(attributes)}
        return self.facts_of("tianshou", self.path.stem, notes, dropped=self._dropped, documents=documents)

    def _plain(self, name: str) -> Any:
        with reading("its attributes", self.path):
            value = self._values.attribute(self._root, name)
        return plain_value(value) if np.ndim(value) == 0 and np.asarray(value).dtype.kind in "biuf" else None

    def files(self) -> list[Path]:
        """Return the one file."""
        return [self.path]

    def on_close(self) -> None:
        """Close the file."""
        self._values.close()
        self._file.close()


def _top(name: str) -> str:
    return name.partition("/")[0]
