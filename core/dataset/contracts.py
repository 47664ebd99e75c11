"""The contracts between formats and the core: N inputs and M outputs never make N x M pieces of code.

`Reader` turns a path in some format into episodes; `StepReader` gives the rows of a dataset or a checkpoint that
rbtool wrote, whatever its layout. Everything that inspects, checks, converts or saves works on one of the two.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np

from ..errors import SchemaError
from ..ted import Field, Key, Timing, key_name
from .digest import digest_of_stats
from .episodes import EpisodeTable
from .manifest import Dropped, Manifest
from .selection import EpisodeRanges

__all__ = ["Array", "Closing", "Piece", "Reader", "SourceFacts", "StepReader"]

Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """What a reader knows of its source before it reads any step.

    `fields` pairs each source field, under its root key, with when it is known. `spaces` holds the observation
    and action spaces as strict JSON. `documents` are the source's own metadata files, kept verbatim.
    `episode_numbers` are the source's ids of all its episodes in storage order; `steps` is their total length.
    """

    source: str
    id: str
    fields: tuple[tuple[Field, Timing], ...]
    episode_numbers: Sequence[int]
    steps: int
    spaces: Mapping[str, Any] = field(default_factory=dict)
    renamed_keys: Mapping[str, str] = field(default_factory=dict)
    dropped_keys: tuple[Dropped, ...] = ()
    notes: tuple[str, ...] = ()
    documents: Mapping[str, bytes] = field(default_factory=dict)
    env_metadata: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Some consecutive steps of one episode.

    `columns` holds, under the root keys of the source fields, n+1 rows of each `state` (those before every step
    and the one after the last) and n rows of each `step` and `result`. `last` marks the end of the episode;
    `seed` and `text` (strings that belong to the whole episode) count where `first` is set.
    """

    episode: int
    columns: Mapping[Key, Array]
    terminated: Array
    truncated: Array
    first: bool
    last: bool
    seed: int | None = None
    text: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.terminated)


class Closing:
    """Something that holds files open; also a context manager."""

    def close(self) -> None:
        """Give back what is held open; harmless when done twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class Reader(Closing, ABC):
    """Reads one dataset in a foreign format; memory is bounded by one piece.

    A subclass says in `recognises` which paths it reads, by content and not by name.
    """

    @classmethod
    @abstractmethod
    def recognises(cls, path: Path) -> bool:
        """Tell whether `path` looks like this format. Must be cheap and must not raise."""

    @abstractmethod
    def __init__(self, path: Path) -> None:
        """Open the dataset at `path`, or raise FormatError or DatasetNotFoundError."""

    @abstractmethod
    def facts(
        self, selection: EpisodeRanges | None = None, *, progress: Callable[[int], None] | None = None
    ) -> SourceFacts:
        """Look the source over (a pass over structure and text, not over the arrays).

        With a selection, `episode_numbers`, `steps` and `notes` are about the episodes chosen, and only those have
        to be sound; the fields are those of the whole source. Without one, the source must agree with its totals.
        `progress` hears how many more episodes were looked at.
        """

    @abstractmethod
    def pieces(self, episodes: Sequence[int] | None = None) -> Iterator[Piece]:
        """Yield the steps of these episodes (all by default) in storage order, in pieces of bounded size."""

    @abstractmethod
    def episode_table(self, episodes: Sequence[int] | None = None) -> EpisodeTable:
        """Summarise these episodes (all by default) from their rewards and flags alone, as a conversion would."""

    @abstractmethod
    def digests(self) -> dict[str, str]:
        """Digest of every source file by its path inside the source."""

    @abstractmethod
    def size(self) -> int:
        """Bytes of the source's files."""


class StepReader(Closing, ABC):
    """Gives the TED rows of what rbtool wrote, from any layout. Safe to fork and to open many times."""

    manifest: Manifest
    path: Path

    @property
    def fields(self) -> tuple[Field, ...]:
        """The TED leaves, root and `next` alike."""
        return self.manifest.fields

    @property
    def has_digests(self) -> bool:
        """Whether digests were recorded, with which `verify_files` compares."""
        return bool(self.manifest.files)

    @property
    @abstractmethod
    def episodes(self) -> EpisodeTable:
        """The episode table."""

    @property
    @abstractmethod
    def episode_text(self) -> list[dict[str, str]] | None:
        """Text that belongs to episodes, in table order; None where there is none."""

    @abstractmethod
    def read(self, key: Key, start: int, stop: int) -> Array:
        """Read rows `[start, stop)` of one leaf as a fresh array `[stop - start, *shape]`."""

    def view(self, key: Key, start: int, stop: int) -> Array:
        """Return the rows that `read` returns in an array that need not be fresh: look at it, and change nothing."""
        return self.read(key, start, stop)

    def pieces(self, key: Key, start: int, stop: int) -> Iterator[Array]:
        """Yield the rows that `read` returns in pieces that need not be fresh: look at them, and change nothing."""
        yield self.read(key, start, stop)

    @abstractmethod
    def documents(self) -> dict[str, bytes]:
        """The source's own metadata files by name, and `env_metadata.json` where there is one."""

    def again(self) -> StepReader:
        """Return a reader of the same steps, for another thread or process; of the very same files where it can."""
        return copy.copy(self)

    def files_state(self) -> str:
        """Tell one state of the files from another without reading them."""
        return digest_of_stats([self.path] if self.path.is_file() else sorted(self.path.rglob("*")))

    @abstractmethod
    def verify_files(self) -> None:
        """Raise CorruptDataError for the first file whose bytes differ from the recorded digest."""

    def proven_episodes(self) -> Array | None:
        """Whether the bytes of each episode have the digest recorded of it; None where single episodes have none."""
        return None

    def chunks(self, chunk_bytes: int = 16 << 20) -> Iterator[tuple[int, int]]:
        """Split all rows into ranges of about `chunk_bytes`; at least one row each."""
        rows = max(1, chunk_bytes // max(1, sum(leaf.row_bytes for leaf in self.fields)))
        for start in range(0, self.manifest.steps, rows):
            yield start, min(start + rows, self.manifest.steps)

    def _leaf(self, key: Key, start: int, stop: int) -> Field:
        """Find the field of `key` and check the row range."""
        for leaf in self.fields:
            if leaf.key == key:
                if 0 <= start <= stop <= self.manifest.steps:
                    return leaf
                raise SchemaError(f"rows {start}:{stop} asked for, there are {self.manifest.steps}")
        raise SchemaError(f"no field {key_name(key)!r} in {self.path}")
