"""Downloads published Minari datasets; never through minari itself."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from ...core.errors import NetworkError, RbtoolError, UsageError
from ...core.format.documents import written_time
from ...core.format.episodes import EpisodeRanges, select_episodes
from ...core.format.sources import (
    Advance,
    Catalogue,
    CatalogueEntry,
    Ids,
    LocalCache,
    Note,
    RemoteDataset,
    RemoteFile,
    Source,
)
from ...core.remote.fetch import fetch_files
from ...core.remote.threads import ask_all
from .remotes import MinariBucket, MinariOrganisation, MinariRemote, raise_if_all_failed, state_of

_REMOTE = "MINARI_REMOTE"
_DEFAULT = "hf://farama-minari"
_NAMED = re.compile(r"(?P<kind>hf|gcp)://(?P<name>[A-Za-z0-9][\w.-]*)/?", re.ASCII)
_KINDS: dict[str, type[MinariOrganisation | MinariBucket]] = {"hf": MinariOrganisation, "gcp": MinariBucket}
_EPISODE_FILE = re.compile(r"data/(0|[1-9]\d{0,17})/.+")


class MinariSource(Source):
    """The remote that `MINARI_REMOTE` names: `hf://ORGANISATION` (by default `hf://farama-minari`) or `gcp://BUCKET`."""

    name = "minari"
    local_cache = LocalCache("minari", "MINARI_DATASETS_PATH", "~/.minari/datasets")

    @property
    def remote(self) -> str:
        """The remote's address; raises UsageError if the variable has another form."""
        return self._remote.address

    @property
    def key(self) -> str:
        """The remote's address, with the host of the hub."""
        return self._remote.key

    @cached_property
    def _remote(self) -> MinariRemote:
        address = os.environ.get(_REMOTE) or _DEFAULT
        named = _NAMED.fullmatch(address)
        if named is None:
            raise UsageError(
                f"{_REMOTE} is {address!r}; hf://ORGANISATION or gcp://BUCKET is expected",
                hint=f"unset it for {_DEFAULT}",
            )
        return _KINDS[named["kind"]](named["name"])

    def list_ids(self) -> Ids:
        """List the ids alone: on a hub, a request for the repositories and one for the index of each."""
        return self._remote.ids()

    def list_catalogue(self, known: Catalogue | None, progress: Callable[[int, int], None]) -> Catalogue:
        """List all datasets; the metadata of each that differs from `known` are requested one by one."""
        found = self._remote.datasets()
        fetched = written_time()
        before = {entry.state: entry for entry in known.entries if entry.state} if known else {}
        entries = {
            dataset.id: CatalogueEntry(dataset.id, dataset.bytes, old.steps, old.episodes, old.state)
            for dataset in found.datasets
            if (old := before.get(state_of(dataset))) is not None
        }
        fresh = [dataset for dataset in found.datasets if dataset.id not in entries]
        done = len(entries)

        def report(more: int) -> None:
            nonlocal done
            done += more
            progress(done, len(found.datasets))

        report(0)
        calls = [functools.partial(self._remote.totals, dataset) for dataset in fresh]
        results = ask_all(calls, self._remote.transport, done=report)
        if not entries:
            raise_if_all_failed(results)
        problems = list(found.problems)
        for dataset, result in zip(fresh, results, strict=True):
            if isinstance(result, RbtoolError):
                problems.append(f"the steps and episodes of {dataset.id} are not known: {result.message}")
                entries[dataset.id] = CatalogueEntry(dataset.id, dataset.bytes)
            else:
                entries[dataset.id] = CatalogueEntry(dataset.id, dataset.bytes, *result, state_of(dataset))
        ordered = tuple(entries[dataset.id] for dataset in found.datasets)
        unreachable = found.unreachable or any(isinstance(result, NetworkError) for result in results)
        return Catalogue(self.remote, fetched, ordered, tuple(problems), unreachable)

    def look_up(self, dataset_id: str, revision: str | None, totals: bool) -> RemoteDataset:
        """Find the files of a dataset: on a hub, a request for the commit, the files, and the metadata for `totals`."""
        found = self._remote.describe(dataset_id, revision)
        if not totals:
            return found
        steps, episodes = self._remote.totals(found)
        return replace(found, steps=steps, episodes=episodes)

    def episode_numbers(self, dataset: RemoteDataset) -> Sequence[int] | None:
        """List them for Arrow and Parquet, by their folders; None for HDF5."""
        return sorted(set(_numbered(dataset).values())) or None

    def choose_files(self, dataset: RemoteDataset, episodes: EpisodeRanges) -> Sequence[RemoteFile]:
        """Choose the files: HDF5 has all episodes in one, Arrow and Parquet have a folder for each.

        Raises UsageError for episodes that have no folder.
        """
        numbers = self.episode_numbers(dataset)
        if numbers is None:
            return dataset.files
        chosen = set(select_episodes(episodes, numbers))
        numbered = _numbered(dataset)
        return tuple(file for file in dataset.files if numbered.get(file.path, -1) in {-1, *chosen})

    def download(self, files: Sequence[RemoteFile], folder: Path, progress: Advance, note: Note) -> None:
        """Download the files to `folder`, a few at a time."""
        fetch_files(files, folder, self._remote.transport, progress=progress, note=note)

    def on_close(self) -> None:
        """Close the connections, if there are any."""
        if "_remote" in self.__dict__:
            self._remote.close()


def _numbered(dataset: RemoteDataset) -> dict[str, int]:
    """The number of the episode of every file that is in the folder of one."""
    return {file.path: int(found[1]) for file in dataset.files if (found := _EPISODE_FILE.fullmatch(file.path))}
