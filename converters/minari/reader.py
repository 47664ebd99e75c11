"""Reads Minari datasets: HDF5, Arrow and Parquet storage, every space and every kind of info that Minari writes.

Imports h5py, pyarrow or Pillow only for datasets stored that way; never minari, gymnasium or torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from ...core.format.contracts import Piece, SourceFacts
from ...core.format.reader import Reader
from ...core.ted.schema import REWARD, row_bytes, ted_fields
from .columns import SourceColumns
from .metadata import METADATA_FILE, MinariMetadata, env_metadata, looks_like_minari
from .names import seed_of
from .spaces import strict_space
from .store import EpisodeStore
from .survey import Survey, survey

PIECE_BYTES = 16 << 20
"""TED bytes of the rows in memory at a time."""
_TABLE_ROWS = 1 << 20


class MinariReader(Reader):
    """The Minari dataset in a folder anywhere on disk; also takes the `data` folder in it.

    Raises FormatError for contradictions and CorruptDataError for damaged files. Episodes are in the order of their
    numbers.
    """

    piece_bytes = PIECE_BYTES

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether the folder has Minari's files, sound or not."""
        return looks_like_minari(path)

    def on_open(self) -> None:
        """Read the metadata, and open the store of episodes."""
        self.metadata = MinariMetadata.load(self.path)
        self._store = _open_store(self.metadata)
        self._found: Survey | None = None

    @property
    def folder(self) -> Path:
        """The folder that holds `metadata.json`."""
        return self.metadata.folder

    @property
    def _survey(self) -> Survey:
        return self._surveyed(None)

    def _surveyed(self, progress: Callable[[int], None] | None) -> Survey:
        if self._found is None:
            self._found = survey(self._store, self.metadata, progress)
        return self._found

    @cached_property
    def _columns(self) -> SourceColumns:
        return SourceColumns(self._survey)

    @cached_property
    def _steps(self) -> dict[int, int]:
        return dict(zip(self._survey.numbers, self._survey.steps, strict=True))

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Look at every episode; fields are those of the whole source, so that all parts of it have the same."""
        found = self._surveyed(progress)
        return SourceFacts(
            source="minari",
            id=self.metadata.id,
            fields=self._columns.fields(),
            episode_numbers=list(found.numbers),
            steps=sum(found.steps),
            spaces={name: strict_space(space) for name, space in self.metadata.spaces().items()},
            renamed_keys=self._columns.renamed_keys(),
            dropped_keys=self._columns.dropped_keys(),
            notes=tuple(f"{name!r} is no episode and was left out" for name in self._store.other_names()),
            documents=self.metadata.documents(),
            env_metadata=env_metadata(self.metadata),
            lengths=list(found.steps),
        )

    def require_sound(self, numbers: Sequence[int], *, everything: bool) -> None:
        """Refuse damaged episodes; all of them together must have the totals of the metadata."""
        self._survey.require_sound(numbers)
        if everything:
            self._survey.require_totals(self.metadata)

    def notes_on(self, numbers: Sequence[int]) -> Sequence[str]:
        """Widened types, missing values and contradictions to the spaces in these episodes."""
        return self._columns.notes(numbers)

    def read_episode(self, number: int) -> Iterator[Piece]:
        """Yield the steps of one episode, about `piece_bytes` at a time."""
        size = max(1, self.piece_bytes // max(1, row_bytes(ted_fields(self._columns.fields()))))
        episode, steps = self._store.episode(number), self._steps[number]
        attributes = episode.attributes()
        text = self._columns.read_texts(episode, number, attributes)
        for start in range(0, steps, size):
            stop = min(start + size, steps)
            terminated, truncated = self._columns.read_flags(episode, number, start, stop)
            columns = self._columns.read(episode, number, start, stop)
            yield Piece(
                number, columns, terminated, truncated, first=not start, last=stop == steps,
                seed=seed_of(attributes), text=text,
            )  # fmt: skip

    def read_outcomes(self, number: int) -> Iterator[Piece]:
        """Yield the rewards, and the flags of the last step, of one episode."""
        episode, steps = self._store.episode(number), self._steps[number]
        seed = seed_of(episode.attributes())
        for start in range(0, steps, _TABLE_ROWS):
            stop = min(start + _TABLE_ROWS, steps)
            rewards = self._columns.read_rewards(episode, number, start, stop)
            terminated, truncated = np.zeros((2, stop - start), bool)
            if stop == steps:
                ends = self._columns.read_flags(episode, number, steps - 1, steps)
                terminated[-1:], truncated[-1:] = ends
            yield Piece(
                number, {REWARD: rewards}, terminated, truncated, first=not start, last=stop == steps, seed=seed
            )

    def files(self) -> list[Path]:
        """The metadata and the files of the store."""
        return [self.metadata.folder / METADATA_FILE, *self._store.files()]

    def on_close(self) -> None:
        """Close the files."""
        self._store.close()


def _open_store(metadata: MinariMetadata) -> EpisodeStore:
    if metadata.data_format == "hdf5":
        from .hdf5 import Hdf5Store  # h5py and pyarrow take longer to load than most datasets to inspect

        return Hdf5Store(metadata.folder)
    from .arrow import ArrowStore

    return ArrowStore(metadata.folder, metadata.data_format)
