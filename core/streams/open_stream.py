"""`load_dataset(…, streaming=True)`: the storage of a dataset that is read shard by shard."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from ..errors import DatasetNotFoundError, UsageError
from ..format.locate import find_dataset, source_names, streams_folder
from ..storages.stream import StreamStorage
from .cache import CachedShards
from .hub_shards import HubShards
from .local_shards import LocalShards
from .source_shards import SourceShards

_HUB = re.compile(r"hf://(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^@\s]+))?", re.ASCII)
_NAMED = re.compile(r"(?P<source>[a-z][a-z0-9_-]*):(?P<id>[^@]+)(?:@(?P<revision>.+))?")
_CACHE_SIZE = 8 << 30
_VARIABLE = "RBTOOL_CACHE_SIZE"
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kMGT]?)i?B?", re.ASCII | re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def open_stream(
    dataset: str | os.PathLike[str],
    root: str | os.PathLike[str] | None,
    cache_size: int | str | None,
    options: Mapping[str, Any],
    *,
    skip_bad: bool = False,
) -> StreamStorage:
    """Open a dataset as a storage of shards: `hf://OWNER/NAME[@REVISION]`, `source:id[@REVISION]` or a path.

    What is stored is read where it is. Shards of a remote are kept below the storage root, in at most `cache_size`
    bytes (`RBTOOL_CACHE_SIZE`, else 8 GiB); `options` go to the source's reader. With `skip_bad` episodes and
    shards that cannot be read are left out. UsageError for an address or a size without sense.
    """
    limit = _limit(cache_size)
    files = _opened(os.fspath(dataset), root, options, skip_bad)
    return StreamStorage(files if isinstance(files, LocalShards) else cached(files, limit, skip_bad=skip_bad))


def cached(files: HubShards | SourceShards, limit: int | str | None, *, skip_bad: bool) -> CachedShards:
    """Keep shards of a remote in their folder below the storage root, in at most `limit` bytes (8 GiB)."""
    folder = files.folder / ("sound" if skip_bad else "shards")
    return CachedShards(files, folder, _limit(limit), skip_bad=skip_bad)


def _limit(given: int | str | None) -> int:
    """Return how many bytes shards may take: as given, else as the environment states, else 8 GiB."""
    if given is not None:
        return bytes_of_size(given)
    stated = os.environ.get(_VARIABLE)
    try:
        return bytes_of_size(stated) if stated else _CACHE_SIZE
    except UsageError as error:
        raise UsageError(f"{_VARIABLE} is {stated!r}, which is no size", hint=error.hint) from error


def _opened(
    dataset: str, root: str | os.PathLike[str] | None, options: Mapping[str, Any], skip_bad: bool
) -> LocalShards | HubShards | SourceShards:
    if dataset.startswith("hf://"):
        found = _HUB.fullmatch(dataset)
        if found is None:
            raise UsageError(f"{dataset} is no address of a dataset on a hub", hint="write it like hf://OWNER/NAME")
        return HubShards(found["repository"], found["revision"], streams_folder(root))
    try:
        return LocalShards(find_dataset(dataset, root))
    except DatasetNotFoundError:
        named = _NAMED.fullmatch(dataset)
        if named is None or named["source"] not in source_names():
            raise
    return SourceShards(
        named["source"], named["id"], named["revision"], options, streams_folder(root), skip_bad=skip_bad
    )


def bytes_of_size(size: int | str) -> int:
    """Read a size like `500MB`, `2 GB` or a number of bytes; UsageError for anything else."""
    found = _SIZE.fullmatch(str(size).strip())
    count = 0 if found is None else int(float(found["number"]) * _UNITS[found["unit"].lower()])
    if isinstance(size, bool) or count < 1:
        raise UsageError(f"{size!r} is no size", hint="write it like 500MB, 2GB or a number of bytes")
    return count
