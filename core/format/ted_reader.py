"""Reads a dataset in layout `ted` by position, so that memory stays bounded and forks share nothing."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Self

from ..errors import CorruptDataError, FormatError
from ..ted import Field, Key, key_name
from .contracts import Array, StepReader
from .digest import FileRecord
from .episodes import EPISODES_TEXT, EpisodeTable, parse_episode_text
from .listed import ListedFiles
from .manifest import ENV_METADATA, HIDDEN, MANIFEST, SOURCE_DOCUMENTS, is_source_document
from .mapped import view_rows
from .staging import mend
from .tree import leaf_path, read_tree

__all__ = ["FolderReader", "TedReader"]


class FolderReader(StepReader):
    """What all layouts that are folders share: manifest, episode table, text, documents, digests.

    All files are opened with it, or were: `listed`, which this closes. What is put at `path` later is never read.
    A subclass for damaged datasets unsets `_whole`: files of rows need not be there in full length then.
    """

    _whole = True

    def __init__(self, path: Path, listed: ListedFiles | None = None) -> None:
        mend(path)
        self.path = path
        self.listed = listed or ListedFiles.at(path)
        self.manifest = self.listed.manifest
        self._table = EpisodeTable.load(self.listed.read, str(path))
        for file in self.manifest.files:
            if _describes_rows(file):
                self.listed.read(file.path)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path, self.listed)

    def again(self) -> Self:
        """Return a reader of the very same files, for another thread or process."""
        return type(self)(self.path, self.listed.again())

    def files_state(self) -> str:
        """Tell one state of the files from another without reading them."""
        return self.listed.state()

    @cached_property
    def episodes(self) -> EpisodeTable:
        """The episode table, compared with its digests when the folder was opened."""
        return self._read_episodes()

    def _read_episodes(self) -> EpisodeTable:
        table = self._table
        if len(table) != self.manifest.episodes or table.steps != self.manifest.steps:
            raise CorruptDataError(
                f"{self.path}: the episode table holds {len(table)} episodes and {table.steps} steps, the manifest "
                f"says {self.manifest.episodes} and {self.manifest.steps}"
            )
        return table

    @cached_property
    def episode_text(self) -> list[dict[str, str]] | None:
        """Text that belongs to episodes, read at first use."""
        if EPISODES_TEXT not in self.listed:
            return None
        return parse_episode_text(self.listed.read(EPISODES_TEXT), str(self.path / EPISODES_TEXT))

    def documents(self) -> dict[str, bytes]:
        """The source's own metadata files by name."""
        names = [file.path for file in self.manifest.files if is_source_document(file.path)]
        return {name.removeprefix(SOURCE_DOCUMENTS): self.listed.read(name) for name in names}

    @property
    def kept_steps(self) -> int:
        """How many steps at the beginning lost no row to files that are cut or missing; all, of what opens whole."""
        return self.manifest.steps

    def verify_files(self) -> None:
        """Compare every file with its digest in the manifest, and the manifest with the form it is written in."""
        if problem := self.listed.manifest_problem():
            raise CorruptDataError(problem)
        self.listed.check_sizes()
        self.listed.verify(self.manifest.files)

    def read_leaf(self, key: Key, leaf: Field, start: int, stop: int) -> Array:
        """Read rows of the file of `key`, whose rows look like `leaf`."""
        return self.listed.rows(leaf_path(key), leaf, start, stop)

    def close(self) -> None:
        """Close the files."""
        self.listed.close()


class TedReader(FolderReader):
    """Rows of a dataset (or a checkpoint) in layout `ted`."""

    def __init__(self, path: Path, listed: ListedFiles | None = None) -> None:
        super().__init__(path, listed)
        if self.manifest.layout != "ted":
            raise FormatError(f"{path} has layout {self.manifest.layout}, ted is expected here")
        self._require_listed_leaves()

    def _require_listed_leaves(self) -> None:
        """Compare the sizes of the leaves as the manifest lists them with the fields it describes."""
        for field in self.fields:
            name, expected = leaf_path(field.key), self.manifest.steps * field.row_bytes
            found = self.listed.listed_size(name) or 0
            if found != expected:
                raise CorruptDataError(
                    f"{self.path / MANIFEST} lists {found:,} bytes of {name}, {expected:,} are expected for "
                    f"{self.manifest.steps:,} rows of {field.name!r}"
                )

    def read(self, key: Key, start: int, stop: int) -> Array:
        """Read rows of one leaf by position."""
        return self.read_leaf(key, self._leaf(key, start, stop), start, stop)

    def view(self, key: Key, start: int, stop: int) -> Array:
        """View rows of one leaf where they lie in the file."""
        name, leaf = leaf_path(key), self._leaf(key, start, stop)
        descriptor = self.listed.descriptor(name) if leaf.row_bytes else -1
        return view_rows(descriptor, self.path / name, leaf, start, stop)

    @property
    def kept_steps(self) -> int:
        """How many steps at the beginning lost no row to files that are cut or missing."""
        sized = [field for field in self.fields if field.row_bytes]
        kept = [(self.listed.size(leaf_path(field.key)) or 0) // field.row_bytes for field in sized]
        return min(*kept, self.manifest.steps, self.manifest.steps)

    def check_tree(self, besides: Collection[str] = ()) -> None:
        """Compare the `meta.json` files and file sizes with the manifest; raise CorruptDataError if they differ.

        The sizes of the files `besides` are not compared.
        """
        leaves = read_tree(self.listed, besides=besides)
        expected = {field.key: (field.dtype, (self.manifest.steps, *field.shape)) for field in self.fields}
        found = {key: (leaf.dtype, leaf.shape) for key, leaf in leaves.items()}
        if found != expected:
            odd = sorted({key_name(key) for key, _ in set(found.items()) ^ set(expected.items())})
            raise CorruptDataError(f"{self.path}: meta.json and the manifest disagree on {', '.join(odd)}")


def _describes_rows(file: FileRecord) -> bool:
    """Whether a file describes the row layout of others; the hidden ones of the episode table are read separately."""
    return file.path.endswith(".json") and not file.path.startswith(f"{HIDDEN}/") and file.path != ENV_METADATA
