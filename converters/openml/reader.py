"""Reads a table of OpenML as it was downloaded, an ARFF file and its description: every row is an episode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import CorruptDataError, FormatError, UsageError
from ...core.format.contracts import Array, EpisodeBlock, Piece, SourceFacts
from ...core.format.digest import read_regular
from ...core.format.documents import dump_json, parse_json
from ...core.format.manifest import Dropped
from ...core.format.reader import Reader
from ...core.ted.episodes import Final
from ...core.ted.schema import Field, Key
from .arff import ArffFile
from .datasets import dataset_named
from .encoding import Encoding

DESCRIPTION = "description.json"
OBSERVATION: Key = ("observation",)
LABEL: Key = ("y",)


class OpenmlReader(Reader):
    """A folder with one ARFF file and `description.json`, the answer of OpenML to what the table is.

    `observation` is the encoded row, float64; `y` the label as a number from 0, int64. There is no action and no
    reward: which label is chosen, and what that is worth, is up to the bandit. Every episode has one step, which is
    terminated, and no next observation. Never detected: `rbtool download openml ID` reads what it fetched.

    Options: `id` is the name of the dataset, which states the encoding. Raises FormatError for other tables, and
    CorruptDataError for damaged files.
    """

    option_names = frozenset({"id"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return False: how a table is encoded is stated by the id alone."""
        return False

    def on_open(self) -> None:
        """Read the description and the header."""
        if "id" not in self.options:
            raise UsageError(
                f"{self.path}: which dataset it is has to be stated", hint="fetch it with rbtool download openml ID"
            )
        self._dataset = dataset_named(str(self.options["id"]))
        self._description = description_in(read_regular(self.path / DESCRIPTION), str(self.path / DESCRIPTION))
        found = sorted(self.path.glob("*.arff"))
        if len(found) != 1:
            raise FormatError(f"{self.path} has {len(found)} ARFF files, expected one")
        self._file = ArffFile(found[0])
        self._encoding: Encoding | None = None
        self._blocks: Iterator[tuple[Array, Array]] = iter(())
        self._block: tuple[Array, Array] = (np.zeros((0, 0)), np.zeros(0, np.int64))
        self._start = self._stop = 0

    def _encoded(self) -> Encoding:
        if self._encoding is None:
            target = str(self._description.get("default_target_attribute") or "")
            ignored = [*_names(self._description, "ignore_attribute"), *_names(self._description, "row_id_attribute")]
            self._encoding = Encoding(self._file, self._dataset, target, ignored)
        return self._encoding

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Read the file once: which categories there are, means and deviations."""
        found = self._encoded()
        progress(found.rows)
        notes = [
            "every row is an episode of one step, without action, reward and next observation: a contextual bandit",
            f"the label is {found.label.attribute.name}, a number for each of {len(found.label.names)} categories",
        ]
        if found.left_out:
            which = "1 row" if found.left_out == 1 else f"{found.left_out:,} rows"
            notes.append(f"{which} with a missing value left out")
        if licence := self._description.get("licence"):
            notes.append(f"licence of the data, as OpenML states it: {licence}")
        return SourceFacts(
            source="openml",
            id=self._dataset.id,
            fields=(
                (Field(OBSERVATION, "float64", (found.width,), "observation"), "step"),
                (Field(LABEL, "int64", (), "info"), "step"),
            ),
            episode_numbers=range(found.rows),
            steps=found.rows,
            renamed_keys={found.label.attribute.name: "y"},
            dropped_keys=tuple(
                Dropped(name, "it is neither the label nor an input, as OpenML or the dataset states")
                for name in found.dropped
            ),
            notes=tuple(notes),
            documents={
                DESCRIPTION: read_regular(self.path / DESCRIPTION),
                "encoding.json": (dump_json(found.to_dict(), indent=1) + "\n").encode(),
            },
            lengths=[1] * found.rows,
        )

    def read_episode(self, number: int) -> Iterator[Piece]:
        """Yield the one step of an episode."""
        if number < self._start or not self._stop:
            self._blocks, self._start, self._stop = self._encoded().encoded(), 0, 0
        while number >= self._stop:
            block = next(self._blocks, None)
            if block is None:
                raise CorruptDataError(f"{self._file.path} changed while it was read")
            self._block, self._start = block, self._stop
            self._stop += len(block[1])
        at = number - self._start
        rows, labels = self._block
        columns = {OBSERVATION: rows[at : at + 1], LABEL: labels[at : at + 1]}
        yield Piece(number, columns, np.ones(1, bool), np.zeros(1, bool), first=True, last=True)

    def read_episodes(self, numbers: Sequence[int]) -> Iterator[EpisodeBlock]:
        """Yield blocks of many episodes: numbers that ascend take one pass over the file."""
        chosen = np.asarray(numbers, np.int64)
        for run in np.split(chosen, np.flatnonzero(np.diff(chosen) < 1) + 1):
            stop = 0
            for rows, labels in self._encoded().encoded():
                start, stop = stop, stop + len(labels)
                here = run[np.searchsorted(run, start) : np.searchsorted(run, stop)]
                if len(here):
                    yield _block(here, rows[here - start], labels[here - start])
                if not len(run) or stop > run[-1]:
                    break
            if len(run) and stop <= run[-1]:
                raise CorruptDataError(f"{self._file.path} changed while it was read")

    def read_outcomes(self, number: int) -> Iterator[Piece]:
        """Yield the one step of an episode without its fields: there is no reward."""
        yield Piece(number, {}, np.ones(1, bool), np.zeros(1, bool), first=True, last=True)

    def files(self) -> list[Path]:
        """The table and its description."""
        return [self._file.path, self.path / DESCRIPTION]


def _block(numbers: Array, rows: Array, labels: Array) -> EpisodeBlock:
    count = len(numbers)
    return EpisodeBlock(
        numbers, np.arange(1, count + 1), {OBSERVATION: rows, LABEL: labels}, np.ones(count, bool),
        np.zeros(count, bool), np.full(count, Final.OBSERVED, np.uint8),
    )  # fmt: skip


def description_in(data: bytes, origin: str) -> dict[str, Any]:
    """Return what OpenML states about a table; FormatError for anything else."""
    document = parse_json(data, origin)
    found = document.get("data_set_description") if isinstance(document, dict) else None
    if not isinstance(found, dict):
        raise FormatError(f"{origin} is no description of a table of OpenML")
    return found


def _names(description: dict[str, Any], entry: str) -> list[str]:
    """The names in an entry: a list, or text that separates them by commas."""
    value = description.get(entry) or []
    return [str(one) for one in value] if isinstance(value, list) else [one.strip() for one in str(value).split(",")]
