"""`rb[index] = data` repeats data along the dimensions that it lacks, in every storage and for every index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.samplers.prioritized import PrioritizedSampler
from rbtool.core.storages.base import Storage
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.list_storage import CompressedListStorage, LazyStackStorage, ListStorage
from rbtool.core.storages.tensor import TensorStorage

TENSORS: list[Callable[..., Storage]] = [LazyTensorStorage, LazyMemmapStorage]
LISTS: list[Callable[..., Storage]] = [ListStorage, LazyStackStorage, CompressedListStorage]
ROWS, LANES = 6, 3


def steps(*shape: int, start: int = 0) -> TensorDict:
    count = int(np.prod(shape))
    numbers = torch.arange(start, start + count)
    return TensorDict(
        {"a": numbers.reshape(shape), "next": {"b": torch.stack([numbers, -numbers], -1).reshape(*shape, 2).double()}},
        shape,
    )


def filled(make: Callable[..., Storage], kind: type[ReplayBuffer] = ReplayBuffer, ndim: int = 1) -> Any:
    arguments = {} if ndim == 1 else {"ndim": 2}
    buffer = kind(storage=make(ROWS * LANES ** (ndim - 1) + 2 * LANES, **arguments), dim_extend=0)
    buffer.extend(steps(ROWS, *[LANES] * (ndim - 1)))
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
    st.integers(-ROWS, ROWS - 1),
    slices(ROWS),
    numbers(ROWS),
    numbers(ROWS).map(torch.tensor),
    numbers(ROWS).map(np.array),
    st.lists(st.booleans(), min_size=ROWS, max_size=ROWS).map(torch.tensor),
    st.just(...),
    st.integers(0, ROWS - 2).map(lambda start: range(start, start + 2)),
)
MATRIX = st.permutations(range(ROWS)).map(lambda order: torch.tensor(order[:4]).reshape(2, 2))
ACROSS = st.tuples(
    st.one_of(st.integers(0, ROWS - 1), slices(ROWS).filter(lambda part: (part.step or 1) > 0)),
    st.one_of(st.integers(-LANES, LANES - 1), slices(LANES).filter(lambda part: (part.step or 1) > 0)),
)


def as_torch(index: Any) -> Any:
    if isinstance(index, slice) and (index.step or 1) < 0:
        return torch.from_numpy(np.arange(ROWS)[index].copy())
    return torch.tensor(index) if isinstance(index, range) else index


def expected(lead: tuple[int, ...], index: Any, data: TensorDict) -> tuple[list[Any], list[Any]]:
    """What torch makes of the same assignment of tensors."""
    rows = steps(*lead)
    for key in ("a", ("next", "b")):
        rows[key][as_torch(index)] = data[key]
    return rows["a"].tolist(), rows["next", "b"].tolist()


def selected(lead: tuple[int, ...], index: Any) -> tuple[int, ...]:
    return tuple(torch.zeros(lead)[as_torch(index)].shape)


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("make", [*TENSORS, *LISTS])
@settings(max_examples=40, deadline=None)
@given(index=ALONG)
def test_one_element_goes_to_all_that_are_named(
    make: Callable[..., Storage], kind: type[ReplayBuffer], index: Any
) -> None:
    buffer, data = filled(make, kind), steps(1, start=100)[0]
    buffer[index] = data
    assert values(buffer) == expected((ROWS,), index, data)
    if kind is TensorDictReplayBuffer:
        assert [int(buffer[row]["index"]) for row in range(ROWS)] == list(range(ROWS))


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("make", TENSORS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_dimensions_of_data_are_the_last_that_are_selected(
    make: Callable[..., Storage], kind: type[ReplayBuffer], data: st.DataObject
) -> None:
    index = data.draw(st.one_of(ALONG, MATRIX, ACROSS))
    size = selected((ROWS, LANES), index)
    given_dims = data.draw(st.integers(0, len(size)))
    value = steps(*size[len(size) - given_dims :], start=100)
    buffer = filled(make, kind, ndim=2)
    buffer[index] = value
    assert values(buffer) == expected((ROWS, LANES), index, value)


@pytest.mark.parametrize("make", TENSORS)
@settings(max_examples=40, deadline=None)
@given(index=st.one_of(ALONG, MATRIX))
def test_data_of_other_kinds_is_repeated_as_well(make: Callable[..., Storage], index: Any) -> None:
    tree = ReplayBuffer(storage=make(ROWS))
    tree.extend({"a": torch.arange(ROWS), "b": [torch.arange(2.0 * ROWS).reshape(ROWS, 2)]})
    tree[index] = {"a": torch.tensor(100), "b": [torch.tensor([7.0, 8.0])]}
    a, b = torch.arange(ROWS), torch.arange(2.0 * ROWS).reshape(ROWS, 2)
    a[as_torch(index)], b[as_torch(index)] = 100, torch.tensor([7.0, 8.0])
    assert (tree[:]["a"].tolist(), tree[:]["b"][0].tolist()) == (a.tolist(), b.tolist())
    plain = ReplayBuffer(storage=make(ROWS))
    plain.extend(torch.arange(2.0 * ROWS).reshape(ROWS, 2))
    plain[index] = torch.tensor([7.0, 8.0])
    assert plain[:].tolist() == b.tolist()


@pytest.mark.parametrize("make", [*TENSORS, *LISTS])
@pytest.mark.parametrize("index", [slice(0, 3), [1, 2, 4], torch.tensor([True, False] * 3)])
@pytest.mark.parametrize("count", [1, 2])
def test_fewer_elements_than_are_named_are_refused(make: Callable[..., Storage], index: Any, count: int) -> None:
    buffer = filled(make)
    before = values(buffer)
    with pytest.raises(RuntimeError):
        buffer[index] = steps(count, start=100)
    assert values(buffer) == before


def test_entries_that_lack_other_dimensions_are_refused() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(ROWS))
    buffer.extend({"a": torch.arange(ROWS), "b": torch.zeros(ROWS, 2)})
    for part in (slice(0, 2), (slice(0, 2),)):
        with pytest.raises(RuntimeError, match="expected"):
            buffer[part] = {"a": torch.tensor([1, 2]), "b": torch.ones(2)}
    assert not buffer[:]["b"].any()


@pytest.mark.parametrize("data", [{"a": 1}, "text", 3])
def test_a_list_does_not_repeat_what_may_be_rows(data: object) -> None:
    buffer = ReplayBuffer(storage=ListStorage(4), collate_fn=lambda rows: rows)
    buffer.extend(["p", "q", "r"])
    with pytest.raises(TypeError):
        buffer[0:2] = data
    assert buffer[:] == ["p", "q", "r"]


def test_repeated_elements_of_a_list_are_copies() -> None:
    buffer = filled(LazyStackStorage)
    buffer[0:2] = steps(1, start=100)[0]
    buffer[0]["a"].fill_(7)
    assert values(buffer)[0] == [7, 100, 2, 3, 4, 5]


def test_elements_with_dimensions_of_their_own() -> None:
    for make in (LazyTensorStorage, LazyStackStorage):
        buffer = ReplayBuffer(storage=make(ROWS))
        buffer.extend(TensorDict({"a": torch.zeros(ROWS, 4)}, [ROWS, 4]))
        buffer[1:3] = TensorDict({"a": torch.arange(4.0)}, [4])
        assert buffer[:]["a"].sum(1).tolist() == [0, 6, 6, 0, 0, 0]


def test_writing_new_elements_repeats_nothing() -> None:
    buffer = filled(LazyTensorStorage)
    with pytest.raises((RuntimeError, TypeError, IndexError)):
        buffer.extend(steps(1)[0])
    assert len(buffer) == ROWS


@pytest.mark.parametrize("lacking", [1, 2])
def test_all_in_the_layout_of_a_user_who_extends_along_another_dimension(lacking: int) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(ROWS * LANES, ndim=2), dim_extend=1)
    buffer.extend(steps(LANES, ROWS))
    value = steps(ROWS, start=100) if lacking == 1 else steps(1, start=100)[0]
    buffer[:] = value
    assert values(buffer) == expected((LANES, ROWS), slice(None), value)


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


def test_a_matrix_of_rows_marks_these_rows() -> None:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(ROWS * 2, ndim=2), sampler=PrioritizedSampler(ROWS * 2, 1.0, 1.0), dim_extend=0
    )
    buffer.extend(steps(ROWS, 2))
    buffer.update_priority(torch.cartesian_prod(torch.arange(ROWS), torch.arange(2)), torch.full((ROWS * 2,), 0.5))
    buffer[torch.tensor([[0, 1], [2, 3]])] = steps(1, start=100)[0]
    weights = buffer.sampler.state_dict()["_sum_tree"]
    assert (weights[:8] > weights[8:].max()).all()
