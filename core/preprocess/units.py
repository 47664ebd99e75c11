"""Calls of a user function, in the process that runs it: with some steps, a single row or a whole episode.

A unit is the argument of one call, a tensordict. The function's result is converted back to columns, and its rows are
assigned to episodes. Before each call, the random generators are seeded by a position in the dataset, so that results
depend neither on the worker nor on the order of calls.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection

from ..engine.tasks import FunctionFailed, ResultRefused
from ..format.contracts import Array
from ..format.manifest import HIDDEN
from ..progress import counted
from ..storages.dataset import tensordict_of
from ..ted.episodes import rows_equal
from ..ted.schema import DTYPES, EPISODE, NEXT, Field, Key, Numbers, key_name, numpy_dtype, role_of, state_keys
from .processor import Block, BlockColumn, LoadedProcessor, Pieces, flagged, marked, marked_pieces, numbers_episodes

_MASK = 2**64 - 1


def mixed_seed(seed: int, number: int) -> int:
    """Mix a seed and a number into 64 bits that are independent for neighbouring numbers.

    This is SplitMix64 (Steele, Lea and Flood 2014): the generator starts at the finalized seed, and its output at
    position `number` is returned.
    """
    return _finalized(_finalized(seed & _MASK) + (number + 1) * 0x9E3779B97F4A7C15)


def _finalized(bits: int) -> int:
    bits &= _MASK
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & _MASK
    return bits ^ (bits >> 31)


def seed_generators(bits: int) -> None:
    """Seed the global generators of torch (on the CPU), `random` and NumPy with 64 bits."""
    torch.default_generator.manual_seed(bits)
    random.seed(bits)
    # User functions may use the legacy generator. It gets the upper half, because torch uses the lower one with the
    # same algorithm.
    np.random.seed(bits >> 32)  # noqa: NPY002


class RandomState:
    """A snapshot of the states of the three global generators: torch's on the CPU, Python's and NumPy's legacy one."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state()  # noqa: NPY002

    def restore(self) -> None:
        """Restore the states."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002

    def changed(self) -> bool:
        """Whether a generator was used or seeded since the snapshot."""
        if not torch.equal(self._torch, torch.get_rng_state()) or self._python != random.getstate():
            return True
        now: Any = np.random.get_state()  # noqa: NPY002
        return self._numpy[2:] != now[2:] or not np.array_equal(self._numpy[1], now[1])


@contextlib.contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the states of the three global generators on exit."""
    before = RandomState()
    try:
        yield
    finally:
        before.restore()


class UserFunction:
    """A loaded function; `label` is its name in messages."""

    def __init__(self, label: str, function: Callable[[Any], Any]) -> None:
        self.label = label
        self._function = function

    def vmapped(self) -> Self:
        """Return this function under `torch.vmap`: it takes many rows, and draws different random numbers for each."""
        return type(self)(self.label, torch.vmap(self._function, randomness="different"))

    def __call__(self, argument: Any, steps: tuple[int, int]) -> Any:
        """Call the function, inside `running`.

        Every exception except KeyboardInterrupt is raised as FunctionFailed, with the range of `steps`.
        """
        process = os.getpid()
        try:
            return self._function(argument)
        except (Exception, SystemExit) as error:
            raise FunctionFailed.of(error, steps) from error
        finally:
            if os.getpid() != process:
                os._exit(0)  # a child that the function forked must not continue the job

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Redirect prints to stderr, and restore the global random generators afterwards."""
        with preserved_generators(), contextlib.redirect_stdout(sys.stderr):
            yield


Layout: TypeAlias = Mapping[Key, tuple[str, tuple[int, ...]]]
"""For each key, the name of its element type and the shape of a single row."""

# Tensordict reserves these names: leaves with such a name would be missing in the folder of a dataset.
_RESERVED = frozenset({"shape", "device", "_type"})
_TAKEN_FOLDERS = frozenset({"meta.json", "env_metadata.json", HIDDEN})


def chunk_of(columns: Mapping[Key, BlockColumn], rows: int) -> TensorDictBase:
    """Return a tensordict of batch size `[rows]` whose tensors share the arrays' memory."""
    return tensordict_of({key: tensor_of_column(column) for key, column in columns.items()}, (rows,))


