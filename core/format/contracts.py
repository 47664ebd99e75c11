"""The contracts between formats and the core, so that N inputs and M outputs do not need N x M pieces of code.

`Reader` (in `converter`) turns a path in some format into episodes, as `Piece`s, or many at once as an `EpisodeBlock`.
`StepReader` provides the rows of a dataset or a checkpoint written by rbtool, in any layout. Everything that inspects,
checks, converts or saves works on one of the two.

Most contracts, also of the parts of buffers, are template methods: final methods do what all implementations
share, and call the methods that a subclass implements. `delegate` and `refuse_overrides` enforce that.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from ..errors import CorruptDataError, FormatError, SchemaError, UsageError
from ..ted.episodes import Final, rows_equal
from ..ted.schema import Array as Array  # for readers of other formats
from ..ted.schema import Field, Key, Timing, key_name, odd_truths
from .episodes import EpisodeTable
from .files import digest_of_stats
from .manifest import Dropped, Manifest
from .memmap.tree import Rows, RowSpans, as_array


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """What a reader states about its source before it reads any step.

    Attributes:
        fields: each source field, under its root key, with its timing: when its value is known.
        episode_numbers: the source's ids of all its episodes in storage order.
        steps: the total length of these episodes.
        spaces: the observation and action spaces as strict JSON.
        documents: the source's own metadata files, kept verbatim.
        videos: the files of videos that rows refer to, by their names in the dataset (`format.videos`).
        lengths: the length of each episode, if known: as in the source from `Reader.stated`, after the choice of
            `final_step` from `Reader.facts`.
        final_missing: whether the source may lack the observation after the last step of an episode; then the last
            piece of each episode states whether it has one.
        last_terminated: which last steps are terminated, for a source that never has an observation after them and
            states the `lengths`; then the facts are known without reading rows.
        keeps_last: whether `auto` keeps all last steps, since without rewards no target bootstraps from them.
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
    videos: Mapping[str, Path | bytes] = field(default_factory=dict)
    env_metadata: Mapping[str, Any] | None = None
    lengths: Sequence[int] | None = None
    final_missing: bool = False
    last_terminated: Sequence[bool] | None = None
    keeps_last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceMetadata:
    """What the metadata of a source state about its episodes; no rows are read for it.

    Args:
        lengths: the number of steps of each episode, by its number; None where it is not stated.
        texts: the texts of each episode by its number, named as conversions name them.
        tasks: the texts of all tasks by number, used or not.
        documents: the metadata files that are checked, by name.
        files: the paths of the metadata, and of the files that episodes refer to.
        contradictions: statements of the metadata that cannot be true, each with the numbers of its episodes.
        problems: faults of the files of rows and videos, each with the numbers of its episodes.
        statistics: the statistics of single episodes: its number, and its measures by the names of features.
    """

    lengths: Mapping[int, int | None]
    texts: Mapping[int, Mapping[str, str]]
    tasks: Mapping[int, str]
    documents: Mapping[str, bytes]
    files: Sequence[str]
    contradictions: Sequence[tuple[str, Sequence[int]]] = ()
    problems: Sequence[tuple[str, Sequence[int]]] = ()
    statistics: Iterable[tuple[int, Mapping[str, Any]]] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """`n` consecutive steps of one episode, `n >= 1`. The arrays must not change once a reader has yielded the piece.

    Attributes:
        episode: the source's number of the episode.
        columns: by root key, arrays `[n + 1, *shape]` for each `state` (the rows before every step, and the row after
            the last) and `[n, *shape]` for each `step` and `result`. The last row of a `state` is the first row of the
            episode's next piece.
        terminated, truncated: bool `[n]`, true if the flag is set after the step.
        first, last: whether the episode begins, or ends, with this piece.
        seed, text: seed and strings of the whole episode; only used if `first` is set.
        next: for a source that stores next states separately, arrays `[n, *shape]` by the root key of a `state`.
            `columns` then has `[n, *shape]` for that state, and a next row need not equal the row before the next step.
        final: only used if `last` is set. `MISSING` means that the source has no observation after the last step;
            `columns` then has `[n, *shape]` for every state that is not in `next`. `Reader.pieces` never yields
            `MISSING`: it repeats the observation or leaves the step out.
        inferred: only used if `last` is set and neither flag is: a discontinuity in the data marks the episode's end.
    """

    episode: int
    columns: Mapping[Key, Array]
    terminated: Array
    truncated: Array
    first: bool
    last: bool
    seed: int | None = None
    text: Mapping[str, str] = field(default_factory=dict)
    next: Mapping[Key, Array] = field(default_factory=dict)
    final: Final = Final.OBSERVED
    inferred: bool = False

    @property
    def is_unfinished(self) -> bool:
        """Whether the row after the last step is still missing."""
        return self.last and self.final is Final.MISSING

    def rows_of(self, key: Key, timing: Timing) -> int:
        """Return how many rows of a field `columns` has to have."""
        more = timing == "state" and key not in self.next and not self.is_unfinished
        return len(self) + more

    def rows_after(self, key: Key) -> Array:
        """Return a state after every step, `[n, *shape]`."""
        return self.next[key] if key in self.next else self.columns[key][1:]

    def rows_before(self, key: Key) -> Array:
        """Return a state before every step, `[n, *shape]`."""
        return self.columns[key][: len(self)]

    def __len__(self) -> int:
        return len(self.terminated)


