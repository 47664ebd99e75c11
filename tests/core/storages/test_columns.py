from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from cases import each
from processes import Interpreter
from tensordict import TensorDict

from rbtool import TensorStorage
from rbtool.core.errors import SchemaError
from rbtool.core.storages import columns as columns_module
from rbtool.core.testing.rows import same


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).float()


@pytest.mark.parametrize(
    "value", [torch.tensor([[1 + 2j]]).conj(), torch.tensor([[1 + 2j]]).conj().imag, torch.ones(1, 2).T[:1]]
)
def test_views_that_read_otherwise_than_their_bytes_are_written_as_they_read(value: torch.Tensor) -> None:
    storage = TensorStorage(torch.zeros(5, 1, dtype=value.dtype))
    storage.set(range(2, 3), value)
    assert torch.equal(storage[2:3], value.resolve_conj().resolve_neg())


@pytest.fixture(params=[False, True], ids=["plain", "compiled"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use compiled loops from the first row on, or not at all."""
    monkeypatch.setattr(columns_module, "_MANY", 0 if request.param else 1 << 60)


VALUES = {
    "rows": lambda: numbers(3, 2),
    "transposed": lambda: numbers(2, 3).t(),
    "repeated": lambda: numbers(1, 2).expand(3, 2),
    "every other": lambda: numbers(6, 2)[::2],
    "negative": lambda: torch._neg_view(numbers(3, 2)),
    "imaginary": lambda: torch.complex(numbers(3, 2), numbers(3, 2)).conj().imag,
    "a parameter": lambda: torch.nn.Parameter(numbers(3, 2)),
}


@pytest.mark.usefixtures("compiled")
@each("kind", VALUES)
@each("start", [0, 4, 7])
def test_rows_of_any_layout_are_written_as_they_read(kind: str, start: int) -> None:
    value, storage = VALUES[kind](), TensorStorage({"a": numbers(10, 2), "b": numbers(10)})
    expected = storage[:]["a"].clone()
    expected[start : start + 3] = value.detach()
    for _ in range(2):  # the loops are compiled at the first write
        storage.set(range(start, start + 3), {"a": value, "b": torch.ones(3)})
        storage.set(start, {"a": value[0], "b": torch.tensor(5.0)})
        assert torch.equal(storage[:]["a"], expected)
    assert storage[:]["b"][start : start + 4].tolist()[:3] == [5, 1, 1]


LANES = {
    "in order": lambda: numbers(3, 4, 2),
    "time last": lambda: numbers(4, 3, 2).transpose(0, 1),
    "every other lane": lambda: numbers(3, 8, 2)[:, ::2],
    "part of each element": lambda: numbers(3, 4, 5)[:, :, 1:3],
    "turned": lambda: numbers(2, 4, 3).permute(2, 1, 0),
    "one for all lanes": lambda: numbers(3, 1, 2).expand(3, 4, 2),
}


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("kind", LANES)
def test_lanes_of_any_layout_are_written_as_they_read(kind: str) -> None:
    value, storage = LANES[kind](), TensorStorage({"a": numbers(10, 4, 2), "b": numbers(10, 4)}, ndim=2)
    expected = storage[:]["a"].clone()
    expected[5:8] = value
    for _ in range(2):
        storage.set(range(5, 8), {"a": value, "b": torch.arange(3.0)[:, None].expand(3, 4)})
        storage.set(5, {"a": value[0], "b": torch.full((4,), 7.0)})
        assert torch.equal(storage[:]["a"], expected)
    assert storage[:]["b"][5:8].tolist() == [[7] * 4, [1] * 4, [2] * 4]


REFUSED = {
    "a is torch.float64 [3, 2], expected torch.float32 [3, 2]": lambda: {"a": numbers(3, 2).double()},
    "a is torch.float32 [2, 3], expected torch.float32 [3, 2]": lambda: {"a": numbers(2, 3)},
    "a is torch.float32 [2, 2], expected torch.float32 [3, 2]": lambda: {"a": numbers(2, 2)},
    "the data lacks a and brings the new c, expected the entries a": lambda: {"c": numbers(3, 2)},
    "the entry 'a' is a list, expected a tensor": lambda: {"a": [[1.0, 2.0]] * 3},
}


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("message", REFUSED)
def test_rows_that_do_not_fit_are_refused_by_name(message: str) -> None:
    storage = TensorStorage({"a": numbers(10, 2)})
    storage.set(range(3), {"a": numbers(3, 2)})
    with pytest.raises(SchemaError, match=re.escape(message)):
        storage.set(range(2, 5), REFUSED[message]())
    assert torch.equal(storage[:]["a"], numbers(10, 2))


@pytest.mark.usefixtures("compiled")
def test_rows_of_the_storage_itself_are_read_whole_before_the_first_is_written() -> None:
    storage = TensorStorage({"a": numbers(10, 2)})
    storage.set(range(3), {"a": numbers(3, 2)})
    storage.set(range(1, 9), {"a": storage[:]["a"][:8]})
    assert torch.equal(storage[:]["a"][1:9], numbers(8, 2))


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
from rbtool.core.errors import SchemaError
from rbtool.core.storages import columns as columns_module
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
