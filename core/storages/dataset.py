"""Datasets on disk as tensors: memory-mapped, or read row by row.

Files that do not fit into memory are mapped with advice to the kernel. Without it, read-ahead would load pages that
nobody needs and evict those in use, and random rows would cost one page fault after another. With MADV_RANDOM for the
whole map, and MADV_WILLNEED for the rows of each batch, the kernel reads just these rows, in parallel. Files that fit
into memory get no advice.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from ..errors import CorruptDataError, SchemaError, require_flags
from ..format.contracts import Array, StepReader
from ..format.memmap.reader import TedReader
from ..format.memmap.tree import leaf_path
from ..format.open_files import ListedFiles
from ..ted.schema import Field, Key
from .base import IndexedStorage
from .cursors import as_index, row_numbers
from .tensor import TensorStorage

_GROUPS = Path("/sys/fs/cgroup")


def exceeds_memory(size: int) -> bool:
    """Whether files of this total size cannot all stay in memory."""
    available = available_memory()
    return available is not None and size > available


def available_memory() -> int | None:
    """Return the bytes that this process and its page cache may use: the machine's, or its control group's if that is
    less.

    None if the system does not say.
    """
    found = [limit for limit in (_system(), *_groups()) if limit is not None]
    return min(found) if found else None


def _system() -> int | None:
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def _groups() -> Iterable[int]:
    """Yield the memory limits of the control groups (version 2 and 1) of this process."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        root = _GROUPS / "memory" if controllers else _GROUPS
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        folder = root / group.lstrip("/")
        for place in (folder, *folder.parents):
            with contextlib.suppress(OSError, ValueError):
                yield int((place / name).read_text(encoding="ascii"))
            if place == root:
                break


class Pages:
    """A mapped file whose rows are read in random order."""

    def __init__(self, pages: mmap.mmap) -> None:
        self._pages = pages
        self._size = len(pages)
        advise_random(pages)

    def expect(self, starts: NDArray[Any], lengths: int | NDArray[Any]) -> None:
        """Hint that `lengths` bytes from each of `starts` are about to be read."""
        will_need = getattr(mmap, "MADV_WILLNEED", None)
        if will_need is None or not len(starts):
            return
        page = mmap.PAGESIZE
        first = np.sort(starts // page)
        last = np.sort((starts + (lengths - 1)) // page)
        # Rows on neighbouring pages are combined into one hint.
        apart = np.flatnonzero(first[1:] > last[:-1] + 1)
        begins = first[np.concatenate(([0], apart + 1))] * page
        stops = np.minimum((last[np.concatenate((apart, [len(last) - 1]))] + 1) * page, self._size)
        advise = self._pages.madvise
        with contextlib.suppress(OSError):
            for begin, size in zip(begins.tolist(), (stops - begins).tolist(), strict=True):
                advise(will_need, begin, size)


def advise_random(pages: mmap.mmap) -> None:
    """Advise the kernel that a mapped file is read in random order."""
    advice = getattr(mmap, "MADV_RANDOM", None)
    if advice is not None:
        with contextlib.suppress(OSError):
            pages.madvise(advice)


def tensor_of(array: Array, field: Field) -> torch.Tensor:
    """View an array as a tensor of the field's element type; bfloat16 comes as its bits."""
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


def dataset_tensors(dataset: str | os.PathLike[str] | TedReader, *, copy_on_write: bool = True) -> TensorDict:
    """Map all leaves of a dataset in layout `ted` into a tensordict of batch size `[steps]`.

    Rows are read from the disk when first touched. The maps are private and the files are opened read-only, so an
    in-place edit stays in this process.

    Args:
        dataset: a path or an open reader.
        copy_on_write: if False, the pages cannot be written at all, which takes nothing from a limit on data memory
            (`RLIMIT_DATA`), but an in-place edit ends the process.

    Raises:
        FormatError: the dataset has another layout.
        CorruptDataError: a file is missing, or does not have the size given in the manifest.
    """
    return MappedDataset(dataset, copy_on_write=copy_on_write).tensors


class MappedDataset:
    """The maps of a dataset in layout `ted`; `tensors` is what `dataset_tensors` returns.

    If the files do not fit into memory, or with `larger_than_memory`, the kernel is advised that rows are read in
    random order, and by `expect` which rows come next.
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
            self._pages: list[tuple[Pages, int]] = []
            self._copy_on_write = copy_on_write
            tensors = {field.key: self._map(reader.listed, field, steps) for field in reader.fields}
        self.tensors = tensordict_of(tensors, (steps,))
        self._steps = steps

    @property
    def advises(self) -> bool:
        """Whether the kernel gets advice."""
        return bool(self._pages)

    def expect(self, rows: NDArray[np.int64]) -> None:
        """Hint at the rows to be read next; negative numbers count from the end, invalid ones are skipped."""
        if self._pages:
            rows = np.where(rows < 0, rows + self._steps, rows)
            rows = np.sort(rows[(rows >= 0) & (rows < self._steps)])
            for pages, width in self._pages:
                pages.expect(rows * width, width)

    def _map(self, files: ListedFiles, field: Field, steps: int) -> torch.Tensor:
        shape = (steps, *field.shape)
        size = steps * field.row_bytes
        if not size:  # an empty field has no file, and cannot be mapped
            return tensor_of(np.empty(shape, field.numpy), field)
        pages = _pages(files, leaf_path(field.key), size, self._copy_on_write)
        if self._advise:
            self._pages.append((Pages(pages), field.row_bytes))
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

    def episode_lengths(self) -> NDArray[np.int64]:
        """Return the lengths of the episodes."""
        return self._lengths


class StepStorage(IndexedStorage):
    """The rows of a `StepReader` as a read-only storage; each `get` reads just the rows asked for.

    Neighbouring rows are read together. Writing raises SchemaError.
    """

    def __init__(self, reader: StepReader) -> None:
        super().__init__(max(1, reader.manifest.steps))
        self._reader = reader

    def __len__(self) -> int:
        return self._reader.manifest.steps

    def episode_lengths(self) -> NDArray[np.int64]:
        """Return the lengths of the episodes."""
        return self._reader.episodes.length

    def entry(self, key: tuple[str, ...], index: Any) -> torch.Tensor | None:
        """Read one leaf of the rows at `index`; None if it does not exist."""
        field = next((field for field in self._reader.fields if field.key == key), None)
        return None if field is None else self._tensors([field], row_numbers(as_index(index, 1), len(self)))[key]

    def read_at(self, index: Any) -> TensorDict:
        """Read the rows at `index` into fresh tensors."""
        numbers = row_numbers(as_index(index, 1), len(self))
        return tensordict_of(self._tensors(self._reader.fields, numbers), numbers.shape)

    def _tensors(self, fields: Iterable[Field], numbers: Array) -> dict[Key, torch.Tensor]:
        unique, place = np.unique(numbers.reshape(-1), return_inverse=True)
        tensors = {}
        for field in fields:
            rows = self._read(field, unique)[place.reshape(-1)]
            tensors[field.key] = tensor_of(rows.reshape((*numbers.shape, *field.shape)), field)
        return tensors

    def _read(self, field: Field, rows: Array) -> Array:
        """Read sorted rows of one leaf, combining neighbours into one read."""
        found = np.empty((len(rows), *field.shape), field.numpy)
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        for run in np.split(np.arange(len(rows)), breaks) if len(rows) else ():
            found[run] = self._reader.read(field.key, int(rows[run[0]]), int(rows[run[-1]]) + 1)
        return found

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
