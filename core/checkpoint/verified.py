"""Takes the digests of a dataset's leaves while they are read, so that nothing has to be read twice."""

from __future__ import annotations

from ..format import (
    Array,
    EpisodeTable,
    Hasher,
    StepReader,
    TedReader,
    bytes_of,
    changed,
    leaf_path,
)
from ..ted import Key

__all__ = ["VerifyingReader"]


class VerifyingReader(StepReader):
    """Passes the rows of a dataset in layout `ted` on. `verify_files` then reads only what was not read in order."""

    def __init__(self, source: TedReader) -> None:
        self.manifest = source.manifest
        self.path = source.path
        self._source = source
        self._rows: dict[Key, int] = {}
        self._hashers: dict[Key, Hasher] = {}

    @property
    def episodes(self) -> EpisodeTable:
        """The episode table."""
        return self._source.episodes

    @property
    def episode_text(self) -> list[dict[str, str]] | None:
        """Text that belongs to episodes."""
        return self._source.episode_text

    def read(self, key: Key, start: int, stop: int) -> Array:
        """View rows of one leaf, and add them to its digest if they follow those added before.

        The array cannot be written: it shows the file, of which nothing is copied.
        """
        rows = self._source.view(key, start, stop)
        if self._rows.setdefault(key, 0) == start:
            self._hashers.setdefault(key, Hasher()).update(bytes_of(rows))
            self._rows[key] = stop
        return rows

    def documents(self) -> dict[str, bytes]:
        """The source's own metadata files by name."""
        return self._source.documents()

    def verify_files(self) -> None:
        """Raise CorruptDataError for the first file whose bytes differ from the recorded digest."""
        files = self.manifest.files
        self._source.listed.check_sizes()
        whole = self.verify_read()
        self._source.listed.verify(file for file in files if file.path not in whole)

    def verify_read(self) -> set[str]:
        """Raise CorruptDataError for the first of the leaves read in order whose bytes differ; return their files."""
        whole = {leaf_path(key): key for key, rows in self._rows.items() if rows == self.manifest.steps}
        for file in self.manifest.files:
            if file.path in whole and self._hashers[whole[file.path]].digest != file.digest:
                raise changed(self.path / file.path)
        return set(whole)
