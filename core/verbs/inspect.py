"""`inspect`: summarise a dataset, a checkpoint, or a raw dataset in a known format, or show one of its episodes.

Other inputs have results of their own: the folder of a split (`PartsResult`), a mixture (`MixResult`), a saved ensemble
(`EnsembleResult`), a saved buffer without steps (`BufferResult`), and a table in an unknown format (`ColumnsResult`).
Streams have `inspect_stream`.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack, overload

import numpy as np

from ..declarations import ReaderOptions, from_leaf
from ..encodings.compact import BUFFER
from ..errors import CorruptDataError, FormatError, SchemaError, UsageError, suggests_keywords
from ..format import fs
from ..format.checks import size_problems
from ..format.contracts import Array, StepReader
from ..format.converter import Reader
from ..format.documents import Count, decode, dump_json, float_from_json, load_json
from ..format.episodes import EpisodeTable
from ..format.locate import (
    ColumnView,
    OptionNeededError,
    Overview,
    convert_command,
    find_dataset,
    known_root,
    open_source,
    overview_of,
)
from ..format.manifest import HIDDEN, Dropped, Manifest, Provenance, has_manifest
from ..format.memmap.tree import FieldRange, read_tree
from ..format.mixture import is_mixture
from ..format.open_files import OpenFiles
from ..format.packed.schema import PackedSchema
from ..format.returns import returns_are_known, table_with_returns
from ..format.staging import PARTS_FILE
from ..format.videos import VIDEO, reference_keys
from ..open_steps import BufferSteps, finished_manifest, is_storage, open_steps
from ..options import PathLike
from ..progress import counted
from ..remote.hub_address import Transfer, transfers_of
from ..results import Result, given_options, refuse_map_alone, refuse_raw_options
from ..saved_steps import has_steps, is_of_buffer, is_unknown, open_saved, row_of_episode
from ..stats import mean_of
from ..ted.episodes import BoundaryCounts, EndReason, Final
from ..ted.schema import NEXT, NEXT_REWARD, REWARD, Field, Key, as_numbers, key_name, row_bytes, ted_fields
from .mix import MixResult, inspect_mixture
from .saved_buffers import SavedFolders, extent_of, saved_folders

if TYPE_CHECKING:
    from ..storages.dataset import StreamStorage

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

    `total_reward` is None without rewards, or if only sums of rewards over n steps are stored. `final` describes the
    observation after the last step: `observed`, `repeated` (a copy of the one before), or `dropped` (missing in the
    source, so that the step was left out).
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
            used = row[: int(read(length))].tobytes() if length in lengths else row.tobytes().rstrip(b"\0")
            values[field.name] = used.decode("utf-8", "replace")
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
_NO_REWARDS = "no return: there is no field next.reward"
_NO_RETURNS = (
    "no return: next.reward holds sums over n steps, and next.original_reward, the reward of every step, is missing"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Minimum, mean, median and maximum of a number per episode, and a histogram of ten equal bins."""

    min: float
    mean: float
    median: float
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
            median=_median(numbers.astype(np.float64)),
            max=numbers.max().item(),
            histogram=tuple(counts.tolist()),
        )


def _median(numbers: np.ndarray[Any, Any]) -> float:
    """Return the median, also of numbers whose sum would overflow."""
    ordered, half = np.sort(numbers), len(numbers) // 2
    with np.errstate(invalid="ignore"):  # between -inf and inf
        middle = ordered[half] if len(ordered) % 2 else ordered[half - 1] / 2 + ordered[half] / 2
    return math.nan if math.isnan(ordered[-1]) else float(middle)


