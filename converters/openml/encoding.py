"""Turns the columns of a table into numbers: a vector for each row, and a label."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import FormatError
from ...core.format.contracts import Array
from ...core.stats import Moments
from .arff import ArffFile, Attribute
from .datasets import OpenmlDataset

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
