"""Statistics of the leaves of a dataset from one pass over its rows, and their cache on disk."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import RbtoolError
from ..format import fs
from ..format.contracts import Array, StepReader
from ..format.digest import digest_bytes
from ..format.documents import decode, dump_json, load_json, plain
from ..format.manifest import Manifest
from ..progress import Progress
from ..ted.schema import NEXT, Field, Key, as_numbers, is_floating, state_keys
from .moments import Moments, QuantileSketch

_BLOCK_BYTES = 8 << 20
_BLOCK_VALUES = 2 << 20
"""Each takes several words while moments and quantiles are computed, also where it is a byte."""
_WIDEST = 1024
"""Leaves of more numbers a row, such as images, are pooled: a mean for each pixel is of little use."""

_NOT_DESCRIBED = frozenset({"id", "text"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldStats:
    """Statistics of one leaf: a number for each dimension (row-major), or one for all if it is `pooled`.

    `count` is of finite values; NaN and infinite ones are counted apart. `std` is the deviation of the values there
    are. `constant` lists the dimensions that never vary, which nothing should be divided by. `quantiles` gives for
    each fraction asked for one number a dimension. Extremes and quantiles of whole numbers are ints, exact whatever
    their size. None where there is no finite value.
    """

    key: Key
    dtype: str
    shape: tuple[int, ...]
    role: str
    pooled: bool
    count: tuple[int, ...]
    nan: tuple[int, ...]
    infinite: tuple[int, ...]
    mean: tuple[float | None, ...]
    std: tuple[float | None, ...]
    min: tuple[int | float | None, ...]
    max: tuple[int | float | None, ...]
    quantiles: tuple[tuple[int | float | None, ...], ...]
    constant: tuple[int, ...]


def described_fields(fields: Sequence[Field]) -> tuple[Field, ...]:
    """Select the leaves that have statistics: no text, no ids, no complex ones.

    A state at the root and under `next` counts once, at the root: else most rows would count twice.
    """
    twins = {(NEXT, *key) for key in state_keys(fields)}
    return tuple(
        field
        for field in fields
        if field.role not in _NOT_DESCRIBED and "complex" not in field.dtype and field.key not in twins
        and 0 not in field.shape
    )  # fmt: skip


def collect_stats(
    reader: StepReader, fields: Sequence[Field], fractions: Sequence[float], progress: Progress
) -> tuple[FieldStats, ...]:
    """Read every row of these leaves once and describe them, with quantiles at these fractions."""
    progress.start("reading", sum(field.row_bytes for field in fields) * reader.manifest.steps, "bytes")
    found = tuple(_described(reader, field, fractions, progress) for field in fields)
    progress.done()
    return found


def _described(reader: StepReader, field: Field, fractions: Sequence[float], progress: Progress) -> FieldStats:
    width = math.prod(field.shape)
    pooled = width > _WIDEST
    moments, sketch = Moments(1 if pooled else width), QuantileSketch(1 if pooled else width)
    for block in _blocks(reader, field):
        values = as_numbers(block, field.dtype).reshape(-1, 1 if pooled else width)
        moments.merge(Moments.of(values))
        sketch.update(values)
        progress.advance(block.nbytes)
    quantiles = [_numbers(row, moments.count) for row in sketch.quantiles(fractions, moments.min, moments.max)]
    if not is_floating(field.dtype):
        quantiles = [_whole_numbers(row, moments) for row in quantiles]
    return FieldStats(
        key=field.key,
        dtype=field.dtype,
        shape=field.shape,
        role=field.role,
        pooled=pooled,
        count=tuple(moments.count.tolist()),
        nan=tuple(moments.nan.tolist()),
        infinite=tuple(moments.infinite.tolist()),
        mean=_numbers(moments.mean, moments.count),
        std=_numbers(moments.std, moments.count),
        min=tuple(moments.lowest),
        max=tuple(moments.highest),
        quantiles=tuple(quantiles),
        constant=tuple(moments.constant.nonzero()[0].tolist()),
    )


def _blocks(reader: StepReader, field: Field) -> Iterator[Array]:
    """Read a leaf in blocks that depend on nothing but its shape: the same rows always give the same numbers."""
    rows = max(1, min(_BLOCK_BYTES // field.row_bytes, _BLOCK_VALUES // math.prod(field.shape)))
    steps = reader.manifest.steps
    for start in range(0, steps, rows):
        yield reader.read(field.key, start, min(start + rows, steps))


def _numbers(values: Array, counts: Array) -> tuple[float | None, ...]:
    return tuple(value if count else None for value, count in zip(values.tolist(), counts.tolist(), strict=True))


def _whole_numbers(values: Sequence[float | None], moments: Moments) -> tuple[int | float | None, ...]:
    """Round quantiles of whole numbers to such, for the middle of a bucket need not be one; extremes stay exact."""
    found: list[int | float | None] = []
    for value, low, high in zip(values, moments.lowest, moments.highest, strict=True):
        if value is None or low is None or high is None:
            found.append(None)
        else:
            found.append(low if value == float(low) else high if value == float(high) else round(value))
    return tuple(found)


_VERSION = 4


class StatsStore:
    """Keeps the statistics of datasets in `<storage root>/.stats`, one file for each content and way to read it.

    An unreadable file, or one of another version, counts as missing; a read-only folder keeps nothing. Both only cost
    another pass over the data.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folder = root / ".stats"

    def load(self, manifest: Manifest, fractions: Sequence[float]) -> tuple[FieldStats, ...] | None:
        """Return the stored statistics of these contents, with quantiles at these fractions; None if there are none."""
        try:
            document = load_json(self._path(manifest))
            digest = document.pop("digest")
            if digest != digest_bytes(dump_json(document).encode()):
                return None
            if (document["version"], document["of"], document["fractions"]) != (
                _VERSION,
                _contents(manifest),
                list(fractions),
            ):
                return None
            return tuple(_field_stats(entry, str(self._folder)) for entry in document["fields"])
        except (OSError, ValueError, KeyError, TypeError, RbtoolError):
            return None

    def save(self, manifest: Manifest, fractions: Sequence[float], fields: Sequence[FieldStats]) -> None:
        """Store the statistics of all leaves of these contents."""
        entries = [dataclasses.asdict(field) for field in fields]
        document = plain({
            "version": _VERSION, "of": _contents(manifest), "fractions": list(fractions), "fields": entries,
        })  # fmt: skip
        document["digest"] = digest_bytes(dump_json(document).encode())
        with contextlib.suppress(OSError, RbtoolError):
            fs.replace_file_below(self._root, self._path(manifest), dump_json(document).encode())

    def _path(self, manifest: Manifest) -> Path:
        name = digest_bytes(dump_json(_contents(manifest)).encode())
        return self._folder / f"{name.replace(':', '-')}.json"


def _contents(manifest: Manifest) -> dict[str, Any]:
    """The input of the statistics: the bytes, and how the manifest interprets them."""
    leaves = [[list(field.key), field.dtype, list(field.shape), field.role] for field in manifest.fields]
    return {
        "content_digest": manifest.content_digest,
        "layout": manifest.layout,
        "steps": manifest.steps,
        "episodes": manifest.episodes,
        "fields": leaves,
    }


def _field_stats(entry: Any, origin: str) -> FieldStats:
    """Decode an entry of a document; FormatError or ValueError for an invalid one."""
    found = decode(FieldStats, entry, origin)
    for name in ("nan", "infinite", "mean", "std", "min", "max"):
        if len(getattr(found, name)) != len(found.count):
            raise ValueError(f"{name} has {len(getattr(found, name))} numbers, count has {len(found.count)}")
    return found
