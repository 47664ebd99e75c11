from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rbtool.core.kernels.rows import ArrayPool, BatchPool, fastest_rows

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
def make(request: pytest.FixtureRequest) -> Callable[..., Make]:
    return request.param


def test_memory_is_used_again_when_nobody_has_it(make: Callable[..., Make]) -> None:
    pool = make((4, 3), np.float32)
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
def test_memory_is_left_alone_while_anything_looks_at_it(
    make: Callable[..., Make], hold: Callable[[torch.Tensor], Any]
) -> None:
    pool = make((4, 3), np.float32)
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
def test_little_is_held_on_to(pool: Any) -> None:
    many = [pool() for _ in range(9)]
    assert len({place(array[0][0] if isinstance(array, tuple) else array) for array in many}) == 9
    assert len(pool._kept) == 2


def test_columns_are_used_again_while_another_of_their_batch_is_held() -> None:
    pool = BatchPool([(2,), (4, 3)], [np.dtype(np.int64), np.dtype(np.float32)])
    held, places = [], set()
    for _ in range(9):
        (index, wide), addresses = pool()
        assert addresses.tolist() == [index.data_ptr(), wide.data_ptr()]
        held.append(index)
        places.add(place(wide))
    assert len({place(index) for index in held}) == 9
    assert len(places) <= 3


def test_batches_that_are_too_large_are_not_held_on_to() -> None:
    pool = BatchPool([(1 << 27,)], [np.dtype(np.uint8)])
    pool()
    assert not pool._kept


def test_threads_get_different_memory(make: Callable[..., Make]) -> None:
    pool = make((50,), np.int64)
    mixed = []

    def use(number: int) -> None:
        for _ in range(2000):
            array = pool()
            array[:] = number
            if not (array == number).all():
                mixed.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not mixed


def test_large_batches_keep_what_they_are_while_others_are_gathered() -> None:
    column = np.arange(200_000.0).reshape(2000, 100)
    rows = fastest_rows([column, column[:, 0].copy()])
    numbers = [np.random.default_rng(seed).integers(0, 2000, 500) for seed in range(5)]
    batches = [rows.gather(chosen, 2000) for chosen in numbers]
    for chosen, (wide, narrow) in zip(numbers, batches, strict=True):
        np.testing.assert_array_equal(wide.numpy(), column[chosen])
        np.testing.assert_array_equal(narrow.numpy(), column[chosen, 0])
