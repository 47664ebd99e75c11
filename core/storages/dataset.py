"""Datasets as storages: memory-mapped, read row by row, or in shards that are fetched when they are needed.

Files that do not fit into memory are mapped with advice to the kernel. Without advice, read-ahead loads pages that
nobody needs in place of pages in use, and random rows cost one page fault after another. With MADV_RANDOM for the whole
map, and MADV_WILLNEED for the rows of each batch, the kernel reads just these rows, in parallel. Files that fit into
memory are mapped without advice.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase

from ..errors import CorruptDataError, NoLengthError, SchemaError, require_flags, warn_caller
from ..format.contracts import Array, StepReader
from ..format.memmap.reader import TedReader
from ..format.memmap.tree import leaf_path
from ..format.open_files import ListedFiles
from ..format.threads import available_memory
from ..format.videos import image_key, reference_keys
from ..ted.schema import Field, Key, Numbers
from .base import IndexedStorage, Storage
from .cursors import as_index, row_numbers
from .list_storage import ListStorage
from .tensor import TensorStorage


def exceeds_memory(size: int) -> bool:
    """Whether files of this total size, in bytes, exceed the available memory."""
    available = available_memory()
    return available is not None and size > available


class Pages:
    """A mapped file whose rows are read in random order."""

    def __init__(self, pages: mmap.mmap) -> None:
        self._pages = pages
        self._size = len(pages)
        if hasattr(mmap, "MADV_RANDOM"):
            with contextlib.suppress(OSError):
                pages.madvise(mmap.MADV_RANDOM)

    def expect(self, starts: NDArray[Any], lengths: int | NDArray[Any]) -> None:
        """Advise the kernel that `lengths` bytes from each of the offsets `starts` are read next."""
        will_need = getattr(mmap, "MADV_WILLNEED", None)
        if will_need is None or not len(starts):
            return
        page = mmap.PAGESIZE
        first = np.sort(starts // page)
        last = np.sort((starts + (lengths - 1)) // page)
        # Rows on the same or on neighbouring pages are combined into one call.
        apart = np.flatnonzero(first[1:] > last[:-1] + 1)
        begins = first[np.concatenate(([0], apart + 1))] * page
        stops = np.minimum((last[np.concatenate((apart, [len(last) - 1]))] + 1) * page, self._size)
        advise = self._pages.madvise
        with contextlib.suppress(OSError):
            for begin, size in zip(begins.tolist(), (stops - begins).tolist(), strict=True):
                advise(will_need, begin, size)


def tensor_of(array: Array, field: Field) -> torch.Tensor:
    """View an array as a tensor of the field's element type; arrays hold bfloat16 as its bits."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if field.dtype == "bfloat16" else tensor


def tensordict_of(tensors: Mapping[Key, torch.Tensor], batch: tuple[int, ...]) -> TensorDict:
    """Nest tensors by their keys in a tensordict of this batch size."""
    nest: dict[str, Any] = {}
    for (*folders, name), tensor in tensors.items():
        inner = nest
        for part in folders:
            inner = inner.setdefault(part, {})
        inner[name] = tensor
    return TensorDict(nest, batch_size=batch)


def tensors_at(
    read: Callable[[Field, Array], Array], fields: Iterable[Field], numbers: Array
) -> dict[Key, torch.Tensor]:
    """Return fields at rows given by `numbers`, in any order and shape.

    `read` is called with a field and rows that ascend, each of them once.
    """
    unique, place = np.unique(numbers.reshape(-1), return_inverse=True)
    tensors = {}
    for field in fields:
        rows = read(field, unique)[place.reshape(-1)]
        tensors[field.key] = tensor_of(rows.reshape((*numbers.shape, *field.shape)), field)
    return tensors


def read_runs(read: Callable[[Key, int, int], Array], field: Field, rows: Array) -> Array:
    """Read ascending rows of one field with `read(key, start, stop)`, which is called once for consecutive rows."""
    found = np.empty((len(rows), *field.shape), field.numpy)
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    for run in np.split(np.arange(len(rows)), breaks) if len(rows) else ():
        found[run] = read(field.key, int(rows[run[0]]), int(rows[run[-1]]) + 1)
    return found


