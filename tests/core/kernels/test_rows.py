from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from forked_scripts import Interpreter

from rbtool.core.kernels import rows as rows_module
from rbtool.core.kernels.rows import CompiledRows, PlainRows, fastest_rows
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


@pytest.mark.parametrize("count", [0, 1, 5, 16, 17, 100])
def test_rows_are_gathered(make: Callable[..., PlainRows], count: int) -> None:
    columns = arrays()
    numbers = np.random.default_rng(1).integers(-ROWS, ROWS, count)
    found = make(columns).gather(numbers, ROWS)
    for tensor, column in zip(found, columns, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), column[numbers])
        assert tensor.numpy().dtype == column.dtype
        assert not tensor.numel() or not np.shares_memory(tensor.numpy(), column)


def test_negative_numbers_count_from_the_last_valid_row(make: Callable[..., PlainRows]) -> None:
    columns = arrays()
    found = make(columns).gather(np.array([-1, -20, 19]), 20)
    np.testing.assert_array_equal(found[5].numpy(), columns[5][[19, 0, 19]])


@pytest.mark.parametrize("number", [20, -21, 1 << 40, -(1 << 40)])
def test_rows_that_are_not_there_are_refused(make: Callable[..., PlainRows], number: int) -> None:
    with pytest.raises(IndexError, match=str(number)):
        make(arrays()).gather(np.array([3] * 40 + [number]), 20)


def test_numbers_need_not_lie_together(make: Callable[..., PlainRows]) -> None:
    columns = arrays()
    numbers = np.arange(40)[::-2]
    for tensor, column in zip(make(columns).gather(numbers, ROWS), columns, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), column[numbers])


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
def test_storages_work_without_numba_and_leave_it_alone_for_a_few_rows(script: str, interpreter: Interpreter) -> None:
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
