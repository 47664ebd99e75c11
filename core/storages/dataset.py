"""Opens a dataset on disk as tensors, so that nothing done to them ever reaches the disk."""

from __future__ import annotations

import mmap
import os
import warnings
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict

from ..dataset import Array, TedReader, leaf_path
from ..errors import CorruptDataError
from ..ted import Field
from .arrays import tensor_of, tensordict_of

__all__ = ["dataset_tensors"]


def dataset_tensors(path: str | os.PathLike[str], *, copy_on_write: bool = True) -> TensorDict:
    """Map every leaf of the dataset in layout `ted` at `path` into a tensordict of batch size `[steps]`.

    Rows are read from the disk when first touched. The maps are private and the files are opened read-only: an
    edit in place stays in this process. With `copy_on_write=False` the pages cannot be written at all, which
    costs no room under a limit on data memory (`RLIMIT_DATA`), but an edit in place ends the process.

    Raises FormatError for another layout and CorruptDataError for a file that is missing or has another size than
    the manifest says.
    """
    with TedReader(Path(path)) as reader:
        steps = reader.manifest.steps
        tensors = {
            field.key: _map(reader.path / leaf_path(field.key), field, steps, copy_on_write) for field in reader.fields
        }
    return tensordict_of(tensors, (steps,))


def _map(path: Path, field: Field, steps: int, copy_on_write: bool) -> torch.Tensor:
    shape = (steps, *field.shape)
    size = steps * field.row_bytes
    if not size:  # a map cannot be empty, and there is no file
        return tensor_of(np.empty(shape, field.numpy), field)
    array = np.frombuffer(_pages(path, size, copy_on_write), field.numpy).reshape(shape)
    return tensor_of(array, field) if copy_on_write else _read_only_tensor(array, field)


def _pages(path: Path, size: int, copy_on_write: bool) -> mmap.mmap:
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError:
        raise CorruptDataError(f"{path} is missing; the manifest lists it") from None
    try:
        found = os.fstat(descriptor).st_size
        if found != size:  # a read beyond the end of a mapped file would kill the process
            raise CorruptDataError(f"{path} has {found:,} bytes, {size:,} are expected: it was cut or overwritten")
        # No swap is set aside for pages that are never written: a dataset may be larger than memory.
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if copy_on_write else 0)
        return mmap.mmap(descriptor, size, flags=flags, prot=protection)
    finally:
        os.close(descriptor)


def _read_only_tensor(array: Array, field: Field) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        return tensor_of(array, field)