def _counts(finite: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Count values in equal bins. Values are scaled, because the width of a bin can overflow float64."""
    scaled = np.ldexp(finite, -int(np.frexp(np.abs(finite).max())[1]))
    try:
        return np.histogram(scaled, bins=_BINS)[0]
    except ValueError:  # numbers that differ only in their last bits, too close for ten bins: treated as equal
        return np.histogram(scaled, bins=_BINS, range=(scaled.min() - 0.5, scaled.max() + 0.5))[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldView:
    """One leaf: the `shape` of a row, the `bytes` of all rows, and `min` and `max` if recorded.

    The `role` `video` means that the rows refer to frames of kept videos.
    """

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
    the first episode, None without episodes. `problems` name the files that are missing or differ in size from the
    manifest; `transfers` are the uploads of the dataset to a hub and its download from there. `scores` has a spread
    over the episodes for each score that `rbtool score` has added, by names like `score.quality`.
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
    scores: Mapping[str, Spread | None] = dataclasses.field(default_factory=dict)


@overload
def inspect(
    dataset: PathLike,
    *,
    episode: int,
    head: int | None = None,
    format: str | None = None,
    root: PathLike | None = None,
    **options: Unpack[ReaderOptions],
) -> InspectResult: ...


@overload
def inspect(
    dataset: PathLike,
    *,
    episode: None = None,
    head: int | None = None,
    format: str | None = None,
    root: PathLike | None = None,
    **options: Unpack[ReaderOptions],
) -> InspectResult | ColumnsResult | MixResult | PartsResult | EnsembleResult | BufferResult: ...


@suggests_keywords(*ReaderOptions.__annotations__)
def inspect(
    dataset: PathLike,
    *,
    episode: int | None = None,
    head: int | None = None,
    format: str | None = None,
    root: PathLike | None = None,
    **options: Unpack[ReaderOptions],
) -> InspectResult | ColumnsResult | MixResult | PartsResult | EnsembleResult | BufferResult:
    """Summarise a dataset, a checkpoint, an export, a saved buffer, or a dataset of another library.

    For rbtool's own formats, only the manifest and the episode table are read, so the time does not grow with the data.
    For n-step data, the reward of every step is read as well, for `returns`. The files of a saved buffer are compared
    with their digests.

    Args:
        dataset: a path or `source:id`.
        episode: the source's number of an episode whose first and last steps the result includes.
        head: the number of its first steps to include; default: all.
        format: the name of the format, instead of detecting it, as in `convert`.
        root: where stored datasets are.
        options: for some formats only, as in `convert`.

    Returns:
        The summary, for most inputs an `InspectResult`. A `ColumnsResult` has the columns, and options that would
        convert them, of a table (HDF5, npz, CSV, Parquet, a folder of npy, CSV or Parquet files) in an unknown format
        or that needs an option such as `horizon`. A mixture gives a `MixResult`, the folder of a split a `PartsResult`,
        a saved ensemble an `EnsembleResult`, and a saved buffer without steps of episodes a `BufferResult`.

    Raises:
        DatasetNotFoundError, FormatError: there is no data to inspect.
        UsageError: the episode does not exist, or other arguments make no sense.
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


def _of_steps(reader: StepReader, root: PathLike | None, episode: int | None, head: int | None) -> InspectResult:
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
        scores={name: Spread.of(column[~np.isnan(column)]) for name, column in table.scores.items()},
    )


