from __future__ import annotations

import warnings

import pytest
import torch
from tensordict import TensorDict

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.errors import MissingKeyError, SchemaError
from rbtool.core.samplers.uniform import RandomSampler
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.list_storage import ListStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.transforms.base import Transform
from rbtool.core.writers.base import ImmutableDatasetWriter
from rbtool.core.writers.max_value import TensorDictMaxValueWriter


def steps(count: int = 4, start: int = 0) -> TensorDict:
    rows = torch.arange(start, start + count)
    return TensorDict({"a": rows, "next": {"b": rows.float().unsqueeze(-1).expand(count, 2).clone()}}, [count])


def filled(**arguments: object) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=LazyTensorStorage(6), **arguments)
    buffer.extend(steps())
    return buffer


def state(buffer: ReplayBuffer) -> tuple[object, ...]:
    return buffer["a"].tolist(), buffer["next", "b"].tolist(), len(buffer), buffer.write_count, buffer.writer._cursor


# What counts as a batch ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "length"),
    [
        (torch.zeros(3, 2), 3),
        (steps(3), 3),
        ([{"a": torch.zeros(2)}, {"a": torch.ones(2)}], 2),
        ((torch.zeros(3), torch.zeros(3, 2)), 3),
        ({"a": {"b": torch.zeros(3), "c": [torch.zeros(3, 2), (torch.ones(3, 10),)]}}, 3),
    ],
)
def test_what_is_a_batch(data: object, length: int) -> None:
    buffer = ReplayBuffer(storage=LazyMemmapStorage(10))
    assert buffer.extend(data).tolist() == list(range(length))
    assert len(buffer) == length


# The edge: leaves of different lengths surface as an error of broadcasting.
def test_leaves_of_different_lengths_are_named() -> None:
    with pytest.raises(SchemaError, match=r"a has 3, b\.0 has 2"):
        ReplayBuffer(storage=LazyTensorStorage(5)).extend({"a": torch.zeros(3), "b": [torch.zeros(2)]})


@pytest.mark.parametrize(
    ("data", "error"),
    [([], RuntimeError), (steps(0), IndexError), (iter([1]), TypeError), (torch.tensor(1), TypeError)],
)
def test_what_is_no_batch(data: object, error: type[Exception]) -> None:
    buffer = filled()
    before = state(buffer)
    with pytest.raises(error):
        buffer.extend(data)
    assert state(buffer) == before


# The edge: TorchRL has moved length, cursor and count already.
@pytest.mark.parametrize(
    "bad",
    [
        steps().set("a", torch.zeros(4)),
        steps().set("a", torch.zeros(4, 1, dtype=torch.int64)),
        steps().set(("next", "b"), torch.zeros(4, 3)),
    ],
)
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_a_failed_extend_changes_nothing(bad: TensorDict, storage: type) -> None:
    buffer = ReplayBuffer(storage=storage(6))
    buffer.extend(steps())
    before = state(buffer)
    for act, data in ((buffer.extend, bad), (buffer.add, bad[0])):
        with pytest.raises(RuntimeError, match="expected"):
            act(data)
        assert state(buffer) == before


# The edge: stale ring data under missing keys, new keys dropped or added as the storage likes.
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize(
    "bad", [steps().exclude("a"), steps().set("new", torch.zeros(4)), steps().exclude(("next", "b"))]
)
def test_missing_and_new_keys_are_named(storage: type, bad: TensorDict) -> None:
    buffer = ReplayBuffer(storage=storage(6))
    buffer.extend(steps())
    before = state(buffer)
    with pytest.raises(RuntimeError, match=r"'?(a|new|b)'?"):
        buffer.extend(bad)
    assert state(buffer) == before


def test_update_priority_belongs_to_buffers_of_tensordicts() -> None:
    with pytest.raises(NotImplementedError, match="ReplayBuffer does not know"):
        filled().extend(steps(), update_priority=True)


# The edge: TorchRL puts "index" into the caller's tensordict.
@pytest.mark.parametrize("transform", [None, Transform()])
def test_the_callers_data_is_not_changed(transform: Transform | None) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), transform=transform)
    data, one = steps(), steps()[0]
    buffer.extend(data.lock_())
    buffer.add(one.lock_())
    assert (set(data.keys()), set(one.keys()), one.batch_size) == ({"a", "next"}, {"a", "next"}, ())
    assert buffer["index"].tolist() == [0, 1, 2, 3, 4]


