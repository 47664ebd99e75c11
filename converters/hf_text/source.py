"""Downloads datasets of text from a Hugging Face hub: any repository with Parquet files, or one of its splits."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...core.errors import DatasetNotFoundError, UsageError
from ...core.format.converter import RemoteDataset, safe_id
from ...core.remote.hub import HubRepositorySource
from .splits import Split, chosen, splits_among

CARD = "README.md"
"""The card of a repository, which states the licence."""
_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(?::(?P<part>.+))?", re.ASCII)


class HfTextSource(HubRepositorySource):
    """Any dataset repository with Parquet files.

    An id is `OWNER/NAME`, for all splits, or `OWNER/NAME:SPLIT`; where a repository has several configurations,
    `OWNER/NAME:CONFIG` or `OWNER/NAME:CONFIG:SPLIT`. It is taken as it is. The repositories of `CarperAI` are listed.
    """

    name = "hf-text"
    owner = "CarperAI"

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
        files = [listed[path] for path in (*paths, *([CARD] if CARD in listed else []))]
        return self.described(dataset_id, repository, commit, files)


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
