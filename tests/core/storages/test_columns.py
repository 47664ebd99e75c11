from __future__ import annotations

from pathlib import Path

import pytest
import torch
from forked_scripts import Interpreter
from tensordict import TensorDict

from rbtool import TensorStorage
from rbtool.core.testing.storages import same


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).float()


@pytest.mark.parametrize(
    "value", [torch.tensor([[1 + 2j]]).conj(), torch.tensor([[1 + 2j]]).conj().imag, torch.ones(1, 2).T[:1]]
)
def test_views_that_read_otherwise_than_their_bytes_are_written_as_they_read(value: torch.Tensor) -> None:
    storage = TensorStorage(torch.zeros(5, 1, dtype=value.dtype))
    storage.set(range(2, 3), value)
    assert torch.equal(storage[2:3], value.resolve_conj().resolve_neg())


def test_tensors_that_are_shared_after_they_were_wrapped_are_followed() -> None:
    data = {"a": numbers(10, 3), "b": numbers(10)}
    storage = TensorStorage(data)
    assert same(storage[[2, 1]], {"a": data["a"][[2, 1]], "b": data["b"][[2, 1]]})
    data["a"].share_memory_()  # moves the rows, and frees where they were
    storage[3] = {"a": torch.ones(3), "b": torch.tensor(7.0)}
    storage[4:6] = storage[0:2]
    assert data["a"][3:6].tolist() == [[1, 1, 1], [0, 1, 2], [3, 4, 5]]
    assert storage[[3]]["a"].tolist() == [[1, 1, 1]]


def test_a_range_is_written_like_its_numbers() -> None:
    storage = TensorStorage(numbers(6))
    storage.set(range(4, 1, -1), torch.tensor([-4.0, -3.0, -2.0]))
    storage.set(range(0), torch.zeros(0))
    assert storage[:].tolist() == [0, 1, -2, -3, -4, 5]


THREADS = """
import os, torch
from rbtool import TensorStorage
torch.set_num_threads(8)
storage = TensorStorage(torch.rand(10_000, 300))
before = len(os.listdir("/proc/self/task"))
for _ in range(3):
    storage[torch.randint(0, 10_000, (4096,))]
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_gathering_starts_no_threads(interpreter: Interpreter) -> None:
    done = interpreter.run(THREADS)
    assert done.stdout == "0\n", done.stderr


@pytest.mark.parametrize("shape", [(2, 3), (1, 4), (0, 5), (2, 2, 2)])
@pytest.mark.parametrize("ndim", [1, 2])
def test_an_index_of_several_dimensions_gives_a_batch_of_its_shape(shape: tuple[int, ...], ndim: int) -> None:
    lead = (12, 2)[:ndim]
    leaves = {
        "action": torch.arange(12 * 2 * 3.0).reshape(12, 2, 3),
        "bits": torch.arange(24, dtype=torch.bfloat16).reshape(12, 2),
    }
    data = TensorDict(leaves, lead)
    storage = TensorStorage(data, ndim=ndim)
    rows, lanes = torch.randint(12, shape), torch.randint(2, shape)
    for index in [rows, (rows, lanes)][:ndim]:
        found = storage[index]
        assert found.batch_size == data[index].batch_size
        assert all(torch.equal(found[key], data[index][key]) for key in leaves)


def test_a_row_out_of_reach_in_an_index_of_two_dimensions_is_an_index_error() -> None:
    with pytest.raises(IndexError, match="99"):
        TensorStorage(torch.arange(12))[torch.tensor([[1, 99]])]
