"""Downloads datasets of text from a Hugging Face hub: any repository with Parquet files, or one of its splits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from ...core.errors import DatasetNotFoundError, UsageError
from ...core.format.sources import Advance, Ids, Note, RemoteDataset, RemoteFile, Source, safe_id
from ...core.remote.fetch import fetch_files
from ...core.remote.hub import Hub, hub_endpoint
from .splits import Split, chosen, splits_among

OWNER = "CarperAI"
"""The organisation whose repositories are listed."""
CARD = "README.md"
"""The card of a repository, which states the licence."""
_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(?::(?P<part>.+))?", re.ASCII)


class HfTextSource(Source):
    """Any dataset repository with Parquet files, on the hub that the environment names (`HF_ENDPOINT`, `HF_TOKEN`).

    An id is `OWNER/NAME`, for all splits, or `OWNER/NAME:SPLIT`; where a repository has several configurations,
    `OWNER/NAME:CONFIG` or `OWNER/NAME:CONFIG:SPLIT`. It is taken as it is. The repositories of `CarperAI` are listed.
    """

    name = "hf-text"
    open_ended = True

    @property
    def remote(self) -> str:
        """The organisation that is listed."""
        return f"hf://{OWNER}"

    @property
    def key(self) -> str:
        """Its address, with the host of the hub."""
        return f"{hub_endpoint()}/{OWNER}"

    @cached_property
    def hub(self) -> Hub:
        """The connections to the hub."""
        return Hub()

    def list_ids(self) -> Ids:
        """List the repositories of `CarperAI`."""
        return Ids(tuple(one.name for one in self.hub.repositories(OWNER)))

    def look_up(self, dataset_id: str, revision: str | None, totals: bool) -> RemoteDataset:
        """Find the files of a dataset: a request for the commit, and one for every 1,000 files or so."""
        named = _NAME.fullmatch(safe_id(dataset_id))
        if named is None:
            raise UsageError(f"{dataset_id!r} is no repository", hint="write it like OWNER/NAME or OWNER/NAME:SPLIT")
        repository = named["repository"]
        commit = self.hub.commit(repository, revision)
        listed = {file.path: file for file in self.hub.tree(repository, commit)}
        where = f"hf://{repository} at {revision or commit[:7]}"
        splits = _wanted(splits_among(listed), named["part"] or "", where)
        paths = [path for split in splits for path in split.files]
        files = (
            RemoteFile(path, listed[path].size, listed[path].checksum, (self.hub.address(repository, commit, path),))
            for path in (*paths, *([CARD] if CARD in listed else []))
        )
        ordered = tuple(sorted(files, key=lambda file: file.path))
        return RemoteDataset(dataset_id, f"hf://{repository}@{commit}", commit, ordered)

    def reader_options(self, dataset_id: str) -> Mapping[str, str]:
        """The id, which the files do not state."""
        return {"id": dataset_id}

    def download(self, files: Sequence[RemoteFile], folder: Path, progress: Advance, note: Note) -> None:
        """Bring the files to `folder`, a few at a time."""
        fetch_files(files, folder, self.hub, progress=progress, note=note)

    def on_close(self) -> None:
        """Close the connections, if there are any."""
        if "hub" in self.__dict__:
            self.hub.close()


def _wanted(splits: Sequence[Split], part: str, where: str) -> list[Split]:
    """Choose the splits of one configuration."""
    if not splits:
        raise DatasetNotFoundError(
            f"{where} has no Parquet files, and these are what is read", hint="--revision takes a branch or a commit"
        )
    found = chosen(splits, part)
    if not found:
        there = ", ".join(dict.fromkeys(split.id for split in splits))
        raise DatasetNotFoundError(f"{where} has no split {part!r}", hint=f"there are {there}")
    configs = list(dict.fromkeys(split.config for split in found))
    if len(configs) > 1:
        raise UsageError(
            f"{where} has {len(configs)} configurations, and one at a time is read",
            hint=f"write one of these behind the id, after a colon: {', '.join(filter(None, configs))}",
        )
    return found
