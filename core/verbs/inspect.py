"""`inspect`: summarise a dataset, a checkpoint, or a raw dataset in a known format, or show one of its episodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Unpack

import numpy as np

from ..declarations import ReaderOptions
from ..errors import CorruptDataError, FormatError, SchemaError, UsageError, suggests_keywords
from ..format.checks import size_problems
from ..format.contracts import Array, StepReader
from ..format.episodes import EpisodeTable
from ..format.hub_address import Transfer, transfers_of
from ..format.locate import find_dataset, known_root, open_source
from ..format.manifest import HIDDEN, Dropped, Manifest, Provenance
from ..format.memmap.tree import FieldRange
from ..format.overview import OptionNeededError, overview_of
from ..format.packed.schema import PackedSchema
from ..format.reader import Reader
from ..format.returns import returns_are_known, table_with_returns
from ..format.videos import VIDEO, reference_keys
from ..open_steps import BufferSteps, is_storage, open_steps
from ..results import Result, given_options, refuse_map_alone, refuse_raw_options
from ..saved_steps import has_steps, is_of_buffer, is_unknown, open_saved, row_of_episode
from ..stats import mean_of
from ..ted.episodes import BoundaryCounts, EndReason, Final
from ..ted.schema import NEXT, NEXT_REWARD, REWARD, Field, Key, as_numbers, key_name, row_bytes, ted_fields
from .inspect_columns import ColumnsResult
from .inspect_parts import BufferResult, EnsembleResult, PartsResult, inspect_buffer, inspect_several
from .mix import MixResult

_MOST_NUMBERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RowView:
    """Step `step` of the episode. `values` maps each leaf's dotted name to its value.

    Text is decoded; a row of more than 64 numbers is given as its shape, range and mean.
    """

    step: int
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeView:
    """An episode: its number, its length in steps, how it ends, and some of its rows, always with the last one.

    `total_reward` is None without rewards, and if they are sums over n steps and those of single steps are not stored.
    `final` describes
    the observation after the last step: `observed`, `repeated` (a copy of the one before), or `dropped` (missing in
    the source, so that the step was left out).
    """

    episode: int
    length: int
    end: str
    total_reward: float | None
    rows: tuple[RowView, ...]
    final: str = "observed"


def steps_view(reader: StepReader, number: int, head: int | None) -> EpisodeView:
    """Return an episode of a dataset or checkpoint of rbtool."""
    table = table_with_returns(reader)
    row = row_of_episode(table, number)
    start = int(table.start[row])

    def read(key: Key, step: int) -> Array:
        return np.asarray(reader.read(key, start + step, start + step + 1)[0])

    wanted = _wanted(int(table.length[row]), head)
    rows = [_row_view(reader.fields, step, lambda key, step=step: read(key, step)) for step in wanted]  # type: ignore[misc]
    return _view(table, row, rows, known=not _why_no_returns(reader.manifest))


def source_view(reader: Reader, table: EpisodeTable, number: int, head: int | None) -> EpisodeView:
    """Return an episode of a raw dataset."""
    row = row_of_episode(table, number)
    source = reader.facts().fields
    fields, timings = ted_fields(source), {field.key: timing for field, timing in source}
    wanted, rows, before = set(_wanted(int(table.length[row]), head)), list[RowView](), 0
    for piece in reader.pieces([number]):
        for step in sorted(wanted & set(range(before, before + len(piece)))):
            values = {key: array[step - before] for key, array in piece.columns.items()}
            values |= {
                (NEXT, *key): piece.rows_after(key)[step - before]
                if timings[key] == "state"
                else piece.columns[key][step - before]
                for key in piece.columns
            }
            values |= _flags(piece.terminated[step - before], piece.truncated[step - before], number)
            if piece.last and step - before == len(piece) - 1:
                values |= _flags(table.terminated[row], table.truncated[row], number)
            rows.append(_row_view(fields, step, lambda key, values=values: np.asarray(values[key])))  # type: ignore[misc]
        before += len(piece)
    return _view(table, row, rows, known=REWARD in timings)


def _flags(terminated: Any, truncated: Any, number: int) -> dict[Key, Any]:
    return {
        ("episode",): number,
        (NEXT, "terminated"): terminated,
        (NEXT, "truncated"): truncated,
        (NEXT, "done"): terminated | truncated,
    }


def _wanted(length: int, head: int | None) -> list[int]:
    """Return the steps to show: the first `head`, and the last."""
    return sorted({*range(min(length, length if head is None else head)), length - 1})


def _view(table: EpisodeTable, row: int, rows: Iterable[RowView], *, known: bool) -> EpisodeView:
    return EpisodeView(
        episode=int(table.episode[row]),
        length=int(table.length[row]),
        end=EndReason(int(table.end_reason[row])).name.lower().replace("_", " "),
        total_reward=float(table.total_reward[row]) if known else None,
        rows=tuple(rows),
        final=Final(int(table.final[row])).name.lower(),
    )


def _row_view(fields: Iterable[Field], step: int, read: Callable[[Key], Array]) -> RowView:
    listed = list(fields)
    lengths = {field.key for field in listed if field.role == "text" and field.dtype == "int32"}
    values = {}
    for field in listed:
        if field.role == "text" and field.dtype == "uint8":
            length = (*field.key[:-1], f"{field.key[-1]}_length")
            row = read(field.key)
            used = int(read(length)) if length in lengths else len(row)
            values[field.name] = row[:used].tobytes().decode("utf-8", "replace")
        elif field.key not in lengths:
            values[key_name(field.key)] = _value(read(field.key), field)
    return RowView(step=step, values=values)


def _value(row: Array, field: Field) -> Any:
    numbers = as_numbers(row, field.dtype)
    if numbers.dtype.kind == "c":
        return np.array2string(numbers)
    if numbers.size <= _MOST_NUMBERS:
        return numbers.tolist()
    low, high = numbers.min().item(), numbers.max().item()
    return {"shape": list(numbers.shape), "min": low, "max": high, "mean": mean_of(numbers)}


_BINS = 10
_NO_REWARDS = "there is no return: no field is next.reward"
_NO_RETURNS = (
    "there is no return: next.reward holds sums over n steps, and next.original_reward, the reward of every step, "
    "is not there"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Minimum, mean and maximum of a number per episode, and a histogram of ten equal bins."""

    min: float
    mean: float
    max: float
    histogram: tuple[int, ...]

    @classmethod
    def of(cls, numbers: np.ndarray[Any, Any]) -> Spread | None:
        """Summarise one number per episode; None without episodes. Bins leave out NaN and infinite values."""
        if not len(numbers):
            return None
        finite = numbers[np.isfinite(numbers)]
        counts = _counts(finite.astype(np.float64)) if len(finite) else np.zeros(_BINS, int)
        return cls(
            min=numbers.min().item(),
            mean=mean_of(numbers),
            max=numbers.max().item(),
            histogram=tuple(counts.tolist()),
        )