def dataset_tensors(dataset: str | os.PathLike[str] | TedReader, *, copy_on_write: bool = True) -> TensorDict:
    """Map all leaves of a dataset in layout `ted` into a tensordict of batch size `[steps]`.

    Rows are read from the disk when first touched. The maps are private and the files are opened read-only, so an
    in-place edit stays in this process.

    Args:
        dataset: a path or an open reader.
        copy_on_write: if False, the pages are read-only. They then do not count towards a limit on data memory
            (`RLIMIT_DATA`), but an in-place edit ends the process.

    Raises:
        FormatError: the dataset has another layout.
        CorruptDataError: a file is missing, or does not have the size given in the manifest.
    """
    return MappedDataset(dataset, copy_on_write=copy_on_write).tensors


class MappedDataset:
    """The maps of a dataset in layout `ted`; `tensors` is what `dataset_tensors` returns.

    If the files do not fit into memory, or with `larger_than_memory`, the kernel is advised that rows are read in
    random order, and `expect` advises it which rows are read next.
    """

    def __init__(
        self,
        dataset: str | os.PathLike[str] | TedReader,
        *,
        copy_on_write: bool = True,
        larger_than_memory: bool | None = None,
    ) -> None:
        require_flags(copy_on_write=copy_on_write, larger_than_memory=larger_than_memory or False)
        with contextlib.ExitStack() as stack:
            reader = dataset if isinstance(dataset, TedReader) else stack.enter_context(TedReader(Path(dataset)))
            steps, size = reader.manifest.steps, sum(file.size for file in reader.manifest.files)
            self._advise = exceeds_memory(size) if larger_than_memory is None else larger_than_memory
            self._pages: dict[Key, tuple[Pages, int]] = {}
            self._copy_on_write = copy_on_write
            tensors = {field.key: self._map(reader.listed, field, steps) for field in reader.fields}
        self.tensors = tensordict_of(tensors, (steps,))
        self._steps = steps

    @property
    def advises(self) -> bool:
        """Whether the kernel is advised, because the files exceed memory."""
        return bool(self._pages)

    def expect(self, rows: Numbers, key: Key | None = None) -> None:
        """Advise the kernel which rows are read next, of the leaf `key` or of all leaves.

        Negative numbers count from the end; rows that do not exist are skipped.
        """
        if self._pages:
            rows = np.where(rows < 0, rows + self._steps, rows)
            rows = np.sort(rows[(rows >= 0) & (rows < self._steps)])
            for pages, width in [self._pages[key]] if key in self._pages else self._pages.values():
                pages.expect(rows * width, width)

    def _map(self, files: ListedFiles, field: Field, steps: int) -> torch.Tensor:
        shape = (steps, *field.shape)
        size = steps * field.row_bytes
        if not size:  # an empty field has no file, and cannot be mapped
            return tensor_of(np.empty(shape, field.numpy), field)
        pages = _pages(files, leaf_path(field.key), size, self._copy_on_write)
        if self._advise:
            self._pages[field.key] = Pages(pages), field.row_bytes
        array = np.frombuffer(pages, field.numpy).reshape(shape)
        return tensor_of(array, field) if self._copy_on_write else _read_only_tensor(array, field)


def _pages(files: ListedFiles, name: str, size: int, copy_on_write: bool) -> mmap.mmap:
    path, descriptor = files.root / name, files.descriptor(name)
    found = os.fstat(descriptor).st_size
    if found != size:  # reading beyond the end of a mapped file would kill the process
        raise CorruptDataError(f"{path} has {found:,} bytes, expected {size:,}: it was cut or overwritten")
    # Reserve no swap for pages that are never written, as a dataset may be larger than memory.
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if copy_on_write else 0)
    return mmap.mmap(descriptor, size, flags=flags, prot=protection)


def _read_only_tensor(array: Array, field: Field) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        return tensor_of(array, field)


