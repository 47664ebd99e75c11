"""`load_dataset(…, streaming=True)`: the storage of a dataset that is read shard by shard."""

from __future__ import annotations

import os
import re

from ...errors import UsageError
from ...format.locate import find_dataset, storage_root
from ...storages.stream import Shards, StreamStorage
from .cache import CachedShards
from .hub_shards import HubShards
from .ted_shards import LocalShards

_HUB = re.compile(r"hf://(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^@\s]+))?", re.ASCII)
_FOLDER = ".streams"
_CACHE_SIZE = 8 << 30
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kMGT]?)i?B?", re.ASCII | re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def open_stream(
    dataset: str | os.PathLike[str], root: str | os.PathLike[str] | None, cache_size: int | str | None
) -> StreamStorage:
    """Open a dataset as a storage of shards: `hf://OWNER/NAME[@REVISION]`, a path or `source:id`.

    Shards of a remote are kept below the storage root, in at most `cache_size` bytes (8 GiB). UsageError for an
    address or a size that makes no sense.
    """
    size = _CACHE_SIZE if cache_size is None else bytes_of_size(cache_size)
    return StreamStorage(_shards(os.fspath(dataset), root, size))


def _shards(dataset: str, root: str | os.PathLike[str] | None, size: int) -> Shards:
    if not dataset.startswith("hf://"):
        return LocalShards(find_dataset(dataset, root))
    found = _HUB.fullmatch(dataset)
    if found is None:
        raise UsageError(f"{dataset} is no address of a dataset on a hub", hint="write it like hf://OWNER/NAME")
    files = HubShards(found["repository"], found["revision"], storage_root(root) / _FOLDER)
    return CachedShards(files, files.folder / "shards", size)


def bytes_of_size(size: int | str) -> int:
    """Read a size like `500MB`, `2 GB` or a number of bytes; UsageError for anything else."""
    found = _SIZE.fullmatch(str(size).strip())
    count = 0 if found is None else int(float(found["number"]) * _UNITS[found["unit"].lower()])
    if isinstance(size, bool) or count < 1:
        raise UsageError(f"{size!r} is no size", hint="write it like 500MB, 2GB or a number of bytes")
    return count
