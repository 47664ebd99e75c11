"""Calls of a user function: seeded generators, the tensordicts it takes, and the columns of what it returns."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from tensordict import TensorDictBase, is_non_tensor, is_tensor_collection

from ...format.contracts import Array
from ...format.manifest import HIDDEN
from ...progress import counted
from ...storages.dataset import tensordict_of
from ...ted.schema import DTYPES, Key, key_name, numpy_dtype
from ..failures import FunctionFailed, ResultRefused
from ..processor import BlockColumn

_MASK = 2**64 - 1


def mixed_seed(seed: int, number: int) -> int:
    """Mix a seed and a number into 64 bits, independent for neighbouring numbers.

    SplitMix64 (Steele, Lea and Flood 2014): its finalizer over the seed, then its `number`-th output from there.
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
    """The states of the three generators at its creation."""

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
        """Whether a generator was used or seeded since."""
        if not torch.equal(self._torch, torch.get_rng_state()) or self._python != random.getstate():
            return True
        now: Any = np.random.get_state()  # noqa: NPY002
        return self._numpy[2:] != now[2:] or not np.array_equal(self._numpy[1], now[1])


@contextlib.contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the three generators afterwards."""
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
        """Return a function of many rows: vmap of this one, with other random numbers for each row."""
        return type(self)(self.label, torch.vmap(self._function, randomness="different"))

    def __call__(self, argument: Any, steps: tuple[int, int]) -> Any:
        """Call the function inside `running`; FunctionFailed for what it raises, except KeyboardInterrupt."""
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
"""Element type by name and shape of a single row, by key."""

# Names reserved by tensordict: leaves of these names would be missing in the folder.
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
    """Return the columns of a function's result for `rows` steps, with as many rows.

    Tensors may be views of the input, expanded, on another device, or part of a graph. ResultRefused unless the result
    is a nest of tensors with `rows` rows each.
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
    """Return the columns of a function's result with any number of rows, and that number.

    A tensordict of batch size `[0]` may have no keys. ResultRefused as for `columns_of`, and where tensors have
    different numbers of rows.
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
    """Return the columns of a function's result for a single step, each one value `[*shape]`.

    ResultRefused unless the result is a nest of tensors, and for a tensordict with a batch size.
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
    """Raise ResultRefused unless keys, element types and shapes of a row are those of `others`."""
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
    """Element type and contiguous values of one leaf, maybe a view."""
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
        """Add a result without rows; the first of these is returned if no rows are ever added."""
        self._empty = self._empty or columns

    def add(self, columns: Mapping[Key, BlockColumn], rows: int) -> None:
        """Copy rows; ResultRefused unless their layout is that of the first."""
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
