"""Where the datasets of one source lie for those who name the folder themselves, and how they come there."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError
from ..format import Staging, fs, has_manifest, mend, remove_dataset, safe_id, storage_root
from ..remote import KnownNames, told_instead
from ..verbs.download import DownloadResult, download

__all__ = ["SourceFolder"]

_STORE = ".rbtool-store"


@dataclass(frozen=True, slots=True)
class SourceFolder:
    """The folder with the datasets of `source`: the dataset `<id>` is at `<folder>/<id>`."""

    source: str
    folder: Path

    @classmethod
    def below(cls, source: str, root: str | os.PathLike[str] | None) -> SourceFolder:
        """Take the folder `root`; None is the source's own below the storage root."""
        return cls(source, fs.expanded(root).absolute() if root is not None else storage_root() / source)

    @property
    def _store(self) -> Path:
        """The storage root to download into: there, datasets of the source go to `<store>/<source>/<id>`.

        A folder that bears the source's name is that very place, unless it is a link, which a store has none of. For
        any other the store is a hidden one inside it, on the same file system, and what was downloaded is moved out
        of it. UsageError if that one is a link: what it leads to would be written to, and removed.
        """
        if self.folder.name == self.source and not self.folder.is_symlink():
            return self.folder.parent
        fs.refuse_links(self.folder, self.folder / _STORE)
        return self.folder / _STORE

    def find(self, asked: str) -> Path | None:
        """Return where the dataset is, by its id or by words that were found to mean it; None if it is not there."""
        known = KnownNames(self._store, self.source).get(asked)
        for dataset_id in (safe_id(asked), known.id if known is not None else None):
            if dataset_id is not None:
                mend(self.folder / dataset_id)
                if has_manifest(self.folder / dataset_id):
                    return self.folder / dataset_id
        return None

    def fetch(self, asked: str, *, force: bool = False) -> Path:
        """Download the dataset and return where it is; report it if another name was taken for what was asked.

        `force` replaces what is there. Raises what `download` does.
        """
        result = download(self.source, asked, root=self._store, force=force)
        if result.resolved == "words":
            warnings.warn(told_instead(asked, result.id), stacklevel=4)
        return self._placed(result, replace=force)

    def rebuild(self, asked: str) -> Path:
        """Make the dataset again from the source's own local cache, unless it is what that holds already."""
        there = self._store / self.source / safe_id(asked)
        try:
            result = download(self.source, asked, local=True, root=self._store)
        except UsageError:
            if not has_manifest(there):
                raise
            result = download(self.source, asked, local=True, root=self._store, force=True)
        return self._placed(result, replace=True)

    def _placed(self, result: DownloadResult, *, replace: bool) -> Path:
        """Move what was downloaded to its place, where it is not there yet."""
        place = self.folder / result.id
        if result.path == place:
            return place
        try:
            with (
                Staging(place, replace=replace, below=self.folder) as staging,
                fs.folder_below(self._store, result.path.parent) as within,
                fs.folder_below(self.folder, staging.path) as into,
            ):
                fs.rename(result.path, staging.path / "dataset", within=within, into=into)
                staging.publish("dataset")
        except (FileNotFoundError, UsageError):
            if replace or not has_manifest(place):
                raise
            if has_manifest(result.path):  # another process was quicker
                remove_dataset(result.path, below=self._store)
        return place
