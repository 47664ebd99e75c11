from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rbtool.core.kernels.rows import ArrayPool, fastest_rows


def place(array: Any) -> int:
    return torch.as_tensor(array).data_ptr()


def test_memory_is_used_again_when_nobody_has_it() -> None:
    pool = ArrayPool((4, 3), np.dtype(np.float32))
    first = pool()
    assert first.shape == (4, 3)
    assert first.dtype == np.float32
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
def test_memory_is_left_alone_while_anything_looks_at_it(hold: Callable[[torch.Tensor], Any]) -> None:
    pool = ArrayPool((4, 3), np.dtype(np.float32))
    tensor = torch.from_numpy(pool())
    before, held = tensor.data_ptr(), hold(tensor)
    del tensor
    others = [pool() for _ in range(3)]
    assert before not in map(place, others)
    del held, others
    assert len({place(pool()) for _ in range(3)}) == 1


def test_little_is_held_on_to() -> None:
    pool = ArrayPool((4, 3), np.dtype(np.float32))
    many = [pool() for _ in range(9)]
    assert len({place(array) for array in many}) == 9
    assert len(pool._kept) == 2


def test_threads_get_different_memory() -> None:
    pool = ArrayPool((50,), np.dtype(np.int64))
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
