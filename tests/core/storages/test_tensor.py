from __future__ import annotations

import multiprocessing
import pickle
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import suite_of
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, tensorclass

from rbtool import (
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictReplayBuffer,
    TensorStorage,
)
from rbtool.core.checkpointers.tensor import TensorStorageCheckpointer
from rbtool.core.errors import SchemaError, UsageError
from rbtool.core.storages.base import register_checkpointer
from rbtool.core.storages.cursors import last_row
from rbtool.core.storages.pytree import added
from rbtool.core.testing.rows import MarkRecorder, same
from rbtool.core.testing.storages import StorageTests

Pair = namedtuple("Pair", ["left", "right"])


@tensorclass
class Step:
    observation: torch.Tensor
    action: torch.Tensor


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def steps(rows: int = 10) -> TensorDict:
    inner = {"observation": numbers(rows, 3) + 0.5, "reward": -numbers(rows, 1, dtype=torch.float64)}
    return TensorDict({"action": numbers(rows, 2, dtype=torch.int16), "next": inner}, [rows])


def tree() -> dict:
    return {"a": numbers(10, dtype=torch.uint16), "b": [numbers(10, 2), (numbers(10, 1, dtype=torch.uint8) > 4,)]}


TestStorages = suite_of(
    StorageTests,
    tensors=lambda: TensorStorage(numbers(10, 2)),
    unsigned=lambda: TensorStorage(numbers(10, dtype=torch.int64).view(torch.uint64)),
    tensordicts=lambda: TensorStorage(steps()),
    trees=lambda: TensorStorage(tree()),
    tensorclasses=lambda: TensorStorage(Step(numbers(10, 3), numbers(10), batch_size=[10])),
    two_dimensions=lambda: TensorStorage(TensorDict({"x": numbers(10, 4, 3), "y": numbers(10, 4)}, [10, 4]), ndim=2),
)


class TestPartlyFilled(StorageTests):
    def make(self) -> TensorStorage:
        storage = TensorStorage(steps(25))
        rows = storage[:10].clone()
        storage.empty()
        storage.set(range(10), rows)
        storage.last_cursor = None
        return storage


def test_max_size_counts_elements_and_is_that_of_the_data() -> None:
    assert TensorStorage(numbers(4, 3), 12, ndim=2).max_size == TensorStorage(numbers(4, 3), 4, ndim=2).max_size == 12
    with pytest.raises(ValueError, match="found None"):
        TensorStorage(None)
    for max_size in (9, 11):
        with pytest.raises(ValueError, match=f"max_size is {max_size}, but the tensors hold 10"):
            TensorStorage(steps(), max_size)


