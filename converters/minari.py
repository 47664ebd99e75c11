"""Reads Minari datasets: HDF5, Arrow and Parquet storage, every space and every kind of info that Minari writes.

Needs h5py, pyarrow or Pillow only for datasets that are stored so; never minari, gymnasium or torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

from ..core.dataset import (
    EpisodeRanges,
    EpisodeRow,
    EpisodeTable,
    Piece,
    Reader,
    SourceFacts,
    digest_file,
    running_return,
    select_episodes,
)
from ..core.errors import DatasetNotFoundError
from ..core.ted import end_reason, row_bytes, ted_fields
from .minari_columns import Columns
from .minari_env_metadata import env_metadata
from .minari_episode_text import seed_of
from .minari_metadata import METADATA_FILE, MinariMetadata, looks_like_minari
from .minari_spaces import strict_space
from .minari_store import EpisodeStore
from .minari_survey import Survey, survey

__all__ = ["PIECE_BYTES", "MinariReader"]

PIECE_BYTES = 16 << 20
"""TED bytes of the rows that are in memory at a time."""
_TABLE_ROWS = 1 << 20


class MinariReader(Reader):
    """The Minari dataset in a folder anywhere on disk; also takes the `data` folder in it.

    Raises FormatError for what contradicts itself and CorruptDataError for damaged files. Episodes come in the
    order of their numbers.
    """

    piece_bytes = PIECE_BYTES

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Tell whether Minari's files are there, sound or not."""
        return looks_like_minari(path)

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise DatasetNotFoundError(f"there is nothing at {path}")
        self.path = path
        self.metadata = MinariMetadata.load(path)
        self._store = _open_store(self.metadata)
        self._found: Survey | None = None

    @property
    def _survey(self) -> Survey:
        return self._surveyed(None)

    def _surveyed(self, progress: Callable[[int], None] | None) -> Survey:
        if self._found is None:
            self._found = survey(self._store, self.metadata, progress)
        return self._found

    @cached_property
    def _columns(self) -> Columns:
        return Columns(self._survey)

    @cached_property
    def _steps(self) -> dict[int, int]:
        return dict(zip(self._survey.numbers, self._survey.steps, strict=True))

    def facts(
        self, selection: EpisodeRanges | None = None, *, progress: Callable[[int], None] | None = None
    ) -> SourceFacts:
        """Look the source over; without a selection its totals must be those of the metadata.

        Fields are those of the whole source whatever is selected, so that its parts are alike.
        """
        self._surveyed(progress)
        numbers = self._numbers(selection)
        return SourceFacts(
            source="minari",
            id=self.metadata.id,
            fields=self._columns.fields(),
            episode_numbers=numbers,
            steps=sum(self._steps[number] for number in numbers),
            spaces={name: strict_space(space) for name, space in self.metadata.spaces().items()},
            renamed_keys=self._columns.renamed_keys(),
            dropped_keys=self._columns.dropped_keys(),
            notes=(*self._strangers(), *self._columns.notes(numbers)),
            documents=self.metadata.documents(),
            env_metadata=env_metadata(self.metadata),
        )

    def _numbers(self, selection: EpisodeRanges | None) -> list[int]:
        if selection is None:
            numbers = list(self._survey.numbers)
            self._survey.require_sound(numbers)
            self._survey.require_totals(self.metadata)
        else:
            numbers = select_episodes(selection, self._survey.numbers)
            self._survey.require_sound(numbers)
        return numbers

    def _strangers(self) -> list[str]:
        return [f"{name!r} is no episode and was left out" for name in self._store.strangers()]

    def pieces(self, episodes: Sequence[int] | None = None) -> Iterator[Piece]:
        """Yield the steps of these episodes (all by default), about `piece_bytes` at a time."""
        numbers = self._survey.numbers if episodes is None else episodes
        self._survey.require_sound(numbers)
        size = max(1, self.piece_bytes // max(1, row_bytes(ted_fields(self._columns.fields()))))
        for number in numbers:
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

    def episode_table(self, episodes: Sequence[int] | None = None) -> EpisodeTable:
        """Summarise these episodes (all by default) as a conversion would; reads rewards and flags only."""
        numbers = self._survey.numbers if episodes is None else episodes
        self._survey.require_sound(numbers)
        return EpisodeTable.from_rows([self._episode_row(number) for number in numbers])

    def _episode_row(self, number: int) -> EpisodeRow:
        episode, steps, total = self._store.episode(number), self._steps[number], 0.0
        for start in range(0, steps, _TABLE_ROWS):
            stop = min(start + _TABLE_ROWS, steps)
            total = running_return(total, self._columns.read_rewards(episode, number, start, stop))
        flags = self._columns.read_flags(episode, number, steps - 1, steps)
        terminated, truncated = (bool(flag[0]) for flag in flags)
        return EpisodeRow(
            number, steps, total, terminated, truncated or not terminated, end_reason(terminated, truncated),
            seed_of(episode.attributes()),
        )  # fmt: skip

    def _files(self) -> list[Path]:
        return [self.metadata.folder / METADATA_FILE, *self._store.files()]

    def digests(self) -> dict[str, str]:
        """Digest of every file of the dataset by its path inside the folder that holds `metadata.json`."""
        return {path.relative_to(self.metadata.folder).as_posix(): digest_file(path) for path in self._files()}

    def size(self) -> int:
        """Bytes of the dataset's files."""
        return sum(path.stat().st_size for path in self._files())

    def close(self) -> None:
        """Close the files."""
        self._store.close()


def _open_store(metadata: MinariMetadata) -> EpisodeStore:
    if metadata.data_format == "hdf5":
        from .minari_hdf5 import Hdf5Store  # h5py and pyarrow take longer to load than most datasets to inspect

        return Hdf5Store(metadata.folder)
    from .minari_arrow import ArrowStore

    return ArrowStore(metadata.folder, metadata.data_format)