def test_a_batch_is_not_added_as_one_element_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match=r"batch size \[4\] is added as one element"):
        ReplayBuffer(storage=LazyTensorStorage(6)).add(steps())
    monkeypatch.setenv("RL_WARNINGS", "0")
    with warnings.catch_warnings(action="error"):
        ReplayBuffer(storage=LazyTensorStorage(6)).add(steps())


# The edge: 32-bit counters become negative after 2^31 - 1.
def test_counters_have_64_bits() -> None:
    buffer = filled()
    buffer.writer._write_count = 2**31 - 2
    buffer.extend(steps())
    assert buffer.write_count == 2**31 + 2


def test_a_writer_may_keep_elements_out() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(2), writer=TensorDictMaxValueWriter(rank_key="a"))
    assert buffer.extend(steps()).tolist() == [-1, -1, 0, 1] or sorted(buffer["a"].tolist()) == [2, 3]
    assert buffer.add(steps()[0]) is None
    assert sorted(buffer["a"].tolist()) == [2, 3]


# Replacing -------------------------------------------------------------------------------------------


# The edge: rows beyond the valid ones are written in silence.
@pytest.mark.parametrize(
    ("index", "count"),
    [(4, 1), (slice(2, 6), 4), (slice(None, 6), 6), ([3, 4], 2), (torch.tensor([5]), 1), (range(3, 5), 2)],
)
def test_nothing_is_written_beyond_the_end(index: object, count: int) -> None:
    buffer = filled()
    before = state(buffer)
    with pytest.raises(IndexError, match="there are 4"):
        buffer[index] = steps()[0] if isinstance(index, int) else steps(count)
    with pytest.raises(IndexError, match="there are 4"):
        buffer.write_all(steps(5))
    assert state(buffer) == before


def test_write_all() -> None:
    buffer = filled()
    buffer.write_all(steps(2, start=10))
    assert (buffer["a"].tolist(), len(buffer), buffer.write_count) == ([10, 11, 2, 3], 4, 4)
    buffer.write_all(steps(4, start=20), end=4)
    assert buffer["a"].tolist() == [20, 21, 22, 23]
    with pytest.raises(RuntimeError):
        buffer.write_all(steps(3), end=2)


def test_setting_elements() -> None:
    buffer = filled()
    buffer[-1] = steps(1, start=9)[0]
    buffer[torch.tensor([True, False, False, False])] = steps(1, start=7)
    buffer[[2, 1]] = steps(2, start=5)
    assert buffer["a"].tolist() == [7, 6, 5, 9]
    buffer["a"] = torch.arange(4)
    buffer["next", "b"] = torch.ones(4, 2)
    assert (buffer["a"].tolist(), float(buffer["next", "b"].sum())) == ([0, 1, 2, 3], 8)


def test_setting_elements_of_the_users_layout() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    buffer.extend(torch.arange(12).reshape(3, 4))
    buffer[1] = torch.full((4,), -1)
    buffer[:, 0] = torch.tensor([-2, -3, -4])
    buffer[2, 3] = torch.tensor(-5)
    assert buffer[:].tolist() == [[-2, 1, 2, 3], [-3, -1, -1, -1], [-4, 9, 10, -5]]
    with pytest.raises(IndexError):
        buffer[3] = torch.zeros(4, dtype=torch.int64)


# Editing entries -------------------------------------------------------------------------------------


def test_entries_are_edited_in_place_and_past_transforms() -> None:
    buffer = filled(transform=lambda rows: rows.set("a", rows["a"] + 100))
    before = buffer.storage.log.now.irregular
    assert buffer.set_("a", torch.tensor([4, 3, 2, 1])) is buffer
    assert buffer.set_at_(("next", "b"), torch.full((2, 2), 9.0), [0, 3]) is buffer
    assert buffer.storage.log.now.irregular == before + 2
    assert buffer.storage[:]["a"].tolist() == [4, 3, 2, 1]
    assert buffer["next", "b"][:, 0].tolist() == [9, 1, 2, 9]