def test_the_device_is_that_of_the_data() -> None:
    meta = torch.empty(3, device="meta")
    with pytest.raises(UsageError, match="on meta, not on cpu"):
        TensorStorage(meta)
    assert TensorStorage(meta, device="auto").device.type == "meta"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("text", "the data is a str"),
        ({}, "found no tensor"),
        ({"a": torch.zeros(3), "b": {"c": torch.zeros(4)}}, r"found \[3\], \[4\]"),
        ({"a": torch.zeros(3), "b": 1.0}, "the entry 'b' is a float"),
        (torch.tensor(1.0), r"found \[\]"),
        (TensorDict({"a": NonTensorStack(object(), "y", "z")}, [3]), "the entry 'a' has a object"),
        (LazyStackedTensorDict(steps(2), steps(2)), "need not be contiguous in memory"),
    ],
)
def test_data_that_cannot_be_wrapped_are_refused(data: object, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        TensorStorage(data)


# A tensordict without entries --------------------------------------------------------------------------


@pytest.mark.parametrize("max_size", [None, 20])
@pytest.mark.parametrize("buffer", [ReplayBuffer, TensorDictReplayBuffer])
def test_the_first_write_makes_the_entries_of_an_empty_tensordict(max_size: int | None, buffer: Any) -> None:
    storage = TensorStorage(TensorDict(batch_size=[20]), max_size)
    rb = buffer(storage=storage, batch_size=4)
    assert (len(rb), storage.shape, storage.max_size, list(rb[3:].keys())) == (20, torch.Size([20]), 20, [])
    assert rb.sample().batch_size == torch.Size([4])
    assert rb.extend(steps(5)).tolist() == [0, 1, 2, 3, 4]
    assert same(rb[:5].exclude("index"), steps(5))
    assert not any(leaf[5:].any() for leaf in rb[:].values(True, True))
    assert (len(rb), rb.sample()["next", "observation"].shape) == (20, torch.Size([4, 3]))
    with pytest.raises(SchemaError, match="brings the new d"):
        rb.extend(steps(2).set("d", torch.ones(2)))


@pytest.mark.parametrize(
    "write",
    [
        lambda storage: storage.set(7, steps(8)[7]),
        lambda storage: storage.__setitem__(slice(6, 8), steps(8)[6:]),
        lambda storage: storage.set([7], [steps(8)[7]]),
        lambda storage: storage.set(range(8), {"action": torch.arange(8)}),
    ],
)
def test_any_write_may_be_the_first(write: Any) -> None:
    storage = TensorStorage(TensorDict({"nested": TensorDict(batch_size=[20, 2])}, [20]))
    assert storage._storage["nested"].batch_size == torch.Size([20, 2])
    write(storage)
    assert (len(storage), storage[7]["action"].any(), storage[8:]["action"].any()) == (20, True, False)


def test_an_empty_tensordict_of_several_dimensions() -> None:
    storage = TensorStorage(TensorDict(batch_size=[5, 3]), ndim=2)
    assert (len(storage), storage.shape, storage.max_size) == (15, torch.Size([5, 3]), 15)
    with pytest.raises(SchemaError, match=r"\[5, 4\], expected \[5, 3\]"):
        storage.set(0, TensorDict({"a": torch.ones(4)}, [4]))
    storage.set(
        range(2), TensorDict({"a": torch.ones(2, 3), "b": TensorDict({"c": torch.ones(2, 3, 4)}, [2, 3, 4])}, [2, 3])
    )
    assert (storage[:]["a"].sum(), storage[:]["b"].batch_size) == (6, torch.Size([5, 3, 4]))


def test_an_empty_tensordict_in_states_and_other_processes(tmp_path: Path) -> None:
    bare, other = (TensorStorage(TensorDict(batch_size=[20])) for _ in range(2))
    assert len(pickle.loads(pickle.dumps(bare))) == 20
    with pytest.raises(SchemaError, match="nothing was ever written"):
        bare.share()
    child = multiprocessing.get_context("spawn").Process(target=print, args=(bare,))
    with pytest.raises(SchemaError, match="cannot be passed to another process"):
        child.start()
    other.load_state_dict(bare.state_dict())
    assert (len(other), other.shape) == (0, torch.Size([0]))  # what was saved has no rows
    filled = TensorStorage(steps(20))
    other.load_state_dict(filled.state_dict())
    filled.dumps(tmp_path / "saved")
    bare.loads(tmp_path / "saved")
    for loaded in (bare, other):
        assert same(loaded[:], filled[:])


def test_a_load_that_fails_on_the_way_is_a_change() -> None:
    storage = LazyTensorStorage(4)
    storage.set(range(4), torch.arange(4))
    before = storage.log.now.irregular

    def write(columns: Any, in_time: bool) -> None:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        storage.fill(storage.structure, [torch.arange(4)], 4, write)
    assert storage.log.now.irregular > before


@pytest.mark.parametrize("data", [torch.zeros(3), steps(2).set("text", NonTensorStack(object(), "b")), steps(0)])
def test_a_first_write_that_fails_leaves_it_empty(data: Any) -> None:
    storage = TensorStorage(TensorDict(batch_size=[20]))
    with pytest.raises(SchemaError):
        storage.set(range(2), data)
    assert (len(storage), list(storage[:].keys()), list(storage._storage.keys())) == (20, [], [])
    storage.set(range(2), steps(2))
    assert same(storage[:2], steps(2))


def test_ensembles_draw_from_empty_tensordicts() -> None:
    buffers = [TensorDictReplayBuffer(storage=TensorStorage(TensorDict(batch_size=[20]))) for _ in range(4)]
    for draws in (None, 2, 3):
        ensemble = ReplayBufferEnsemble(*buffers, num_buffer_sampled=draws)
        for buffer in buffers:
            buffer.extend(steps(10))
        batch = ensemble.sample(48)
        shape = torch.Size([draws or 4, 48 // (draws or 4)])
        assert (batch.shape, batch["index", "buffer_ids"].shape) == (shape, shape)


def test_reading_keeps_the_kind() -> None:
    tensorclass_row = TensorStorage(Step(numbers(10, 3), numbers(10), batch_size=[10]))[[3]]
    assert type(tensorclass_row) is Step
    found = TensorStorage(Pair(numbers(10), {"x": numbers(10)}))[2:4]
    assert type(found) is Pair
    assert found.left.tolist() == found.right["x"].tolist() == [2, 3]


def test_rows_keep_the_batch_size_of_their_lanes() -> None:
    storage = TensorStorage(TensorDict({"x": numbers(10, 4, 3)}, [10, 4]), ndim=2)
    rows, lanes = torch.tensor([0, 1, 9]), torch.tensor([3, 2, 0])
    chosen = storage[rows, lanes]
    assert [storage[0].batch_size, storage[1:3].batch_size, chosen.batch_size] == [(4,), (2, 4), (3,)]
    assert storage[torch.zeros(2, 5, dtype=torch.int64)].batch_size == (2, 5, 4)
    assert chosen["x"][:, 0].tolist() == [9, 18, 108]
    storage[rows, lanes] = -chosen
    assert storage[rows, lanes]["x"][:, 0].tolist() == [-9, -18, -108]
    assert len(storage) == 40


@pytest.mark.parametrize("index", [(0, 0), torch.zeros(10, 3, dtype=torch.bool)])
def test_indices_do_not_reach_into_rows(index: object) -> None:
    with pytest.raises(IndexError):
        TensorStorage(steps())[index]


@pytest.mark.parametrize(
    "dtype",
    [
        torch.uint16, torch.uint32, torch.uint64, torch.bfloat16, torch.bool, torch.float8_e4m3fn,
        torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
    ],
)  # fmt: skip
def test_every_element_type_is_gathered_and_written(dtype: torch.dtype) -> None:
    data = (numbers(6, 2, dtype=torch.int64) % 2).to(dtype)
    storage = TensorStorage(data.clone())
    assert same(storage[[5, 1]], torch.stack([data[5], data[1]]))
    storage[torch.tensor([0, 4])] = data[1:3]
    storage[5] = data[0]
    assert same(storage[[0, 4, 5]], torch.cat([data[1:3], data[:1]]))


def test_slices_are_views() -> None:
    storage = TensorStorage(steps())
    storage[2:3]["next", "observation"].zero_()
    assert storage[2]["next", "observation"].tolist() == [0, 0, 0]


def test_later_rows_win_where_a_cursor_repeats() -> None:
    storage = TensorStorage(torch.zeros(10, dtype=torch.int64))
    storage.set(torch.arange(25) % 10, torch.arange(25))
    assert storage[:].tolist() == [20, 21, 22, 23, 24, 15, 16, 17, 18, 19]


@pytest.mark.parametrize("kind", [list, lambda rows: LazyStackedTensorDict(*rows)])
def test_rows_are_written_one_by_one(kind) -> None:
    storage, rows = TensorStorage(steps()), [steps()[row] for row in (9, 8, 7)]
    storage.set([2, 0, 4], kind(rows))
    assert same(storage[[2, 0, 4]], steps()[[9, 8, 7]])
    with pytest.raises(SchemaError, match="found 3 rows for 2 places"):
        storage.set([0, 1], kind(rows))


@pytest.mark.parametrize(
    "make", [steps, tree, lambda: numbers(10, 3), lambda: Step(numbers(10, 3), numbers(10), batch_size=[10])]
)
@pytest.mark.parametrize("cursor", [slice(1, 4), [2, 0, 1], range(9, 6, -1)])
def test_views_of_the_storage_can_be_written_into_it(make, cursor: object) -> None:
    storage, expected = TensorStorage(make()), TensorStorage(make())
    fresh = expected[torch.tensor([0, 1, 2])]
    expected[cursor] = fresh
    storage[cursor] = storage[0:3]
    assert same(storage[:], expected[:])
    again = TensorStorage(make())
    again[cursor] = [again[0], again[1], again[2]]
    assert same(again[:], expected[:])


def test_a_lazy_stack_of_views_is_read_first() -> None:
    storage = TensorStorage(steps())
    storage[1:4] = LazyStackedTensorDict(storage[0], storage[1], storage[2])
    assert same(storage[1:4], steps()[0:3])


def test_columns_that_change_places_are_read_first() -> None:
    storage = TensorStorage({"a": numbers(4), "b": numbers(4) + 10})
    storage[1:3] = {"a": storage[1:3]["b"], "b": storage[1:3]["a"]}
    assert storage[:]["a"].tolist() == [0, 11, 12, 3]
    assert storage[:]["b"].tolist() == [10, 1, 2, 13]
    storage.load_state_dict({"_storage": {"a": storage[:]["b"], "b": storage[:]["a"]}, "_len": 4})
    assert storage[:]["a"].tolist() == [10, 1, 2, 13]
    assert storage[:]["b"].tolist() == [0, 11, 12, 3]


def test_one_buffer_wrapped_twice_is_read_first() -> None:
    buffer = numbers(6).numpy()
    storage = TensorStorage(torch.from_numpy(buffer))
    storage[2:5] = torch.from_numpy(buffer[1:4])
    assert buffer.tolist() == [0, 1, 1, 2, 3, 5]


def test_elements_and_coordinates_out_of_the_storage_are_read_first() -> None:
    data = {"at": torch.tensor([[0, 1], [2, 0]]), "x": numbers(2, 2)}
    storage = TensorStorage(data, ndim=2)
    rows, columns = storage[0]["at"], torch.tensor([0, 1])
    storage[rows, columns] = {"at": storage[0]["at"].flip(0), "x": storage[1]["x"]}
    assert storage[:]["at"].tolist() == [[1, 1], [2, 0]]
    assert storage[:]["x"].tolist() == [[2, 1], [2, 3]]


def test_data_that_share_no_memory_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "clone", lambda self, **options: pytest.fail("copied"))
    storage, rows = TensorStorage(numbers(6)), numbers(3) + 20
    storage[1:4] = rows
    storage[0:2] = [rows[2], rows[1]]
    storage.load_state_dict(storage.state_dict())
    assert storage[:].tolist() == [22, 21, 21, 22, 4, 5]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (steps(3), r"action is torch.int16 \[3, 2\], expected torch.int16 \[2, 2\]"),
        (
            steps(2).exclude(("next", "reward")),
            "the entry 'next' lacks reward, expected the entries observation, reward",
        ),
        (steps(2).set("extra", torch.zeros(2)), "the data brings the new extra, expected the entries action, next"),
        (steps(2).set("action", numbers(2, 2)), "action is torch.float32"),
        (numbers(2), "the data is a Tensor"),
        ({"action": numbers(2, 2, dtype=torch.int16), "next": 1}, "the entry 'next' is a int"),
    ],
)
def test_data_that_do_not_fit_are_refused_and_change_nothing(data: object, message: str) -> None:
    storage = TensorStorage(steps())
    with pytest.raises(RuntimeError, match=message):
        storage.set([0, 1], data)
    assert same(storage[:], steps())
    assert storage.log.now == (0, 0, 0)


