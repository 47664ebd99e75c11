"""The contract of what writes a dataset in another format, and the episodes of a dataset that it is given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, final

from ..errors import SchemaError, UsageError
from ..ted.schema import Field, Key
from .contracts import Array, StepReader, own_attributes, refuse_overrides
from .episodes import EpisodeTable
from .manifest import Dropped
from .returns import table_with_returns
from .videos import refuse_videos

_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class Chosen:
    """Episodes of a dataset, one after another: those in the rows `rows`, ascending, of its episode table."""

    reader: StepReader
    rows: Array

    @cached_property
    def table(self) -> EpisodeTable:
        """The episode table of these alone; `start` counts from the first of their steps."""
        return table_with_returns(self.reader).chosen(self.rows)

    @property
    def steps(self) -> int:
        """Steps of these episodes."""
        return self.table.steps

    @property
    def fields(self) -> tuple[Field, ...]:
        """The TED leaves."""
        return self.reader.fields

    @cached_property
    def text(self) -> list[dict[str, str]] | None:
        """The texts of the episodes; None if there are none."""
        texts = self.reader.episode_text
        return None if texts is None else [texts[row] for row in self.rows.tolist()]

    def episode(self, position: int) -> tuple[int, int]:
        """Return where the steps of the episode at `position` are in the whole dataset, half-open."""
        table, row = self.reader.episodes, int(self.rows[position])
        start = int(table.start[row])
        return start, start + int(table.length[row])

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield half-open ranges of the whole dataset's steps, as long as can be, that hold these episodes."""
        first = last = 0
        for position in range(len(self.rows)):
            start, stop = self.episode(position)
            if start != last:
                if last > first:
                    yield first, last
                first = start
            last = stop
        if last > first:
            yield first, last

    def chunks(self, key: Key, row_bytes: int) -> Iterator[Array]:
        """Yield all rows of a leaf in chunks of about 4 MB; `row_bytes` is what a row takes."""
        size = max(1, _CHUNK_BYTES // max(1, row_bytes))
        for first, last in self.spans():
            for start in range(first, last, size):
                yield self.reader.read(key, start, min(start + size, last))


class Sink(ABC):
    """Writes episodes in one format.

    `keeps_videos` states that it can hold videos that a dataset keeps; others refuse such a dataset. Options that a
    format takes are named in `option_names` and found in `self.options`: `fps` is `--fps` of the command line.

    The public methods are final. A subclass implements `made(path)`; `prepare()`, which refuses what the format cannot
    hold; and `write_rows(target, progress)`. It may implement `size`.

    `notes` are sentences on what is different there, `dropped` the keys left out; both are known once `check` has
    returned.
    """

    keeps_videos: ClassVar[bool] = False
    option_names: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse_overrides(cls, own_attributes(cls, Sink), {"check": "prepare", "write": "write_rows"})

    def __init__(self, chosen: Chosen, name: str, options: Mapping[str, Any] | None = None) -> None:
        """Take the episodes and the name of the destination; UsageError for `options` that the format does not have."""
        self.chosen = chosen
        self.name = name
        self.options: Mapping[str, Any] = dict(options or {})
        for option in self.options.keys() - self.option_names:
            raise UsageError(f"an export in this format has no option --{option}", hint=f"leave out --{option}")
        self._prepared = False
        self.notes: list[str] = []
        self.dropped: list[Dropped] = []

    @classmethod
    @abstractmethod
    def made(cls, path: Path) -> bool:
        """Return whether `path` is an export in this format, with nothing of others in it; must not raise."""

    @abstractmethod
    def prepare(self) -> None:
        """Raise SchemaError where the format cannot hold the data, and fill `notes` and `dropped`; called once."""

    def size(self) -> int:
        """Bytes that the rows take before compression."""
        return sum(field.row_bytes for field in self.chosen.fields) * self.chosen.steps

    @abstractmethod
    def write_rows(self, target: Path, progress: Callable[[int], None]) -> None:
        """Write all to the new file or folder `target`, synced; `progress` takes bytes of rows, up to `size`."""

    @final
    def check(self) -> None:
        """Raise SchemaError where the format cannot hold the data, before anything is written."""
        if not self._prepared:
            if not self.keeps_videos:
                refuse_videos(self.chosen.reader, "an export in this format")
            self.prepare()
            self._prepared = True

    @final
    def write(self, target: Path, progress: Callable[[int], None]) -> None:
        """Check, and write all to `target`, which must be free; SchemaError for a format that has not written it."""
        self.check()
        if target.exists():
            raise UsageError(f"{target} already exists")
        self.write_rows(target, progress)
        if not target.exists():
            raise SchemaError(f"{type(self).__name__} has written nothing to {target}")

    def refuse(self, dtypes: set[str], what: str) -> None:
        """Raise SchemaError for the first field of one of these element types."""
        for field in self.chosen.fields:
            if field.dtype in dtypes:
                raise SchemaError(
                    f"{field.name} is {field.dtype}, which {what} does not know",
                    hint="convert the field first",
                )
