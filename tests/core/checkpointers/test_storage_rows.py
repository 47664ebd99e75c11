"""Rows of storages of any kind as steps of episodes: where those end, and how they are loaded again, by threads too."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from buffers_of_episodes import BufferPlan, bits
from damage import flip
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.checkpointers import storage_rows
from rbtool.core.checkpointers.episodes import FlatStorageCheckpointer, H5StorageCheckpointer, NestedStorageCheckpointer
from rbtool.core.checkpointers.storage_rows import Order, StorageRows, keys_of
from rbtool.core.datasets.storage import DatasetStorage
from rbtool.core.encodings import compact as encoded_rows
from rbtool.core.errors import CorruptDataError, SchemaError, UsageError
from rbtool.core.format.contracts import StepReader
from rbtool.core.format.returns import episode_returns, running_return
from rbtool.core.open_steps import open_steps
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.list_storage import LazyStackStorage, ListStorage
from rbtool.core.storages.packed import PackedStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.ted.episodes import EndReason
from rbtool.core.testing.datasets import ODD_LEAVES, DatasetPlan, write_packed, write_plan


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(0, 99))
def test_returns_are_those_of_adding_one_by_one(lengths: list[int], seed: int) -> None:
    draw = np.random.default_rng(seed)
    rewards = draw.normal(size=sum(lengths)) * 10.0 ** draw.integers(-9, 9, sum(lengths))
    starts = np.cumsum(lengths) - lengths
    expected = [running_return(0.0, rewards[a : a + n]) for a, n in zip(starts, lengths, strict=True)]
    assert episode_returns(rewards, starts, np.array(lengths)).tolist() == expected


@pytest.mark.parametrize("most", [1, 3, 1 << 20])
def test_returns_are_added_in_parts(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr("rbtool.core.format.returns._MOST_STEPS", most)
    done = torch.tensor([0, 0, 1, 1, 0, 0, 0, 1, 0]).bool().unsqueeze(-1)
    data = TensorDict({"next": {"done": done, "reward": torch.arange(9.0).unsqueeze(-1)}}, [9])
    table = StorageRows(TensorStorage(data)).episodes
    assert table.total_reward.tolist() == [3.0, 3.0, 22.0, 8.0]
    assert table.length.tolist() == [3, 1, 4, 1]


@pytest.mark.parametrize("kind", [LazyTensorStorage, ListStorage])
def test_a_full_ring_whose_state_was_loaded_keeps_the_order_of_time(kind: Any, tmp_path: Path) -> None:
    step = torch.arange(8)
    done = (step % 3 == 2).unsqueeze(-1)
    data = TensorDict({"observation": step, "next": {"observation": step + 1, "done": done}}, [8])
    buffer, again = (ReplayBuffer(storage=kind(5), batch_size=2) for _ in range(2))
    for row in data.unbind(0):
        buffer.add(row)
    again.load_state_dict(buffer.state_dict())
    again.storage.checkpointer = FlatStorageCheckpointer()
    again.storage.dumps(tmp_path / "saved")
    with open_steps(tmp_path / "saved") as steps:
        assert steps.read(("observation",), 0, 5).tolist() == [3, 4, 5, 6, 7]
        assert steps.episodes.length.tolist() == [3, 2]


@pytest.mark.parametrize(
    ("terminated", "truncated", "done", "reason"),
    [
        (True, False, True, EndReason.TERMINATED), (False, True, True, EndReason.TRUNCATED),
        (True, True, True, EndReason.BOTH), (False, False, True, EndReason.INFERRED),
        (False, False, False, EndReason.END_OF_FILE), (True, False, False, EndReason.TERMINATED),
    ],
)  # fmt: skip
def test_the_flags_of_the_last_step_are_the_end_reason(
    terminated: bool, truncated: bool, done: bool, reason: EndReason
) -> None:
    flags = {"terminated": terminated, "truncated": truncated, "done": done}
    data = TensorDict({"next": {name: torch.tensor([[False], [value]]) for name, value in flags.items()}}, [2])
    table = StorageRows(TensorStorage(data)).episodes
    assert table.end_reason.tolist() == [reason]
    assert (table.terminated.tolist(), table.truncated.tolist()) == ([terminated], [truncated])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16, torch.int64])
def test_flags_may_be_numbers(dtype: torch.dtype) -> None:
    data = TensorDict({"next": {"done": torch.tensor([0, 1, 0, 1, 0]).to(dtype)}}, [5])
    assert StorageRows(TensorStorage(data)).episodes.length.tolist() == [2, 2, 1]


def test_nested_flags_count_if_there_are_no_others() -> None:
    done = torch.tensor([0, 1, 0]).bool().unsqueeze(-1)
    data = TensorDict({"next": {"team": {"done": done, "speed": torch.ones(3)}}}, [3])
    assert StorageRows(TensorStorage(data)).episodes.length.tolist() == [2, 1]


@pytest.mark.parametrize(
    ("given_keys", "found"),
    [
        (None, []),
        ("done", [("done",)]),
        (("done", "over"), [("done",), ("over",)]),
        ([("next", "a", "done"), "next"], [("a", "done"), ("next",)]),
    ],
)
def test_keys_are_read_with_and_without_next(given_keys: object, found: list[tuple[str, ...]]) -> None:
    assert keys_of(given_keys, "done_keys") == found  # type: ignore[arg-type]


def test_a_key_that_is_no_text_is_refused() -> None:
    with pytest.raises(UsageError, match="reward_keys has 3"):
        keys_of([3], "reward_keys")  # type: ignore[list-item]


@given(st.integers(1, 6), st.integers(1, 4), st.data())
def test_runs_have_every_step_in_order(rows: int, lanes: int, data: st.DataObject) -> None:
    oldest = data.draw(st.integers(0, rows - 1))
    start, stop = sorted(data.draw(st.tuples(st.integers(0, rows * lanes), st.integers(0, rows * lanes))))
    found = []
    for run in Order(rows, lanes, oldest).runs(start, stop):
        places = [(lane, row) for lane in range(10)[run.lanes] for row in range(10)[run.rows]]
        assert run.stop - run.start == len(places)
        assert run.start == start + len(found)
        found += places
    assert found == [(step // rows, (oldest + step) % rows) for step in range(start, stop)]


MAKERS: dict[str, Callable[..., Any]] = {
    "flat": FlatStorageCheckpointer, "nested": NestedStorageCheckpointer, "h5": H5StorageCheckpointer,
}  # fmt: skip
any_form = pytest.mark.parametrize("form", MAKERS)
PLAN = DatasetPlan((4, 1, 6), ("terminated", "both", "truncated"), (True, False, False), ODD_LEAVES, root_flags="set")


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("datasets")
    write_plan(PLAN, folder / "ted")
    write_packed(folder / "ted", folder / "packed")
    write_plan(DatasetPlan((4, 1, 6), PLAN.endings, (False,) * 3, ODD_LEAVES, seed=9), folder / "other")
    return folder


# Packed datasets -----------------------------------------------------------------------------------


@any_form
def test_a_packed_dataset_is_saved_and_loaded(form: str, datasets: Path, tmp_path: Path) -> None:
    packed, ted = PackedStorage(datasets / "packed"), DatasetStorage(datasets / "ted")
    MAKERS[form]().dumps(packed, tmp_path / "saved")
    MAKERS[form]().loads(packed, tmp_path / "saved")
    for target in (LazyTensorStorage(11), LazyTensorStorage(20), ListStorage(11), ted):
        MAKERS[form]().loads(target, tmp_path / "saved")
        rows = torch.stack(target[:]) if isinstance(target, ListStorage) else target[:]
        assert bits(rows) == bits(packed[:])


@any_form
def test_a_saved_packed_dataset_has_its_episodes(form: str, datasets: Path, tmp_path: Path) -> None:
    MAKERS[form]().dumps(PackedStorage(datasets / "packed"), tmp_path / "saved.h5")
    with open_steps(tmp_path / "saved.h5") as saved, open_steps(datasets / "packed") as dataset:
        assert saved.episodes.length.tolist() == dataset.episodes.length.tolist()
        assert saved.manifest.boundary.explicit_next == 1


@any_form
def test_only_the_same_rows_are_loaded_into_a_packed_dataset(form: str, datasets: Path, tmp_path: Path) -> None:
    packed = PackedStorage(datasets / "packed")
    MAKERS[form]().dumps(DatasetStorage(datasets / "ted"), tmp_path / "same")
    MAKERS[form]().loads(packed, tmp_path / "same")
    edited = DatasetStorage(datasets / "ted")
    edited[3:4] = edited[3:4].clone().apply(lambda leaf: leaf + 1 if leaf.dtype == torch.float32 else leaf)
    for number, (source, match) in enumerate((
        (edited, "of step 3 of .* differs from the PackedStorage"),
        (DatasetStorage(datasets / "other"), "differs from the PackedStorage"),
        (TensorStorage(edited[:7]), r"holds 7 steps of a storage \[7\], this one has 11"),
        (TensorStorage(edited[:].exclude("action")), "'action' of .* differs"),
    )):  # fmt: skip
        MAKERS[form]().dumps(source, tmp_path / str(number))
        with pytest.raises(SchemaError, match=match):
            MAKERS[form]().loads(packed, tmp_path / str(number))


@any_form
def test_a_damaged_dataset_is_not_saved(form: str, datasets: Path, tmp_path: Path) -> None:
    write_packed(datasets / "ted", tmp_path / "packed")
    packed, file = PackedStorage(tmp_path / "packed"), tmp_path / "packed" / "records.bin"
    flip(file, 3)
    with pytest.raises(CorruptDataError, match=r"records\.bin"):
        MAKERS[form]().dumps(packed, tmp_path / "saved")
    shutil.rmtree(tmp_path / "packed")
    write_packed(datasets / "other", tmp_path / "packed")
    with pytest.raises(CorruptDataError, match="it was replaced"):
        MAKERS[form]().dumps(packed, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_hooks_of_packed_datasets_are_refused(datasets: Path, tmp_path: Path) -> None:
    checkpointer = FlatStorageCheckpointer()
    checkpointer.dumps(PackedStorage(datasets / "packed"), tmp_path / "saved")
    checkpointer.register_load_hook(lambda data, out: data)
    checkpointer.register_save_hook(lambda data, path: data)
    for call in (checkpointer.dumps, checkpointer.loads):
        with pytest.raises(UsageError, match="hooks change the rows of tensors, found a PackedStorage"):
            call(PackedStorage(datasets / "packed"), tmp_path / "saved")


# Recordings ----------------------------------------------------------------------------------------


def recorded(folder: Path) -> tuple[Any, TensorDict]:
    """A recording of two episodes, the second under way, and its rows."""
    rows = BufferPlan(9, (9,), ends=0.0).rows(np.random.default_rng(0), 9)
    for flag in ("done", "terminated"):
        rows["next", flag][4] = True
    recording = PackedStorage.create(folder)
    recording.set(range(3), rows[:3])
    recording.set(range(3, 9), rows[3:])
    return recording, rows


@any_form
@pytest.mark.parametrize("finished", [False, True])
def test_a_recording_is_saved(form: str, finished: bool, tmp_path: Path) -> None:
    recording, _ = recorded(tmp_path / "recording")
    if finished:
        recording.finish()
    MAKERS[form]().dumps(recording, tmp_path / "saved")
    MAKERS[form]().loads(recording, tmp_path / "saved")
    target = LazyTensorStorage(20)
    MAKERS[form]().loads(target, tmp_path / "saved")
    assert bits(target[:]) == bits(recording[:])
    with open_steps(next((tmp_path / "saved").glob("*.h5"), tmp_path / "saved")) as saved:
        assert saved.episodes.length.tolist() == [5, 4]


def test_a_recording_that_has_grown_refuses_its_older_checkpoint(tmp_path: Path) -> None:
    recording, rows = recorded(tmp_path / "recording")
    FlatStorageCheckpointer().dumps(recording, tmp_path / "saved")
    recording.set(9, rows[0])
    with pytest.raises(SchemaError, match="this one has 10 and is read-only"):
        FlatStorageCheckpointer().loads(recording, tmp_path / "saved")
    with pytest.raises(SchemaError, match="recording is empty"):
        FlatStorageCheckpointer().dumps(PackedStorage.create(tmp_path / "empty"), tmp_path / "nothing")


# Lists ---------------------------------------------------------------------------------------------


def listed(kind: type[ListStorage], capacity: int, plan: BufferPlan) -> ListStorage:
    storage = kind(capacity)
    for row, step in enumerate(plan.rows(np.random.default_rng(plan.seed), 13).unbind(0)):
        storage.set(row % capacity, step.clone())
    return storage


@any_form
@pytest.mark.parametrize("kind", [ListStorage, LazyStackStorage])
@pytest.mark.parametrize("capacity", [8, 13, 20])
def test_a_list_of_steps_is_saved_and_loaded(
    form: str, kind: type[ListStorage], capacity: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepReader.chunks, "__defaults__", (200,))  # bytes: a few rows at a time
    plan = BufferPlan(13, (13,), oddities=("jumps", "types", "root flags", "next only"), seed=3)
    source, target = listed(kind, capacity, plan), kind(capacity + 2)
    MAKERS[form]().dumps(source, tmp_path / "saved")
    MAKERS[form]().loads(target, tmp_path / "saved")
    assert [bits(item) for item in target] == [bits(item) for item in source]
    assert target.last_cursor == source.last_cursor
    tensors = LazyTensorStorage(capacity)
    MAKERS[form]().loads(tensors, tmp_path / "saved")
    assert bits(tensors[:]) == bits(torch.stack(list(source)))
    with pytest.raises(SchemaError, match="room for 3"):
        MAKERS[form]().loads(kind(3), tmp_path / "saved")
    assert target[0].batch_size == torch.Size([])


@any_form
@pytest.mark.parametrize(
    ("items", "match"),
    [
        (["a text"], "row 0 of the list is a str"),
        ([{"a": torch.zeros(1)}], "row 0 of the list is a dict"),
        ([TensorDict({"a": torch.zeros(3)}, [3])], r"row 0 of the list is batch size \[3\]"),
        ([TensorDict({"a": torch.zeros(3)}), TensorDict({"a": torch.zeros(4)})], "row 1 of the list has other entries"),
        ([TensorDict({"a": torch.zeros(3)}), TensorDict({"b": torch.zeros(3)})], "row 1 of the list has other entries"),
    ],
)
def test_lists_of_anything_but_steps_are_refused(form: str, items: list[Any], match: str, tmp_path: Path) -> None:
    storage = ListStorage(5)
    storage.set(range(len(items)), items)
    with pytest.raises(SchemaError, match=match) as raised:
        MAKERS[form]().dumps(storage, tmp_path / "saved")
    assert "ListStorageCheckpointer" in raised.value.hint


def test_lanes_are_not_loaded_into_a_list(tmp_path: Path) -> None:
    FlatStorageCheckpointer().dumps(BufferPlan(4, (4,), (2,)).buffer()._storage, tmp_path / "saved")
    with pytest.raises(SchemaError, match="ndim=2, but a list has ndim=1"):
        FlatStorageCheckpointer().loads(ListStorage(8), tmp_path / "saved")


@pytest.fixture
def many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """More threads than cores, and many parts to share."""
    monkeypatch.setattr(storage_rows, "threads_for_memory", lambda: 4)
    monkeypatch.setattr(encoded_rows, "LEAF_BYTES", 400)


def filled(form: str, rows: int, capacity: int) -> LazyTensorStorage:
    """A ring of episodes of 1 to 50 steps, of which some rows were written over."""
    storage = LazyTensorStorage(capacity, checkpointer=MAKERS[form]())
    for start in range(0, rows, 7):
        count = min(7, rows - start)
        values = torch.rand(count, 5, dtype=torch.float64)
        ends = torch.rand(count, 1) < 0.1
        after = {"observation": values + 1, "done": ends, "reward": values[:, :1]}
        data = TensorDict({"observation": values, "next": TensorDict(after, [count])}, [count])
        storage.set(torch.arange(start, start + count) % capacity, data)
    return storage


@any_form
@pytest.mark.parametrize(("rows", "capacity", "room"), [(1, 9, 9), (90, 200, 300), (200, 200, 200), (533, 200, 250)])
@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.usefixtures("many_threads")
def test_rows_come_back_bit_for_bit(form: str, rows: int, capacity: int, room: int, kind: Any, tmp_path: Path) -> None:
    saved, other = filled(form, rows, capacity), kind(room, checkpointer=MAKERS[form]())
    saved.dumps(tmp_path / "saved")
    for _ in range(2):  # into an empty storage, and into one that holds rows
        other.loads(tmp_path / "saved")
        assert len(other) == len(saved)
        assert bool((other[:] == saved[:]).all())


def damage(folder: Path) -> None:
    largest = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    flip(largest, largest.stat().st_size - 9)


@any_form
@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.usefixtures("many_threads")
def test_a_changed_byte_leaves_a_storage_as_it_was(form: str, kind: Any, tmp_path: Path) -> None:
    filled(form, 150, 200).dumps(tmp_path / "saved")
    damage(tmp_path / "saved")
    other = kind(200, checkpointer=MAKERS[form]())
    with pytest.raises(CorruptDataError, match="was changed"):
        other.loads(tmp_path / "saved")
    assert len(other) == 0
    assert not other.initialized
    whole = filled(form, 150, 200)
    whole.dumps(tmp_path / "whole")
    other.loads(tmp_path / "whole")
    assert bool((other[:] == whole[:]).all())
    with pytest.raises(CorruptDataError):
        other.loads(tmp_path / "saved")
    assert bool((other[:] == whole[:]).all())