def test_holes_are_refused_and_growth_is_counted() -> None:
    storage = TensorStorage(numbers(10))
    storage.empty()
    storage.set(torch.tensor([1, 0]), numbers(2))
    with pytest.raises(SchemaError, match="row 4 cannot be written yet: only 2 rows"):
        storage.set(4, torch.tensor(1.0))
    with pytest.raises(SchemaError, match="row 9 cannot be written yet"):
        storage.set([2, 9], numbers(2))
    storage[0] = torch.tensor(5.0)
    assert storage[:].tolist() == [5, 0]
    storage.set(slice(1, 5), numbers(4))
    assert storage[:].tolist() == [5, 0, 1, 2, 3]


@pytest.mark.parametrize("cursor", [10, [3, 10], slice(8, 12)])
def test_the_capacity_is_kept(cursor: object) -> None:
    with pytest.raises(SchemaError):
        TensorStorage(numbers(10)).set(cursor, numbers(4)[: len(cursor)] if isinstance(cursor, list) else numbers(4))


def test_flattening_takes_the_valid_part_in_order() -> None:
    storage = TensorStorage(TensorDict({"x": numbers(4, 3)}, [4, 3]), ndim=2)
    storage.empty()
    storage.set([0, 1], {"x": numbers(2, 3)})
    flat = storage.flatten()
    assert (flat.max_size, len(flat), flat[:]["x"].tolist()) == (6, 6, [0, 1, 2, 3, 4, 5])


