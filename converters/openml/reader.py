"""Reads a table of OpenML as it was downloaded, an ARFF file and its description: every row is an episode.

The columns become numbers, a vector for each row and a label, as each of the seven datasets encodes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import CorruptDataError, DatasetNotFoundError, FormatError, UsageError, did_you_mean
from ...core.format.contracts import Array, EpisodeBlock, Piece, SourceFacts
from ...core.format.converter import Reader
from ...core.format.documents import dump_json, parse_json
from ...core.format.files import read_regular
from ...core.format.manifest import Dropped
from ...core.stats import Moments
from ...core.ted.episodes import Final
from ...core.ted.schema import Field, Key
from .arff import ArffFile, Attribute


class UnknownTableError(DatasetNotFoundError, RuntimeError):
    """A name that none of the datasets has; a RuntimeError too, as TorchRL raises."""


@dataclass(frozen=True, slots=True)
class OpenmlDataset:
    """A dataset: the table `table` in version `version`.

    `one_hot` states that columns of categories become a column for each category, and not one of codes. `target` is
    the column that becomes the label, None for the one that OpenML names; `complete` leaves out rows with a missing
    value.
    """

    id: str
    table: str
    version: int
    one_hot: bool = False
    target: str | None = None
    complete: bool = False


DATASETS = {
    one.id: one
    for one in (
        OpenmlDataset("adult_num", "adult", 1, target="occupation", complete=True),
        OpenmlDataset("adult_onehot", "adult", 1, one_hot=True, target="occupation", complete=True),
        OpenmlDataset("covertype", "covertype", 3),
        OpenmlDataset("magic", "MagicTelescope", 1),
        OpenmlDataset("mushroom_num", "mushroom", 1),
        OpenmlDataset("mushroom_onehot", "mushroom", 1, one_hot=True),
        OpenmlDataset("shuttle", "shuttle", 1),
    )
}


def dataset_named(name: str) -> OpenmlDataset:
    """Return the dataset of a name, or raise UnknownTableError (DatasetNotFoundError and RuntimeError)."""
    if name not in DATASETS:
        raise UnknownTableError(
            f"openml has no dataset {name!r} that is known here{did_you_mean(name, DATASETS)}",
            hint=f"known: {', '.join(DATASETS)}; any other table can be converted with --from table",
        )
    return DATASETS[name]


MISSING_CATEGORY = "?"


@dataclass(frozen=True, slots=True)
class Categories:
    """A column of categories: `codes` maps the position in the header (missing last) to the code, -1 for none.

    Codes number the values that occur, in the order of their text; a missing value is a category of its own, after all
    others. `names` are the values by code.
    """

    attribute: Attribute
    codes: Array
    names: tuple[str, ...]

    @classmethod
    def of(cls, attribute: Attribute, occurs: Array) -> Categories:
        """Number the values that occur; `occurs` is bool, by position in the header, missing last."""
        texts = attribute.categories or ()
        order = sorted((text, at) for at, text in enumerate(texts) if occurs[at])
        codes = np.full(len(texts) + 1, -1, np.int64)
        for code, (_, at) in enumerate(order):
            codes[at] = code
        names = tuple(text for text, _ in order)
        if occurs[-1]:
            codes[-1] = len(names)
            names = (*names, MISSING_CATEGORY)
        return cls(attribute, codes, names)

    def encode(self, positions: Array) -> Array:
        """Return the codes of positions in the header, of which -1 is missing."""
        return np.asarray(self.codes[positions])


@dataclass(frozen=True, slots=True)
class Scaled:
    """A column of numbers, brought to mean 0 and deviation 1; a constant one is only centred."""

    attribute: Attribute
    mean: float
    std: float

    def encode(self, values: Array) -> Array:
        """Return the scaled values."""
        return np.asarray((values - self.mean) / (self.std or 1.0))


class Encoding:
    """How the rows of a file become numbers, found in one pass over it.

    `rows` counts those that are kept, `left_out` those with a missing value where the dataset wants complete rows.
    `width` is the length of a vector. FormatError for a target that is not there, has missing values or is no category,
    and for a missing number.
    """

    def __init__(self, file: ArffFile, dataset: OpenmlDataset, target: str, ignored: Sequence[str]) -> None:
        self._file, self._dataset = file, dataset
        names = [one.name for one in file.attributes]
        chosen = dataset.target or target
        if chosen not in names:
            raise FormatError(f"{file.path} has no column {chosen!r}, which is the label; there are {', '.join(names)}")
        left = {chosen, target, *ignored}
        self.dropped = tuple(name for name in names if name in left - {chosen})
        inputs = [one for one in file.attributes if one.name not in left]
        label = next(one for one in file.attributes if one.name == chosen)
        if label.categories is None:
            raise FormatError(f"{file.path}: the label {chosen!r} has numbers, expected categories")
        self.rows = self.left_out = 0
        self._used = [*inputs, label]
        occurs = {one.name: np.zeros(len(one.categories or ()) + 1, bool) for one in self._used}
        moments = {one.name: Moments(1) for one in inputs if one.categories is None}
        for block in self._kept_blocks(count=True):
            for one in self._used:
                if one.categories is None:
                    moments[one.name].merge(Moments.of(block[one.name].reshape(-1, 1)))
                else:
                    occurs[one.name][block[one.name]] = True
        if not self.rows:
            raise FormatError(f"{file.path} has no rows that are complete")
        self.columns = tuple(self._column(one, occurs[one.name], moments.get(one.name), file.path) for one in inputs)
        self.label = Categories.of(label, occurs[chosen])
        if occurs[chosen][-1]:
            raise FormatError(f"{file.path}: the label {chosen!r} is missing in some rows")
        self.width = sum(self._width(one) for one in self.columns)

    def _column(self, one: Attribute, occurs: Array, moments: Moments | None, path: Path) -> Categories | Scaled:
        if moments is None:
            return Categories.of(one, occurs)
        if moments.nan[0] or moments.infinite[0]:
            raise FormatError(f"{path}: {one.name!r} is missing or infinite in some rows, expected a number")
        return Scaled(one, float(moments.mean[0]), float(moments.std[0]))

    def _width(self, column: Categories | Scaled) -> int:
        return len(column.names) if self._dataset.one_hot and isinstance(column, Categories) else 1

    def _kept_blocks(self, *, count: bool = False) -> Iterator[Mapping[str, Array]]:
        """Yield the rows that are kept: where the dataset wants complete ones, those without a missing value."""
        for block in self._file.blocks():
            rows = len(next(iter(block.values())))
            kept = np.ones(rows, bool)
            if self._dataset.complete:
                left = {*self.dropped}
                for one in self._file.attributes:
                    if one.name not in left:
                        kept &= ~np.isnan(block[one.name]) if one.categories is None else block[one.name] >= 0
            if count:
                self.rows += int(kept.sum())
                self.left_out += int(rows - kept.sum())
            if kept.any():
                yield {one.name: block[one.name][kept] for one in self._used}

    def encoded(self) -> Iterator[tuple[Array, Array]]:
        """Yield blocks of rows: vectors, float64 `[n, width]`, and labels, int64 `[n]`."""
        for block in self._kept_blocks():
            parts: list[Array] = []
            for column in self.columns:
                values = column.encode(block[column.attribute.name])
                if self._width(column) == 1 and not (self._dataset.one_hot and isinstance(column, Categories)):
                    parts.append(values.astype(np.float64).reshape(-1, 1))
                elif isinstance(column, Categories):
                    parts.append(np.eye(len(column.names))[values])
            yield np.concatenate(parts, 1), self.label.encode(block[self.label.attribute.name])

    def to_dict(self) -> dict[str, Any]:
        """Return the constants, so that numbers can be turned back: for the documents of the dataset."""
        columns: list[dict[str, Any]] = []
        for column in self.columns:
            name = column.attribute.name
            if isinstance(column, Scaled):
                columns.append({"name": name, "mean": column.mean, "std": column.std})
            else:
                how = "one-hot" if self._dataset.one_hot else "code"
                columns.append({"name": name, "encoding": how, "categories": list(column.names)})
        label = {"name": self.label.attribute.name, "categories": list(self.label.names)}
        return {"dataset": self._dataset.id, "columns": columns, "label": label, "rows_left_out": self.left_out}


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
