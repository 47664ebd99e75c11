"""Rows that are gathered and written by compiled loops and plainly, and memory that batches use again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import Interpreter
from waiting import run_threads

from rbtool.core.kernels import rows as rows_module
from rbtool.core.kernels.rows import (
    ArrayPool,
    BatchPool,
    CompiledRecords,
    CompiledRows,
    PlainRecords,
    PlainRows,
    RecordColumn,
    RecordPlaces,
    collector_paused,
    fastest_records,
    fastest_rows,
)
from rbtool.core.storages import columns
from rbtool.core.storages.tensor import TensorStorage

ROWS = 50  # a few of which are more than 8 kB of the widest
SHAPES: dict[str, tuple[type[Any], tuple[int, ...]]] = {
    "flag": (np.bool_, ()),
    "short": (np.int16, (1,)),
    "action": (np.float32, (1,)),
    "reward": (np.float64, ()),
    "odd": (np.uint8, (3, 7)),
    "wide": (np.float32, (40, 40)),
    "uneven": (np.uint8, (1021,)),
    "nothing": (np.float32, (0,)),
}


def arrays() -> list[np.ndarray[Any, Any]]:
    made = np.random.default_rng(0)
    return [made.integers(0, 99, (ROWS, *shape)).astype(dtype) for dtype, shape in SHAPES.values()]


@pytest.fixture(params=[PlainRows, fastest_rows])
def make(request: pytest.FixtureRequest) -> Callable[..., PlainRows]:
    return request.param


def test_the_fastest_is_the_compiled_one() -> None:
    pytest.importorskip("numba")
    assert type(fastest_rows(arrays())) is CompiledRows


@pytest.mark.parametrize(
    "numbers",
    [*(np.random.default_rng(1).integers(-ROWS, ROWS, count) for count in (0, 1, 5, 16, 17, 100)), np.arange(40)[::-2]],
    ids=lambda numbers: f"{len(numbers)} rows, {numbers.strides[0]} bytes apart",
)
def test_rows_are_gathered(make: Callable[..., PlainRows], numbers: np.ndarray[Any, Any]) -> None:
    columns = arrays()
    found = make(columns).gather(numbers, ROWS)
    for tensor, column in zip(found, columns, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), column[numbers])
        assert tensor.numpy().dtype == column.dtype
        assert not tensor.numel() or not np.shares_memory(tensor.numpy(), column)


@pytest.mark.parametrize("chosen", [range(len(SHAPES)), range(2, 4), [*reversed(range(len(SHAPES)))], [3]])
def test_rows_of_chosen_columns_are_gathered(make: Callable[..., PlainRows], chosen: Sequence[int]) -> None:
    columns, numbers = arrays(), np.array([7, -1, 0])
    targets = [torch.from_numpy(np.zeros_like(columns[place][:3])) for place in chosen]
    make(columns).gather_into(numbers, ROWS, targets, chosen)
    for target, place in zip(targets, chosen, strict=True):
        np.testing.assert_array_equal(target.numpy(), columns[place][numbers])


def test_negative_numbers_count_from_the_last_valid_row(make: Callable[..., PlainRows]) -> None:
    columns = arrays()
    found = make(columns).gather(np.array([-1, -20, 19]), 20)
    np.testing.assert_array_equal(found[5].numpy(), columns[5][[19, 0, 19]])


@pytest.mark.parametrize("number", [20, -21, 1 << 40, -(1 << 40)])
def test_missing_rows_are_refused(make: Callable[..., PlainRows], number: int) -> None:
    with pytest.raises(IndexError, match=str(number)):
        make(arrays()).gather(np.array([3] * 40 + [number]), 20)


@pytest.mark.parametrize(("start", "count"), [(0, ROWS), (7, 1), (49, 1), (10, 30), (5, 0), (13, 3)])
def test_rows_are_written(make: Callable[..., PlainRows], start: int, count: int) -> None:
    columns, expected = arrays(), arrays()
    values = [torch.from_numpy(column[::-1][:count].copy()) for column in arrays()]
    for column, value in zip(expected, values, strict=True):
        column[start : start + count] = value.numpy()
    make(columns).write(start, count, [value.data_ptr() for value in values])
    for column, other in zip(columns, expected, strict=True):
        np.testing.assert_array_equal(column, other)


def test_without_numba_rows_are_moved_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "compiled_loops", lambda: None)
    assert type(fastest_rows(arrays())) is PlainRows


BLOCKED = """
import sys
sys.modules["numba"] = None
import torch
from rbtool import LazyTensorStorage
from rbtool.core.storages import columns
columns._MANY = 0
storage = LazyTensorStorage(8)
storage.set(range(4), torch.arange(4))
print(storage[torch.tensor([3, -4])].tolist(), "llvmlite" in sys.modules)
"""
SMALL = """
import sys, torch
from rbtool import LazyTensorStorage
storage = LazyTensorStorage(8)
storage.set(range(4), torch.arange(4))
print(storage[torch.tensor([3, -4])].tolist(), "numba" in sys.modules)
"""


@pytest.mark.parametrize("script", [BLOCKED, SMALL])
def test_storages_work_without_numba_and_do_not_load_it_for_a_few_rows(script: str, interpreter: Interpreter) -> None:
    done = interpreter.run(script)
    assert done.stdout == "[3, 0] False\n", done.stderr


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint16, torch.complex64, torch.float16, torch.bool])
def test_large_storages_read_and_write_every_type_with_compiled_loops(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(columns, "_MANY", 0)
    storage = TensorStorage({"a": torch.zeros(9, 2, dtype=dtype), "b": torch.zeros(9)})
    value = torch.arange(8).reshape(4, 2).to(dtype)
    storage.set(range(3, 7), {"a": value, "b": torch.arange(4.0)})
    found = storage[torch.tensor([6, -9, 4])]
    assert found["a"].tolist() == [value[3].tolist(), torch.zeros(2, dtype=dtype).tolist(), value[1].tolist()]
    assert found["b"].tolist() == [3, 0, 1]
    assert found["a"].dtype == dtype
    with pytest.raises(IndexError, match="9"):
        storage[torch.tensor([9])]


@pytest.fixture(autouse=True)
def _cold() -> Iterator[None]:
    yield
    rows_module._loops = None


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any), st.integers(0, 2**32))
def test_fractions_are_scaled_the_same_with_and_without_numba(counts: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    stops, sizes = np.cumsum(counts), random.integers(1, 1 << 40, len(counts))
    chances = random.random(int(stops[-1]))
    rows_module._loops = None
    plain = rows_module.scaled_parts(chances, stops, sizes)
    assert rows_module.warm()
    np.testing.assert_array_equal(plain, rows_module.scaled_parts(chances, stops, sizes))
    assert bool((plain < np.repeat(sizes, counts)).all())


def tables(count: int, rows: int) -> list[list[np.ndarray]]:
    """So many tables of three columns."""
    random = np.random.default_rng(count)
    return [
        [random.random((rows, 3)), random.integers(0, 99, rows), random.random((rows, 5)).astype(np.float16)]
        for _ in range(count)
    ]


def gathered(
    found: list[list[np.ndarray]], numbers: np.ndarray, members: list[int], counts: list[int]
) -> list[np.ndarray] | None:
    """Gather rows of some tables with the compiled loop; None if it refuses."""
    first, rows = found[0], len(found[0][0])
    places = np.array([[column.ctypes.data for column in table] for table in found], np.int64)
    widths = np.array([column[0].nbytes for column in first], np.int64)
    targets = [np.empty((len(numbers), *column.shape[1:]), column.dtype) for column in first]
    stops, lengths = np.cumsum(counts), np.full(len(members), rows)
    addresses = np.array([target.ctypes.data for target in targets])
    done = rows_module.gather_parts(places, widths, addresses, numbers, np.array(members), stops, lengths)
    return targets if done else None


@pytest.mark.parametrize("counts", [[1], [30, 0, 7], [3, 90, 40], [0, 0, 2]])
@pytest.mark.parametrize("runs", [False, True])
def test_rows_of_several_tables_are_gathered(counts: list[int], runs: bool) -> None:
    rows_module.warm()
    found, members = tables(3, 60), [2, 0, 1][: len(counts)]
    numbers = np.random.default_rng(0).integers(-60, 60, sum(counts))
    if runs:
        numbers = np.arange(len(numbers)) % 60
    targets, ids = gathered(found, numbers, members, counts), np.repeat(members, counts)
    assert targets is not None
    for column, target in enumerate(targets):
        expected = [found[member][column][number] for member, number in zip(ids, numbers, strict=True)]
        np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("number", [60, -61, 1 << 40])
def test_missing_rows_of_several_tables_are_refused(number: int) -> None:
    rows_module.warm()
    for numbers in (np.array([3, 4, 5, number]), np.array([number, *range(20)])):
        assert gathered(tables(2, 60), numbers, [1, 0], [2, len(numbers) - 2]) is None


def test_nothing_is_gathered_without_compiled_loops() -> None:
    assert gathered(tables(2, 5), np.zeros(3, np.int64), [0, 1], [1, 2]) is None


Make = Callable[[], torch.Tensor]


def place(array: Any) -> int:
    return torch.as_tensor(array).data_ptr()


def of_arrays(shape: tuple[int, ...], dtype: Any) -> Make:
    pool = ArrayPool(shape, np.dtype(dtype))
    return lambda: torch.from_numpy(pool())


def of_batches(shape: tuple[int, ...], dtype: Any) -> Make:
    pool = BatchPool([(2,), shape], [np.dtype(np.int8), np.dtype(dtype)])
    return lambda: pool()[0][1]


@pytest.fixture(params=[of_arrays, of_batches])
def make_pool(request: pytest.FixtureRequest) -> Callable[..., Make]:
    return request.param


def test_memory_is_used_again_when_nothing_refers_to_it(make_pool: Callable[..., Make]) -> None:
    pool = make_pool((4, 3), np.float32)
    first = pool()
    assert first.shape == (4, 3)
    assert first.dtype == torch.float32
    before = place(first)
    del first
    assert place(pool()) == before


@pytest.mark.parametrize(
    "hold",
    [
        torch.Tensor.numpy,
        lambda tensor: tensor[1:, 0],
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: tensor.view(torch.int32),
        lambda tensor: memoryview(tensor.numpy()),
        torch.utils.dlpack.to_dlpack,
        lambda tensor: (tensor.requires_grad_() * tensor).sum().grad_fn,
    ],
)
def test_memory_is_not_used_again_while_anything_refers_to_it(
    make_pool: Callable[..., Make], hold: Callable[[torch.Tensor], Any]
) -> None:
    pool = make_pool((4, 3), np.float32)
    tensor = pool()
    before, held = tensor.data_ptr(), hold(tensor)
    del tensor
    others = [pool() for _ in range(3)]
    assert before not in map(place, others)
    del held, others
    assert len({place(pool()) for _ in range(3)}) == 1


@pytest.mark.parametrize(
    "pool",
    [ArrayPool((4, 3), np.dtype(np.float32)), BatchPool([(4, 3)], [np.dtype(np.float32)])],
    ids=["array", "batch"],
)
def test_a_pool_keeps_little_memory(pool: Any) -> None:
    many = [pool() for _ in range(9)]
    assert len({place(array[0][0] if isinstance(array, tuple) else array) for array in many}) == 9
    assert len(pool._kept) == 2


@pytest.mark.parametrize("first", [None, 1])
def test_columns_are_used_again_while_another_one_of_their_batch_is_held(first: int | None) -> None:
    pool = BatchPool([(2,), (4, 3)], [np.dtype(np.int64), np.dtype(np.float32)], first)
    held, places = [], set()
    for _ in range(9):
        (index, wide, *views), addresses = pool()
        assert [view.shape for view in views] == ([] if first is None else [(1,), (1, 3)])
        del views[:]
        assert addresses.tolist() == [index.data_ptr(), wide.data_ptr()]
        held.append(index)
        places.add(place(wide))
    assert len({place(index) for index in held}) == 9
    assert len(places) <= 3


def test_a_pool_keeps_no_large_batches() -> None:
    pool = BatchPool([(1 << 27,)], [np.dtype(np.uint8)])
    pool()
    assert not pool._kept


def test_threads_get_different_memory(make_pool: Callable[..., Make]) -> None:
    pool = make_pool((50,), np.int64)

    def use(number: int) -> None:
        for _ in range(2000):
            array = pool()
            array[:] = number
            assert (array == number).all()

    run_threads(*(partial(use, number) for number in range(4)))


def test_large_batches_keep_their_values_while_others_are_gathered() -> None:
    column = np.arange(200_000.0).reshape(2000, 100)
    rows = fastest_rows([column, column[:, 0].copy()])
    numbers = [np.random.default_rng(seed).integers(0, 2000, 500) for seed in range(5)]
    batches = [rows.gather(chosen, 2000) for chosen in numbers]
    for chosen, (wide, narrow) in zip(numbers, batches, strict=True):
        np.testing.assert_array_equal(wide.numpy(), column[chosen])
        np.testing.assert_array_equal(narrow.numpy(), column[chosen, 0])


def fail() -> None:
    assert not gc.isenabled()
    raise ImportError


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_paused_and_restored(enabled: bool) -> None:
    was = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        with pytest.raises(ImportError), collector_paused():
            fail()
        assert gc.isenabled() is enabled
    finally:
        gc.enable() if was else gc.disable()


# Records ---------------------------------------------------------------------------------------------

SIZE, AFTER = 64, 32
RECORD_COLUMNS = [
    RecordColumn(0, np.dtype("float64"), (2,), after=False),
    RecordColumn(0, np.dtype("float64"), (2,), after=True),
    RecordColumn(16, np.dtype("int32"), (), after=True),
    RecordColumn(20, np.dtype("uint8"), (3,), after=False),
    RecordColumn(24, np.dtype("bool"), (1,), after=True),
    RecordColumn(32, np.dtype("complex64"), (2, 1), after=False),
    RecordColumn(56, np.dtype("uint64"), (), after=False),
]


def records_of(lengths: list[int], explicit: list[bool]) -> RecordPlaces:
    draw = np.random.default_rng(0)
    starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    stored = np.where(explicit, lengths, 0)
    explicit_starts = np.where(explicit, np.cumsum(stored) - stored, -1).astype(np.int64)
    counts = int(starts[-1]) + len(lengths), int(stored.sum())
    records, after = (draw.integers(0, 2, (count, SIZE)).astype(np.uint8) for count in counts)
    return RecordPlaces(records, after, starts, explicit_starts)


@given(st.data())
def test_both_kinds_give_the_rows(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    explicit = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    places, steps = records_of(lengths, explicit), sum(lengths)
    numbers = np.array(data.draw(st.lists(st.integers(-steps, steps - 1), max_size=50)), np.int64)
    compiled, plain = (make(places, RECORD_COLUMNS, AFTER) for make in (fastest_records, PlainRecords))
    assert isinstance(compiled, CompiledRecords)
    for column, one, other in zip(RECORD_COLUMNS, compiled.gather(numbers), plain.gather(numbers), strict=True):
        assert one.shape == (len(numbers), *column.shape)
        assert torch.equal(one, other)
        for row, number in zip(other, numbers % steps, strict=True):
            assert row.numpy().tobytes() == expected(places, column, int(number))
    assert torch.equal(compiled.spans(numbers), plain.spans(numbers))


def expected(places: RecordPlaces, column: RecordColumn, step: int) -> bytes:
    """The bytes of one row, found by counting."""
    episode = next(number for number, stop in enumerate(places.starts[1:]) if step < stop)
    record = places.records[step + episode + column.after]
    if column.after and places.explicit_starts[episode] >= 0:
        record = places.explicit[places.explicit_starts[episode] + step - places.starts[episode]]
    return record[column.offset : column.offset + column.width].tobytes()


@pytest.mark.parametrize("number", [5, -6, 2**40])
@pytest.mark.parametrize("make", [fastest_records, PlainRecords])
def test_missing_steps_are_named(make: type[PlainRecords], number: int) -> None:
    gatherer = make(records_of([2, 3], [True, False]), RECORD_COLUMNS, AFTER)
    for read in (gatherer.gather, gatherer.spans):
        with pytest.raises(IndexError, match=rf"row is {number}, expected one of 5"):
            read(np.array([0, number]))


def test_batches_are_apart_from_each_other_and_from_the_records() -> None:
    places = records_of([30], [False])
    gatherer, before = fastest_records(places, RECORD_COLUMNS, AFTER), places.records.copy()
    first, second = (gatherer.gather(np.arange(20)) for _ in range(2))
    first[0].fill_(7)
    first[2].fill_(9)
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert np.array_equal(places.records, before)