def tensor_of_column(column: BlockColumn) -> torch.Tensor:
    """View a column as a tensor of its element type, `[rows, *shape]`."""
    tensor = torch.from_numpy(column.values)
    return tensor.view(torch.bfloat16) if column.dtype == "bfloat16" else tensor


def columns_of(result: Any, rows: int) -> dict[Key, BlockColumn]:
    """Return the columns of a function's result, which must have exactly `rows` rows.

    Tensors may be views of the input, expanded, on another device, or part of an autograd graph. ResultRefused unless
    the result is a nest of tensors with `rows` rows each.
    """
    columns = _columns(result, f"a tensordict of {counted(rows, 'row')}")
    for key, (_, values) in columns.items():
        if not values.shape or len(values) != rows:
            raise ResultRefused(
                f"it returned {_length(values)} of {key_name(key)!r} for {counted(rows, 'step')}, expected as many"
            )
    if not columns:
        raise ResultRefused("it returned no tensors")
    return columns


def table_of(result: Any) -> tuple[dict[Key, BlockColumn], int]:
    """Return the columns of a function's result with any number of rows, and the number of rows.

    A tensordict of batch size `[0]` may have no keys. ResultRefused unless the result is a nest of tensors with the
    same number of rows.
    """
    columns = _columns(result, "a tensordict of some rows")
    batch = tuple(result.batch_size) if is_tensor_collection(result) else ()
    if not columns and batch[:1] != (0,):
        raise ResultRefused("it returned no tensors")
    first, (_, values) = next(iter(columns.items()), ((), BlockColumn("", np.empty(batch))))
    rows = batch[0] if batch else len(values) if values.shape else -1
    for key, (_, values) in columns.items():
        if not values.shape:
            raise ResultRefused(f"it returned no rows of {key_name(key)!r}; all tensors have a row for each step")
        if len(values) != rows:
            raise ResultRefused(
                f"it returned {counted(rows, 'row')} of {key_name(first)!r} and {len(values):,} of {key_name(key)!r}; "
                "all must have the same number"
            )
    return columns, rows


def row_of(result: Any) -> dict[Key, BlockColumn]:
    """Return the columns of a function's result for a single step. The values of a column have no dimension of rows.

    ResultRefused unless the result is a nest of tensors, and for a tensordict whose batch size is not `[]`.
    """
    columns = _columns(result, "a tensordict of one step")
    if is_tensor_collection(result) and tuple(result.batch_size):
        raise ResultRefused(
            f"it returned a tensordict of batch size {list(result.batch_size)}, expected exactly one step, []"
        )
    if not columns:
        raise ResultRefused("it returned no tensors")
    return columns


def require_layout(found: Layout, expected: Layout, others: str) -> None:
    """Raise ResultRefused unless keys, element types and shapes of a row are the expected ones.

    `others` names the rows that have the expected layout, for the message.
    """
    for text, keys in (("lacks", expected.keys() - found.keys()), ("has besides", found.keys() - expected.keys())):
        if keys:
            names = ", ".join(sorted(map(key_name, keys)))
            raise ResultRefused(f"the result {text} {names}; it must have the keys of {others}")
    for key, (dtype, shape) in found.items():
        if (dtype, shape) != expected[key]:
            before, size = expected[key]
            raise ResultRefused(
                f"{key_name(key)!r} came out as {dtype} {list(shape)}, where {others} had {before} {list(size)}"
            )


def _columns(result: Any, expected: str) -> dict[Key, BlockColumn]:
    if not _is_nest(result):
        returned = "None" if result is None else type(result).__name__
        raise ResultRefused(f"it returned {returned}, expected {expected}")
    return {key: _column_of(value, key) for key, value in _leaves(result, ())}


def _length(values: Array) -> str:
    return counted(len(values), "row") if values.shape else "no rows"


def _is_nest(value: Any) -> bool:
    return (isinstance(value, Mapping) or is_tensor_collection(value)) and not is_non_tensor(value)