def test_contains_takes_tensors() -> None:
    found = TensorStorage(numbers(10)).contains(torch.tensor([[0, 9], [10, -1]]))
    assert found.tolist() == [[True, True], [False, False]]
    pairs = torch.tensor([[3, 2], [4, 0], [0, 3]])
    assert TensorStorage(numbers(4, 3), ndim=2).contains(pairs).tolist() == [True, False, False]


@pytest.mark.parametrize("storage", [TensorStorage({"a.b": numbers(2), "a": {"b": numbers(2)}}), LazyTensorStorage(2)])
def test_a_state_names_leaves_with_dots_and_keeps_keys_with_dots_apart(storage: TensorStorage) -> None:
    state = TensorStorage(steps()).state_dict()
    assert list(state["_storage"]) == ["action", "next.observation", "next.reward"]
    assert (state["_len"], state["initialized"]) == (10, True)
    data = {"a.b": numbers(2), "a": {"b": -numbers(2)}}
    storage.load_state_dict(TensorStorage(data).state_dict())
    assert same(storage[:], data)


@pytest.mark.parametrize(
    ("other", "length", "message"),
    [
        (steps(10).set("action", numbers(10, 2)), 10, "action is torch.float32"),
        (steps(10).exclude("action"), 10, "the saved data holds next.observation, next.reward, but this storage"),
        (steps(4), 5, r"action is torch.int16 \[4, 2\], expected torch.int16 \[5, 2\]"),
        (steps(10), 11, "11 saved elements do not fit: this storage has room for 10"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(other: TensorDict, length: int, message: str) -> None:
    storage = TensorStorage(steps())
    with pytest.raises(SchemaError, match=message):
        storage.load_state_dict(TensorStorage(other).state_dict() | {"_len": length})
    assert same(storage[:], steps())
    storage.load_state_dict(TensorStorage(steps() + 1).state_dict() | {"_len": 4})
    assert same(storage[:], (steps() + 1)[:4])


def test_memory_mapped_contents_are_wrapped_not_copied() -> None:
    mapped = steps().memmap()
    storage = TensorStorage(mapped)
    storage[0] = steps()[9]
    assert mapped[0]["action"].tolist() == [18, 19]
    assert type(storage[[0]]["action"]) is torch.Tensor


def test_a_pickle_is_a_copy() -> None:
    storage = TensorStorage({"a": numbers(10), "b": [numbers(10, 2, dtype=torch.int16)]})
    storage.set(0, storage[1])
    other = pickle.loads(pickle.dumps(storage))
    assert same(other[:], storage[:])
    assert (other.last_cursor, other.log.now) == (0, (1, 1, 0))
    other[2] = other[3]
    assert same(other[2], storage[3])
    assert same(storage[2], TensorStorage(storage._storage)[2])


def test_attached_buffers_are_notified_once_and_not_pickled() -> None:
    storage, recorder = TensorStorage(numbers(4)), MarkRecorder()
    storage.attach(recorder)
    storage.attach(recorder)
    storage[2] = torch.tensor(1.0)
    assert (recorder.marks, pickle.loads(pickle.dumps(storage))._attached) == ([2], [])


def test_a_class_has_the_checkpointer_of_its_base_or_its_own() -> None:
    class Other(TensorStorage):
        pass

    assert type(Other(numbers(3)).checkpointer) is TensorStorageCheckpointer
    register_checkpointer(Other, list)
    storage = Other(numbers(3))
    assert storage.checkpointer == []
    storage.checkpointer = given = TensorStorageCheckpointer()
    assert storage.checkpointer is given
    storage.checkpointer = None
    assert storage.checkpointer == []


@pytest.mark.parametrize(
    ("cursor", "row"),
    [
        (3, 3), (range(2, 5), 4), (slice(1, 4), 3), (torch.tensor([8, 9, 0]), 0), ([4, 2], 2), ((1, 2), 1),
        (None, None), (slice(None), None), (-1, None), (torch.tensor([False, True]), 1), ([], None),
        (range(0), None), (range(-2, 1), 0), (range(4, 1, -1), 2), (slice(3, 3), None), (slice(5, 2), None),
    ],
)  # fmt: skip
def test_the_row_written_last(cursor: object, row: int | None) -> None:
    assert last_row(cursor) == row


@pytest.mark.parametrize("make", [ListStorage, LazyTensorStorage])
@pytest.mark.parametrize(
    ("cursor", "row"), [(slice(0, 100), 6), (slice(2, 9), 6), (slice(1, 3), 2), (slice(None), None)]
)
def test_a_slice_that_ends_beyond_the_capacity_has_written_up_to_the_last_row(
    make: Callable[[int], Any], cursor: slice, row: int | None
) -> None:
    storage = make(7)
    storage.set(range(7), torch.arange(7))
    storage.set(cursor, torch.arange(len(range(7)[cursor])))
    assert last_row(storage.last_cursor) == row


def batch() -> TensorDict:
    return TensorDict({"step": torch.arange(4), "next": TensorDict({"step": torch.arange(4)}, [4])}, [4])


def test_entries_at_the_root_and_below_are_those_that_set_adds() -> None:
    entries = {"index": torch.arange(4), ("next", "done"): torch.ones(4, 1), "step": torch.zeros(4, 2)}
    found, expected = batch(), batch()
    assert added(found, entries)
    for key, value in entries.items():
        expected.set(key, value)
    assert (found == expected).all()


@pytest.mark.parametrize(
    ("data", "key", "value"),
    [
        (batch(), "index", torch.arange(3)),
        (batch(), "index", torch.tensor(3)),
        (batch(), "index", torch.arange(4).numpy()),
        (batch(), ("other", "index"), torch.arange(4)),
        (batch(), ("step", "index"), torch.arange(4)),
        (batch(), ("next", 1), torch.arange(4)),
        (batch(), (), torch.arange(4)),
        (batch().lock_(), "index", torch.arange(4)),
        (TensorDict(batch(), [4], device="meta"), "index", torch.arange(4)),
        (batch().reshape(2, 2), "index", torch.arange(4).reshape(2, 2)),
        ({"step": torch.arange(4)}, "index", torch.arange(4)),
    ],
)
def test_entries_that_need_set_change_nothing(data: Any, key: Any, value: Any) -> None:
    before = list(data.keys())
    assert not added(data, {"first": torch.arange(4), key: value})
    assert list(data.keys()) == before
