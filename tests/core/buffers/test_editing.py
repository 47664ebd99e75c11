"""Every way to change stored data, on every storage: it writes or raises an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.datasets.storage import DatasetStorage
from rbtool.core.errors import MissingKeyError, SchemaError
from rbtool.core.format.memmap.builder import Origin
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.format.packed.builder import write_dataset
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.list_storage import CompressedListStorage, LazyStackStorage, ListStorage
from rbtool.core.storages.packed import PackedRecording, PackedStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.testing.datasets import write_walks

ROWS = 4


def steps(rows: int = ROWS, start: int = 0) -> TensorDict:
    numbers = torch.arange(start, start + rows)
    inner = TensorDict({"b": numbers.float().unsqueeze(1).expand(rows, 2).contiguous()}, [rows])
    return TensorDict({"a": numbers, "next": inner}, [rows])


def made(kind: Callable[..., Any]) -> ReplayBuffer:
    if kind is TensorStorage:
        return ReplayBuffer(storage=TensorStorage(steps()))
    buffer = ReplayBuffer(storage=kind(6))
    buffer.extend(steps())
    return buffer


ALONE = torch.full((2, 2), 9.0)
WAYS: dict[str, Callable[[ReplayBuffer], Any]] = {
    "set_": lambda buffer: buffer.set_(("next", "b"), torch.full((ROWS, 2), 9.0)),
    "set_at_": lambda buffer: buffer.set_at_(("next", "b"), ALONE, [0, 3]),
    "set_at_ slice": lambda buffer: buffer.set_at_(("next", "b"), ALONE, slice(1, 3)),
    "set_at_ int": lambda buffer: buffer.set_at_(("next", "b"), ALONE[0], -1),
    "update_": lambda buffer: buffer.update_({"next": {"b": torch.full((ROWS, 2), 9.0)}}),
    "key": lambda buffer: buffer.__setitem__(("next", "b"), torch.full((ROWS, 2), 9.0)),
    "nest": lambda buffer: buffer.__setitem__("next", TensorDict({"b": torch.full((ROWS, 2), 9.0)}, [ROWS])),
}
EXPECTED = {
    "set_": [9, 9, 9, 9], "set_at_": [9, 1, 2, 9], "set_at_ slice": [0, 9, 9, 3], "set_at_ int": [0, 1, 2, 9],
    "update_": [9, 9, 9, 9], "key": [9, 9, 9, 9], "nest": [9, 9, 9, 9],
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [TensorStorage, LazyTensorStorage, LazyMemmapStorage, LazyStackStorage])
def test_entries_are_edited(kind: Callable[..., Any], way: str) -> None:
    buffer = made(kind)
    before = buffer.storage.log.now.irregular
    WAYS[way](buffer)
    for found in (buffer[:], torch.stack([buffer[row] for row in range(ROWS)])):
        assert found["next", "b"][:, 0].tolist() == found["next", "b"][:, 1].tolist() == EXPECTED[way]
        assert found["a"].tolist() == [0, 1, 2, 3]
    assert buffer.storage.log.now.irregular > before


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [ListStorage, CompressedListStorage])
def test_lists_say_that_they_cannot(kind: Callable[..., Any], way: str) -> None:
    buffer = made(kind)
    with pytest.raises(SchemaError, match="one by one"):
        WAYS[way](buffer)


@pytest.mark.parametrize("way", ["set_", "set_at_", "update_", "key", "elements", "storage"])
def test_packed_datasets_and_recordings_say_that_they_cannot(tmp_path: Path, way: str) -> None:
    write_walks(tmp_path / "ted", [(3, "terminated"), (2, "terminated")])
    with TedReader(tmp_path / "ted") as reader:
        write_dataset(reader, tmp_path / "packed", "packed", Origin.of(reader.manifest, reader.documents()))
    recording = PackedRecording(tmp_path / "recording")
    recording.set(slice(0, 5), PackedStorage(tmp_path / "packed")[:])
    ways: dict[str, Callable[[ReplayBuffer], Any]] = {
        "set_": lambda buffer: buffer.set_("episode", torch.zeros(5, dtype=torch.int64)),
        "set_at_": lambda buffer: buffer.set_at_("episode", torch.zeros(1, dtype=torch.int64), [1]),
        "update_": lambda buffer: buffer.update_({"episode": torch.zeros(5, dtype=torch.int64)}),
        "key": lambda buffer: buffer.__setitem__("episode", torch.zeros(5, dtype=torch.int64)),
        "elements": lambda buffer: buffer.__setitem__([0], buffer[[1]]),
        "storage": lambda buffer: buffer.storage.__setitem__(0, buffer[1]),
    }
    for storage in (PackedStorage(tmp_path / "packed"), recording):
        with pytest.raises(SchemaError, match=r"read-only|recording only grows|cannot be changed"):
            ways[way](ReplayBuffer(storage=storage))


def test_a_lazy_stack_leaves_the_callers_tensors_alone() -> None:
    data, buffer = steps(), ReplayBuffer(storage=LazyStackStorage(6))
    buffer.extend(data)
    buffer["a"] = -torch.arange(ROWS)
    buffer.set_at_("a", torch.tensor(7), 0)
    assert data["a"].tolist() == [0, 1, 2, 3]
    assert buffer["a"].tolist() == [7, -1, -2, -3]


def test_a_lazy_stack_along_another_dimension() -> None:
    buffer = ReplayBuffer(storage=LazyStackStorage(6, stack_dim=-1))
    buffer.extend([TensorDict({"a": torch.full((3,), row)}, [3]) for row in range(2)])
    buffer.set_at_("a", torch.tensor([8, 9]), 1)
    assert [buffer[row]["a"].tolist() for row in range(2)] == [[0, 8, 0], [1, 9, 1]]


def test_ragged_entries_of_a_lazy_stack_are_refused() -> None:
    buffer = ReplayBuffer(storage=LazyStackStorage(6))
    buffer.extend([TensorDict({"a": torch.zeros(n)}, []) for n in (2, 3)])
    with pytest.raises(SchemaError, match="differs in shape"):
        buffer.set_("a", torch.zeros(2, 2))
    with pytest.raises(MissingKeyError, match=r"'b' not found|'b' is"):
        buffer.set_("b", torch.zeros(2, 2))


# New entries ------------------------------------------------------------------------------------------


def with_values(rows: int = ROWS) -> TensorDict:
    return steps(rows, start=10).set("value", torch.arange(rows).float())


@pytest.mark.parametrize("kind", [TensorStorage, LazyTensorStorage, LazyStackStorage])
@pytest.mark.parametrize("way", ["write_all", "slice", "key", "nested"])
def test_all_elements_may_get_new_entries(kind: Callable[..., Any], way: str) -> None:
    buffer = made(kind)
    if way == "write_all":
        buffer.write_all(with_values())
    elif way == "slice":
        buffer[:] = with_values()
    else:
        buffer["value" if way == "key" else ("new", "value")] = torch.arange(ROWS).float()
    name: Any = ("new", "value") if way == "nested" else "value"
    assert buffer[name].tolist() == [0, 1, 2, 3]
    assert buffer[[2]][name].tolist() == [2]
    assert buffer["a"].tolist() == ([10, 11, 12, 13] if way in ("write_all", "slice") else [0, 1, 2, 3])


def test_new_entries_go_with_the_elements_that_had_them() -> None:
    buffer = made(LazyTensorStorage)
    for _ in range(2):
        buffer.write_all(with_values())
        assert "value" in list(buffer[:].keys())
        buffer.empty()
        buffer.extend(steps())
        assert "value" not in list(buffer[:].keys())
    buffer.write_all(with_values())
    with pytest.raises(SchemaError, match="lacks a"):
        buffer.extend(steps().exclude("a"))
    assert buffer["value"].tolist() == [0, 1, 2, 3]


def test_new_entries_of_a_lazy_stack_along_another_dimension() -> None:
    buffer = ReplayBuffer(storage=LazyStackStorage(6, stack_dim=-1))
    buffer.extend(TensorDict({"a": torch.arange(12).reshape(4, 3)}, [4, 3]))
    buffer["b"] = 2 * buffer["a"]
    assert (buffer[1]["b"].tolist(), tuple(buffer["b"].shape)) == ([6, 8, 10], (3, 4))
    with pytest.raises(SchemaError, match=r"'c' has the shape \[4, 3\], expected it to begin with \[3, 4\]"):
        buffer["c"] = torch.zeros(4, 3)
    buffer.extend(TensorDict({"a": torch.zeros(1, 2)}, [1, 2]))
    with pytest.raises(SchemaError, match="elements differ in shape"):
        buffer["c"] = torch.zeros(3, 5)
    assert sorted(buffer[0].keys()) == ["a", "b"]


def test_new_entries_in_the_users_layout() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    data = TensorDict({"a": torch.arange(12).reshape(3, 4)}, [3, 4])
    buffer.extend(data)
    buffer.write_all(data.clone().set("value", -data["a"]))
    buffer["twice"] = 2 * data["a"]
    assert torch.equal(buffer["value"], -data["a"])
    assert torch.equal(buffer["twice"], 2 * data["a"])


@pytest.mark.parametrize(
    "act",
    [
        lambda buffer: buffer.__setitem__(slice(0, 3), with_values(3)),
        lambda buffer: buffer.write_all(with_values(2)),
        lambda buffer: buffer.extend(with_values()),
        lambda buffer: buffer.set_("value", torch.zeros(ROWS)),
        lambda buffer: buffer.__setitem__("value", torch.zeros(3)),
        lambda buffer: buffer.__setitem__(slice(None), with_values().exclude("a")),
    ],
)
def test_a_new_entry_of_some_elements_is_refused(act: Callable[[ReplayBuffer], Any]) -> None:
    buffer = made(LazyTensorStorage)
    with pytest.raises((SchemaError, MissingKeyError)):
        act(buffer)
    assert sorted(buffer[:].keys()) == ["a", "next"]
    assert (len(buffer), buffer["a"].tolist()) == (4, [0, 1, 2, 3])


def test_files_take_no_new_entries(tmp_path: Path) -> None:
    buffer = made(LazyMemmapStorage)
    with pytest.raises(SchemaError):
        buffer.write_all(with_values())
    with pytest.raises(MissingKeyError, match="cannot take the new entry"):
        buffer["value"] = torch.zeros(ROWS)
    write_walks(tmp_path / "walks", [(3, "terminated")])
    with pytest.raises(MissingKeyError, match="cannot take the new entry"):
        ReplayBuffer(storage=DatasetStorage(tmp_path / "walks"))["value"] = torch.zeros(3)


# Several indices --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim_extend", [0, 1])
@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_data_is_repeated_along_dimensions_that_it_lacks(kind: type[ReplayBuffer], dim_extend: int) -> None:
    shape = (5, 40)
    buffer = kind(storage=LazyTensorStorage(200, ndim=2), dim_extend=dim_extend)
    td = TensorDict({"a": torch.arange(200).reshape(shape), "b": torch.zeros(*shape, 3)}, shape)
    buffer.extend(td)
    expected = td["a"].clone()
    buffer[:, 10:20] = TensorDict({"a": torch.arange(10), "b": torch.ones(10, 3)}, [10])
    expected[:, 10:20] = torch.arange(10)
    assert torch.equal(buffer["a"], expected)
    assert buffer["b"].sum() == 5 * 10 * 3
    buffer[1:3, 4] = td[0, 0]
    expected[1:3, 4] = 0
    assert torch.equal(buffer["a"], expected)
    if kind is TensorDictReplayBuffer:
        assert torch.equal(buffer.storage[:]["index"], torch.arange(len(buffer.storage[:])).unsqueeze(1).expand(
            buffer.storage.shape))  # fmt: skip


def test_several_indices_concern_the_batch_size_of_elements_too() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(8))
    td = TensorDict({"a": torch.arange(160).reshape(8, 20)}, [8, 20])
    buffer.extend(td)
    buffer[:, 10:20] = td[3, :10]
    assert torch.equal(buffer["a"][:, 10:], torch.arange(60, 70).expand(8, 10))
    assert torch.equal(buffer["a"][:, :10], td["a"][:, :10])


@pytest.mark.parametrize("data", [torch.zeros(4).long(), torch.zeros(3, 2), torch.zeros(2, 3).long()])
def test_data_that_cannot_be_repeated_changes_nothing(data: torch.Tensor) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    buffer.extend(torch.arange(12).reshape(3, 4))
    with pytest.raises(SchemaError, match=r"expected torch.int64 \[3, 2\]"):
        buffer[:, 0:2] = data
    assert torch.equal(buffer[:], torch.arange(12).reshape(3, 4))


def test_data_of_another_batch_size_is_named_in_full() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4))
    buffer.extend(steps())
    with pytest.raises(SchemaError, match=r"the data has the batch size \[3\], expected \[2\]"):
        buffer[:2] = steps(3)
    assert buffer["a"].tolist() == [0, 1, 2, 3]
