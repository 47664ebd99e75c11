"""Downloads datasets of LeRobot from a Hugging Face hub: any repository that has one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ...core.errors import DatasetNotFoundError, UsageError
from ...core.format.episodes import EpisodeRanges, select_episodes
from ...core.format.sources import Advance, Ids, Note, RemoteDataset, RemoteFile, RemoteShard, Source, safe_id
from ...core.remote.fetch import fetch_files
from ...core.remote.hub import Hub, hub_endpoint
from .info import INFO, read_info
from .metadata import read_episodes
from .runs import paths_of, runs_of

OWNER = "lerobot"
"""The organisation whose repositories are listed."""
_METADATA, _VIDEO = "meta/", ".mp4"
_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_FILES = re.compile(r"(meta|data|videos?|images)/.*\.(json|jsonl|parquet|mp4)", re.ASCII)
_EPISODE = re.compile(r".*/episode_(\d{1,9})\.(?:parquet|mp4)", re.ASCII)


class LerobotSource(Source):
    """Any dataset repository with a LeRobot dataset, on the hub that the environment names (`HF_ENDPOINT`, `HF_TOKEN`).

    An id is `OWNER/NAME`, and is taken as it is. The repositories of `lerobot` are listed, and found by their words.
    LeRobot tags the revisions of a dataset by version, like `v3.0`; the newest commit may be of another one.
    """

    name = "lerobot"
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
        """List the repositories of `lerobot`."""
        return Ids(tuple(one.name for one in self.hub.repositories(OWNER)))

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
        files = (
            RemoteFile(file.path, file.size, file.checksum, (self.hub.address(dataset_id, commit, file.path),))
            for file in found
        )
        ordered = tuple(sorted(files, key=lambda file: file.path))
        return RemoteDataset(dataset_id, f"hf://{dataset_id}@{commit}", commit, ordered)

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
        """Return runs of episodes that are in files of their own: in v3 those of a file of rows, else about 64 MiB.

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

    def download(self, files: Sequence[RemoteFile], folder: Path, progress: Advance, note: Note) -> None:
        """Bring the files to `folder`, a few at a time."""
        fetch_files(files, folder, self.hub, progress=progress, note=note)

    def reader_options(self, dataset_id: str) -> dict[str, str]:
        """The repository, which the files do not state."""
        return {"id": dataset_id}

    def on_close(self) -> None:
        """Close the connections, if there are any."""
        if "hub" in self.__dict__:
            self.hub.close()


def _episode_of(path: str) -> int | None:
    found = _EPISODE.fullmatch(path)
    return None if found is None else int(found[1])