def _counts(finite: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Count values in equal bins. Values are scaled, because the width of a bin can overflow float64."""
    scaled = np.ldexp(finite, -int(np.frexp(np.abs(finite).max())[1]))
    try:
        return np.histogram(scaled, bins=_BINS)[0]
    except ValueError:  # numbers that differ in their last digits leave no room for ten bins: as if they were equal
        return np.histogram(scaled, bins=_BINS, range=(scaled.min() - 0.5, scaled.max() + 0.5))[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldView:
    """One leaf: `shape` of a row, `bytes` of all rows, `min` and `max` if recorded; `role` `video` refers to frames."""

    key: Key
    dtype: str
    shape: tuple[int, ...]
    role: str
    bytes: int
    min: float | None
    max: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectResult(Result):
    """A summary. `type` is `dataset`, `checkpoint` or `source` (a raw dataset).

    `layouts` maps each layout of datasets to the bytes of the rows in it, uncompressed unless it is the current one;
    `bytes_saved` is the difference between layout `ted` and the current one. `first_episode` is the source's number of
    the first episode, None without any. `problems` name the files that are missing or differ in size from the
    manifest; `transfers` are its uploads to a hub and its download from there.
    """

    kind: ClassVar[str] = "inspect"
    name: str
    path: Path
    type: str
    layout: str
    steps: int
    episodes: int
    bytes: int
    layouts: Mapping[str, int]
    bytes_saved: int
    ends: BoundaryCounts
    length: Spread | None
    returns: Spread | None
    fields: tuple[FieldView, ...]
    spaces: Mapping[str, Any]
    renamed_keys: Mapping[str, str]
    dropped_keys: tuple[Dropped, ...]
    notes: tuple[str, ...]
    content_digest: str | None
    resolved_revision: str | None
    created_by: str | None
    provenance: tuple[Provenance, ...]
    episode: EpisodeView | None
    first_episode: int | None
    problems: tuple[str, ...] = ()
    transfers: tuple[Transfer, ...] = ()


@suggests_keywords(*ReaderOptions.__annotations__)
def inspect(
    dataset: str | os.PathLike[str],
    *,
    episode: int | None = None,
    head: int | None = None,
    format: str | None = None,
    root: str | os.PathLike[str] | None = None,
    **options: Unpack[ReaderOptions],
) -> InspectResult | ColumnsResult | MixResult | PartsResult | EnsembleResult | BufferResult:
    """Summarise a dataset, a checkpoint, an export, a saved buffer, or a raw dataset in a known format.

    `dataset` is a path or `source:id`. Of rbtool's own formats only the manifest and the episode table are read, so
    the time does not grow with the data; of n-step data also the reward of every step, for `returns`. `episode` is the
    source's number of an episode of which the first `head` steps (all by default) and the last are included. `format`
    and `options` are those of `convert`. Of a table (HDF5, npz, CSV, Parquet, a folder of npy, CSV or Parquet files) in
    no known format the columns are listed, with the options that would convert it, as of a file that can be read only
    with an option that is not given, such as `horizon`; of a mixture and of the folder of a split the datasets. The
    files of a saved buffer are compared with their digests; one without steps of episodes is a `BufferResult`.

    Raises DatasetNotFoundError, FormatError, or UsageError for a missing episode.
    """
    if head is not None and head < 1:
        raise UsageError(f"--head is {head}, expected 1 or more")
    if head is not None and episode is None:
        raise UsageError("--head needs --episode K", hint="it limits the steps of one episode that are shown")
    path, given = find_dataset(dataset, root), given_options(options)
    if episode is None and (several := inspect_several(path, root)) is not None:
        refuse_raw_options(path, {"format": format, **given})
        return several
    if is_of_buffer(path) or (is_storage(path) and episode is None):
        refuse_raw_options(path, {"format": format, **given})
        return _of_buffer(path, root, episode, head)
    if format is None and given.keys() <= {"files"} and episode is None and is_unknown(path):
        overview = overview_of(path, given.get("files"))
        if overview is not None:
            return ColumnsResult.of(path, os.fspath(dataset), overview)
    if given and format is None and is_unknown(path):
        refuse_map_alone(path, given)
    if has_steps(path, raw=True, format=format):
        refuse_raw_options(path, {"format": format, **given})
        with open_steps(path, damaged=True) as steps:
            return _of_steps(steps, root, episode, head)
    try:
        with open_source(path, format=format, options=given) as reader:
            return _of_source(reader, path, episode, head)
    except OptionNeededError as error:
        overview = error.overview() if episode is None else None
        if overview is None:
            raise
        return ColumnsResult.of(path, os.fspath(dataset), overview)


def _of_steps(
    reader: StepReader, root: str | os.PathLike[str] | None, episode: int | None, head: int | None
) -> InspectResult:
    manifest, table = reader.manifest, table_with_returns(reader)
    unknown, layouts = _why_no_returns(manifest), _layouts(reader)
    return InspectResult(
        name=_name(reader.path, manifest, known_root(root)),
        path=reader.path,
        type=manifest.kind,
        layout=manifest.layout,
        steps=manifest.steps,
        episodes=len(table),
        bytes=manifest.bytes or sum(field.row_bytes for field in reader.fields) * manifest.steps,
        layouts=layouts,
        bytes_saved=max(0, layouts["ted"] - layouts[manifest.layout]) if manifest.layout in layouts else 0,
        ends=table.counts(),
        length=Spread.of(table.length),
        returns=None if unknown else Spread.of(table.total_reward),
        fields=_fields(reader.fields, manifest.steps, manifest.ranges),
        spaces=manifest.spaces,
        renamed_keys=manifest.renamed_keys,
        dropped_keys=manifest.dropped_keys,
        notes=(*manifest.notes, *([unknown] if unknown else [])),
        content_digest=manifest.content_digest if manifest.files else None,
        resolved_revision=manifest.resolved_revision,
        created_by=manifest.created_by if manifest.files else None,
        provenance=manifest.provenance,
        episode=None if episode is None else steps_view(reader, episode, head),
        first_episode=_first(table),
        problems=tuple(size_problems(reader)),
        transfers=tuple(transfers_of(reader.path)),
    )


def _of_buffer(
    path: Path, root: str | os.PathLike[str] | None, episode: int | None, head: int | None
) -> InspectResult | BufferResult:
    """Describe the steps of a saved buffer or storage, and the buffer itself where it has no steps of episodes."""
    if not is_of_buffer(path):
        return inspect_buffer(path)
    try:
        reader = open_saved(path, damaged=True)
    except CorruptDataError:
        raise
    except (FormatError, SchemaError, UsageError):
        if episode is not None:
            raise
        return inspect_buffer(path)
    with reader:
        found = _of_steps(reader, root, episode, head)
        notes = (inspect_buffer(path).sentence,) if isinstance(reader, BufferSteps) else ()
    return replace(found, name=str(path), path=path, notes=(*notes, *found.notes))


def _why_no_returns(manifest: Manifest) -> str:
    """Return why episodes have no returns; empty where they have."""
    if not returns_are_known(manifest):
        return _NO_RETURNS
    return "" if any(field.key == NEXT_REWARD for field in manifest.fields) else _NO_REWARDS


def _layouts(reader: StepReader) -> dict[str, int]:
    """Return the bytes of the rows in each layout of datasets; {} for a checkpoint."""
    manifest = reader.manifest
    if manifest.kind != "dataset":
        return {}
    found = {
        "ted": row_bytes(reader.fields) * manifest.steps,
        "packed": PackedSchema.of(reader.fields).size(manifest.steps, len(reader.episodes)),
    }
    if manifest.files:
        found[manifest.layout] = sum(file.size for file in manifest.files if not file.path.startswith(f"{HIDDEN}/"))
    return found


def _of_source(reader: Reader, path: Path, episode: int | None, head: int | None) -> InspectResult:
    facts, table = reader.facts(), reader.episode_table()
    return InspectResult(
        name=str(path),
        path=path,
        type="source",
        layout=facts.source,
        steps=table.steps,
        episodes=len(table),
        bytes=reader.size(),
        layouts={},
        bytes_saved=0,
        ends=table.counts(),
        length=Spread.of(table.length),
        returns=Spread.of(table.total_reward) if REWARD in {field.key for field, _ in facts.fields} else None,
        fields=_fields(ted_fields(facts.fields), table.steps, {}),
        spaces=facts.spaces,
        renamed_keys=facts.renamed_keys,
        dropped_keys=facts.dropped_keys,
        notes=facts.notes,
        content_digest=None,
        resolved_revision=None,
        created_by=None,
        provenance=(),
        episode=None if episode is None else source_view(reader, table, episode, head),
        first_episode=_first(table),
    )


def _first(table: EpisodeTable) -> int | None:
    return int(table.episode[0]) if len(table) else None


def _fields(leaves: tuple[Field, ...], steps: int, ranges: Mapping[Key, FieldRange]) -> tuple[FieldView, ...]:
    views, frames = [], reference_keys(leaves)
    for leaf in leaves:
        refers = leaf.key in frames
        low, high = (None if refers else ranges.get(leaf.key)) or (None, None)  # ids of videos have no range
        views.append(
            FieldView(
                key=leaf.key,
                dtype=leaf.dtype,
                shape=leaf.shape,
                role=VIDEO if refers else leaf.role,
                bytes=leaf.row_bytes * steps,
                min=low,
                max=high,
            )
        )
    return tuple(views)


def _name(path: Path, manifest: Manifest, root: Path | None) -> str:
    """Return `source:id` for a dataset below the root, the path for anything else."""
    folder = Path(os.path.abspath(path))
    parts = folder.relative_to(root).parts if root is not None and folder.is_relative_to(root) else ()
    if manifest.kind == "dataset" and len(parts) > 1:
        source, *rest = parts
        return f"{source}:{'/'.join(rest)}"
    return str(path)