class Closing:
    """Something that holds files open; also a context manager."""

    def close(self) -> None:
        """Close everything; harmless when called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class StepReader(Closing, ABC):
    """Reads TED rows that rbtool wrote, from any layout. Safe to fork and to open many times."""

    manifest: Manifest
    path: Path
    serves_threads: ClassVar[bool] = False
    """Whether several threads may call `pieces` at once, once one call has returned."""

    @property
    def fields(self) -> tuple[Field, ...]:
        """The TED leaves, root and `next` alike."""
        return self.manifest.fields

    @property
    def has_digests(self) -> bool:
        """Whether digests were recorded that `verify_files` can compare the files with."""
        return bool(self.manifest.files)

    @property
    @abstractmethod
    def episodes(self) -> EpisodeTable:
        """The episode table."""

    @property
    @abstractmethod
    def episode_text(self) -> list[dict[str, str]] | None:
        """The texts of episodes, in table order; None if there are none."""

    @abstractmethod
    def read(self, key: Key, start: int, stop: int) -> Array:
        """Read rows `[start, stop)` of one leaf as a fresh array `[stop - start, *shape]`."""

    def view(self, key: Key, start: int, stop: int) -> Array:
        """Return the rows that `read` returns, perhaps as a view of a file: the array must not be changed."""
        return self.read(key, start, stop)

    def pieces(self, key: Key, start: int, stop: int) -> Iterator[Array]:
        """Yield the rows that `read` returns in pieces, perhaps views of a file: they must not be changed."""
        yield self.read(key, start, stop)

    @abstractmethod
    def documents(self) -> dict[str, bytes]:
        """The source's own metadata files by name, and `env_metadata.json` if there is one."""

    def videos(self) -> dict[str, Path | bytes]:
        """Where the files of kept videos can be read, by name, while this reader is open."""
        return {}

    def again(self) -> StepReader:
        """Return another reader of the same steps for a thread or process, if possible of the same open files."""
        return copy.copy(self)

    def files_state(self) -> str:
        """Identify the state of the files without reading them."""
        return digest_of_stats(self.path)

    @abstractmethod
    def verify_files(self) -> None:
        """Raise CorruptDataError for the first file whose bytes differ from the recorded digest."""

    def verify_leaves(self, keys: Collection[Key]) -> None:
        """Verify the files of these leaves, for a caller that reads no others; by default all files."""
        self.verify_files()

    def proven_episodes(self) -> Array | None:
        """Return for each episode whether its bytes match its own digest, bool `[episodes]`; None without digests."""
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
                raise SchemaError(f"rows are {start}:{stop}, expected within {self.manifest.steps} rows")
        raise SchemaError(f"no field {key_name(key)!r} in {self.path}")