def _of_buffer(
    path: Path, root: PathLike | None, episode: int | None, head: int | None
) -> InspectResult | BufferResult:
    """Describe the steps of a saved buffer or storage, or the buffer itself if it has no steps of episodes."""
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
    """Return the reason why episodes have no returns; "" if they have."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicView:
    """A topic of a robot log. Times are in seconds; `begin` and `end` count from the first message of all topics.

    `rate` is the usual number of messages per second, `gap` the longest silence. `delay` is the shortest time from the
    stamp of a message to its entry in the log, and `jitter` the variation of that time, both in a sample of messages;
    None if messages have no stamps.
    """

    name: str
    type: str
    encoding: str
    messages: int
    rate: float
    gap: float
    begin: float
    end: float
    delay: float | None
    jitter: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnsResult(Result):
    """The columns of a table in an unknown format, or the fields of the `topics` of a robot log.

    `file` is the kind of file in words. `command` is the command line that would convert it; its `format` and `options`
    are guessed from the names of the columns. `doubts` has a sentence on each guess that the names do not confirm.
    """

    kind: ClassVar[str] = "columns"
    path: Path
    file: str
    bytes: int
    columns: tuple[ColumnView, ...]
    format: str
    options: Mapping[str, Any]
    command: str
    doubts: tuple[str, ...]
    topics: tuple[TopicView, ...] = ()

    @property
    def map_document(self) -> str:
        """The proposed map, as the text of a TOML file for `--map`."""
        pairs = (one.partition("=") for one in self.options.get("map", ()))
        values = ((key, columns if columns[:1] == '"' else dump_json(columns)) for key, _, columns in pairs)
        return "".join(f"{key} = {value}\n" for key, value in values)

    @classmethod
    def of(cls, path: Path, asked: str, overview: Overview) -> ColumnsResult:
        """Make the result from the overview of a file; `asked` is its name in the command."""
        return cls(
            path=path, file=overview.file, bytes=overview.bytes, columns=overview.columns,
            format=overview.format, options=overview.options, command=convert_command(asked, overview),
            doubts=overview.doubts, topics=getattr(overview, "topics", ()),
        )  # fmt: skip


def write_proposed_map(result: Result, path: Path) -> None:
    """Write the map that is proposed for a table or a robot log as a TOML file, which can be edited.

    Raises UsageError for the result of another input, or if the file exists.
    """
    if not isinstance(result, ColumnsResult):
        raise UsageError(f"there is no map to write to {path}", hint="only tables and robot logs have one")
    if path.exists():
        raise UsageError(f"{path} already exists", hint="name another file, or remove it")
    fs.write_file(path, result.map_document.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class PartView:
    """A part of a split. `problem` states whether it is missing, damaged or changed; None if it is not."""

    name: str
    path: Path
    steps: int
    episodes: int
    mean_return: float | None
    content_digest: str
    problem: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsResult(Result):
    """The parts of a split in the folder `path`, and how they were drawn from the dataset with `content_digest`."""

    kind: ClassVar[str] = "parts"
    path: Path
    by: str
    seed: int | None
    in_order: bool
    stratify: str | None
    steps: int
    episodes: int
    duplicates: int
    parts: tuple[PartView, ...]
    content_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberView:
    """A member of a saved ensemble, named by number: `1.0` is member 0 of member 1.

    `weight` is its weight in the ensemble: 1 if all are equal, None if weights are the numbers of elements. `capacity`
    is None if the storage has no bound or does not record it.
    """

    name: str
    path: Path
    elements: int
    capacity: int | None
    weight: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleResult(Result):
    """The checkpoint of an ensemble of buffers in the folder `path`."""

    kind: ClassVar[str] = "ensemble"
    path: Path
    batch_size: int | None
    elements: int
    members: tuple[MemberView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferResult(Result):
    """The checkpoint of a buffer, or of a storage, whose elements are not the steps of episodes.

    `capacity` is None if the storage has no bound or does not record it; `batch_size` is None for a storage.
    """

    kind: ClassVar[str] = "buffer"
    path: Path
    batch_size: int | None
    elements: int
    capacity: int | None

    @property
    def sentence(self) -> str:
        """A phrase that describes the checkpoint."""
        room = "" if self.capacity is None else f", room for {self.capacity:,}"
        batch = "" if self.batch_size is None else f", batches of {self.batch_size:,}"
        what = "a buffer" if (self.path / BUFFER).is_file() else "a storage"
        return f"the checkpoint of {what}: {counted(self.elements, 'element')}{room}{batch}"


def inspect_buffer(path: Path) -> BufferResult:
    """Describe the saved buffer or storage at `path`; CorruptDataError for one that is damaged."""
    whole = (path / BUFFER).is_file()
    document = decode(dict[str, Any], load_json(path / BUFFER), str(path / BUFFER), CorruptDataError) if whole else {}
    extent = extent_of(saved_folders(path).storage if whole else path)
    return BufferResult(path=path, batch_size=document.get("batch_size"), elements=extent.length, capacity=extent.most)


@dataclass(frozen=True)
class _Made:
    name: str
    steps: Count
    episodes: Count
    content_digest: str


@dataclass(frozen=True)
class _Arguments:
    by: str
    seed: int | None
    in_order: bool
    stratify: str | None


@dataclass(frozen=True)
class _Split:
    content_digest: str
    arguments: _Arguments
    duplicates: Count
    mean_returns: tuple[float | str | None, ...]
    made: tuple[_Made, ...]


def inspect_several(path: Path, root: PathLike | None = None) -> MixResult | PartsResult | EnsembleResult | None:
    """Describe the mixture file, the folder of a split or the saved ensemble at `path`; None for anything else."""
    if is_mixture(path):
        return inspect_mixture(path, root)
    if (path / BUFFER).is_file() and (members := saved_folders(path).members):
        return _inspect_ensemble(path, members)
    return _inspect_parts(path) if (path / PARTS_FILE).is_file() and not has_manifest(path) else None


def _inspect_ensemble(path: Path, members: Sequence[SavedFolders]) -> EnsembleResult:
    found = tuple(view for weight, member in zip(_weights(path / "sampler", len(members)), members, strict=True)
                  for view in _member_views(member, weight))  # fmt: skip
    document = decode(dict[str, Any], load_json(path / BUFFER), str(path / BUFFER), CorruptDataError)
    return EnsembleResult(
        path=path, batch_size=document.get("batch_size"), elements=sum(one.elements for one in found), members=found
    )


def _member_views(member: SavedFolders, weight: float | None) -> Iterator[MemberView]:
    if not (inner := member.members):
        extent = extent_of(member.storage)
        yield MemberView(
            name=member.name, path=member.storage, elements=extent.length, capacity=extent.most, weight=weight
        )
    for own, one in zip(_weights(member.sampler, len(inner)), inner, strict=True):
        yield from _member_views(one, own)


def _weights(sampler: Path, count: int) -> list[float | None]:
    """Read the weights of the `count` members of an ensemble; CorruptDataError if there are more or fewer."""
    folder = sampler / "ensemble"
    if not (folder / "meta.json").is_file():
        return [1.0] * count
    with OpenFiles(folder) as files:
        leaves = read_tree(files)
        if ("by_size",) in leaves and any(files.read("by_size.memmap")):
            return [None] * count
        if ("p",) not in leaves:
            return [1.0] * count
        found = np.frombuffer(files.read("p.memmap"), np.float64)
    if len(found) != count:
        raise CorruptDataError(f"{folder} has the weights of {len(found)} members, there are {count}")
    return list(map(float, found))


def _inspect_parts(folder: Path) -> PartsResult:
    """Read `split.json` in a folder, and compare the parts with it; FormatError if `split` did not write it."""
    origin = str(folder / PARTS_FILE)
    document: Mapping[str, Any] = load_json(folder / PARTS_FILE)
    found = decode(_Split, document, origin)
    if len(found.mean_returns) != len(found.made) or any(Path(one.name).name != one.name for one in found.made):
        raise FormatError(f"{origin} does not list the parts as split does")
    parts = tuple(
        _part(folder, one, float_from_json(mean)) for one, mean in zip(found.made, found.mean_returns, strict=True)
    )
    asked = found.arguments
    return PartsResult(
        path=folder, by=asked.by, seed=asked.seed, in_order=asked.in_order, stratify=asked.stratify,
        steps=sum(part.steps for part in parts), episodes=sum(part.episodes for part in parts),
        duplicates=found.duplicates, parts=parts, content_digest=found.content_digest,
    )  # fmt: skip


def _part(folder: Path, made: _Made, mean: float | None) -> PartView:
    path = folder / made.name
    manifest = finished_manifest(path)
    problem = None
    if manifest is None:
        problem = "damaged" if path.exists() else "missing"
    elif manifest.content_digest != made.content_digest:
        problem = "changed since the split"
    return PartView(
        name=made.name, path=path, steps=made.steps, episodes=made.episodes,
        mean_return=None if mean is None or math.isnan(mean) else mean, content_digest=made.content_digest,
        problem=problem,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamField:
    """One leaf: the dtype and `shape` of its rows; the `role` of references to frames is `video`."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    role: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamResult(Result):
    """A dataset in shards.

    `steps`, `episodes` and the `bytes` of all rows are None if they are known only once all shards are read.
    `shard_steps` and `shard_episodes` describe the first shard that has steps. `lacking` has a sentence on each part of
    the dataset that the stream leaves out.
    """

    kind: ClassVar[str] = "stream"
    address: str
    identity: str
    shards: int
    steps: int | None
    episodes: int | None
    bytes: int | None
    fields: tuple[StreamField, ...]
    shard_steps: int
    shard_episodes: int
    lacking: tuple[str, ...] = ()


def inspect_stream(
    dataset: str, raw: Mapping[str, Any], root: str | None = None, cache_size: str | None = None
) -> StreamResult:
    """Summarise a dataset as a stream; one shard is fetched to find the fields. `raw` are options of its reader.

    Raises the errors of opening the stream and of fetching a shard.
    """
    storage: StreamStorage = from_leaf("open_stream")(dataset, root, cache_size, given_options(raw))
    shards, fields = storage.shards, storage.fields
    lengths = next((found for n in range(len(shards)) if len(found := storage.take(n).lengths)), np.empty(0, np.int64))
    steps, frames = None if shards.rows is None else sum(shards.rows), reference_keys(fields)
    views = [(one, VIDEO if one.key in frames else one.role) for one in fields]
    return StreamResult(
        address=shards.address, identity=shards.identity, shards=len(shards), steps=steps, episodes=shards.episodes,
        bytes=None if steps is None else steps * row_bytes(tuple(fields)),
        fields=tuple(StreamField(key=one.name, dtype=one.dtype, shape=one.shape, role=role) for one, role in views),
        shard_steps=int(lengths.sum()), shard_episodes=len(lengths), lacking=tuple(storage.left_out),
    )  # fmt: skip