def test_update_replaces_several_entries() -> None:
    buffer = filled()
    new = {"a": torch.arange(4) + 10, "next": {"b": torch.zeros(4, 2)}}
    assert buffer.update_(new, keys_to_update=["a"]) is buffer
    assert (buffer["a"].tolist(), float(buffer["next", "b"].sum())) == ([10, 11, 12, 13], 12)
    buffer.update_(TensorDict(new, [4]))
    assert float(buffer["next", "b"].sum()) == 0


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"a": torch.zeros(4, dtype=torch.int64), "c": torch.zeros(4)}, MissingKeyError),
        ({"a": torch.zeros(4, dtype=torch.int64), "next": {"b": torch.zeros(4)}}, SchemaError),
        ({"a": torch.zeros(4)}, SchemaError),
        ({"a": torch.zeros(3, dtype=torch.int64)}, SchemaError),
        ({"next": torch.zeros(4)}, SchemaError),
    ],
)
def test_an_update_that_fails_changes_nothing(values: dict, error: type[Exception]) -> None:
    buffer = filled()
    before = state(buffer)
    with pytest.raises(error):
        buffer.update_(values)
    assert state(buffer) == before


def test_set_at_wants_the_shape_of_its_place() -> None:
    buffer = filled()
    for value in (torch.zeros(3, 2), torch.zeros(2, 2).double()):
        with pytest.raises(SchemaError):
            buffer.set_at_(("next", "b"), value, [0, 1])
    with pytest.raises(SchemaError, match="one by one"):
        ReplayBuffer(storage=ListStorage(3)).set_("a", torch.zeros(1))


# Emptying --------------------------------------------------------------------------------------------


def test_empty_may_keep_the_count() -> None:
    buffer = filled()
    buffer.empty(empty_write_count=False)
    assert (len(buffer), buffer.write_count, buffer.writer._cursor) == (0, 4, 0)


# The edge: emptying a dataset raises; it must not have changed anything then.
def test_a_dataset_that_allows_no_writing_stays_as_it_is() -> None:
    buffer = ReplayBuffer(storage=TensorStorage(torch.arange(3)), writer=ImmutableDatasetWriter())
    for act in (buffer.empty, lambda: buffer.extend(torch.arange(2)), lambda: buffer.add(torch.tensor(1))):
        with pytest.raises(RuntimeError, match="doesn't allow writing"):
            act()
    assert (len(buffer), buffer[:].tolist()) == (3, [0, 1, 2])


def test_priorities_of_a_sampler_without_any_warn() -> None:
    with pytest.warns(UserWarning, match="does not use priorities"):
        filled().update_priority(torch.tensor([0]), torch.tensor([1.0]))


def test_entries_of_the_users_layout_are_edited() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    buffer.extend(TensorDict({"a": torch.arange(12).reshape(3, 4)}, [3, 4]))
    buffer.set_at_("a", torch.tensor([-1, -2, -3, -4]), 1)
    assert buffer["a"].tolist() == [[0, 1, 2, 3], [-1, -2, -3, -4], [8, 9, 10, 11]]
    buffer.set_("a", -torch.arange(12).reshape(3, 4))
    assert buffer.storage[:]["a"][:, 2].tolist() == [-8, -9, -10, -11]
    with pytest.raises(SchemaError, match=r"\[4, 3\], expected \[3, 4\]"):
        buffer.set_("a", torch.zeros(4, 3, dtype=torch.int64))


class Listens(RandomSampler):
    def __init__(self) -> None:
        self.heard: list[tuple[str, object]] = []

    def add(self, index: object) -> None:
        self.heard.append(("add", index))

    def extend(self, index: torch.Tensor) -> None:
        self.heard.append(("extend", index.tolist()))

    def mark_update(self, index: object, *, storage: object = None) -> None:
        self.heard.append(("mark", torch.as_tensor(index).tolist()))


def test_samplers_hear_of_writes() -> None:
    buffer = filled(sampler=Listens())
    buffer.add(steps(1)[0])
    buffer[0] = steps(1)[0]
    new = [("mark", [0, 1, 2, 3]), ("extend", [0, 1, 2, 3]), ("mark", 4), ("add", 4), ("mark", 0)]
    assert buffer.sampler.heard == new
    silent = buffer.set_sampler(RandomSampler())
    buffer.extend(steps(2))
    assert silent.heard == new
    buffer.set_sampler(again := Listens())
    assert again.heard == [("extend", [0, 1, 2, 3, 4, 5])]
    buffer.extend(steps(1))
    assert again.heard[1:] == [("mark", [1]), ("extend", [1])]
