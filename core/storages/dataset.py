"""Opens a dataset on disk as tensors, so that nothing done to them ever reaches the disk."""

from __future__ import annotations

import contextlib
import mmap
import os
import warnings
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from ..errors import CorruptDataError
from ..format import Array, ListedFiles, TedReader, leaf_path
from ..ted import Field
from .advice import Pages, exceeds_memory
from .arrays import tensor_of, tensordict_of

__all__ = ["MappedDataset", "dataset_tensors"]


def dataset_tensors(dataset: str | os.PathLike[str] | TedReader, *, copy_on_write: bool = True) -> TensorDict:
    """Map every leaf of a dataset in layout `ted`, at a path or open, into a tensordict of batch size `[steps]`.

    Rows are read from the disk when first touched. The maps are private and the files are opened read-only: an
    edit in place stays in this process. With `copy_on_write=False` the pages cannot be written at all, which
    costs no room under a limit on data memory (`RLIMIT_DATA`), but an edit in place ends the process.

    Raises FormatError for another layout and CorruptDataError for a file that is missing or has another size than
    the manifest says.
    """
    return MappedDataset(dataset, copy_on_write=copy_on_write).tensors


class MappedDataset:
    """The maps of a dataset in layout `ted`: `tensors` is what `dataset_tensors` returns.

    Where the files do not fit into memory, or `larger_than_memory` says so, the system is told that rows are read in
    no order, and with `expect` which ones come next.
    """

    def __init__(
        self,
        dataset: str | os.PathLike[str] | TedReader,
        *,
        copy_on_write: bool = True,
        larger_than_memory: bool | None = None,
    ) -> None:
        with contextlib.ExitStack() as stack:
            reader = dataset if isinstance(dataset, TedReader) else stack.enter_context(TedReader(Path(dataset)))
            steps, size = reader.manifest.steps, sum(file.size for file in reader.manifest.files)
            self._advise = exceeds_memory(size) if larger_than_memory is None else larger_than_memory
            self._pages: list[tuple[Pages, int]] = []
            self._copy_on_write = copy_on_write
            tensors = {field.key: self._map(reader.listed, field, steps) for field in reader.fields}
        self.tensors = tensordict_of(tensors, (steps,))
        self._steps = steps

    def expect(self, rows: NDArray[np.int64]) -> None:
        """Hint at the rows to be read next; negative numbers count from the end, and what is beyond is left out."""
        if self._pages:
            rows = np.where(rows < 0, rows + self._steps, rows)
            rows = np.sort(rows[(rows >= 0) & (rows < self._steps)])
            for pages, width in self._pages:
                pages.expect(rows * width, width)

    def _map(self, files: ListedFiles, field: Field, steps: int) -> torch.Tensor:
        shape = (steps, *field.shape)
        size = steps * field.row_bytes
        if not size:  # a map cannot be empty, and there is no file
            return tensor_of(np.empty(shape, field.numpy), field)
        pages = _pages(files, leaf_path(field.key), size, self._copy_on_write)
        if self._advise:
            self._pages.append((Pages(pages), field.row_bytes))
        array = np.frombuffer(pages, field.numpy).reshape(shape)
        return tensor_of(array, field) if self._copy_on_write else _read_only_tensor(array, field)


def _pages(files: ListedFiles, name: str, size: int, copy_on_write: bool) -> mmap.mmap:
    path, descriptor = files.root / name, files.descriptor(name)
    found = os.fstat(descriptor).st_size
    if found != size:  # a read beyond the end of a mapped file would kill the process
        raise CorruptDataError(f"{path} has {found:,} bytes, {size:,} are expected: it was cut or overwritten")
    # No swap is set aside for pages that are never written: a dataset may be larger than memory.
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if copy_on_write else 0)
    return mmap.mmap(descriptor, size, flags=flags, prot=protection)


def _read_only_tensor(array: Array, field: Field) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        return tensor_of(array, field)
