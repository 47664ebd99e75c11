"""Rows keep every bit on their way through a storage: the sign of zero, and the payload of NaN."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import rbtool
from rbtool.core.buffers.base import ReplayBuffer
from rbtool.core.errors import SchemaError
from rbtool.core.storages.base import Storage, require_like

WORDS = {
    torch.float16: (torch.int16, [0x7E55, -0x8000, -1, 0x7C01, 1]),
    torch.bfloat16: (torch.int16, [0x7FD5, -0x8000, -1, 0x7F81, 1]),
    torch.float32: (torch.int32, [0x7FC12345, -(1 << 31), -1, 0x7F800001, 1]),
    torch.float64: (torch.int64, [0x7FF8000000012345, -(1 << 63), -1, 0x7FF0000000000001, 1]),
}
"""Of each type: quiet NaNs with a payload, minus zero, a signalling NaN, and the smallest number."""

COUNT = 5


def rows(device: str | None, turn: int = 0) -> TensorDict:
    leaves = {str(dtype)[6:]: torch.tensor(words).to(kind).view(dtype) for dtype, (kind, words) in WORDS.items()}
    leaves = {name: leaf.view(kind_of(leaf)).roll(turn).view(leaf.dtype) for name, leaf in leaves.items()}
    done = torch.tensor([[False]] * (COUNT - 1) + [[True]])
    after = {
        "observation": leaves["float32"].unsqueeze(-1),
        "done": done,
        "terminated": done,
        "truncated": ~done & done,
    }
    pair = torch.complex(leaves["float32"], leaves["float32"])
    return TensorDict(
        {**leaves, "pair": pair, "next": TensorDict(after, [COUNT], device=device)}, [COUNT], device=device
    )


def kind_of(leaf: torch.Tensor) -> torch.dtype:
    return {2: torch.int16, 4: torch.int32, 8: torch.int64}[leaf.element_size()]


def bits(data: Any) -> dict[Any, Any]:
    found = {}
    for key, leaf in data.items(True, True):
        if key != "index":
            plain = torch.view_as_real(leaf) if leaf.is_complex() else leaf
            found[key] = (plain.contiguous().view(kind_of(plain)) if plain.is_floating_point() else plain).tolist()
    return found


class TensorDictRows(Storage):
    """A storage of a user, which keeps a tensordict, and has the state that all storages have by default."""

    def __init__(self, max_size: int) -> None:
        super().__init__(max_size)
        self.kept: Any = None
        self.length = 0

    def __len__(self) -> int:
        return self.length

    def read_rows(self, rows: Any) -> Any:
        return self.kept[rows]

    def write_rows(self, rows: Any, data: Any) -> None:
        if self.kept is None:
            one = data if isinstance(rows, int) else data[0]
            self.kept = one.expand(self.max_size, *one.shape).apply(torch.zeros_like)
        require_like(data, self.kept[rows])
        self.kept[rows] = data
        self.length = self.length_after(rows)

    def clear_rows(self) -> None:
        self.length = 0


def wrapped(size: int) -> Storage:
    empty = TensorDict({}, [size]).update(rows(None)[:1].expand(size).apply(torch.zeros_like))
    storage = rbtool.TensorStorage(empty)
    storage.set_length(0)
    return storage


STORAGES: dict[str, Callable[[int], Storage]] = {
    "wrapped": wrapped,
    "lazy": rbtool.LazyTensorStorage,
    "memory-mapped": rbtool.LazyMemmapStorage,
    "list": rbtool.ListStorage,
    "lazy stack": rbtool.LazyStackStorage,
    "compressed": rbtool.CompressedListStorage,
    "of a user": TensorDictRows,
}

devices = pytest.mark.parametrize("device", [None, "cpu"])


def filled(name: str, device: str | None) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=STORAGES[name](2 * COUNT), generator=torch.Generator().manual_seed(0))
    given = rows(device)
    buffer.extend(given[:-1])
    buffer.add(given[-1])
    return buffer


@devices
@pytest.mark.parametrize("name", STORAGES)
def test_written_rows_are_read_bit_for_bit(name: str, device: str | None) -> None:
    buffer, expected = filled(name, device), rows(device)
    assert bits(buffer[:]) == bits(expected)
    assert bits(buffer[torch.tensor([1, 3, 0])]) == bits(expected[torch.tensor([1, 3, 0])])
    assert [bits(buffer[row]) for row in range(COUNT)] == [bits(expected[row]) for row in range(COUNT)]
    batch, info = buffer.sample(32, return_info=True)
    assert bits(batch) == bits(expected[info["index"]])


@devices
@pytest.mark.parametrize("name", STORAGES)
def test_replaced_rows_are_read_bit_for_bit(name: str, device: str | None) -> None:
    buffer, others = filled(name, device), rows(device, turn=1)
    buffer[1:3] = others[1:3]
    buffer[4] = others[4]
    expected = torch.stack([(others if row in (1, 2, 4) else rows(device))[row] for row in range(COUNT)])
    assert bits(buffer[:]) == bits(expected)


@devices
@pytest.mark.parametrize("name", sorted({*STORAGES} - {"compressed", "of a user"}))
def test_a_row_for_several_is_repeated_bit_for_bit(name: str, device: str | None) -> None:
    buffer, row = filled(name, device), rows(device)[1]
    buffer[0:3] = row
    assert [bits(buffer[number]) for number in range(3)] == [bits(row)] * 3


@devices
@pytest.mark.parametrize("name", STORAGES)
def test_states_hold_every_bit(name: str, device: str | None) -> None:
    buffer, other = filled(name, device), ReplayBuffer(storage=STORAGES[name](3 * COUNT))
    other.load_state_dict(buffer.state_dict())
    assert bits(other[:]) == bits(rows(device))


@devices
@pytest.mark.parametrize("name", sorted({*STORAGES} - {"of a user"}))
def test_checkpoints_hold_every_bit(name: str, device: str | None, tmp_path: Path) -> None:
    filled(name, device).dumps(tmp_path / "saved")
    other = ReplayBuffer(storage=STORAGES[name](3 * COUNT))
    other.loads(tmp_path / "saved")
    assert bits(other[:]) == bits(rows(device))


@devices
def test_a_load_that_fails_leaves_every_bit(device: str | None) -> None:
    storage = TensorDictRows(COUNT)
    storage.set(range(COUNT), rows(device))
    with pytest.raises(SchemaError):
        storage.load_state_dict({"_storage": rows(device).exclude("float32"), "_len": COUNT})
    assert bits(storage[:]) == bits(rows(device))


@devices
def test_steps_that_a_transform_holds_back_keep_every_bit(device: str | None) -> None:
    transform = rbtool.MultiStepTransform(n_steps=2, gamma=0.9, reward_keys=())
    buffer = ReplayBuffer(storage=rbtool.LazyTensorStorage(10), transform=transform)
    given = rows(device)
    buffer.extend(given[:3])
    buffer.extend(given[3:])
    buffer.flush()
    stored = buffer[:]
    for name in ("float16", "bfloat16", "float32", "float64", "pair"):
        assert bits(stored.select(name)) == bits(given.select(name))
