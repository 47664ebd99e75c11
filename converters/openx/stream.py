"""The shards of a dataset as sources of a stream: those of a folder, and those on the hub."""

from __future__ import annotations

import contextlib
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...core.datasets.streams.episodes import RawEpisode
from ...core.errors import (
    AuthorisationError,
    CorruptDataError,
    DatasetNotFoundError,
    NetworkError,
    RbtoolError,
    UsageError,
)
from ...core.format.digest import digest_text
from ...core.remote.transport import require_network
from .shards import EpisodeArchives, is_episode, missing_shards, require_one_dataset, shards_at
from .source import REPOSITORY, OpenXSource

_FIELD = "data.pickle"
_BLOCK = 512
_CLIENTS = ("aiohttp", "fsspec", "httpcore", "httpx", "huggingface_hub", "requests", "urllib3")
_CONTINUE = "state_dict() and load_state_dict() continue where it stopped"


class FolderArchives:
    """Shards in a folder."""

    def __init__(self, folder: Path) -> None:
        found = shards_at(folder)
        require_one_dataset(folder, found)
        for problem in missing_shards(folder, found):
            raise problem
        self.identity = digest_text(f"{folder}\0" + "\0".join(one.path.name for one in found))
        self.count = len(found)
        self._found = found

    def episodes(self, shard: int, start: int) -> Iterator[RawEpisode]:
        """Yield episodes from a file; raises what damaged archives raise."""
        with contextlib.closing(EpisodeArchives(self._found)) as shards:
            members = (member for member in shards.members(shard) if is_episode(member))
            for place, member in enumerate(members):
                if place >= start:
                    data = shards.archive(shard).read(member.start, member.size)
                    yield RawEpisode(shard, place, member.name.rpartition("/")[2], data)


class HubArchives:
    """Shards on a hub, at one commit, read by the `webdataset` loader of the library `datasets`."""

    def __init__(self, dataset_id: str, revision: str | None = None) -> None:
        with OpenXSource() as source:
            found = source.describe(dataset_id, revision)
        files = {file.path: file.known_size for file in found.files}
        self._names = sorted(files)
        self._sizes = [files[name] for name in self._names]
        self._folder = f"hf://datasets/{REPOSITORY}@{found.revision}/{dataset_id}"
        self.identity = digest_text(f"{self._folder}\0" + "\0".join(self._names))
        self.count = len(self._names)

    def episodes(self, shard: int, start: int) -> Iterator[RawEpisode]:
        """Yield episodes as they arrive.

        NetworkError where the connection breaks off, CorruptDataError for a shard that is cut, UsageError where
        `datasets` is not installed.
        """
        path, read = f"{self._folder}/{self._names[shard]}", 0
        with _understood(path):
            for place, example in enumerate(_examples(path)):
                data = example[_FIELD]
                if not isinstance(data, bytes):
                    raise CorruptDataError(f"{path}: {example['__key__']} has no {_FIELD}")
                read += _BLOCK + -(-len(data) // _BLOCK) * _BLOCK
                if place >= start:
                    yield RawEpisode(shard, place, f"{example['__key__']}.{_FIELD}", data)
        if read + _BLOCK > self._sizes[shard]:  # the loader takes an archive without an end for a whole one
            raise CorruptDataError(f"{path} is cut: it ends after {self._sizes[shard]:,} bytes")


def _examples(path: str) -> Any:
    require_network(f"streaming {path}", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    try:
        from datasets import Features, Value, load_dataset  # takes seconds
    except ImportError as error:
        raise UsageError(
            "streaming needs the package datasets, which is not installed", hint="pip install datasets"
        ) from error
    features = Features({"__key__": Value("string"), "__url__": Value("string"), _FIELD: Value("binary")})
    return load_dataset(
        "webdataset", data_files={"train": [path]}, split="train", streaming=True, features=features
    )  # fmt: skip


@contextlib.contextmanager
def _understood(path: str) -> Iterator[None]:
    """Raise what `datasets` and the clients below it raise as our errors."""
    try:
        yield
    except (RbtoolError, GeneratorExit, MemoryError):
        raise
    except (tarfile.TarError, EOFError) as error:
        raise CorruptDataError(f"{path} is damaged or cut: {_said(error)}") from error
    except Exception as error:  # of httpx, fsspec, huggingface_hub, or pyarrow
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            raise AuthorisationError(
                f"{path} may not be read: the hub answered {status}", hint="set HF_TOKEN"
            ) from error
        if status == 404 or isinstance(error, FileNotFoundError):
            raise DatasetNotFoundError(f"{path} is not there any more") from error
        if isinstance(error, OSError) or type(error).__module__.startswith(_CLIENTS):
            raise NetworkError(f"{path} broke off: {_said(error)}", hint=_CONTINUE) from error
        raise CorruptDataError(f"{path} is no archive of episodes: {_said(error)}") from error


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
