"""`load_dataset`: any dataset that is stored, as a buffer."""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch

from ..errors import DatasetNotFoundError, UsageError
from ..format.locate import find_dataset, reader_class, reader_names, storage_root
from ..format.packed.reader import PackedReader
from ..format.staging import is_ours
from ..format.ted.reader import TedReader
from ..opening import is_steps, open_steps
from ..remote.catalogue import KnownNames
from ..storages.base import Storage
from ..storages.packed import PackedStorage
from ..torchrl.reader import BUFFER
from .buffer import DatasetReplayBuffer
from .storage import DatasetStorage, Mode


def load_dataset(
    dataset: str | os.PathLike[str],
    batch_size: int | None = None,
    *,
    sampler: Any = None,
    transform: Any = None,
    collate_fn: Callable[[Any], Any] | None = None,
    pin_memory: bool = False,
    prefetch: int | None = None,
    split_trajs: bool = False,
    seed: int | None = None,
    mode: Mode = "c",
    verify: bool = False,
    root: str | os.PathLike[str] | None = None,
) -> DatasetReplayBuffer:
    """Open a stored dataset (a path or `source:id`, like `minari:D4RL/door/human-v2`) as a `TensorDictReplayBuffer`.

    The same `seed` gives the same batches, with any number of prefetched ones, and of a seed every worker of a
    `DataLoader` has a stream of its own; without one a fresh seed is drawn, in every process that gets a copy. The
    buffer always has a generator, so what it saves continues with the very same batches. Edits of batches and of rows
    stay in this process; with `mode="r+"` those of rows are written to the dataset. Nothing can be added.
    `verify` first reads all files and compares them with their digests; what is small is compared at every open.
    `split_trajs` makes elements of whole trajectories, padded to one length, with a `"mask"`. `root` is the storage
    root; the other arguments are those of `ReplayBuffer`. Nothing is downloaded.

    DatasetNotFoundError (a FileNotFoundError) explains how to fetch what is not there. UsageError (a ValueError) for
    checkpoints, raw datasets of other libraries, datasets without steps, and arguments that make no sense;
    FormatError and CorruptDataError for what cannot be read.
    """
    if seed is not None and not 0 <= seed < 1 << 64:
        raise UsageError(f"the seed {seed!r} was given, a number of 64 bits without sign is expected")
    path = _found(dataset, root)
    with _opened(path) as reader:  # what is verified is what is mapped, also if the dataset is replaced meanwhile
        if verify:
            reader.verify_files()
        storage = _storage(reader, mode, split_trajs)
    generator = torch.Generator().manual_seed(secrets.randbits(63) if seed is None else seed)
    buffer = DatasetReplayBuffer(
        storage=storage,
        batch_size=batch_size,
        sampler=sampler,
        transform=transform,
        collate_fn=collate_fn,
        pin_memory=pin_memory,
        prefetch=prefetch,
        generator=generator,
    )
    buffer._unseeded = seed is None
    return buffer


def _storage(reader: TedReader | PackedReader, mode: Mode, split_trajs: bool) -> Storage:
    """Make the storage that the layout asks for."""
    if isinstance(reader, TedReader) or split_trajs:
        return DatasetStorage(reader, mode=mode, split_trajs=split_trajs)
    if mode not in get_args(Mode):
        raise UsageError(f"the mode {mode!r} was given, 'c' (edits stay here) or 'r+' (edits are kept) is expected")
    if mode == "r+":
        raise UsageError(
            f"{reader.path} has the layout packed, which cannot be edited in place",
            hint=f"make a copy that can be: rbtool convert {shlex.quote(str(reader.path))} DEST --layout ted",
        )
    return PackedStorage(reader)


def _found(dataset: str | os.PathLike[str], root: str | os.PathLike[str] | None) -> Path:
    """Find the dataset, also by words that a download has found to mean it."""
    try:
        return find_dataset(dataset, root)
    except DatasetNotFoundError:
        source, colon, asked = os.fspath(dataset).partition(":")
        known = KnownNames(storage_root(root), source).get(asked) if colon else None
        if known is None:
            raise
        return find_dataset(f"{source}:{known.id}", root)


def _opened(path: Path) -> TedReader | PackedReader:
    """Open a dataset; UsageError states what to do with anything that is no dataset of ours."""
    quoted = shlex.quote(str(path))
    if (path / BUFFER).is_file():
        raise UsageError(f"{path} is the checkpoint of a buffer", hint="make the buffer and have it load: loads(path)")
    if not is_steps(path):
        form = next((name for name in reader_names() if reader_class(name).recognises(path)), None)
        if form is not None:
            raise UsageError(
                f"{path} is a raw {form} dataset, one in TED is expected",
                hint=f"convert it first: rbtool convert {quoted} DEST",
            )
    elif not is_ours(path) and not (path / ".rbtool").is_dir():
        raise UsageError(
            f"{path} is a tensordict folder, and no dataset that rbtool made",
            hint="TensorStorage(TensorDict.load_memmap(path)) is a storage of it",
        )
    reader = open_steps(path)
    if isinstance(reader, TedReader | PackedReader) and reader.manifest.kind == "dataset":
        return reader
    with reader:
        raise UsageError(
            f"{path} is a checkpoint in the layout {reader.manifest.layout}, a dataset is expected",
            hint=f"make a dataset of it first: rbtool checkpoint load {quoted} DEST",
        )
