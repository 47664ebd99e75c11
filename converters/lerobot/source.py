"""Downloads datasets of LeRobot from a Hugging Face hub: any repository that has one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import DatasetNotFoundError, UsageError
from ...core.format.converter import RemoteDataset, RemoteFile, RemoteShard, safe_id
from ...core.format.episodes import EpisodeRanges, select_episodes
from ...core.remote.hub import HubRepositorySource
from .metadata import INFO, paths_of, read_episodes, read_info, runs_of

_METADATA, _VIDEO = "meta/", ".mp4"
_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_FILES = re.compile(r"(meta|data|videos?|images)/.*\.(json|jsonl|parquet|mp4)", re.ASCII)
_EPISODE = re.compile(r".*/episode_(\d{1,9})\.(?:parquet|mp4)", re.ASCII)


class LerobotSource(HubRepositorySource):
    """Any dataset repository with a LeRobot dataset.

    An id is `OWNER/NAME`, and is taken as it is. The repositories of `lerobot` are listed, and found by their words.
    LeRobot tags the revisions of a dataset by version, like `v3.0`; the newest commit may be of another one.
    """

    name = "lerobot"
    owner = "lerobot"

    def look_up(self, dataset_id: str, revision: str | None, totals: bool) -> RemoteDataset:
        """Find the files of a dataset: a request for the commit, and one for every 1,000 files or so."""
        if not _NAME.fullmatch(safe_id(dataset_id)):
            raise UsageError(f"{dataset_id!r} is no repository", hint="write it like OWNER/NAME")
        commit = self.hub.commit(dataset_id, revision)
        found = [file for file in self.hub.tree(dataset_id, commit) if _FILES.fullmatch(file.path)]
        if all(file.path != INFO for file in found):
            raise DatasetNotFoundError(
                f"hf://{dataset_id} has no {INFO} at {revision or commit[:7]}: it holds no dataset of LeRobot",
                hint="--revision takes a branch, a tag like v3.0, or a commit",
            )
        return self.described(dataset_id, dataset_id, commit, found)

    def choose_files(self, dataset: RemoteDataset, episodes: EpisodeRanges) -> Sequence[RemoteFile]:
        """Return the files of these episodes and all shared ones; in v3 every file is shared."""
        numbers = {file.path: _episode_of(file.path) for file in dataset.files}
        known = sorted({number for number in numbers.values() if number is not None})
        chosen = {None, *(select_episodes(episodes, known) if known else ())}
        return [file for file in dataset.files if numbers[file.path] in chosen]

    def files_read(self, files: Sequence[RemoteFile], options: Mapping[str, Any]) -> Sequence[RemoteFile]:
        """Return the files less the videos where images are left out."""
        skips = options.get("images") == "skip"
        return [file for file in files if not (skips and file.path.endswith(_VIDEO))]

    def shards(self, dataset: RemoteDataset, folder: Path) -> list[RemoteShard]:
        """Return runs of episodes that are in files of their own: one file of rows in v3, else about 64 MiB.

        The metadata are fetched into `folder` for it. A video that holds frames of two shards is a file of both.
        """
        metadata = [file for file in dataset.files if file.path.startswith(_METADATA)]
        self.fetch(metadata, folder)
        entries = list(read_episodes(read_info(folder)).values())
        known = {file.path: file for file in dataset.files}
        sizes = {file.path: file.known_size for file in dataset.files}
        found: list[RemoteShard] = []
        for run in runs_of(entries, sizes):
            paths = dict.fromkeys(path for entry in run for path in paths_of(entry, sizes))
            files = (*metadata, *(known[path] for path in paths))
            found.append(RemoteShard(files, ",".join(str(entry.number) for entry in run)))
        return found

    def episode_numbers(self, dataset: RemoteDataset) -> Sequence[int] | None:
        """Return the numbers of the episodes that have files of their own; None in v3."""
        rows = (_episode_of(path) for path in dataset.paths if path.endswith(".parquet"))
        return sorted({number for number in rows if number is not None}) or None


def _episode_of(path: str) -> int | None:
    found = _EPISODE.fullmatch(path)
    return None if found is None else int(found[1])
