"""`StreamingSliceSampler`: new windows first, each once, compared with windows that are cut step by step."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from waiting import HANG

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.errors import CorruptDataError, SchemaError
from rbtool.core.samplers.slices import SliceSampler
from rbtool.core.samplers.streaming_slice import StreamingSliceSampler
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.storages.list_storage import ListStorage
from rbtool.core.testing.slice_samplers import Step, step_lists, tensordict_of

Window = tuple[int, ...]


def steps(count: int, done: Sequence[int] = (), first: int = 0) -> TensorDict:
    """Steps with consecutive numbers, some of which are done."""
    number = torch.arange(first, first + count)
    flags = torch.isin(number, torch.tensor(done, dtype=torch.int64)).unsqueeze(-1)
    return TensorDict({"number": number, "next": {"done": flags}}, [count])


def streaming(
    slice_len: int = 3, capacity: int = 20, slices: int = 2, *, shared: bool = False, **options: Any
) -> TensorDictReplayBuffer:
    sampler, size = StreamingSliceSampler(slice_len=slice_len, **options), slices * slice_len or None
    return TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler, batch_size=size, shared=shared)


def drawn(buffer: TensorDictReplayBuffer, slice_len: int = 3, key: str = "number") -> list[Window]:
    return [tuple(part) for part in buffer.sample()[key].view(-1, slice_len).tolist()]


def queued(buffer: TensorDictReplayBuffer) -> list[list[int]]:
    found: list[list[int]] = buffer.sampler.state_dict()["queued_indices"].tolist()
    return found


# Cutting -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("writes", "windows", "waiting"),
    [
        ([steps(7)], [[0, 1, 2], [3, 4, 5]], [6]),
        ([steps(7), steps(2)], [[0, 1, 2], [3, 4, 5], [6, 7, 8]], []),
        ([steps(8, done=[4])], [[0, 1, 2], [5, 6, 7]], []),
        ([steps(2, done=[1])], [], []),
        ([steps(1)] * 4, [[0, 1, 2]], [3]),
        ([steps(7).set("episode", torch.tensor([0, 0, 0, 0, 1, 1, 1]))], [[0, 1, 2], [4, 5, 6]], []),
        ([steps(7).set("is_init", torch.tensor([1, 0, 0, 0, 1, 0, 0]).bool())], [[0, 1, 2], [4, 5, 6]], []),
        ([steps(5).set("episode", torch.arange(5) // 4), steps(4).set("episode", torch.ones(4).long())],
         [[0, 1, 2], [4, 5, 6]], [7, 8]),
    ],
)  # fmt: skip
def test_written_rows_are_cut_into_windows(
    writes: list[TensorDict], windows: list[list[int]], waiting: list[int]
) -> None:
    buffer = streaming()
    for data in writes:
        buffer.extend(data)
    assert queued(buffer) == windows
    assert buffer.sampler.state_dict()["pending_indices"].tolist() == waiting


def test_new_windows_are_drawn_once_and_then_slices_fill_the_batch() -> None:
    buffer = streaming(slices=3)
    buffer.extend(steps(6))
    assert drawn(buffer)[:2] == [(0, 1, 2), (3, 4, 5)]
    assert len({window for _ in range(50) for window in drawn(buffer)}) == 4  # every slice of six steps
    for number in range(6, 9):
        buffer.add(steps(1, first=number)[0])
    batch = buffer.sample()
    assert batch["number"][:3].tolist() == [6, 7, 8]
    assert batch["next", "truncated"].view(3, 3).tolist() == [[False, False, True]] * 3


@pytest.mark.parametrize("options", [{"strict_length": False, "pad_output": True}, {"span": (1, 0)}, {"batched": True}])
def test_windows_come_before_slices_of_all_kinds(options: dict[str, Any]) -> None:
    buffer = streaming(slices=4, **options)
    buffer.extend(steps(8, done=[4, 5]))  # windows: 0 to 2
    for _ in range(20):
        batch = buffer.sample()
        assert batch["number"].reshape(-1)[:3].tolist() == [0, 1, 2]
        buffer.empty()
        buffer.extend(steps(8, done=[4, 5]))


class Cutter:
    """Cuts windows step by step; steps are known by the number of steps before them."""

    def __init__(self, slice_len: int) -> None:
        self.slice_len = slice_len
        self.steps: list[Step] = []
        self.tail: list[int] = []
        self.windows: list[Window] = []

    def ends_before(self, number: int) -> bool:
        here, there = self.steps[number - 1 : number + 1]
        return here.done or here.trajectory != there.trajectory or there.first

    def write(self, step: Step) -> None:
        self.steps.append(step)
        number = len(self.steps) - 1
        if number and self.ends_before(number):
            self.tail = []
        self.tail.append(number)
        if len(self.tail) == self.slice_len:
            self.windows.append(tuple(self.tail))
            self.tail = []

    def is_legal(self, window: Window, capacity: int) -> bool:
        """Whether it is a slice of steps that are stored."""
        stored = len(self.steps) - capacity <= window[0] <= window[-1] < len(self.steps)
        inside = range(window[0] + 1, window[0] + self.slice_len)
        return stored and window[1:] == tuple(inside) and not any(map(self.ends_before, inside))

    def is_possible(self, capacity: int) -> bool:
        """Whether there is any slice."""
        begins = range(max(0, len(self.steps) - capacity), len(self.steps) - self.slice_len + 1)
        return any(self.is_legal(tuple(range(at, at + self.slice_len)), capacity) for at in begins)


@st.composite
def lives(draw: st.DrawFn, longest: int | None = None) -> tuple[int, int, list[Any]]:
    """Draw a capacity, a slice length, and what happens: rows are written, slices drawn, or something else."""
    slice_len = draw(st.integers(1, 4))
    capacity = draw(st.integers(slice_len, 14))
    rows = draw(step_lists(1, 60))
    happens: list[Any] = []
    while rows:
        count = draw(st.integers(1, longest or max(1, capacity // 2)))
        happens.append(rows[:count])
        rows = rows[count:]
        happens += draw(
            st.lists(st.integers(1, 3) | st.sampled_from(["state", "folder", "pickle", "edit"]), max_size=2)
        )
    return capacity, slice_len, happens


def after(
    buffer: TensorDictReplayBuffer, way: str, fresh: TensorDictReplayBuffer, path: Path
) -> TensorDictReplayBuffer:
    """Return the buffer after something that makes no windows."""
    if way == "pickle":
        return pickle.loads(pickle.dumps(buffer))  # type: ignore[no-any-return]
    if way == "edit":
        buffer.mark_update(torch.arange(len(buffer)))
        buffer[:] = buffer[:].clone()
        return buffer
    if way == "state":
        fresh.load_state_dict(buffer.state_dict())
    else:
        buffer.dumps(path)
        fresh.loads(path)
    return fresh


@given(lives())
def test_the_windows_are_those_that_are_cut_step_by_step(
    tmp_path_factory: pytest.TempPathFactory, life: tuple[int, int, list[Any]]
) -> None:
    capacity, slice_len, happens = life
    cutter, buffer = Cutter(slice_len), streaming(slice_len, capacity, 0)
    for happening in happens:
        if isinstance(happening, list):
            buffer.extend(tensordict_of(happening))
            for row in happening:
                cutter.write(row[0])
        elif isinstance(happening, str):
            path = tmp_path_factory.mktemp("saved") / "buffer"
            buffer = after(buffer, happening, streaming(slice_len, capacity, 0), path)
        else:
            size = happening * slice_len
            new = [window for window in cutter.windows if window[0] >= len(cutter.steps) - capacity]
            assert buffer.can_sample(size) is cutter.is_possible(capacity)
            if not buffer.can_sample(size):
                continue
            found = [tuple(part) for part in buffer.sample(size)["number"].view(-1, slice_len).tolist()]
            assert found[: len(new)] == new[:happening]
            assert all(cutter.is_legal(window, capacity) for window in found)
            cutter.windows = new[happening:]


@given(lives(longest=40))
def test_windows_of_long_writes_are_whole_and_drawn_once(life: tuple[int, int, list[Any]]) -> None:
    capacity, slice_len, happens = life
    cutter, buffer, seen = Cutter(slice_len), streaming(slice_len, capacity, 0), []
    for happening in happens:
        if isinstance(happening, list):
            buffer.extend(tensordict_of(happening))
            for row in happening:
                cutter.write(row[0])
            windows = queued(buffer)
            stored = buffer[:]["number"]
            numbers = [tuple(stored[torch.tensor(window)].tolist()) for window in windows]
            assert all(cutter.is_legal(window, capacity) for window in numbers)
            assert len(windows) <= capacity // slice_len
        elif isinstance(happening, int) and (count := len(queued(buffer))):
            part = buffer.sample(slice_len * min(happening, count))["number"].tolist()
            assert part[0] > max(seen, default=-1)
            seen += part
    assert len(set(seen)) == len(seen)


# What writes ---------------------------------------------------------------------------------------


def test_a_write_longer_than_the_buffer_begins_anew() -> None:
    buffer = streaming(capacity=9, slices=3)
    buffer.extend(steps(2))
    buffer.extend(steps(20, first=2))
    assert drawn(buffer) == [(13, 14, 15), (16, 17, 18), (19, 20, 21)]


def test_edits_and_new_samplers_make_no_windows() -> None:
    buffer = streaming()
    buffer.extend(steps(6))
    drawn(buffer)
    buffer.mark_update(torch.arange(6))
    buffer[:3] = steps(3).set("index", torch.arange(3))
    assert queued(buffer) == []
    buffer.set_sampler(StreamingSliceSampler(slice_len=2))
    assert queued(buffer) == []
    buffer.extend(steps(2, first=6))
    assert queued(buffer) == [[6, 7]]
    buffer.empty()
    buffer.extend(steps(4, first=8))
    assert queued(buffer) == [[0, 1], [2, 3]]


def test_a_window_in_which_a_trajectory_now_ends_is_dropped() -> None:
    buffer = streaming()
    buffer.extend(steps(9))
    buffer.set_at_(("next", "done"), torch.ones(1, 1, dtype=torch.bool), torch.tensor([4]))
    assert drawn(buffer) == [(0, 1, 2), (6, 7, 8)]


def test_rows_loaded_from_a_checkpoint_of_another_sampler_are_not_new(tmp_path: Path) -> None:
    plain = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=SliceSampler(slice_len=3), batch_size=6)
    plain.extend(steps(6))
    plain.dumps(tmp_path / "saved")
    buffer = streaming()
    buffer.loads(tmp_path / "saved")
    assert queued(buffer) == []
    buffer.extend(steps(3, first=6))
    assert queued(buffer) == [[6, 7, 8]]


def written_elsewhere(buffer: TensorDictReplayBuffer) -> None:
    buffer.extend(steps(6, first=6))


def test_the_writes_of_another_process_make_windows_here() -> None:
    buffer = streaming(shared=True)
    buffer.extend(steps(2))
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=written_elsewhere, args=(buffer,))
    process.start()
    process.join(HANG)
    assert process.exitcode == 0
    assert drawn(buffer) == [(0, 1, 6), (7, 8, 9)]


# State ---------------------------------------------------------------------------------------------


def test_the_state_has_the_windows_and_the_steps_that_wait_for_one() -> None:
    buffer = streaming(capacity=7)
    buffer.extend(steps(7).set("episode", torch.full((7,), 4)))
    buffer.extend(steps(4, first=7).set("episode", torch.full((4,), 4)))
    state = buffer.sampler.state_dict()
    plain = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
    assert plain == {
        "slot_versions": [2, 2, 2, 2, 1, 1, 1],
        "queued_indices": [[6, 0, 1]],
        "queued_versions": [[1, 2, 2]],
        "pending_indices": [2, 3],
        "pending_versions": [2, 2],
        "last_traj": 4,
        "has_last_traj": True,
        "last_was_done": False,
        "slice_len": 3,
    }


@pytest.mark.parametrize(("more", "first"), [(0, 7), (5, 4)])
def test_a_checkpoint_continues_in_a_ring_of_any_capacity(more: int, first: int, tmp_path: Path) -> None:
    buffer = streaming(capacity=7)
    buffer.extend(steps(11))
    buffer.dumps(tmp_path / "saved")
    assert (tmp_path / "saved/sampler/streaming_slice.pt").is_file()
    other = streaming(capacity=7 + more)
    other.loads(tmp_path / "saved")
    other.extend(steps(2, first=11))  # a window waited for them; in the smaller ring, they overwrite the first one
    assert other[:]["number"][torch.tensor(queued(other))].flatten().tolist() == list(range(first, 13))


def test_stale_windows_of_a_state_are_dropped() -> None:
    buffer, other = streaming(), streaming()
    buffer.extend(steps(8))
    state = buffer.state_dict()
    state["_sampler"]["queued_versions"][0, 1] = 0
    state["_sampler"]["pending_versions"][0] = 0
    other.load_state_dict(state)
    other.extend(steps(3, first=8))
    assert queued(other) == [[3, 4, 5], [8, 9, 10]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slice_len": 2}, "windows of 2 steps, expected 3"),
        ({"queued_indices": torch.tensor([[0, 1, 30]])}, "queued_indices has rows beyond the 6"),
        ({"slot_versions": None}, "slot_versions is not an int64 tensor"),
        (None, "slot_versions, queued_indices, .* missing"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(
    changes: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    buffer = streaming()
    buffer.extend(steps(6))
    sampler = buffer.sampler
    state = {} if changes is None else sampler.state_dict() | changes
    with pytest.raises(SchemaError, match=message):
        sampler.load_state_dict(state)
    sampler.write_state(tmp_path / "state", state)
    with pytest.raises(CorruptDataError, match=message):
        sampler.loads(tmp_path / "state")
    assert drawn(buffer) == [(0, 1, 2), (3, 4, 5)]


# Wrong input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"slice_len": True}, TypeError, "slice_len is True, expected an int"),
        ({"slice_len": 2.0}, TypeError, "slice_len is 2.0, expected an int"),
        ({"slice_len": 0}, ValueError, "slice_len is 0"),
        ({"slice_len": 2, "num_slices": 3}, TypeError, "expected exactly one"),
        ({"slice_len": 2, "traj_kye": "a"}, TypeError, "traj_kye'; did you mean 'traj_key'"),
        ({"slice_len": 2, "init_key": 3}, ValueError, "the key is 3"),
        ({}, TypeError, "slice_len"),
    ],
)
def test_arguments_without_sense_are_refused(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        StreamingSliceSampler(**options)


@pytest.mark.parametrize(
    ("storage", "data", "kind", "message"),
    [
        (LazyTensorStorage(12, ndim=2), steps(6).reshape(2, 3), RuntimeError, "needs a storage of one dimension"),
        (LazyTensorStorage(2), steps(2), ValueError, "slice_len is 3, the storage has room for 2"),
    ],
)
def test_the_first_write_to_a_storage_that_does_not_fit_is_refused(
    storage: LazyTensorStorage, data: TensorDict, kind: type[Exception], message: str
) -> None:
    buffer = TensorDictReplayBuffer(storage=storage, sampler=StreamingSliceSampler(slice_len=3), batch_size=3)
    for _ in range(2):
        with pytest.raises(kind, match=message):
            buffer.extend(data)
    assert (len(buffer), buffer.write_count) == (0, 0)


def test_elements_that_are_not_tensordicts_are_refused() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(9), sampler=StreamingSliceSampler(slice_len=3), batch_size=3)
    with pytest.raises(TypeError, match="an element of the storage is a Tensor"):
        buffer.extend(torch.arange(4))


def test_a_list_of_tensordicts_is_cut_as_well() -> None:
    buffer = TensorDictReplayBuffer(storage=ListStorage(9), sampler=StreamingSliceSampler(slice_len=3), batch_size=3)
    buffer.extend(steps(5, done=[1]))
    assert drawn(buffer) == [(2, 3, 4)]


def test_a_sampler_without_a_buffer_draws_slices() -> None:
    storage = LazyTensorStorage(9)
    storage.set(range(6), steps(6))
    sampler = StreamingSliceSampler(slice_len=3, init_key=None)
    (index,), _ = sampler.sample(storage, 6)
    assert torch.equal(index.view(2, 3).diff(), torch.ones(2, 2, dtype=torch.int64))
    storage.set(range(6, 9), steps(3))
    assert sampler.sample(storage, 3)[0][0].tolist() == [6, 7, 8]