class FoundSteps(StepReader):
    """Reads TED steps from a file or folder that is not a dataset folder, such as an export; detected by its content.

    A format declares such a class as `steps`. The constructor takes the path.
    """

    @abstractmethod
    def __init__(self, path: Path) -> None: ...

    @classmethod
    @abstractmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether this class can read `path`; little is read of files in other formats."""


class PassedSteps(StepReader):
    """A wrapper around another reader, `source`, which it closes; a subclass changes some of the results."""

    def __init__(self, source: StepReader) -> None:
        self.source = source
        self.path = source.path
        self.manifest = source.manifest

    @property
    def has_digests(self) -> bool:
        return self.source.has_digests

    @property
    def episodes(self) -> EpisodeTable:
        return self.source.episodes

    @property
    def episode_text(self) -> list[dict[str, str]] | None:
        return self.source.episode_text

    def read(self, key: Key, start: int, stop: int) -> Array:
        return self.source.read(key, start, stop)

    def documents(self) -> dict[str, bytes]:
        return self.source.documents()

    def videos(self) -> dict[str, Path | bytes]:
        return self.source.videos()

    def again(self) -> StepReader:
        return type(self)(self.source.again())

    def files_state(self) -> str:
        return self.source.files_state()

    def verify_files(self) -> None:
        self.source.verify_files()

    def close(self) -> None:
        self.source.close()


class FinalMethodError(UsageError, TypeError):
    """A subclass overrides a method that the contract keeps for itself."""


def own_attributes(cls: type, contract: type) -> dict[str, Any]:
    """Return the attributes that `cls` and its plain mixins define, without those inherited from the contract."""
    inherited = {parent for base in cls.__bases__ if issubclass(base, contract) for parent in base.__mro__}
    own: dict[str, Any] = {}
    for parent in reversed(cls.__mro__):
        if parent not in inherited:
            own |= vars(parent)
    return own


def refuse_overrides(cls: type, own: Mapping[str, Any], finals: Mapping[str, str]) -> None:
    """Raise FinalMethodError (a TypeError) if a class overrides a final method.

    `finals` maps the final methods to the methods that a subclass implements instead.
    """
    for name, instead in finals.items():
        if name in own:
            raise FinalMethodError(
                f"{cls.__name__} overrides {name}(), which does the book-keeping and is final",
                hint=f"implement {instead}",
            )


def delegate(cls: type, name: str) -> None:
    """Give `cls` a method `name` that calls the next one in the method resolution order.

    For an abstract method that a class does not need, because it overrides the public method that calls it. A class
    that also derives from a class with an implementation still reaches that one.
    """

    def passed_on(self: Any, *arguments: Any, **options: Any) -> Any:
        return getattr(super(cls, self), name)(*arguments, **options)

    passed_on.__name__ = name
    setattr(cls, name, passed_on)


@dataclass(frozen=True, slots=True)
class EpisodeBlock:
    """Whole episodes, at least one, whose `n` steps follow each other in every array.

    - `episodes`: the source's numbers of the episodes, int64 `[k]`.
    - `stops`: the row after the last of each episode, int64 `[k]`, ascending; every episode has a step, the last stop
      is `n`.
    - `columns`: by the root keys of the source fields, arrays `[n, *shape]`; of a `state`, the rows before every step.
    - `terminated`, `truncated`: bool `[n]`, true where the flag is set after the step.
    - `final`: numbers of `Final`, uint8 `[k]`: `OBSERVED` or `MISSING`, as in `Piece`.
    - `next`: arrays `[n, *shape]` by the root key of a `state`: what came after each step. A state may be absent where
      every episode is `MISSING`: then the next row of `columns` is what came after a step that is not the last.
    - `inferred`: bool `[k]`, as in `Piece`.
    - `text`: the texts of each episode, as in `Piece`; empty where none has any.
    - `following`: the states of `next` that `completed_block` has derived from `columns`; a reader leaves it empty.

    A reader provides arrays. The core may replace them by runs of their rows that are copied later (`RowRuns`).

    A block has no seeds: episodes with seeds come as pieces. The arrays must not change once a reader has yielded the
    block.
    """

    episodes: Array
    stops: Array
    columns: Mapping[Key, Rows]
    terminated: Array
    truncated: Array
    final: Array
    next: Mapping[Key, Rows] = field(default_factory=dict)
    inferred: Array | None = None
    text: Sequence[Mapping[str, str]] = ()
    following: frozenset[Key] = frozenset()

    def __len__(self) -> int:
        return len(self.terminated)

    @property
    def starts(self) -> Array:
        """The first row of each episode, int64 `[k]`."""
        return self.stops - self.lengths

    @property
    def lengths(self) -> Array:
        """The number of steps of each episode, int64 `[k]`."""
        found = self.stops.copy()
        found[1:] -= self.stops[:-1]
        return found

    def explicit_episodes(self) -> Array:
        """Return for each episode whether some next row differs from the row before the following step, bool `[k]`."""
        found = np.zeros(len(self.episodes), bool)
        for key in self.next.keys() - self.following:
            apart = ~rows_equal(as_array(self.next[key])[:-1], as_array(self.columns[key])[1:])
            apart[self.stops[:-1] - 1] = False
            found[np.searchsorted(self.stops, np.flatnonzero(apart), side="right")] = True
        return found


def completed_block(block: EpisodeBlock, keep: Array, fields: Sequence[tuple[Field, Timing]]) -> EpisodeBlock | None:
    """Keep or drop last steps without an observation after them, and give every state its `next`.

    `keep`, bool `[k]`, states for each episode whether such a step is kept, with the last observation repeated.
    Otherwise it is left out, and the step before it becomes the truncated end. None if no step is left.

        rows of a block    a0 a1 a2 | b0 b1      neither episode has an observation after its last step
        keep = [1, 0]      a0 a1 a2 | b0         columns: b1 is left out, b0 becomes truncated
                           a1 a2 a2 | b1         next: a2 is repeated, b1 is the observation after b0
    """
    missing = block.final == Final.MISSING
    left_out = missing & ~keep
    absent = [key for key in _states(fields) if key not in block.next]
    starts, stops = block.starts, block.stops - left_out
    rows = RowSpans(starts, stops) if left_out.any() else None
    if rows is not None and not len(rows):
        return None
    # The next rows of an episode: its rows from the second on, and the last one again if the last step is kept.
    after = RowSpans(*np.stack((starts + 1, block.stops, block.stops - 1, stops), axis=1).reshape(-1, 2).T)

    def kept(array: Rows) -> Rows:
        return array if rows is None else rows.of(as_array(array))

    following = {key: after.of(as_array(block.columns[key])) for key in absent}
    found = replace(
        block,
        columns={key: kept(array) for key, array in block.columns.items()},
        next={key: kept(array) for key, array in block.next.items()} | following,
        terminated=as_array(kept(block.terminated)),
        truncated=as_array(kept(block.truncated)),
        final=np.where(left_out, Final.DROPPED, np.where(missing, Final.REPEATED, block.final)).astype(np.uint8),
        following=frozenset(absent),
    )
    return found if rows is None else _cut(found, block.lengths - left_out, left_out)


def _cut(block: EpisodeBlock, lengths: Array, left_out: Array) -> EpisodeBlock:
    """Adjust a block to the remaining `lengths`, without empty episodes; `left_out` marks those with a new end."""
    there = lengths > 0
    stops, truncated = np.cumsum(lengths[there]), block.truncated.copy()
    truncated[stops[left_out[there]] - 1] = True
    return replace(
        block,
        episodes=block.episodes[there],
        stops=stops,
        truncated=truncated,
        final=block.final[there],
        inferred=None if block.inferred is None else block.inferred[there],
        text=[one for one, kept in zip(block.text, there, strict=False) if kept],
    )


def require_block(block: EpisodeBlock, numbers: Sequence[int], whole: SourceFacts, what: str) -> None:
    """Raise FormatError for a block of other episodes than `numbers`, or that contradicts the facts of the source.

    `what` names the source in messages.
    """
    steps, count = len(block), len(block.episodes)
    if block.episodes.tolist() != list(numbers) or not count:
        raise FormatError(f"{what} came with a block of other episodes, expected those to read")
    lengths = block.lengths
    if len(lengths) != count or (lengths < 1).any() or int(block.stops[-1]) != steps:
        raise FormatError(f"{what} came with a block that does not mark where its episodes end")
    if len(block.text) not in (0, count):
        raise FormatError(f"{what} came with {len(block.text)} texts for {count} episodes")
    inferred = np.zeros(count, bool) if block.inferred is None else block.inferred
    flags = (
        ("terminated", block.terminated, bool, steps), ("truncated", block.truncated, bool, steps),
        ("final", block.final, np.uint8, count), ("inferred", inferred, bool, count),
    )  # fmt: skip
    for name, found, dtype, expected in flags:
        if found.dtype != dtype or found.shape != (expected,):
            raise FormatError(f"{what}: {name} is {form_of(found)}, expected {np.dtype(dtype)} [{expected}]")
        require_truths(found, name, what)
    lacking = block.final == Final.MISSING
    if not (lacking | (block.final == Final.OBSERVED)).all() or (lacking.any() and not whole.final_missing):
        raise FormatError(f"{what} has no observation after a last step, and the facts do not state that one may lack")
    known = {one.key: one for one, _ in whole.fields}
    states = _states(whole.fields)
    odd = (block.columns.keys() ^ known.keys()) | (block.next.keys() - states)
    if not lacking.all():
        odd |= states - block.next.keys()
    if odd:
        raise FormatError(f"{what} came with other fields than the facts name: {', '.join(sorted(map(key_name, odd)))}")
    for key, rows in (*block.columns.items(), *block.next.items()):
        if rows.dtype != known[key].numpy or rows.shape != (steps, *known[key].shape):
            expected_shape = [steps, *known[key].shape]
            raise FormatError(
                f"{what}: {key_name(key)!r} is {form_of(rows)}, expected {known[key].dtype} {expected_shape}"
            )
        require_truths(as_array(rows), key_name(key), what)


def require_truths(rows: Array, name: str, what: str) -> None:
    """Raise CorruptDataError for bool rows with a byte that is neither 0 nor 1; `name` and `what` are for messages."""
    if rows.dtype.kind == "b" and (odd := odd_truths(rows)).any():
        value = int(rows.view(np.uint8)[odd][0])
        raise CorruptDataError(f"{what}: {name!r} has a truth value of {value}, expected 0 or 1")


def _states(fields: Sequence[tuple[Field, Timing]]) -> set[Key]:
    return {one.key for one, timing in fields if timing == "state"}


def form_of(rows: Rows) -> str:
    """Return the element type and the shape of rows, for messages."""
    return f"{rows.dtype} {list(rows.shape)}"