class MappedSteps(TensorStorage):
    """The rows of an open dataset in layout `ted`, mapped read-only; an in-place edit ends the process."""

    def __init__(self, reader: TedReader) -> None:
        self._lengths = reader.episodes.length
        super().__init__(dataset_tensors(reader, copy_on_write=False))

    def episode_lengths(self) -> Numbers:
        """Return the lengths of the episodes."""
        return self._lengths


class StepStorage(IndexedStorage):
    """The rows of a `StepReader` as a read-only storage.

    Each `get` reads the rows from the file, consecutive rows together. Writing raises SchemaError.
    """

    def __init__(self, reader: StepReader) -> None:
        super().__init__(max(1, reader.manifest.steps))
        self._reader = reader

    def __len__(self) -> int:
        return self._reader.manifest.steps

    def episode_lengths(self) -> Numbers:
        """Return the lengths of the episodes."""
        return self._reader.episodes.length

    @property
    def entry_keys(self) -> Sequence[Key]:
        """The leaves."""
        return [field.key for field in self._reader.fields]

    def entry(self, key: tuple[str, ...], index: Any) -> torch.Tensor | None:
        """Read one leaf of the rows at `index`; None if it does not exist."""
        fields = [field for field in self._reader.fields if field.key == key]
        return self._tensors(fields, row_numbers(as_index(index, 1), len(self))).get(key)

    def read_at(self, index: Any) -> TensorDict:
        """Read the rows at `index` into fresh tensors."""
        numbers = row_numbers(as_index(index, 1), len(self))
        return tensordict_of(self._tensors(self._reader.fields, numbers), numbers.shape)

    def _tensors(self, fields: Iterable[Field], numbers: Array) -> dict[Key, torch.Tensor]:
        return tensors_at(partial(read_runs, self._reader.read), fields, numbers)

    def write_at(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> NoReturn:
        """Raise SchemaError: datasets are never edited."""
        raise SchemaError(f"{self._reader.path} is read-only: datasets are never edited in place")

    def editable(self, key: tuple[str, ...]) -> torch.Tensor:
        """Raise SchemaError: datasets are never edited."""
        raise SchemaError(f"{self._reader.path} is read-only: datasets are never edited in place")

    def save_state(self) -> dict[str, Any]:
        """Return the digest of the contents, which are on disk."""
        return {"content_digest": self._reader.manifest.content_digest, "_len": len(self)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Check that the state belongs to the same contents."""
        if state["content_digest"] != self._reader.manifest.content_digest:
            raise SchemaError(f"the state belongs to other data than {self._reader.path}")

    def clear_rows(self) -> None:
        """Raise SchemaError: datasets are never edited."""
        raise SchemaError(f"{self._reader.path} is read-only: datasets are never edited in place")


_Schema: TypeAlias = dict[tuple[str, ...], tuple[torch.dtype, torch.Size]]

_SHARD = 32
"""How many bits of an element's number hold its row, if the sizes of the shards are unknown; the others its shard."""
_TEXT_LENGTH = "_length"
_EPISODE = "episode"


class OpenShard(NamedTuple):
    """A shard on this disk.

    Attributes:
        storage: the storage that holds its rows.
        first: the row of the storage that is row 0 of the shard.
        lengths: the lengths of its episodes, int64.
        episode: a number that is added to its episode numbers, because several shards may use the same ones.
        left_out: a sentence on each part that cannot be read, and is left out.
        decode: turns stored rows into a batch, for example by decoding frames from video files next to the rows.
        fields: the fields of the rows as they are stored.
        kept: an object that keeps the files of the shard on this disk as long as it exists.
        fps: returns the steps per second that its dataset states; None if it states none.
    """

    storage: Storage
    first: int
    lengths: Numbers
    episode: int = 0
    left_out: tuple[str, ...] = ()
    decode: Callable[[TensorDictBase], TensorDictBase] | None = None
    fields: Sequence[Field] = ()
    kept: object = None
    fps: Callable[[], float | None] = lambda: None

    @classmethod
    def nothing(cls, left_out: tuple[str, ...] = ()) -> OpenShard:
        """Return a shard without rows."""
        return cls(ListStorage(1), 0, np.empty(0, np.int64), left_out=left_out)

    @property
    def rows(self) -> int:
        """The number of rows."""
        return int(self.lengths.sum())

    def read(self, rows: Numbers) -> TensorDictBase:
        """Read rows, int64 `[n]`."""
        found: TensorDictBase = self.storage.get(torch.from_numpy(rows + self.first))
        if self.episode and _EPISODE in found.keys():  # noqa: SIM118  # not a dict
            found.set(_EPISODE, found.get(_EPISODE) + self.episode)
        return found if self.decode is None else self.decode(found)


class ShardedData(ABC):
    """A dataset in shards, each of which consists of whole episodes.

    Attributes:
        address: the name of the dataset in messages.
        identity: a text that differs for other data.
        rows: the number of rows of each shard; None if it is unknown until a shard is fetched.
        episodes: the number of episodes; None if unknown.
        lacking: a sentence on each part of the dataset that is missing in all shards.
        texts: returns the texts of each episode, by its number; UsageError if the shards contain them.
    """

    address: str
    identity: str
    rows: Sequence[int] | None = None
    episodes: int | None = None
    lacking: Sequence[str] = ()
    texts: Callable[[], Mapping[int, Mapping[str, str]]]

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of shards."""


class StreamShards(ShardedData):
    """A dataset in shards, a few of which are on this disk at a time."""

    @abstractmethod
    def take(self, number: int) -> OpenShard:
        """Return a shard; wait until it is fetched."""

    def expect(self, numbers: Sequence[int]) -> None:
        """Fetch the shards that are needed next, in this order, in the background; other shards may be removed."""


class StreamStorage(Storage):
    """The steps of a dataset in shards; reading an element fetches its shard. It is read-only.

    If the sizes of all shards are known, elements are numbered from 0 as in the whole dataset, and `len` counts them.
    Otherwise row r of shard s has the number `s * 2**32 + r`, and `len` raises NoLengthError (a TypeError). Texts are
    `[L]` bytes with a `<key>_length`; in a batch, L is the width of the widest one.

    Args:
        shards: provides the shards.
        checkpointer: saves and loads the storage.

    Raises:
        SchemaError: something is written; or a field differs between shards.
        IndexError: an element does not exist. Errors of `shards` are passed on.
    """

    def __init__(self, shards: StreamShards, checkpointer: Any = None) -> None:
        self.shards = shards
        rows = shards.rows
        self._starts = None if rows is None else np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
        self._schema: tuple[int, _Schema] | None = None
        self._fields: Sequence[Field] = ()
        self._compared: set[int] = set()
        self._left_out: dict[int, tuple[str, ...]] = {}
        super().__init__(sys.maxsize if self._starts is None else max(1, int(self._starts[-1])), checkpointer)

    def __len__(self) -> int:
        if self._starts is None:
            raise NoLengthError(f"the number of steps of {self.shards.address} is unknown until all of it was read")
        return int(self._starts[-1])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shards.address})"

    @property
    def has_rows(self) -> bool:
        """Whether there is a shard."""
        return len(self.shards) > 0 if self._starts is None else len(self) > 0

    @property
    def fields(self) -> Sequence[Field]:
        """The fields of the rows as they are stored; fetches the first shard with rows, if none was fetched yet."""
        if self._schema is None:
            self._first_shard()
        return self._fields

    def stated_fps(self) -> float | None:
        """Return the steps per second that the first shard with rows states, or None; fetches this shard."""
        first = self._first_shard()
        return None if first is None else first.fps()

    def _first_shard(self) -> OpenShard | None:
        return next((found for found in map(self.take, range(len(self.shards))) if found.rows), None)

    # Elements ----------------------------------------------------------------------------------------

    def take(self, shard: int) -> OpenShard:
        """Return a shard, after comparing its fields with the first shard taken."""
        found = self.shards.take(shard)
        if shard not in self._compared:
            self._compare(shard, found)
            self._compared.add(shard)
            if found.left_out:
                self._left_out[shard] = found.left_out
                said = "; ".join(found.left_out)
                warn_caller(f"left out of shard {shard} of {self.shards.address}: {said}")
        return found

    @property
    def left_out(self) -> tuple[str, ...]:
        """A sentence on each part that `skip_bad` has left out, in the shards read so far.

        A warning also says so when the shard is first read.
        """
        return (*self.shards.lacking, *(said for shard in sorted(self._left_out) for said in self._left_out[shard]))

    def _compare(self, shard: int, found: OpenShard) -> None:
        if self.shards.rows is not None and not found.left_out and found.rows != self.shards.rows[shard]:
            raise SchemaError(
                f"shard {shard} of {self.shards.address} has {found.rows:,} steps, expected {self.shards.rows[shard]:,}"
            )
        if not found.rows:
            return
        schema = _schema_of(found.storage.get(torch.tensor([found.first])))
        if self._schema is None:
            self._schema, self._fields = (shard, schema), found.fields
        elif schema != self._schema[1]:
            self._refuse(shard, schema)

    def _refuse(self, shard: int, schema: _Schema) -> NoReturn:
        assert self._schema is not None
        first, known = self._schema
        name = next(key for key in (*known, *schema) if known.get(key) != schema.get(key))
        one, other = (_described(found.get(name)) for found in (known, schema))
        raise SchemaError(
            f"{'.'.join(name)} is {one} in shard {first} of {self.shards.address}, and {other} in shard {shard}"
        )

    def numbers(self, shard: int, rows: Numbers) -> Numbers:
        """Return the element numbers of rows of a shard, int64 `[n]`."""
        return rows + (shard << _SHARD if self._starts is None else self._starts[shard])

    def _places(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return the shards of elements, and their rows there."""
        if self._starts is None:
            return numbers >> _SHARD, numbers & ((1 << _SHARD) - 1)
        shards = np.searchsorted(self._starts, numbers, side="right") - 1
        return shards, numbers - self._starts[shards]

    def read_rows(self, rows: Any) -> Any:
        """Return the elements with these numbers: an int, a slice or int64 `[n]`."""
        return self.read_at(rows)

    def read_at(self, index: Any) -> TensorDictBase:
        """Read the elements with these numbers into fresh tensors."""
        numbers = self.numbers_at(index)
        batch = self._gathered(numbers.reshape(-1))
        shaped: TensorDictBase = batch.reshape(numbers.shape) if numbers.ndim else batch[0]
        return shaped

    def numbers_at(self, index: Any) -> Numbers:
        """Return the element numbers that an index selects, int64 in its shape; IndexError for a mask."""
        index = as_index(index, 1)
        if isinstance(index, slice):
            index = torch.arange(*index.indices(len(self)))
        found = torch.as_tensor(index)
        if found.dtype == torch.bool:
            raise IndexError("the elements of a stream are selected by number, found a mask")
        numbers: Numbers = found.numpy(force=True).astype(np.int64, copy=False)
        return numbers

    def _checked(self, numbers: Numbers) -> Numbers:
        limit = len(self.shards) << _SHARD if self._starts is None else len(self)
        outside = np.flatnonzero((numbers < 0) | (numbers >= limit))
        if len(outside):
            raise IndexError(f"{self.shards.address} has no element {numbers[outside[0]]:,}")
        return numbers

    def parts(self, numbers: Numbers) -> Iterator[tuple[Numbers, OpenShard, Numbers]]:
        """Divide elements, int64 `[n]`, by shard.

        Yields:
            The positions of the elements of a shard, the shard, and their rows there.
        """
        shards, rows = self._places(self._checked(numbers))
        for shard in np.unique(shards):
            places = np.flatnonzero(shards == shard)
            found, wanted = self.take(int(shard)), rows[places]
            if len(wanted) and wanted.max() >= found.rows:
                raise IndexError(f"shard {shard} has no row {wanted.max():,}: it has {found.rows:,} rows")
            yield places, found, wanted

    def _gathered(self, numbers: Numbers) -> TensorDictBase:
        parts = [(places, shard.read(rows)) for places, shard, rows in self.parts(numbers)]
        if not parts and (first := self._first_shard()) is not None:
            return first.read(numbers)  # no rows, with the entries of the dataset
        return parts[0][1] if len(parts) == 1 else merged(parts, len(numbers))

    @property
    def entry_keys(self) -> Sequence[Key] | None:
        """The entries of batches: for a reference to frames, the image."""
        frames = set(reference_keys(self.fields))
        return [image_key(one.key) if one.key in frames else one.key for one in self.fields] or None

    def places_in_episodes(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return for each element its step within its episode, and the length of the episode; both int64 `[n]`."""
        before, lengths = np.zeros((2, len(numbers)), np.int64)
        for places, shard, rows in self.parts(numbers):
            starts = np.cumsum(shard.lengths) - shard.lengths
            episode = np.searchsorted(starts, rows, side="right") - 1
            before[places], lengths[places] = rows - starts[episode], shard.lengths[episode]
        return before, lengths

    # Writing, which is refused ------------------------------------------------------------------------

    def write_rows(self, rows: Any, data: Any) -> NoReturn:
        """Raise SchemaError (a RuntimeError): streams are read-only."""
        raise SchemaError(f"{self.shards.address} is a stream, which is read-only")

    def write_at(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> NoReturn:
        """Raise SchemaError (a RuntimeError): streams are read-only."""
        self.write_rows(cursor, data)

    def clear_rows(self) -> NoReturn:
        """Raise SchemaError (a RuntimeError): streams are read-only."""
        self.write_rows(None, None)

    # State -------------------------------------------------------------------------------------------

    def save_state(self) -> dict[str, Any]:
        """Return the identity of this data."""
        return {"identity": self.shards.identity}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Check that the state belongs to the same data; SchemaError otherwise."""
        if state.get("identity") != self.shards.identity:
            raise SchemaError(f"the state belongs to other data than {self.shards.address}")
        self.mark_replaced(0)

    @property
    def shared(self) -> bool:
        """True: other processes see the same rows, because they cannot change."""
        return True

    def share(self) -> None:
        """Do nothing: other processes read the same files."""


def _columns(rows: TensorDictBase) -> dict[tuple[str, ...], torch.Tensor]:
    """Return the leaves by their paths."""
    found: dict[Any, Any] = dict(rows.items(True, True))
    return {(key,) if isinstance(key, str) else tuple(key): leaf for key, leaf in found.items()}


def _schema_of(rows: TensorDictBase) -> _Schema:
    """Return type and row shape of each leaf; the width of texts, which differs between shards, is -1."""
    found = {path: (leaf.dtype, leaf.shape[1:]) for path, leaf in _columns(rows).items()}
    texts = {path for path in found if (*path[:-1], path[-1] + _TEXT_LENGTH) in found}
    return {path: (dtype, torch.Size([-1]) if path in texts else shape) for path, (dtype, shape) in found.items()}


def _described(leaf: tuple[torch.dtype, torch.Size] | None) -> str:
    return "missing" if leaf is None else f"{str(leaf[0]).removeprefix('torch.')} {list(leaf[1])}"


def merged(parts: Iterable[tuple[Numbers, TensorDictBase]], count: int) -> TensorDictBase:
    """Put the rows of several shards, with the same fields, at their positions in one batch."""
    lots = [(torch.from_numpy(places), _columns(rows)) for places, rows in parts]
    merged = {}
    for path in lots[0][1]:
        columns = [columns[path] for _, columns in lots]
        shape = columns[0].shape[1:]
        if any(column.shape[1:] != shape for column in columns):  # texts of different widths
            shape = torch.Size([max(column.shape[1] for column in columns)])
        target = torch.zeros((count, *shape), dtype=columns[0].dtype)
        for (places, _), column in zip(lots, columns, strict=True):
            target[(places, slice(column.shape[1])) if column.dim() == 2 else places] = column
        merged[path] = target
    return tensordict_of(merged, (count,))
