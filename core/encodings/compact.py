"""The compact form of steps, which stores each state once: its leaves, and conversion from and to TED rows.

The leaves follow from the fields of the steps, so that no index has to be stored. A key that exists at the root and
under `next` is a state. It becomes one leaf, which has one row more than steps in every episode:

    TED, per step          root          s0 s1 s2 │ s3 s4         two episodes, of 3 and 2 steps
                           next          s1 s2 E  │ s4 F          E, F: the observations after the last steps
    stored, one leaf                  s0 s1 s2 E  │ s3 s4 F       5 + 2 rows instead of 10

Rewards and done flags are stored at the root, as in a flat checkpoint of TorchRL; other keys that exist only under
`next` stay there. Done flags and a reward at TED's root, which TorchRL does not store, are under `at_root`, unless they
are all zero. If in an episode the next observation of some step is not the observation of the following step, all of
its next rows are stored under `explicit_next`.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from ..errors import CorruptDataError
from ..format.contracts import Array, StepReader
from ..format.episodes import ALL_COLUMNS, FINAL, EpisodeTable
from ..format.manifest import HIDDEN
from ..format.returns import sum_rewards
from ..progress import Progress, Silent
from ..ted.episodes import Continuity, EndReason, rows_equal
from ..ted.schema import (
    NEXT,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    SINGLETONS,
    Field,
    Key,
    as_numbers,
    key_name,
    safe_part,
    state_keys,
)
from .output_files import Blocks

CHUNK_BYTES = 4 << 20
"""Bytes read at once over all leaves: memory that fits into the caches is several times faster than fresh pages."""

LEAF_BYTES = 2 << 20
"""Bytes read at once when leaves are processed one after another."""

FEW_ROWS = 32
"""If episodes have fewer rows than this on average, a Python call for each one takes longer than copying them."""


def leaf_parts(steps: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Split the rows of one leaf into ranges of about `LEAF_BYTES`, of at least one row each."""
    rows = max(1, LEAF_BYTES // max(1, row_bytes))
    for start in range(0, steps, rows):
        yield start, min(start + rows, steps)


def flags_at(reader: StepReader, key: Key, steps: Array) -> Array:
    """Return whether a flag is set at each of `steps`, bool `[n]`; False if the key does not exist.

    `steps` must ascend. A flag with several numbers is set if one of them is.
    """
    found = np.zeros(len(steps), bool)
    field = next((field for field in reader.fields if field.key == key), None)
    if field is None:
        return found
    for start, stop in leaf_parts(reader.manifest.steps, field.row_bytes):
        low, high = np.searchsorted(steps, (start, stop))
        if low < high:
            rows = as_numbers(reader.read(key, start, stop)[steps[low:high] - start], field.dtype)
            found[low:high] = (rows.reshape(high - low, -1) != 0).any(1)
    return found


def table_of_ends(reader: StepReader, last: Array, flagged: Array) -> EpisodeTable:
    """Make the episode table of steps in which episodes follow one after another.

    Args:
        reader: the steps.
        last: the last steps of the episodes, int64 `[episodes]`, ascending.
        flagged: whether each episode ends with a flag, bool `[episodes]`.
    """
    lengths = np.diff(last, prepend=-1)
    starts, count = last + 1 - lengths, len(last)
    terminated, truncated = flags_at(reader, NEXT_TERMINATED, last), flags_at(reader, NEXT_TRUNCATED, last)
    neither = np.where(flagged, EndReason.INFERRED, EndReason.END_OF_FILE)
    one = np.where(terminated, EndReason.TERMINATED, EndReason.TRUNCATED)
    columns = {
        "episode": np.arange(count), "start": starts, "length": lengths,
        "return": sum_rewards(reader, starts, lengths), "terminated": terminated, "truncated": truncated,
        "end_reason": np.where(terminated & truncated, EndReason.BOTH, np.where(terminated | truncated, one, neither)),
        "explicit_start": np.full(count, -1),
    }  # fmt: skip
    return EpisodeTable.from_columns(
        columns | {name: np.zeros(count) for name in ("explicit_next", "seed", "has_seed")}
    )


class Boundaries:
    """The first and last steps of episodes; CorruptDataError if the episodes do not follow one after another.

    Attributes:
        starts: the first step of each episode.
        stops: the step after the last step of each episode.
        lengths: their numbers of steps.
    """

    def __init__(self, table: EpisodeTable, steps: int, origin: str) -> None:
        if not table.covers(steps):
            raise CorruptDataError(
                f"{origin}: start and length of the episode table do not place episodes one after another "
                f"over {steps:,} steps",
                hint="see what is wrong with: rbtool check",
            )
        self.starts = table.start
        self.stops = np.cumsum(table.length)
        self.lengths = table.length

    def episode_of(self, steps: Array) -> Array:
        """Return the episodes of these steps, as rows of the episode table."""
        return np.searchsorted(self.stops, steps, side="right")

    def before(self, step: int) -> int:
        """Return how many episodes end before this step, and thus how many more rows than steps precede its state."""
        return int(np.searchsorted(self.stops, step, side="right"))

    def ends(self, start: int, stop: int) -> Array:
        """Return which of the steps `[start, stop)` are the last of their episodes, as positions from `start` on."""
        low, high = np.searchsorted(self.stops, (start, stop), side="right")
        return self.stops[low:high] - 1 - start


def with_ends(root: Array, after: Array, ends: Array) -> Array:
    """Return the rows of `root`, with the row of `after` inserted behind each of `ends`: n + len(ends) rows."""
    if not len(ends):
        return root
    rows = np.empty((len(root) + len(ends), *root.shape[1:]), root.dtype)
    if rows.size:
        items, extra = _items(rows), _extra(len(rows), ends)
        items[~extra], items[extra] = _items(root), _items(after)[ends]
    return rows


def without_ends(rows: Array, ends: Array) -> Array:
    """Return the root rows of a result of `with_ends`; of one without its first row, the rows of `after`."""
    if not len(ends):
        return rows
    kept = np.empty((len(rows) - len(ends), *rows.shape[1:]), rows.dtype)
    if kept.size:
        np.compress(~_extra(len(rows), ends), _items(rows), out=_items(kept))
    return kept


def differing_rows(one: Array, other: Array) -> Array:
    """Return the numbers of the rows whose bits differ: a NaN equals a NaN with the same bits, and 0.0 is not -0.0."""
    return np.flatnonzero(~rows_equal(one, other))


def _extra(rows: int, ends: Array) -> Array:
    """Mark the rows that `with_ends` inserts, in its result."""
    extra = np.zeros(rows, bool)
    extra[ends + np.arange(1, len(ends) + 1)] = True
    return extra


def _items(array: Array) -> Array:
    """View each row as one opaque item, which NumPy copies several times faster than rows of numbers."""
    whole = np.ascontiguousarray(array)
    return whole.reshape(len(whole), -1).view((np.void, whole.nbytes // len(whole))).reshape(len(whole))


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between two datasets or checkpoints.

    Attributes:
        key: what differs: a leaf, a column of the episode table (`episodes.…`), or for example `steps`.
        what: how it differs.
        count: how many rows, or episodes, differ.
        first_step: the first step that differs; None if the difference is not in rows.
        episode: the number of its episode in the first of the two; None as well.
    """

    key: str
    what: str
    count: int = 0
    first_step: int | None = None
    episode: int | None = None


def compare_steps(one: StepReader, other: StepReader, progress: Progress | None = None) -> list[Difference]:
    """Compare every leaf, the episode table and the texts of episodes, in bounded memory."""
    found = [*_fields(one, other), *_episodes(one, other), *_text(one, other)]
    if one.manifest.steps == other.manifest.steps:
        found = [*_rows(one, other, progress or Silent()), *found]
    return found


def _fields(one: StepReader, other: StepReader) -> Iterator[Difference]:
    if one.manifest.steps != other.manifest.steps:
        yield Difference("steps", f"{one.manifest.steps:,} against {other.manifest.steps:,}")
    here, there = _by_key(one), _by_key(other)
    for key in {**here, **there}:
        if _description(here.get(key)) != _description(there.get(key)):
            yield Difference(key_name(key), f"{_description(here.get(key))} against {_description(there.get(key))}")


def _by_key(reader: StepReader) -> dict[Key, Field]:
    return {leaf.key: leaf for leaf in reader.fields}


def _description(leaf: Field | None) -> str:
    return "nothing" if leaf is None else f"{leaf.dtype} {list(leaf.shape)}"


def _episodes(one: StepReader, other: StepReader) -> Iterator[Difference]:
    here, there = one.episodes, other.episodes
    if len(here) != len(there):
        yield Difference("episodes", f"{len(here):,} against {len(there):,}")
        return
    columns, others = (table.columns() | {FINAL: table.final} for table in (here, there))
    for name in ALL_COLUMNS:
        column = columns[name]
        rows = differing_rows(column, others[name])
        if len(rows):
            row = int(rows[0])
            what = f"{column[row]} against {others[name][row]}"
            yield Difference(f"episodes.{name}", what, len(rows), int(here.start[row]), int(here.episode[row]))


def _text(one: StepReader, other: StepReader) -> Iterator[Difference]:
    here, there = (reader.episode_text or [{}] * len(reader.episodes) for reader in (one, other))
    rows = [row for row, (a, b) in enumerate(zip(here, there, strict=False)) if a != b]
    if rows:
        first, number = int(one.episodes.start[rows[0]]), int(one.episodes.episode[rows[0]])
        yield Difference("episodes_text", "text differs", len(rows), first, number)
    elif len(here) != len(there):
        yield Difference("episodes_text", f"text of {len(here):,} episodes against {len(there):,}")


def _rows(one: StepReader, other: StepReader, progress: Progress) -> Iterator[Difference]:
    there = _by_key(other)
    alike = [leaf for leaf in one.fields if _description(leaf) == _description(there.get(leaf.key))]
    counts, firsts = dict.fromkeys(alike, 0), dict.fromkeys(alike, -1)
    progress.start("comparing", one.manifest.steps, "steps")
    for start, stop in one.chunks(CHUNK_BYTES):
        for leaf in alike:
            rows = differing_rows(one.read(leaf.key, start, stop), other.read(leaf.key, start, stop))
            if len(rows):
                firsts[leaf] = start + int(rows[0]) if not counts[leaf] else firsts[leaf]
                counts[leaf] += len(rows)
        progress.advance(stop - start)
    progress.done()
    for leaf in alike:
        if counts[leaf]:
            first = firsts[leaf]
            episode = int(one.episodes.episode[one.episodes.index_of_step(np.array([first]))[0]])
            yield Difference(leaf.name, "rows differ", counts[leaf], first, episode)


Form: TypeAlias = Literal["ted", "flat", "nested", "h5"]
CompactForm: TypeAlias = Literal["flat", "nested", "h5"]

AT_ROOT = "at_root"
EXPLICIT_NEXT = "explicit_next"
EXPLICIT_EPISODES = Field(("explicit_episodes",), "int64", (), "id")
"""The leaf that lists the episodes, by row of the episode table, whose next rows are stored explicitly."""

_NAMES = frozenset({AT_ROOT, EXPLICIT_NEXT, EXPLICIT_EPISODES.name, NEXT, *(key[0] for key in SINGLETONS)})
_TAKEN: dict[str, frozenset[str]] = {
    "flat": _NAMES | {HIDDEN, "storage_metadata.json", "env_metadata.json"},
    "nested": _NAMES | {HIDDEN, "storage_metadata.json", "env_metadata.json"},
    "h5": _NAMES | {"episodes", "episodes_text", "source", "storage"},
}
_TABLE = ".shape"

BUFFER = "buffer_metadata.json"
"""The file by which the folder of a buffer is recognised; its rows are in `STORAGE_FOLDER`."""
STORAGE_FOLDER = "storage"


@dataclass(frozen=True, slots=True)
class CompactLayout:
    """The leaves of a checkpoint, by the TED keys whose values they hold.

    The key of each field is the place of the leaf in the checkpoint.

    Attributes:
        states: leaves by root key, with one row more than steps in every episode.
        steps: leaves with one row for each step.
        at_root: rewards and done flags at TED's root, one row for each step; only stored if some byte is not zero.
        explicit: by root key, the next rows of the episodes that store them explicitly, one episode after another.
    """

    states: Mapping[Key, Field]
    steps: Mapping[Key, Field]
    at_root: Mapping[Key, Field]
    explicit: Mapping[Key, Field]

    @classmethod
    def of(cls, fields: Iterable[Field], form: CompactForm) -> CompactLayout:
        """Arrange the fields for a form."""
        leaves = {field.key: field for field in fields}
        results = _results(leaves.values())
        states = dict.fromkeys(key for key in state_keys(leaves.values()) if key not in results)
        after = {(NEXT, *key) for key in states}
        steps = [key for key in leaves if key not in states and key not in after and key not in results]
        at_root = [key for key in results if key in leaves]
        moved = _moved_to_root(leaves, results, _TAKEN[form])
        places = {key: _place(key, _TAKEN[form], moved) for key in (*states, *steps)}
        places |= {key: _safe(key) for key in at_root}

        def stored(keys: Iterable[Key], *prefix: str) -> dict[Key, Field]:
            return {key: _moved(leaves[key], (*prefix, *places[key])) for key in keys}

        return cls(
            states=stored(states),
            steps=stored(steps),
            at_root=stored(at_root, AT_ROOT),
            explicit=stored(states, EXPLICIT_NEXT),
        )

    def stored(self, *, with_explicit: bool) -> list[Field]:
        """List all leaves that a checkpoint can have, in the order in which they are written."""
        leaves = [*self.states.values(), *self.steps.values(), *self.at_root.values()]
        return [*leaves, EXPLICIT_EPISODES, *self.explicit.values()] if with_explicit else leaves

    def bytes(self, steps: int, episodes: int) -> int:
        """Return the bytes of all rows, without leaves of `at_root` and `explicit`."""
        per_state = sum(field.row_bytes for field in self.states.values())
        return per_state * (steps + episodes) + sum(field.row_bytes for field in self.steps.values()) * steps


def _moved(field: Field, place: Key) -> Field:
    return Field(place, field.dtype, field.shape, field.role)


def _results(fields: Iterable[Field]) -> dict[Key, None]:
    """Return the keys of rewards and done flags below `next`.

    The same keys at TED's root have another meaning: they belong to the state before the step.
    """
    named = [field.key[1:] for field in fields if field.key[0] == NEXT and field.role in {"reward", "done"}]
    return dict.fromkeys((*SINGLETONS, *(key for key in named if key)))


def _moved_to_root(leaves: Collection[Key], results: Iterable[Key], taken: frozenset[str]) -> frozenset[Key]:
    """Return the rewards and done flags that are stored at the root.

    These are all of TED's own. Others stay below `next` if their name is taken at the root.
    """
    folders = {key[:depth] for key in leaves if key[0] != NEXT for depth in range(1, len(key))}

    def free(key: Key) -> bool:
        above = any(key[:depth] in leaves for depth in range(1, len(key)))
        return not above and key not in folders and key[0].rstrip("_") not in taken and key == _safe(key)

    return frozenset(key for key in results if key in SINGLETONS or free(key))


def _place(key: Key, taken: frozenset[str], moved: frozenset[Key]) -> Key:
    """Return the place of a leaf: its key, or for `moved` keys without `next`; names that are taken get a `_`."""
    if key[0] == NEXT and len(key) > 1:
        return key[1:] if key[1:] in moved else _safe(key)
    first = key[0] + "_" if key[0].rstrip("_") in taken else key[0]
    return _safe((first, *key[1:]))


def _safe(key: Key) -> Key:
    """Return a key that cannot be the name of a table of row shapes: the table of a leaf `x` is named `x.shape`."""
    *folders, name = map(safe_part, key)
    return (*folders, name + "_") if name.rstrip("_").endswith(_TABLE) else (*folders, name)


STORAGE = "storage"
"""The source in the manifest of a storage's checkpoint."""

SEGMENTS_FILE = "segments.json"
"""Describes the checkpoint of a storage of tensors in segments."""

ENSEMBLE_FILE = "ensemble.json"
"""Lists the members in the checkpoint of a storage of several storages."""


@dataclass(frozen=True, slots=True)
class FilledStorage:
    """The storage whose rows a checkpoint holds.

    Attributes:
        shape: the number of its valid rows, then the other dimensions that count elements.
        capacity: its capacity in elements.
        cursor: the row after the one written last; None if unknown.
        structure: how its data is nested, as JSON; None for plain nested dictionaries.
    """

    shape: tuple[int, ...]
    capacity: int
    cursor: int | None
    structure: Mapping[str, Any] | None = None

    @classmethod
    def of_dataset(cls, steps: int) -> FilledStorage:
        """Return the storage that a dataset fills completely; the next write goes to row 0."""
        return cls((steps,), steps, 0)

    @property
    def length(self) -> int:
        """The number of valid elements."""
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """The capacity in rows."""
        return self.capacity // max(math.prod(self.shape[1:]), 1)

    @property
    def full(self) -> bool:
        """Whether the next write replaces an older row."""
        return self.length >= self.capacity

    @property
    def oldest(self) -> int:
        """The valid row that was written first; the rows before it are newer than all others."""
        return self.cursor or 0 if self.full else 0

    @property
    def last_row(self) -> int | None:
        """The row that was written last."""
        if self.cursor is None or not self.shape[0] or (self.cursor == 0 and not self.full):
            return None
        return (self.cursor or self.shape[0]) - 1

    def to_bytes(self) -> bytes:
        """Return the bytes of `storage_metadata.json`, with TorchRL's entries and more."""
        document = {
            "metadata": {}, "is_pytree": False, "len": self.length, "cursor": self.cursor,
            "capacity": self.capacity, "shape": self.shape,
        }  # fmt: skip
        return json.dumps(document | ({} if self.structure is None else {"structure": self.structure})).encode()

    @classmethod
    def from_document(cls, document: Any, steps: int, origin: str) -> FilledStorage:
        """Read the document of `to_bytes` in a checkpoint with this many steps.

        CorruptDataError, which names `origin`, if it is invalid.
        """
        try:
            found = cls(
                tuple(map(_count, document["shape"])), _count(document["capacity"]),
                None if document["cursor"] is None else _count(document["cursor"]), document.get("structure"),
            )  # fmt: skip
            lengths = {found.length, _count(document["len"])}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptDataError(f"{origin} does not describe a storage: {error!r}") from error
        last = found.shape[0] - found.full if found.shape else -1
        inside = found.cursor is None or found.cursor <= max(last, 0)
        if lengths != {steps} or not found.shape or found.capacity < steps or not inside:
            raise CorruptDataError(
                f"{origin} says that {list(found.shape)} of {found.capacity:,} elements are filled and row "
                f"{found.cursor} is next, which does not fit {steps:,} steps"
            )
        return found


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


class LeafSink(ABC):
    """Writes the rows of leaves to a checkpoint, one leaf after another."""

    @abstractmethod
    def create(self, leaf: Field, rows: int) -> None:
        """Begin a leaf with this many rows."""

    @abstractmethod
    def append(self, leaf: Field, rows: Array) -> None:
        """Append rows to the leaf created last."""

    def append_states(self, leaf: Field, root: Array, after: Array, ends: Array) -> None:
        """Append the rows of `with_ends`."""
        self.append(leaf, with_ends(root, after, ends))


def write_compact(source: StepReader, layout: CompactLayout, sink: LeafSink, progress: Progress) -> Array:
    """Write all leaves of `source`, one after another, in parts that fit into the processor's caches.

    While the states are written, each next observation is compared with the observation of the following step, bit for
    bit. The next rows of episodes in which they differ are written explicitly at the end.

    Returns:
        These episodes, by row of the episode table.
    """
    steps = source.manifest.steps
    bounds = Boundaries(source.episodes, steps, str(source.path))
    continuity, broken = Continuity(), np.zeros(len(bounds.stops), bool)
    counter = LeafProgress(progress, len(layout.states) + len(layout.steps) + len(layout.at_root))
    for key, leaf in layout.states.items():
        sink.create(leaf, steps + len(bounds.stops))
        for start, stop in leaf_parts(steps, leaf.row_bytes):
            root, after = source.read(key, start, stop), source.read((NEXT, *key), start, stop)
            follows = continuity.see(key, root, after)
            _mark_broken(broken, bounds, np.flatnonzero(~follows) + (start - 1))
            sink.append_states(leaf, root, after, bounds.ends(start, stop))
            counter.advance(stop - start)
    for key, leaf in ({**layout.steps, **layout.at_root}).items():
        if key in layout.at_root and _is_zero(source, key, leaf):
            counter.advance(steps)
            continue
        sink.create(leaf, steps)
        for start, stop in leaf_parts(steps, leaf.row_bytes):
            sink.append(leaf, source.read(key, start, stop))
            counter.advance(stop - start)
    if broken.any():
        _write_explicit(source, layout.explicit, sink, bounds, broken)
    return np.flatnonzero(broken)


def states_in_place(blocks: Blocks, root: Array, after: Array, ends: Array) -> None:
    """Append the rows of `with_ends`; if episodes are long, parts of the two arrays are written without a copy."""
    if len(ends) * FEW_ROWS >= len(root):
        blocks.append(with_ends(root, after, ends))
        return
    blocks.append_joined(_pieces(ends.tolist(), len(root)), (root, after))


def _pieces(ends: Sequence[int], rows: int) -> Iterator[tuple[int, int, int]]:
    begin = 0
    for end in ends:
        yield 0, begin, end + 1
        yield 1, end, end + 1
        begin = end + 1
    yield 0, begin, rows


class LeafProgress:
    """Reports progress in steps while leaves are written one after another, each with the same share."""

    def __init__(self, progress: Progress, leaves: int) -> None:
        self._progress = progress
        self._whole = max(1, leaves)
        self._rows = 0
        self._reported = 0

    def advance(self, rows: int) -> None:
        """Report `rows` more rows of a leaf as done."""
        self._rows += rows
        done = self._rows // self._whole
        if done > self._reported:
            self._progress.advance(done - self._reported)
            self._reported = done


def _mark_broken(broken: Array, bounds: Boundaries, steps: Array) -> None:
    """Mark the episodes of steps whose next observation is not the observation of the following step.

    At the last step of an episode this means nothing: the following step belongs to another episode.
    """
    episodes = bounds.episode_of(steps)
    broken[episodes[bounds.stops[episodes] - 1 != steps]] = True


def _is_zero(source: StepReader, key: Key, leaf: Field) -> bool:
    """Whether every byte of a leaf is zero."""
    parts = leaf_parts(source.manifest.steps, leaf.row_bytes)
    return not any(source.read(key, *part).reshape(-1).view(np.uint8).any() for part in parts)


def _write_explicit(
    source: StepReader, leaves: Mapping[Key, Field], sink: LeafSink, bounds: Boundaries, broken: Array
) -> None:
    """Write the numbers of the broken episodes, and their next rows one episode after another."""
    numbers = np.flatnonzero(broken)
    sink.create(EXPLICIT_EPISODES, len(numbers))
    sink.append(EXPLICIT_EPISODES, numbers)
    for key, leaf in leaves.items():
        sink.create(leaf, int(bounds.lengths[numbers].sum()))
        for start, stop in leaf_parts(source.manifest.steps, leaf.row_bytes):
            chosen = np.flatnonzero(broken[bounds.episode_of(np.arange(start, stop))])
            if len(chosen):
                low, high = int(chosen[0]), int(chosen[-1]) + 1
                rows = source.read((NEXT, *key), start + low, start + high)
                sink.append(leaf, rows if len(rows) == len(chosen) else rows[chosen - low])


def row_counts(layout: CompactLayout, lengths: Array, explicit: Array) -> dict[Key, Array]:
    """Return how many rows of each episode each stored leaf has, int64 `[episodes]`, by the place of the leaf.

    `explicit` are the episodes with rows in the explicit leaves.
    """
    chosen = np.zeros(len(lengths), np.int64)
    chosen[explicit] = 1
    counts = {leaf.key: lengths + 1 for leaf in layout.states.values()}
    counts |= {leaf.key: lengths for leaf in (*layout.steps.values(), *layout.at_root.values())}
    counts |= {leaf.key: lengths * chosen for leaf in layout.explicit.values()}
    return counts | {EXPLICIT_EPISODES.key: chosen}


Fetch = Callable[[Field, int, int], Array]
"""Reads rows `[start, stop)` of a stored leaf."""


def require_ascending(explicit: Array, episodes: int, path: str | Path) -> Array:
    """Return `explicit`, rows of the episode table, after checking them; CorruptDataError if they are invalid."""
    if len(explicit) and (explicit[0] < 0 or explicit[-1] >= episodes or (np.diff(explicit) < 1).any()):
        raise CorruptDataError(f"{path} does not hold ascending rows of the table of {episodes:,} episodes")
    return explicit


class Expansion:
    """Expands stored leaves to the rows of any TED leaf, with one or two reads of a stored leaf for each call.

    Args:
        layout: the stored leaves.
        bounds: the episodes.
        explicit: the episodes, by row of the episode table, whose next rows are stored explicitly.
        trivial: the TED keys that are not stored because they are zero.
        fetch: reads rows of a stored leaf.
    """

    def __init__(
        self, layout: CompactLayout, bounds: Boundaries, explicit: Array, trivial: frozenset[Key], fetch: Fetch
    ) -> None:
        self._layout = layout
        self._bounds = bounds
        self._trivial = trivial
        self._fetch = fetch
        self._explicit = np.zeros(len(bounds.lengths), bool)
        self._explicit[explicit] = True
        stored = np.where(self._explicit, bounds.lengths, 0)
        self._explicit_starts = np.cumsum(stored) - stored

    def read(self, leaf: Field, start: int, stop: int) -> Array:
        """Read TED rows `[start, stop)` of one leaf into a fresh array."""
        layout, key = self._layout, leaf.key
        if start == stop:
            return np.empty((0, *leaf.shape), leaf.numpy)
        if key in layout.steps:
            return self._fetch(layout.steps[key], start, stop)
        if key in layout.states:
            return self._states(layout.states[key], start, stop, 0)
        if key in layout.at_root:
            if key in self._trivial:
                return np.zeros((stop - start, *leaf.shape), leaf.numpy)
            return self._fetch(layout.at_root[key], start, stop)
        if key[0] != NEXT or key[1:] not in layout.states:
            raise CorruptDataError(f"the field {leaf.name!r} is not stored")
        return self._after(key[1:], start, stop)

    def pieces(self, leaf: Field, start: int, stop: int, view: Fetch) -> Iterator[Array]:
        """Yield TED rows `[start, stop)` of one leaf in pieces; rows that are adjacent in a stored leaf as views.

        `view` returns rows of a stored leaf as a view, if it can. If episodes are short, or next rows are stored
        explicitly, all rows are one fresh array.
        """
        layout, key = self._layout, leaf.key
        stored = layout.steps.get(key) or layout.at_root.get(key)
        if stored is not None and key not in self._trivial:
            yield view(stored, start, stop)
            return
        ahead = int(key[0] == NEXT and key[1:] in layout.states)
        state = layout.states.get(key[ahead:])
        ends = self._bounds.ends(start, stop - 1)
        few = len(ends) * FEW_ROWS < stop - start
        if state is None or not few or (ahead and self._is_explicit(start, stop)):
            yield self.read(leaf, start, stop)
            return
        first = start + self._bounds.before(start) + ahead
        rows = view(state, first, first + stop - start + len(ends))
        begin = 0
        for number, end in enumerate([*ends.tolist(), stop - start - 1]):
            yield rows[begin + number : end + 1 + number]
            begin = end + 1

    def _states(self, leaf: Field, start: int, stop: int, ahead: int) -> Array:
        """Read the states before the steps (`ahead` is 0) or after them (1).

        The state before step s is in row s + (episodes that end before s); the state after it is in the next row.
        """
        first = start + self._bounds.before(start) + ahead
        last = stop - 1 + self._bounds.before(stop - 1) + ahead
        ends = self._bounds.ends(start, stop - 1)
        return without_ends(self._fetch(leaf, first, last + 1), ends)

    def _after(self, key: Key, start: int, stop: int) -> Array:
        rows = self._states(self._layout.states[key], start, stop, 1)
        if self._is_explicit(start, stop):
            which = self._bounds.episode_of(np.arange(start, stop))
            steps = np.flatnonzero(self._explicit[which])
            places = self._explicit_starts[which[steps]] + steps + start - self._bounds.starts[which[steps]]
            # Explicit episodes are stored one after another, so the places are consecutive.
            rows[steps] = self._fetch(self._layout.explicit[key], int(places[0]), int(places[-1]) + 1)
        return rows

    def _is_explicit(self, start: int, stop: int) -> bool:
        """Whether next rows of an episode with one of these steps are stored explicitly."""
        low, high = self._bounds.before(start), self._bounds.before(stop - 1)
        return bool(self._explicit[low : high + 1].any())


class CompactReader(StepReader):
    """Reads the TED rows of a checkpoint in compact form; a subclass reads the rows of stored leaves."""

    _layout: CompactLayout

    @property
    @abstractmethod
    def _explicit(self) -> Array:
        """The episodes, by row of the episode table, whose next rows are stored explicitly."""

    @abstractmethod
    def _is_stored(self, leaf: Field) -> bool:
        """Whether the checkpoint has a leaf; leaves of `at_root` are only stored if they are not zero."""

    @abstractmethod
    def _fetch(self, leaf: Field, start: int, stop: int) -> Array:
        """Read rows `[start, stop)` of a stored leaf into a fresh array."""

    @abstractmethod
    def _view(self, leaf: Field, start: int, stop: int) -> Array:
        """Return the rows of `_fetch` as a view of the file, if they are adjacent there."""

    def read(self, key: Key, start: int, stop: int) -> Array:
        return self._expansion.read(self._leaf(key, start, stop), start, stop)

    def pieces(self, key: Key, start: int, stop: int) -> Iterator[Array]:
        """Yield rows of one TED leaf in pieces, which are read-only views of the file where possible."""
        return self._expansion.pieces(self._leaf(key, start, stop), start, stop, self._view)

    @cached_property
    def _bounds(self) -> Boundaries:
        return Boundaries(self.episodes, self.manifest.steps, str(self.path))

    @cached_property
    def _rows(self) -> dict[Key, int]:
        """The number of rows of each stored leaf, by its place."""
        counts = row_counts(self._layout, self._bounds.lengths, self._explicit)
        return {place: int(count.sum()) for place, count in counts.items()}

    @cached_property
    def _expansion(self) -> Expansion:
        trivial = frozenset(key for key, leaf in self._layout.at_root.items() if not self._is_stored(leaf))
        return Expansion(self._layout, self._bounds, self._explicit, trivial, self._fetch)
