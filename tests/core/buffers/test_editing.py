"""Every way to change stored data, on every storage: it writes or raises an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import each
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorClass, TensorDict

from rbtool import ConditionalUpdateResult, RoundRobinWriter, SliceSampler, TensorDictRoundRobinWriter
from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.datasets.storage import DatasetStorage
from rbtool.core.errors import MissingKeyError, SchemaError
from rbtool.core.samplers.prioritized import PrioritizedSampler
from rbtool.core.storages.base import Storage
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.list_storage import CompressedListStorage, LazyStackStorage, ListStorage
from rbtool.core.storages.packed import PackedRecording, PackedStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.testing.datasets import write_packed, write_walks

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


@each("way", WAYS)
@each("kind", [TensorStorage, LazyTensorStorage, LazyMemmapStorage, LazyStackStorage])
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
def test_entries_of_lists_are_not_edited(kind: Callable[..., Any], way: str) -> None:
    buffer = made(kind)
    with pytest.raises(SchemaError, match="one by one"):
        WAYS[way](buffer)


@pytest.mark.parametrize(
    "edit",
    [
        lambda buffer: buffer.set_("episode", torch.zeros(5, dtype=torch.int64)),
        lambda buffer: buffer.set_at_("episode", torch.zeros(1, dtype=torch.int64), [1]),
        lambda buffer: buffer.update_({"episode": torch.zeros(5, dtype=torch.int64)}),
        lambda buffer: buffer.__setitem__("episode", torch.zeros(5, dtype=torch.int64)),
        lambda buffer: buffer.__setitem__([0], buffer[[1]]),
        lambda buffer: buffer.storage.__setitem__(0, buffer[1]),
    ],
)
def test_packed_datasets_and_recordings_are_not_edited(tmp_path: Path, edit: Callable[[ReplayBuffer], Any]) -> None:
    write_walks(tmp_path / "ted", [(3, "terminated"), (2, "terminated")])
    write_packed(tmp_path / "ted", tmp_path / "packed")
    recording = PackedRecording(tmp_path / "recording")
    recording.set(slice(0, 5), PackedStorage(tmp_path / "packed")[:])
    for storage in (PackedStorage(tmp_path / "packed"), recording):
        with pytest.raises(SchemaError, match=r"read-only|recording only grows|cannot be changed"):
            edit(ReplayBuffer(storage=storage))


def test_edits_of_a_lazy_stack_do_not_reach_the_data_of_the_caller() -> None:
    data, buffer = steps(), ReplayBuffer(storage=LazyStackStorage(6))
    buffer.extend(data)
    buffer["a"] = -torch.arange(ROWS)
    buffer.set_at_("a", torch.tensor(7), 0)
    assert data["a"].tolist() == [0, 1, 2, 3]
    assert buffer["a"].tolist() == [7, -1, -2, -3]


def test_entries_of_a_lazy_stack_along_another_dimension_are_edited() -> None:
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


@pytest.mark.parametrize("kind", [TensorStorage, LazyTensorStorage])
@pytest.mark.parametrize(
    ("write", "rows"),
    [
        (lambda buffer, ones: buffer.__setitem__(slice(0, 3), ones), [0, 1, 2]),
        (lambda buffer, ones: buffer.__setitem__(slice(1, 3), ones[0]), [1, 2]),
        (lambda buffer, ones: buffer.write_all(ones), [0, 1, 2]),
        (lambda buffer, ones: buffer.__setitem__(3, ones[0]), [3]),
        (lambda buffer, ones: buffer.__setitem__([2, 0], ones[:2]), [0, 2]),
        (lambda buffer, ones: buffer.storage.__setitem__(torch.tensor([False, True] * 2), ones[:2]), [1, 3]),
    ],
)
def test_some_elements_may_get_new_entries_that_are_zero_in_the_others(kind: Any, write: Any, rows: list[int]) -> None:
    buffer = made(kind)
    write(buffer, with_values(3).set("value", torch.ones(3)))
    assert buffer["value"].tolist() == [float(row in rows) for row in range(ROWS)]
    assert buffer.sample(4)["value"].shape == (4,)


def test_elements_of_several_dimensions_may_get_new_entries() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    data = TensorDict({"a": torch.arange(12).reshape(3, 4)}, [3, 4])
    buffer.extend(data)
    buffer[1, 2:] = TensorDict({"a": torch.tensor([7, 8]), "value": torch.ones(2, 5)}, [2])
    assert buffer["value"].sum(-1).tolist() == [[0] * 4, [0, 0, 5, 5], [0] * 4]
    assert buffer["a"][1].tolist() == [4, 5, 7, 8]
    with pytest.raises(SchemaError):
        buffer[1, 2:] = TensorDict({"a": torch.ones(2), "other": torch.ones(2)}, [2])
    assert sorted(buffer[:].keys()) == ["a", "value"]
    buffer.write_all(TensorDict({"a": data["a"], "value": torch.ones(3, 4, 5), "minus": -data["a"]}, [3, 4]))
    buffer["twice"] = 2 * data["a"]
    assert torch.equal(buffer["minus"], -data["a"])
    assert torch.equal(buffer["twice"], 2 * data["a"])


@pytest.mark.parametrize(
    "act",
    [
        lambda buffer: buffer.extend(with_values()),
        lambda buffer: buffer.set_("value", torch.zeros(ROWS)),
        lambda buffer: buffer.__setitem__("value", torch.zeros(3)),
        lambda buffer: buffer.__setitem__(slice(None), with_values().exclude("a")),
        lambda buffer: buffer.__setitem__(slice(1), with_values(1).exclude("a")),
        lambda buffer: buffer.__setitem__(slice(1), with_values(1).set("a", torch.ones(1, 3))),
    ],
)
def test_a_new_entry_that_does_not_fit_is_refused(act: Callable[[ReplayBuffer], Any]) -> None:
    buffer = made(LazyTensorStorage)
    with pytest.raises((SchemaError, MissingKeyError)):
        act(buffer)
    assert sorted(buffer[:].keys()) == ["a", "next"]
    assert (len(buffer), buffer["a"].tolist()) == (4, [0, 1, 2, 3])


def test_files_take_no_new_entries(tmp_path: Path) -> None:
    buffer = made(LazyMemmapStorage)
    with pytest.raises(SchemaError):
        buffer.write_all(with_values())
    with pytest.raises(MissingKeyError, match="new entry"):
        buffer["value"] = torch.zeros(ROWS)
    write_walks(tmp_path / "walks", [(3, "terminated")])
    with pytest.raises(MissingKeyError, match="new entry"):
        ReplayBuffer(storage=DatasetStorage(tmp_path / "walks"))["value"] = torch.zeros(3)


# Several indices --------------------------------------------------------------------------------------


def test_several_indices_also_address_the_batch_size_of_elements() -> None:
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


# Data is repeated along the dimensions that it lacks ----------------------------------------------


TENSORS: list[Callable[..., Storage]] = [LazyTensorStorage, LazyMemmapStorage]
LISTS: list[Callable[..., Storage]] = [ListStorage, LazyStackStorage, CompressedListStorage]
REPEATED_ROWS, LANES = 6, 3


def repeated_steps(*shape: int, start: int = 0) -> TensorDict:
    numbers = torch.arange(start, start + int(np.prod(shape))).reshape(shape)
    return TensorDict({"a": numbers, "next": {"b": torch.stack([numbers, -numbers], -1).double()}}, shape)


def filled(make: Callable[..., Storage], kind: type[ReplayBuffer] = ReplayBuffer, ndim: int = 1) -> Any:
    arguments = {} if ndim == 1 else {"ndim": 2}
    buffer = kind(storage=make(REPEATED_ROWS * LANES ** (ndim - 1) + 2 * LANES, **arguments), dim_extend=0)
    buffer.extend(repeated_steps(REPEATED_ROWS, *[LANES] * (ndim - 1)))
    return buffer


def values(buffer: Any) -> tuple[list[Any], list[Any]]:
    rows = buffer[:]
    if isinstance(rows, list):
        return [row["a"].tolist() for row in rows], [row["next", "b"].tolist() for row in rows]
    return rows["a"].tolist(), rows["next", "b"].tolist()


def numbers(size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(-size, size - 1), min_size=1, max_size=size, unique_by=lambda number: number % size)


def slices(size: int) -> st.SearchStrategy[slice]:
    return st.slices(size).map(lambda part: slice(part.start, part.stop if part.step is None else None, part.step))


ALONG = st.one_of(
    st.integers(-REPEATED_ROWS, REPEATED_ROWS - 1),
    slices(REPEATED_ROWS),
    numbers(REPEATED_ROWS),
    numbers(REPEATED_ROWS).map(torch.tensor),
    numbers(REPEATED_ROWS).map(np.array),
    st.lists(st.booleans(), min_size=REPEATED_ROWS, max_size=REPEATED_ROWS).map(torch.tensor),
    st.just(...),
    st.integers(0, REPEATED_ROWS - 2).map(lambda start: range(start, start + 2)),
)
MATRIX = st.permutations(range(REPEATED_ROWS)).map(lambda order: torch.tensor(order[:4]).reshape(2, 2))
ACROSS = st.tuples(
    st.one_of(st.integers(0, REPEATED_ROWS - 1), slices(REPEATED_ROWS).filter(lambda part: (part.step or 1) > 0)),
    st.one_of(st.integers(-LANES, LANES - 1), slices(LANES).filter(lambda part: (part.step or 1) > 0)),
)


def as_torch(index: Any) -> Any:
    if isinstance(index, slice) and (index.step or 1) < 0:
        return torch.from_numpy(np.arange(REPEATED_ROWS)[index].copy())
    return torch.tensor(index) if isinstance(index, range) else index


def expected(lead: tuple[int, ...], index: Any, data: TensorDict) -> tuple[list[Any], list[Any]]:
    """What torch makes of the same assignment of tensors."""
    rows = repeated_steps(*lead)
    for key in ("a", ("next", "b")):
        rows[key][as_torch(index)] = data[key]
    return rows["a"].tolist(), rows["next", "b"].tolist()


def selected(lead: tuple[int, ...], index: Any) -> tuple[int, ...]:
    return tuple(torch.zeros(lead)[as_torch(index)].shape)


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("make", [*TENSORS, *LISTS])
@settings(max_examples=15, deadline=None)
@given(index=ALONG)
def test_one_element_is_written_to_every_row_of_the_index(
    make: Callable[..., Storage], kind: type[ReplayBuffer], index: Any
) -> None:
    buffer, data = filled(make, kind), repeated_steps(1, start=100)[0]
    buffer[index] = data
    assert values(buffer) == expected((REPEATED_ROWS,), index, data)
    if kind is TensorDictReplayBuffer:
        assert [int(buffer[row]["index"]) for row in range(REPEATED_ROWS)] == list(range(REPEATED_ROWS))


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("make", TENSORS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_dimensions_of_data_are_the_last_that_are_selected(
    make: Callable[..., Storage], kind: type[ReplayBuffer], data: st.DataObject
) -> None:
    index = data.draw(st.one_of(ALONG, MATRIX, ACROSS))
    size = selected((REPEATED_ROWS, LANES), index)
    given_dims = data.draw(st.integers(0, len(size)))
    value = repeated_steps(*size[len(size) - given_dims :], start=100)
    buffer = filled(make, kind, ndim=2)
    buffer[index] = value
    assert values(buffer) == expected((REPEATED_ROWS, LANES), index, value)


@pytest.mark.parametrize("make", TENSORS)
@settings(max_examples=40, deadline=None)
@given(index=st.one_of(ALONG, MATRIX))
def test_data_of_other_kinds_is_repeated_as_well(make: Callable[..., Storage], index: Any) -> None:
    tree = ReplayBuffer(storage=make(REPEATED_ROWS))
    tree.extend({"a": torch.arange(REPEATED_ROWS), "b": [torch.arange(2.0 * REPEATED_ROWS).reshape(REPEATED_ROWS, 2)]})
    tree[index] = {"a": torch.tensor(100), "b": [torch.tensor([7.0, 8.0])]}
    a, b = torch.arange(REPEATED_ROWS), torch.arange(2.0 * REPEATED_ROWS).reshape(REPEATED_ROWS, 2)
    a[as_torch(index)], b[as_torch(index)] = 100, torch.tensor([7.0, 8.0])
    assert (tree[:]["a"].tolist(), tree[:]["b"][0].tolist()) == (a.tolist(), b.tolist())
    plain = ReplayBuffer(storage=make(REPEATED_ROWS))
    plain.extend(torch.arange(2.0 * REPEATED_ROWS).reshape(REPEATED_ROWS, 2))
    plain[index] = torch.tensor([7.0, 8.0])
    assert plain[:].tolist() == b.tolist()


@each("make", [*TENSORS, *LISTS])
@each("index", [slice(0, 3), [1, 2, 4], torch.tensor([True, False] * 3)])
@each("count", [1, 2])
def test_fewer_elements_than_are_named_are_refused(make: Callable[..., Storage], index: Any, count: int) -> None:
    buffer = filled(make)
    before = values(buffer)
    with pytest.raises(RuntimeError):
        buffer[index] = repeated_steps(count, start=100)
    assert values(buffer) == before


def test_entries_that_lack_other_dimensions_are_refused() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(REPEATED_ROWS))
    buffer.extend({"a": torch.arange(REPEATED_ROWS), "b": torch.zeros(REPEATED_ROWS, 2)})
    for part in (slice(0, 2), (slice(0, 2),)):
        with pytest.raises(RuntimeError, match="expected"):
            buffer[part] = {"a": torch.tensor([1, 2]), "b": torch.ones(2)}
    assert not buffer[:]["b"].any()


@pytest.mark.parametrize("data", [{"a": 1}, "text", 3])
def test_lists_do_not_repeat_objects_that_may_be_rows(data: object) -> None:
    buffer = ReplayBuffer(storage=ListStorage(4), collate_fn=lambda rows: rows)
    buffer.extend(["p", "q", "r"])
    with pytest.raises(TypeError):
        buffer[0:2] = data
    assert buffer[:] == ["p", "q", "r"]


def test_repeated_elements_of_a_list_are_copies() -> None:
    buffer = filled(LazyStackStorage)
    buffer[0:2] = repeated_steps(1, start=100)[0]
    buffer[0]["a"].fill_(7)
    assert values(buffer)[0] == [7, 100, 2, 3, 4, 5]


def test_elements_with_dimensions_of_their_own_are_repeated() -> None:
    for make in (LazyTensorStorage, LazyStackStorage):
        buffer = ReplayBuffer(storage=make(REPEATED_ROWS))
        buffer.extend(TensorDict({"a": torch.zeros(REPEATED_ROWS, 4)}, [REPEATED_ROWS, 4]))
        buffer[1:3] = TensorDict({"a": torch.arange(4.0)}, [4])
        assert buffer[:]["a"].sum(1).tolist() == [0, 6, 6, 0, 0, 0]


def test_new_elements_are_not_repeated() -> None:
    buffer = filled(LazyTensorStorage)
    with pytest.raises((RuntimeError, TypeError, IndexError)):
        buffer.extend(repeated_steps(1)[0])
    assert len(buffer) == REPEATED_ROWS


@pytest.mark.parametrize("index", [slice(None), (slice(None), slice(1, 3)), (slice(1, 3), 4)])
def test_data_is_repeated_in_the_layout_of_the_user(index: Any) -> None:
    size = selected((LANES, REPEATED_ROWS), index)
    for dims in range(len(size) + 1):
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(REPEATED_ROWS * LANES, ndim=2), dim_extend=1)
        buffer.extend(repeated_steps(LANES, REPEATED_ROWS))
        value = repeated_steps(*size[len(size) - dims :], start=100)
        buffer[index] = value
        assert values(buffer) == expected((LANES, REPEATED_ROWS), index, value)
        rows = torch.arange(REPEATED_ROWS).unsqueeze(1)
        assert torch.equal(buffer.storage[:]["index"], rows.expand(REPEATED_ROWS, LANES))


def test_a_mask_of_all_dimensions_names_elements() -> None:
    storage = TensorStorage(torch.arange(12).reshape(4, 3), ndim=2)
    mask = torch.zeros(4, 3, dtype=torch.bool)
    mask[0, 1] = mask[2, 0] = True
    storage[mask] = torch.tensor([100, 200])
    assert storage[:].tolist() == [[0, 100, 2], [3, 4, 5], [200, 7, 8], [9, 10, 11]]
    storage[mask] = torch.tensor(5)
    assert storage[mask].tolist() == [5, 5]
    with pytest.raises(IndexError):
        storage[mask[:3]] = torch.tensor(5)


def test_rows_of_a_matrix_are_marked_as_updated() -> None:
    size = REPEATED_ROWS * 2
    storage, sampler = LazyTensorStorage(size, ndim=2), PrioritizedSampler(size, 1.0, 1.0)
    buffer = ReplayBuffer(storage=storage, sampler=sampler, dim_extend=0)
    index = buffer.extend(repeated_steps(REPEATED_ROWS, 2))
    buffer.update_priority(index, torch.full((size,), 0.5))
    buffer[torch.tensor([[0, 1], [2, 3]])] = repeated_steps(1, start=100)[0]
    weights = buffer.sampler.state_dict()["_sum_tree"]
    assert (weights[:8] > weights[8:].max()).all()


# Conditional updates, against a model -------------------------------------------------------------


CAPACITY = 6


def rows(first: int, count: int, lanes: int = 0) -> TensorDict:
    shape = (lanes, count) if lanes else (count,)
    value = torch.arange(first, first + count).expand(shape)
    version = torch.zeros(*shape, 1, dtype=torch.int64)
    return TensorDict({"value": value.clone(), "version": version, "next": {"other": value.double()}}, shape)


def ring(count: int = 0, lanes: int = 0, storage: Any = None, **options: Any) -> TensorDictReplayBuffer:
    writer = TensorDictRoundRobinWriter(track_generations=True)
    if storage is None:
        storage = LazyTensorStorage(CAPACITY * max(lanes, 1), ndim=2 if lanes else 1)
    buffer = TensorDictReplayBuffer(storage=storage, writer=writer, batch_size=4, **options)
    if count:
        buffer.extend(rows(0, count, lanes))
    return buffer


def update(buffer: Any, index: list[int], generation: list[int], **options: Any) -> ConditionalUpdateResult:
    values = {"value": 100 + torch.arange(len(index))}
    return buffer.update_if_present(
        index=torch.tensor(index, dtype=torch.int64), generation=torch.tensor(generation, dtype=torch.int64),
        **{"patch": values} | options,
    )  # fmt: skip


RECORDS = st.lists(st.tuples(st.integers(-2, CAPACITY + 1), st.integers(-1, 3), st.integers(-1, 3)), max_size=8)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=4), RECORDS, st.sampled_from([None, False, True]))
def test_conditional_updates_are_those_of_the_model(writes: list[int], records: list[Any], newer: bool | None) -> None:
    buffer, stamps, first = ring(), [-1] * CAPACITY, 0
    for count in writes:
        buffer.extend(rows(first, count))
        for number in range(first, first + count):
            stamps[number % CAPACITY] += 1
        first += count
    values, versions = buffer[:]["value"].tolist(), buffer[:]["version"].flatten().tolist()
    live = [0 <= row < CAPACITY and stamp == stamps[row] >= 0 for row, stamp, _ in records]
    chosen: dict[int, int] = {}  # the record that updates each row: the last one, or the last of the newest
    for number, ((row, _, version), is_live) in enumerate(zip(records, live, strict=True)):
        fits = newer is None or (is_live and (version > versions[row] if newer else version >= versions[row]))
        if is_live and fits and (newer is None or version >= records[chosen.get(row, number)][2]):
            chosen[row] = number
    updated = [ok if newer is None else chosen.get(records[number][0]) == number for number, ok in enumerate(live)]
    for row, number in chosen.items():
        values[row] = 100 + number
        versions[row] = versions[row] if newer is None else records[number][2]
    index, generation, version = (list(part) for part in zip(*records, strict=True)) if records else ([], [], [])
    options: dict[str, Any] = {}
    if newer is not None:
        options = {"version_key": "version", "version": torch.tensor(version).long(), "require_newer": newer}
    found = update(buffer, index, generation, **options)
    assert found.updated.tolist() == updated
    assert buffer[:]["value"].tolist() == values
    assert buffer[:]["version"].flatten().tolist() == versions
    if newer is None:
        assert found.version_rejected is None
    else:
        assert found.version_rejected.tolist() == [one and not other for one, other in zip(live, updated, strict=True)]
    for result in (found, found.clone(), torch.cat([found[:1], found[1:]])):
        assert isinstance(result, TensorClass)
        assert result.batch_size == (len(live),)
        counts = result.updated_count, result.version_rejected_count, result.stale_count
        assert counts == (sum(updated), sum(live) - sum(updated), len(live) - sum(live))


@pytest.mark.parametrize("kind", ["memory", "memmap", "lanes", "shared"])
def test_batches_are_updated_until_they_are_overwritten(kind: str, tmp_path: Any) -> None:
    lanes = 2 if kind == "lanes" else 0
    storage = LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "rows") if kind == "memmap" else None
    buffer = ring(4, lanes, storage, shared=kind == "shared")
    batch = buffer.sample()
    handle = {"index": batch["index"], "generation": batch["index_generation"]}
    for value in (5, 6):  # a second update of the same batch works
        found = buffer.update_if_present(**handle, patch={("next", "other"): torch.full((4,), float(value)).double()})
        assert found.updated.all()
        index = tuple(batch["index"].unbind(-1)) if lanes else batch["index"]
        assert (buffer.storage[index]["next", "other"] == value).all()
    buffer.extend(rows(50, CAPACITY, lanes))
    found = buffer.update_if_present(**handle, patch={("next", "other"): torch.full((4,), 7.0).double()})
    assert (found.updated_count, found.stale_count) == (0, 4)
    assert not (buffer.storage[:]["next", "other"] == 7).any()
    buffer.empty()
    if not lanes:
        assert update(buffer, [0], [2]).stale_count == 1


@pytest.mark.parametrize("prefetch", [None, 2])
def test_submitted_updates_come_after_the_batches_prepared_ahead(prefetch: int | None) -> None:
    buffer = ring(4, prefetch=prefetch)
    batch = buffer.sample()
    handle = {"index": batch["index"], "generation": batch["index_generation"]}
    future = buffer.submit_update_if_present(**handle, patch={"value": torch.full((4,), 50)})
    assert future.done()
    assert future.result().updated_count == 4
    buffer.synchronize()
    old = [buffer.sample()["value"].max() < 50 for _ in range(prefetch or 0)]
    assert old == [True] * (prefetch or 0)
    changed = buffer.storage[:]["value"] == 50
    batch = buffer.sample()
    assert torch.equal(batch["value"] == 50, changed[batch["index"]])


def test_synchronize_raises_an_error_once() -> None:
    buffer = ring(4, prefetch=2)
    handle = {"index": torch.arange(2), "generation": torch.zeros(2, dtype=torch.int64)}
    failed = buffer.submit_update_if_present(**handle, patch={"unknown": torch.ones(2)})
    assert isinstance(failed.exception(), KeyError)
    with pytest.raises(KeyError, match="unknown"):
        buffer.synchronize()
    buffer.synchronize()
    with pytest.raises(TypeError, match="generation"):
        buffer.submit_update_if_present(index=torch.arange(2), patch={})
    buffer.shutdown()
    buffer.synchronize()
    with pytest.raises(RuntimeError, match="was shut down"):
        buffer.submit_update_if_present(**handle, patch={})
    late = TensorDictReplayBuffer(delayed_init=True)
    late.synchronize()
    assert not late.initialized


def test_slice_samplers_see_conditional_updates() -> None:
    buffer = ring(6, sampler=SliceSampler(slice_len=2, traj_key="value"))
    with pytest.raises(RuntimeError, match="long enough"):
        buffer.sample()
    nines = {"value": torch.tensor([9, 9])}
    buffer.update_if_present(index=torch.tensor([2, 3]), generation=torch.tensor([0, 0]), patch=nines)
    assert set(buffer.sample()["index"].flatten().tolist()) == {2, 3}


@pytest.mark.parametrize(
    ("dtype", "version", "kept"),
    [
        (torch.uint8, -1, None), (torch.uint8, 256, None), (torch.uint8, 255, 255), (torch.float32, 2**24 + 1, None),
        (torch.float32, 2**24, 2.0**24), (torch.float32, 0.1, pytest.approx(0.1)), (torch.int64, 3.0, 3),
    ],
)  # fmt: skip
def test_versions_are_those_that_were_given_or_an_error(dtype: torch.dtype, version: Any, kept: Any) -> None:
    writer = TensorDictRoundRobinWriter(track_generations=True)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1), writer=writer)
    buffer.extend(TensorDict({"value": torch.zeros(1), "version": torch.zeros(1, dtype=dtype)}, [1]))
    asked = {"index": [0], "generation": [0], "patch": {"value": torch.ones(1)}, "version_key": "version"}
    if kept is None:
        with pytest.raises(ValueError, match="cannot hold"):
            buffer.update_if_present(**asked, version=version)
    else:
        assert buffer.update_if_present(**asked, version=version).updated_count == 1
    assert buffer[:]["version"].item() == (0 if kept is None else kept)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"generation": torch.zeros(3, dtype=torch.int64)}, ValueError, "3 numbers for 2 elements"),
        ({"generation": torch.zeros(2)}, ValueError, "whole numbers"),
        ({"index": torch.zeros(2)}, ValueError, "whole numbers"),
        ({"version_key": "version"}, ValueError, "both or neither"),
        ({"version": 3}, ValueError, "both or neither"),
        ({"version_key": ("value",), "version": 3}, ValueError, "part of the patch"),
        ({"version_key": "missing", "version": 3}, KeyError, "missing"),
        ({"version_key": "next.other", "version": 3}, ValueError, "without dots"),
        ({"version_key": "version", "version": torch.ones(2, dtype=torch.int32)}, ValueError, "int32"),
        ({"version_key": "version", "version": torch.ones(3, dtype=torch.int64)}, ValueError, r"\[3\]"),
        ({"version_key": "version", "version": 2.7}, ValueError, "2.7, which 'version', torch.int64, cannot"),
        ({"version_key": "version", "version": [1, 1.5]}, ValueError, r"\[1, 1.5\].* cannot hold"),
        ({"version_key": "version", "version": 2**63}, ValueError, "cannot hold"),
        ({"version_key": "version", "version": float("nan")}, ValueError, "version is nan"),
        ({"version_key": "version", "version": "3"}, ValueError, "version is '3', expected numbers"),
        ({"version_key": "version", "version": 2**70}, ValueError, "expected numbers"),
        ({"patch": {"missing": torch.zeros(2)}}, KeyError, "missing"),
        ({"patch": {"value": torch.zeros(2)}}, ValueError, "float32"),
        ({"patch": {"value": torch.zeros(3, dtype=torch.int64)}}, ValueError, r"\[3\]"),
        ({"patch": {"value": 3}}, ValueError, "is int in the patch"),
    ],
)  # fmt: skip
def test_bad_updates_change_nothing(options: dict[str, Any], error: type[Exception], words: str) -> None:
    buffer = ring(4)
    before = buffer[:].clone()
    asked: dict[str, Any] = {"index": torch.tensor([0, 1]), "generation": torch.zeros(2).long()}
    with pytest.raises(error, match=words):
        buffer.update_if_present(**asked | {"patch": {"value": torch.tensor([7, 7])}} | options)
    assert (buffer[:] == before).all()


def test_conditional_updates_need_generations_and_columns() -> None:
    untracked = TensorDictReplayBuffer(storage=LazyTensorStorage(4))
    for buffer in (untracked, ring(2, storage=ListStorage(4)), ring()):
        with pytest.raises(RuntimeError, match="conditional"):
            update(buffer, [0], [0])


@pytest.mark.parametrize("kind", [TensorStorage, LazyTensorStorage, LazyMemmapStorage, LazyStackStorage])
def test_new_values_may_be_views_of_what_is_stored(kind: Callable[..., Any]) -> None:
    rows = TensorDict({"a": torch.arange(6), "b": torch.arange(6) * 10}, [6])
    buffer = ReplayBuffer(storage=TensorStorage(rows.clone()) if kind is TensorStorage else kind(6))
    if kind is not TensorStorage:
        buffer.extend(rows)
    whole = buffer[:]
    buffer.update_({"a": whole["b"], "b": whole["a"]})
    assert buffer["a"].tolist() == [0, 10, 20, 30, 40, 50]
    assert buffer["b"].tolist() == [0, 1, 2, 3, 4, 5]
    buffer.set_at_("b", buffer["b"][0:6:2], slice(3, 6))
    assert buffer["b"].tolist() == [0, 1, 2, 0, 2, 4]


def test_a_patch_may_have_views_of_what_is_stored() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(3), writer=RoundRobinWriter(track_generations=True))
    index = buffer.extend(TensorDict({"a": torch.arange(3), "b": torch.arange(3) * 10}, [3]))
    whole = buffer[:]
    patch = {"a": whole["b"], "b": whole["a"]}
    buffer.update_if_present(index=index, generation=torch.zeros(3, dtype=torch.int64), patch=patch)
    assert (buffer["a"].tolist(), buffer["b"].tolist()) == ([0, 10, 20], [0, 1, 2])


@pytest.mark.parametrize("values", [np.array([300, 1]), np.array([-1, 1]), [1.5, 2.0], np.array([1.5, 2.0])])
def test_numbers_that_an_entry_cannot_hold_are_refused(values: Any) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(2))
    buffer.extend(TensorDict({"a": torch.ones(2, dtype=torch.uint8)}, [2]))
    with pytest.raises(SchemaError, match="which cannot hold"):
        buffer.set_("a", values)
    assert buffer["a"].tolist() == [1, 1]
    buffer["a"] = [2.0, 3]
    assert buffer["a"].tolist() == [2, 3]
