"""The compiled gather of records and its plain twin give the same, for every width, and name what is not there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rbtool.core.kernels.rows import CompiledRecords, PlainRecords, RecordColumn, RecordPlaces, fastest_records

SIZE, AFTER = 64, 32
COLUMNS = [
    RecordColumn(0, np.dtype("float64"), (2,), after=False),
    RecordColumn(0, np.dtype("float64"), (2,), after=True),
    RecordColumn(16, np.dtype("int32"), (), after=True),
    RecordColumn(20, np.dtype("uint8"), (3,), after=False),
    RecordColumn(24, np.dtype("bool"), (1,), after=True),
    RecordColumn(32, np.dtype("complex64"), (2, 1), after=False),
    RecordColumn(56, np.dtype("uint64"), (), after=False),
]


def made(lengths: list[int], explicit: list[bool]) -> RecordPlaces:
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
    places, steps = made(lengths, explicit), sum(lengths)
    numbers = np.array(data.draw(st.lists(st.integers(-steps, steps - 1), max_size=50)), np.int64)
    compiled, plain = (make(places, COLUMNS, AFTER) for make in (fastest_records, PlainRecords))
    assert isinstance(compiled, CompiledRecords)
    for column, one, other in zip(COLUMNS, compiled.gather(numbers), plain.gather(numbers), strict=True):
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
    gatherer = make(made([2, 3], [True, False]), COLUMNS, AFTER)
    for read in (gatherer.gather, gatherer.spans):
        with pytest.raises(IndexError, match=rf"row is {number}, expected one of 5"):
            read(np.array([0, number]))


def test_batches_are_apart_from_each_other_and_from_the_records() -> None:
    places = made([30], [False])
    gatherer, before = fastest_records(places, COLUMNS, AFTER), places.records.copy()
    first, second = (gatherer.gather(np.arange(20)) for _ in range(2))
    first[0].fill_(7)
    first[2].fill_(9)
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert np.array_equal(places.records, before)