def _leaves(nest: Any, prefix: Key) -> Iterator[tuple[Key, Any]]:
    for part, value in nest.items():
        if not isinstance(part, str):
            raise ResultRefused(f"it returned the key {part!r} of type {type(part).__name__}; keys are strings")
        if part in _RESERVED:
            raise ResultRefused(
                f"it returned the key {part!r}, which tensordict keeps for itself; call it {part + '_'!r}"
            )
        if not _is_nest(value):
            yield (*prefix, part), value
        elif part in _TAKEN_FOLDERS:
            raise ResultRefused(f"it returned the nested key {part!r}, whose place in the folder is taken")
        else:
            yield from _leaves(value, (*prefix, part))


def _column_of(value: Any, key: Key) -> BlockColumn:
    """Return the element type and the values of one leaf, as a contiguous array or a view of one."""
    if isinstance(value, np.ndarray):
        name = value.dtype.newbyteorder("=").name
        _known(name, str(value.dtype), key)
        return BlockColumn(name, np.ascontiguousarray(value, numpy_dtype(name)).reshape(value.shape))
    if not isinstance(value, torch.Tensor):
        raise ResultRefused(f"it returned {type(value).__name__} under {key_name(key)!r}, expected a tensor")
    if value.is_nested or value.layout is not torch.strided:
        raise ResultRefused(f"it returned a nested or sparse tensor under {key_name(key)!r}, expected a dense one")
    if value.device.type == "meta":
        raise ResultRefused(f"it returned a tensor without data (on meta) under {key_name(key)!r}")
    name = str(value.dtype).removeprefix("torch.")
    _known(name, str(value.dtype), key)
    tensor = value.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg().contiguous()
    return BlockColumn(name, (tensor.view(torch.uint16) if name == "bfloat16" else tensor).numpy())


def _known(name: str, found: str, key: Key) -> None:
    if name not in DTYPES:
        known = ", ".join(DTYPES)
        raise ResultRefused(f"it returned {key_name(key)!r} as {found}, which cannot be stored; known: {known}")


class ColumnBuffer:
    """Arrays that grow as rows are added. The first rows decide keys, element types and shapes."""

    def __init__(self, expected: int) -> None:
        self._room = max(expected, 1)
        self._rows = 0
        self._layout: Layout = {}
        self._arrays: dict[Key, Array] = {}
        self._empty: Mapping[Key, BlockColumn] = {}

    def nothing(self, columns: Mapping[Key, BlockColumn]) -> None:
        """Add a result without rows. If no rows are ever added, `columns` returns the first of these results."""
        self._empty = self._empty or columns

    def add(self, columns: Mapping[Key, BlockColumn], rows: int) -> None:
        """Copy rows; ResultRefused unless their layout matches the first rows."""
        layout = {key: (dtype, values.shape[1:]) for key, (dtype, values) in columns.items()}
        if not self._layout:
            self._layout = layout
            self._arrays = {key: self._empty_array(key) for key in layout}
        require_layout(layout, self._layout, "the first episode")
        self._make_room(self._rows + rows)
        for key, (_, values) in columns.items():
            self._arrays[key][self._rows : self._rows + rows] = values
        self._rows += rows

    def columns(self) -> dict[Key, BlockColumn]:
        """The columns of all rows."""
        if not self._rows:
            return dict(self._empty)
        return {key: BlockColumn(self._layout[key][0], array[: self._rows]) for key, array in self._arrays.items()}

    def _empty_array(self, key: Key) -> Array:
        dtype, shape = self._layout[key]
        return np.empty((self._room, *shape), numpy_dtype(dtype))

    def _make_room(self, rows: int) -> None:
        if rows <= self._room:
            return
        self._room = max(rows, self._room + self._room // 2)
        for key, array in self._arrays.items():
            self._arrays[key] = self._empty_array(key)
            self._arrays[key][: self._rows] = array[: self._rows]


class StepUnit(LoadedProcessor):
    """Unit `step`: K rows in, any number of rows out. Generators are seeded by the number of the first row."""

    def __init__(self, function: UserFunction, seed: int) -> None:
        self._function = function
        self._seed = seed

    def apply(self, block: Block) -> Block:
        """Return the function's rows for the block.

        If the function returns as many rows as it was given, each row stays in its episode. Otherwise the column
        `episode` says which episode each row belongs to; an episode may have no rows left. An episode that now ends
        without a flag is marked truncated.
        """
        steps = (block.first, block.first + block.rows)
        before = _Ends.of(block)
        with self._function.running():
            seed_generators(mixed_seed(self._seed, block.first))
            result = self._function(chunk_of(block.columns, block.rows), steps)
        columns, rows = table_of(result)
        if rows == block.rows:
            return Block(columns, block.pieces, block.first)
        pieces = _left(block.pieces, before.episodes, columns, rows, block.rows)
        return marked_pieces(Block(columns, pieces, block.first), before.marked)


class _Ends:
    """The episode number of each run of a block, and whether its last row has an end flag.

    Both are read before the function is called, because the function may edit the block. `episodes` is None if the
    numbers are not known.
    """

    def __init__(self, episodes: Numbers | None, marked: NDArray[np.bool_]) -> None:
        self.episodes = episodes
        self.marked = marked

    @classmethod
    def of(cls, block: Block) -> _Ends:
        pieces = block.pieces
        filled = pieces.rows > 0
        marked = np.zeros(len(pieces), np.bool_)
        marked[filled] = flagged(block.columns, (pieces.starts + pieces.rows - 1)[filled])
        if not filled.all() or not numbers_episodes(block.columns):
            return cls(None, marked)
        return cls(block.columns[EPISODE].values[pieces.starts].reshape(len(pieces)).astype(np.int64), marked)


def _left(
    pieces: Pieces, episodes: Numbers | None, columns: Mapping[Key, BlockColumn], rows: int, given: int
) -> Pieces:
    """Return the runs of a block after the function has returned another number of rows than it was `given`.

    The column `episode` of the result assigns its `rows` rows to the runs: equal consecutive numbers are one run. The
    numbers must be among `episodes`, in the same order; runs whose number does not occur have no rows left.
    """
    counts = np.zeros(len(pieces), np.int64)
    if not rows:
        return Pieces(pieces.episode, counts, pieces.begins, pieces.ends)
    returned = f"it returned {counted(rows, 'row')} for {counted(given, 'step')}"
    if episodes is None or not numbers_episodes(columns):
        if given > 1 and all(values.shape[1:2] == (given,) for _, values in columns.values()):
            raise ResultRefused(
                f"it returned the batch size {[rows, given]} for {counted(given, 'step')}, expected {[given]}"
            )
        raise ResultRefused(
            f"{returned} without a column 'episode' that says whose they are; keep 'episode', or use --unit episode"
        )
    numbers = columns[EPISODE].values.reshape(rows).astype(np.int64)
    starts = np.flatnonzero(np.concatenate(([True], numbers[1:] != numbers[:-1])))
    lengths = np.diff(np.append(starts, rows))
    at = 0
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        number = numbers[start]
        found = np.flatnonzero(episodes[at:] == number)
        if not len(found):
            known = "comes after a later one" if number in episodes else "is none of those given"
            raise ResultRefused(
                f"{returned}, and the episode of row {start:,}, {number}, {known}; "
                "rows stay in the order of their episodes"
            )
        if len(found) > 1:
            raise ResultRefused(
                f"{returned} of which several episodes are numbered {number}; "
                "their rows cannot be separated; use --unit episode"
            )
        at += int(found[0])
        counts[at] = length
        at += 1
    return Pieces(pieces.episode, counts, pieces.begins, pieces.ends)


class EpisodeUnit(LoadedProcessor):
    """Unit `episode`: the T rows of an episode in; any number of rows out, which form any number of episodes.

    Blocks hold whole episodes. Generators are seeded by the number of the episode among the selected ones. With
    `new_flags_end` the function must return as many rows as it gets, and each end flag that it adds ends an episode.
    """

    def __init__(self, function: UserFunction, seed: int, *, new_flags_end: bool = False) -> None:
        self._function = function
        self._seed = seed
        self._new_flags_end = new_flags_end

    def apply(self, block: Block) -> Block:
        """Return the function's rows for each episode.

        The rows are split into episodes where the column `episode` changes, and after each end flag whose next
        observation differs from the observation of the following row. New ends without a flag are marked truncated if
        the original episode had a flag at its end.
        """
        grown = ColumnBuffer(block.rows)
        runs: list[tuple[int, int, bool, bool]] = []
        pieces = block.pieces
        with self._function.running():
            for place, (start, rows) in enumerate(zip(pieces.starts.tolist(), pieces.rows.tolist(), strict=True)):
                lengths = self._call(block, place, start, rows, grown) if rows else [0]
                episode, last = int(pieces.episode[place]), len(lengths) - 1
                runs += (
                    (episode, length, bool(pieces.begins[place]) or run > 0, bool(pieces.ends[place]) or run < last)
                    for run, length in enumerate(lengths)
                )
        columns = zip(*runs, strict=True) if runs else ((), (), (), ())
        return Block(grown.columns(), Pieces.of(*columns), block.first)

    def _call(self, block: Block, place: int, start: int, given: int, grown: ColumnBuffer) -> list[int]:
        """Append the rows of one episode; return the lengths of its runs."""
        part = {
            key: BlockColumn(dtype, values[start : start + given]) for key, (dtype, values) in block.columns.items()
        }
        steps = (block.first + start, block.first + start + given)
        before = flagged(part, np.arange(given))  # the function may edit the flags
        seed_generators(mixed_seed(self._seed, int(block.pieces.episode[place])))
        result = self._function(chunk_of(part, given), steps)
        with ResultRefused.on(steps):
            columns, rows = table_of(result)
            if not rows:
                grown.nothing(columns)
                return [0]
            kept = before if self._new_flags_end else np.ones(rows, np.bool_)
            ends = np.append(_inner_ends(columns, rows, kept), rows - 1)
            if before[-1]:
                columns |= marked(columns, ends[~flagged(columns, ends)])
            grown.add(columns, rows)
        lengths: list[int] = np.diff(ends, prepend=-1).tolist()
        return lengths


def _inner_ends(columns: Mapping[Key, BlockColumn], rows: int, kept: NDArray[np.bool_]) -> Numbers:
    """Return the rows, except the last, that end an episode.

    An end flag in one of the rows `kept`, bool `[rows]`, does not count if the next row continues from its next
    observation.
    """
    ends = np.zeros(rows - 1, np.bool_)
    if numbers_episodes(columns):
        numbers = columns[EPISODE].values.reshape(rows)
        ends |= numbers[1:] != numbers[:-1]
    flags = np.flatnonzero(flagged(columns, np.arange(rows - 1)))
    if len(flags):
        fields = (Field(key, dtype, values.shape[1:], role_of(key)) for key, (dtype, values) in columns.items())
        states = state_keys(fields)
        follows = np.full(len(flags), bool(states))
        for key in states:
            follows &= rows_equal(columns[NEXT, *key].values[flags], columns[key].values[flags + 1])
        ends[flags[~(follows & kept[flags])]] = True
    return np.flatnonzero(ends)


_NO_BATCH = torch.Size([])


@dataclass(slots=True)
class _RowLeaf:
    """One leaf of the results: its key and layout, and `rows`, the destination of each row of the stretch."""

    key: Key
    dtype: torch.dtype
    shape: torch.Size
    rows: tuple[torch.Tensor, ...] = ()

    def takes(self, value: Any) -> bool:
        """Whether a value is a plain tensor of the expected type and shape."""
        return (
            type(value) is torch.Tensor
            and value.dtype is self.dtype
            and value.layout is torch.strided
            and value.is_cpu
            and not value.requires_grad
            and not value.is_nested
            and value.shape == self.shape
        )


# The entries of a nest of results, in the order in which the first row had them.
_Plan: TypeAlias = "tuple[tuple[str, _RowLeaf | _Plan], ...]"


class RowResults:
    """The results of `rows` rows. Each is copied at once, because the function may reuse its memory for the next one.

    The first row decides keys, element types and shapes. Rows are processed in stretches: `start` selects one, and
    `put` takes the place of a row within it.

    Checking a result in full takes longer than copying it. If a result has the entries of the first row in the same
    order, as plain tensors of the same layout, they are copied without further checks.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._stretch = (0, rows)
        self._layout: Layout = {}
        self._arrays: dict[Key, Array] = {}
        self._leaves: list[_RowLeaf] = []
        self._plan: _Plan = ()

    def forget_first(self) -> None:
        """Let the first row decide the layout again, if it is in the current stretch."""
        if not self._stretch[0]:
            self._layout, self._arrays, self._leaves, self._plan = {}, {}, [], ()

    def start(self, start: int, stop: int) -> None:
        """Select the rows `[start, stop)`, a few hundred at most, for the next calls of `put`."""
        self._stretch = (start, stop)
        for leaf in self._leaves:
            leaf.rows = self._tensor(leaf.key)[start:stop].unbind(0)

    def put(self, place: int, result: Any) -> None:
        """Copy the result for the row `place` of the stretch; ResultRefused unless it has the layout of the first."""
        if self._layout and self._put_at_once(place, result):
            return
        columns = row_of(result)
        layout = {key: (column.dtype, column.values.shape) for key, column in columns.items()}
        if not self._layout:
            self._decide(layout, result)
        require_layout(layout, self._layout, "the first row")
        for key, column in columns.items():
            self._arrays[key][self._stretch[0] + place] = column.values

    def columns(self) -> dict[Key, BlockColumn]:
        """The columns of all rows, after the last `put`."""
        return {key: BlockColumn(self._layout[key][0], array) for key, array in self._arrays.items()}

    def _put_at_once(self, place: int, result: Any) -> bool:
        if type(result) is TensorDict and result.batch_size != _NO_BATCH:
            return False
        try:
            return _copied(result, self._plan, place)
        except (ValueError, RuntimeError):  # another number of entries, or a tensor without a shape
            return False

    def _decide(self, layout: Layout, result: Any) -> None:
        self._layout = layout
        self._arrays = {
            key: np.zeros((self._rows, *shape), numpy_dtype(dtype)) for key, (dtype, shape) in layout.items()
        }
        self._plan = self._planned(result, ())
        self.start(*self._stretch)

    def _planned(self, nest: Any, prefix: Key) -> _Plan:
        return tuple((part, self._leaf_or_plan(value, (*prefix, part))) for part, value in nest.items())

    def _leaf_or_plan(self, value: Any, key: Key) -> _RowLeaf | _Plan:
        if key not in self._layout:
            return self._planned(value, key)
        tensor = self._tensor(key)
        leaf = _RowLeaf(key, tensor.dtype, tensor.shape[1:])
        self._leaves.append(leaf)
        return leaf

    def _tensor(self, key: Key) -> torch.Tensor:
        return tensor_of_column(BlockColumn(self._layout[key][0], self._arrays[key]))


def _copied(nest: Any, plan: _Plan, place: int) -> bool:
    """Copy a nest if it has exactly the planned entries; return whether it has."""
    if type(nest) is not TensorDict and type(nest) is not dict:
        return False
    entries: Mapping[str, Any] = nest
    for (part, value), (name, inner) in zip(entries.items(), plan, strict=True):
        if part != name:
            return False
        if not isinstance(inner, _RowLeaf):
            if not _copied(value, inner, place):
                return False
        elif inner.takes(value):
            inner.rows[place].copy_(value)
        else:
            return False
    return True


# A nest of leaves, each a tuple with one tensor for each row.
_Rows: TypeAlias = "dict[str, tuple[torch.Tensor, ...] | _Rows]"

_FIRST, _MOST = 8, 256
"""Rows of the first stretch and of the longest ones."""

_PROBED = 8
"""Rows that `RowUnit.probe` compares."""


class RowUnit(LoadedProcessor):
    """Unit `row`: one row of batch size `[]` in, one out.

    If the function is called row by row, the generators are seeded by the number of the row, so that random numbers do
    not depend on blocks. Under vmap, which draws for all rows at once, they are seeded by the number of the first row.

    Seeding takes longer than many functions do. Until the function is seen to use random numbers, a stretch of rows
    runs without seeding; if that changed the state of a generator, the stretch runs again, with seeding.
    """

    def __init__(self, function: UserFunction, seed: int, vmap: bool | None) -> None:
        self._function = function
        self._seed = seed
        self._vmap = bool(vmap)
        self._draws = False

    def apply(self, block: Block) -> Block:
        """Return one row for each row of the block; episodes are unchanged."""
        with self._function.running():
            columns = self._at_once(block, block.first) if self._vmap else self._one_by_one(block)
        return Block(columns, block.pieces, block.first)

    def probe(self, block: Block) -> bool:
        """Whether vmap can be used: a few rows must have equal results with and without it."""
        if not block.rows:
            return False
        try:
            with self._function.running():
                # Use another seed than the loop: a function with random numbers must not be found equal.
                at_once = self._at_once(_sample(block), ~block.first)
                return _alike(at_once, self._one_by_one(_sample(block)))
        except (FunctionFailed, ResultRefused):
            return False  # a function that also fails without vmap is reported by the run

    def _at_once(self, block: Block, number: int) -> dict[Key, BlockColumn]:
        seed_generators(mixed_seed(self._seed, number))
        steps = (block.first, block.first + block.rows)
        result = self._function.vmapped()(chunk_of(block.columns, block.rows), steps)
        if is_tensor_collection(result) and len(result.batch_size) != 1:
            found = list(result.batch_size[1:])
            raise ResultRefused(f"it returned a tensordict of batch size {found}, expected exactly one step, []")
        return columns_of(result, block.rows)

    def _one_by_one(self, block: Block) -> dict[Key, BlockColumn]:
        results = RowResults(block.rows)
        start, size = 0, _FIRST
        while start < block.rows:
            stop = min(start + size, block.rows)
            results.start(start, stop)
            self._stretch(_taken(block, slice(start, stop), block.first + start), results)
            start, size = stop, min(2 * size, _MOST)
        return results.columns()

    def _stretch(self, block: Block, results: RowResults) -> None:
        if not self._draws:
            again = _taken(block, np.arange(block.rows), block.first)
            before = RandomState()
            refused: FunctionFailed | ResultRefused | None = None
            try:
                self._call(block, results)
            except (FunctionFailed, ResultRefused) as error:
                refused = error
            self._draws = before.changed()
            if not self._draws:
                if refused is not None:
                    raise refused
                return
            block = again
            results.forget_first()
        self._call(block, results)

    def _call(self, block: Block, results: RowResults) -> None:
        """Call the function with each row of a stretch."""
        rows = _unbound(block)
        for place in range(block.rows):
            number = block.first + place
            if self._draws:
                seed_generators(mixed_seed(self._seed, number))
            result = self._function(_row(rows, place), (number, number + 1))
            try:
                results.put(place, result)
            except ResultRefused as error:
                error.steps = (number, number + 1)
                raise


def _taken(block: Block, rows: Any, first: int) -> Block:
    """Return some rows of a block as a single run: views for a slice, copies for an array of row numbers."""
    columns = {key: BlockColumn(dtype, values[rows]) for key, (dtype, values) in block.columns.items()}
    count = len(range(block.rows)[rows]) if isinstance(rows, slice) else len(rows)
    return Block(columns, Pieces.of([0], [count], [True], [True]), first)


def _sample(block: Block) -> Block:
    """Return copies of a few evenly spaced rows of a block."""
    return _taken(block, np.linspace(0, block.rows - 1, min(_PROBED, block.rows)).astype(np.int64), block.first)


def _unbound(block: Block) -> _Rows:
    """Nest the tensors of all rows by their keys."""
    nest: _Rows = {}
    for (*folders, name), column in block.columns.items():
        inner: Any = nest
        for part in folders:
            inner = inner.setdefault(part, {})
        inner[name] = tensor_of_column(column).unbind(0)
    return nest


def _row(rows: _Rows, place: int) -> TensorDict:
    """Return one row of a nest as a tensordict of batch size `[]`.

    `_new_unsafe` leaves out the checks of tensordict, which would take most of the time.
    """
    entries: dict[Any, Any] = {
        name: inner[place] if isinstance(inner, tuple) else _row(inner, place) for name, inner in rows.items()
    }
    tensordict: TensorDict = TensorDict._new_unsafe(entries, batch_size=_NO_BATCH)
    return tensordict


def _alike(one: Mapping[Key, BlockColumn], other: Mapping[Key, BlockColumn]) -> bool:
    """Whether two results agree in keys, element types, shapes and, up to rounding, values."""
    if one.keys() != other.keys():
        return False
    try:
        for key in one:
            torch.testing.assert_close(
                tensor_of_column(one[key]), tensor_of_column(other[key]), rtol=None, atol=None, equal_nan=True
            )
    except AssertionError:
        return False
    return True
