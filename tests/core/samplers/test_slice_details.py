"""What `SliceSampler` says of steps, cuts off, hands over to buffers, and does on storages at the edge."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from waiting import HANG

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.datasets.load_dataset import load_dataset
from rbtool.core.datasets.storage import DatasetStorage
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.samplers.slices import SliceSampler, SliceSamplerWithoutReplacement, scaled
from rbtool.core.samplers.trajectories import trajectory_table
from rbtool.core.storages.dataset import StepStorage
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.storages.list_storage import ListStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.testing.datasets import write_walks

DONE = ("next", "done")


def of_ids(ids: list[int], **entries: torch.Tensor) -> TensorStorage:
    return TensorStorage(TensorDict({"episode": torch.tensor(ids), **entries}, [len(ids)]))


def drawn(sampler: SliceSampler, where: Any, size: int) -> set[tuple[int, ...]]:
    """Rows of the slices of one large batch, told apart by the mark at their last steps."""
    (index,), info = sampler.sample(where, size)
    ends = (info["next", "truncated"].flatten().nonzero().flatten() + 1).tolist()
    return {tuple(index[start:stop].tolist()) for start, stop in zip([0, *ends], ends, strict=False)}


# Lengths -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "shape"), [({"num_slices": 3}, (3, 4)), ({"slice_len": 3}, (4, 3))])
def test_one_measure_of_slices_gives_the_other(options: dict[str, Any], shape: tuple[int, int]) -> None:
    (index,), _ = SliceSampler(batched=True, **options).sample(of_ids([0] * 20), 12)
    assert index.shape == shape
    assert (index.diff(dim=1) == 1).all()


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        (False, {(0, 1, 2), (1, 2, 3)}),
        ((0, 1), {(0, 1, 2), (1, 2, 3), (2, 3)}),
        ((1, False), {(0, 1), (0, 1, 2), (1, 2, 3)}),
        (1, {(0, 1), (0, 1, 2), (1, 2, 3), (2, 3)}),
        ((False, True), {(0, 1, 2), (1, 2, 3), (2, 3), (3,)}),
        (True, {(0,), (0, 1), (0, 1, 2), (1, 2, 3), (2, 3), (3,)}),
    ],
)
def test_slices_hang_over_by_the_span(span: Any, expected: set[tuple[int, ...]]) -> None:
    assert drawn(SliceSampler(slice_len=3, span=span), of_ids([0] * 4), 900) == expected


@pytest.mark.parametrize(
    ("anchor", "expected"), [("start", {(0, 1), (4, 5)}), ("end", {(2, 3), (5, 6)}), ("any", None)]
)
def test_slices_lie_where_they_are_anchored(anchor: Any, expected: set[tuple[int, ...]] | None) -> None:
    found = drawn(SliceSampler(slice_len=2, anchor=anchor), of_ids([0] * 4 + [1] * 3), 400)
    assert found == (expected or {(0, 1), (1, 2), (2, 3), (4, 5), (5, 6)})


def test_padding_repeats_the_last_real_step_which_is_the_truncated_one() -> None:
    where = of_ids([0, 0])
    (index,), info = SliceSampler(slice_len=4, strict_length=False, pad_output=True).sample(where, 8)
    assert index.tolist() == [0, 1, 1, 1] * 2
    assert info["collector", "mask"].tolist() == [True, True, False, False] * 2
    assert info["next", "truncated"].flatten().tolist() == [False, True, False, False] * 2


def test_the_mask_is_there_too_where_nothing_was_padded() -> None:
    _, info = SliceSampler(slice_len=2, strict_length=False, pad_output=True).sample(of_ids([0] * 4), 8)
    assert info["collector", "mask"].tolist() == [True] * 8
    assert ("collector", "mask") not in SliceSampler(slice_len=2).sample(of_ids([0] * 4), 8)[1]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 7, 1000, 2**31 + 1, 2**53 - 1, 2**53])
def test_the_largest_fraction_chooses_the_last_number(size: int) -> None:
    chances = np.array([0.0, np.nextafter(1.0, 0.0)])
    assert scaled(chances, size).tolist() == [0, size - 1]


# What is said of steps ---------------------------------------------------------------------------------


def test_marks_stand_beside_the_key_that_was_asked_for() -> None:
    where = of_ids([0] * 3, ended=torch.tensor([0, 0, 1]).bool().unsqueeze(-1))
    assert SliceSampler(slice_len=3, truncated_key=None).sample(where, 3)[1] == {}
    _, info = SliceSampler(slice_len=3, truncated_key=("a", "cut")).sample(where, 3)
    assert set(info) == {("a", "cut"), ("a", "done"), ("a", "terminated")}
    _, info = SliceSampler(slice_len=3, truncated_key="cut").sample(where, 3)
    assert {key: value.flatten().tolist() for key, value in info.items()} == {
        "cut": [False, False, True],
        "done": [False, False, True],
        "terminated": [False, False, False],
    }


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("trail", [(), (1,), (2, 1)])
def test_flags_are_as_stored_or_cut_whatever_their_shape(trail: tuple[int, ...], batched: bool) -> None:
    done, terminated = torch.zeros(2, 6, *trail, dtype=torch.bool)
    done[1], terminated[1] = True, True
    where = of_ids([0] * 6)
    where = TensorStorage(where[:].set("next", TensorDict({"done": done, "terminated": terminated}, [6])))
    _, info = SliceSampler(slice_len=6, batched=batched, traj_key="episode").sample(where, 6)
    flat = {key: value.reshape(6, -1) for key, value in info.items() if key != ("collector", "mask")}
    expected = {"truncated": [5], "done": [1, 5], "terminated": [1]}
    for name, steps in expected.items():
        value = flat["next", name]
        assert value.dtype == torch.bool
        assert value.all(1).nonzero().flatten().tolist() == value.any(1).nonzero().flatten().tolist() == steps
    assert info["next", "done"].shape == ((1, 6) if batched else (6,)) + (trail or (1,))


def test_the_first_step_of_every_slice_is_an_initial_one() -> None:
    initial = torch.tensor([0, 0, 0, 1, 0, 0]).bool()
    for stored in (initial, initial.unsqueeze(-1)):
        (index,), info = SliceSampler(slice_len=3).sample(of_ids([0] * 6, is_init=stored), 30)
        assert info["is_init"].shape == (30, *stored.shape[1:])
        expected = (torch.arange(30) % 3 == 0) | (index == 3)
        assert torch.equal(info["is_init"].flatten(), expected)


# Signals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"traj_key": "epsiode"}, r"'epsiode' is not in .* separated by 'next\.done'; did you mean 'episode'"),
        ({"end_key": "nowhere"}, "'nowhere' is not in .* separated by 'episode'"),
        ({"end_keys": ["nowhere", ("no", "where")]}, r"'nowhere' or 'no\.where' is not in"),
    ],
)
def test_what_is_absent_is_replaced_by_the_other_kind_with_a_warning(options: dict[str, Any], words: str) -> None:
    done = torch.tensor([0, 1, 0, 1]).bool().unsqueeze(-1)
    where = of_ids([0, 0, 1, 1], next=TensorDict({"done": done}, [4]))
    sampler = SliceSampler(slice_len=2, **options)
    with pytest.warns(UserWarning, match=words):
        sampler.sample(where, 2)
    where.set([0], where[[0]], set_cursor=False)  # the table is made again, and nothing is announced twice
    assert drawn(sampler, where, 60) == drawn(sampler, where, 60) == {(0, 1), (2, 3)}


def test_where_neither_kind_is_there_a_key_error_names_what_was_looked_for() -> None:
    where = TensorStorage(TensorDict({"x": torch.zeros(4)}, [4]))
    with pytest.raises(KeyError, match=r"collector\.traj_ids, episode, a, b\.c"):
        SliceSampler(slice_len=2, end_keys=["a", ("b", "c")]).sample(where, 4)


def test_objects_without_entries_are_refused() -> None:
    where = ListStorage(4)
    where.set(range(2), ["one", "two"])
    with pytest.raises(RuntimeError, match="holds a str"):
        SliceSampler(slice_len=1).sample(where, 2)


def test_cached_values_do_not_outlive_a_write() -> None:
    sampler = SliceSampler(slice_len=2, cache_values=True)
    buffer = ReplayBuffer(storage=TensorStorage(of_ids([0, 0, 1, 1])[:]), sampler=sampler)
    assert drawn(sampler, buffer.storage, 60) == {(0, 1), (2, 3)}
    buffer.storage[1] = TensorDict({"episode": torch.tensor(1)}, [])
    assert drawn(sampler, buffer.storage, 60) == {(1, 2), (2, 3)}
    buffer.set_("episode", torch.zeros(4, dtype=torch.int64))
    assert drawn(sampler, buffer.storage, 90) == {(0, 1), (1, 2), (2, 3)}


class Reads(StepStorage):
    """A storage on disk that knows which leaves were read."""

    def __init__(self, path: Path) -> None:
        super().__init__(TedReader(path))
        self.read: list[Any] = []

    def _read(self, field: Any, rows: Any) -> Any:
        self.read.append((field.key, len(rows)))
        return super()._read(field, rows)


@pytest.fixture
def walks(tmp_path: Path) -> Path:
    write_walks(tmp_path / "walks", [(4, "terminated"), (1, "truncated"), (6, "open"), (2, "both")])
    return tmp_path / "walks"


def test_rows_on_disk_are_read_only_where_slices_lie(walks: Path) -> None:
    where = Reads(walks)
    found = drawn(SliceSampler(slice_len=2), where, 200)
    assert {row for pair in found for row in pair} == {*range(4), *range(5, 13)}
    trajectory_table(where, SliceSampler(slice_len=2, end_key=DONE)._boundaries.source(where)).refresh()
    assert {key for key, rows in where.read[-3:]} >= {DONE}
    assert all(key == DONE for key, rows in where.read if rows == 13)


@pytest.mark.parametrize(
    ("options", "longest"), [({}, 6), ({"end_key": DONE}, 6), ({"traj_key": "episode"}, 6), ({"weight": "step"}, 6)]
)
def test_slices_of_datasets_lie_in_one_episode_open_ones_too(walks: Path, options: Any, longest: int) -> None:
    sampler = SliceSampler(slice_len=longest, strict_length=False, **options)
    buffer = load_dataset(walks, batch_size=240, sampler=sampler, seed=0)
    for _ in range(3):
        batch = buffer.sample()
        assert set(torch.unique(batch["episode"]).tolist()) == {0, 1, 2, 3}
    assert drawn(sampler, buffer.storage, 600) == {(0, 1, 2, 3), (4,), tuple(range(5, 11)), (11, 12)}


def test_episodes_of_a_dataset_are_not_those_of_rows_written_over_it(walks: Path) -> None:
    sampler = SliceSampler(slice_len=2, end_key=DONE), SliceSampler(slice_len=2)
    buffer = ReplayBuffer(storage=DatasetStorage(walks))
    rows = buffer[:].clone()
    rows["next", "done"][:] = True
    rows["episode"][:] = 9
    assert drawn(sampler[0], buffer.storage, 300) == drawn(sampler[1], buffer.storage, 300)
    buffer.extend(rows[:7])
    for each in sampler:
        found = drawn(each, buffer.storage, 400)
        assert (9, 10) in found
        assert (11, 12) in found
    assert not any(first < 6 for first, _ in drawn(sampler[0], buffer.storage, 300))
    assert (3, 4) in drawn(sampler[1], buffer.storage, 400)  # their ids say so


def test_whole_trajectories_are_no_steps(walks: Path) -> None:
    buffer = load_dataset(walks, batch_size=4, sampler=SliceSampler(slice_len=2), split_trajs=True)
    with pytest.raises(RuntimeError):
        buffer.sample()


# Small and odd storages --------------------------------------------------------------------------------


def rows_of(numbers: range, length: int) -> TensorDict:
    number = torch.tensor(numbers)
    return TensorDict({"number": number, "episode": number // length}, [len(number)])


def test_a_ring_of_one_row_has_one_slice() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1), sampler=SliceSampler(slice_len=1), batch_size=2)
    for number in range(3):
        buffer.extend(rows_of(range(number, number + 1), 9))
        assert buffer.sample()["number"].tolist() == [number] * 2


@pytest.mark.parametrize("at_once", [1, 2, 5, 7, 40])
def test_a_trajectory_longer_than_the_ring_is_cut_at_the_newest_row(at_once: int) -> None:
    sampler = SliceSampler(slice_len=5)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(5), sampler=sampler, batch_size=5)
    for start in range(0, 40, at_once):
        buffer.extend(rows_of(range(start, start + at_once), 1000))
        if len(buffer) == 5:
            last = start + at_once
            assert buffer.sample()["number"].tolist() == list(range(last - 5, last))


def test_of_many_lanes_one_has_most_trajectories() -> None:
    ids = torch.zeros(400, 50, dtype=torch.int64)
    ids[:, 7] = torch.arange(400)
    where = TensorStorage(TensorDict({"episode": ids}, [400, 50]), ndim=2)
    index, _ = SliceSampler(slice_len=1, strict_length=False).sample(where, 4000)
    assert (index[1] == 7).float().mean() == pytest.approx(400 / 449, abs=0.05)
    index, _ = SliceSampler(slice_len=1, weight="step").sample(where, 4000)
    assert (index[1] == 7).float().mean() == pytest.approx(1 / 50, abs=0.02)


# Buffers -----------------------------------------------------------------------------------------------


def filled(kind: type[ReplayBuffer], **options: Any) -> Any:
    options = {"sampler": SliceSampler(slice_len=3), "batch_size": 6, **options}
    buffer = kind(storage=LazyTensorStorage(30), generator=torch.Generator().manual_seed(0), **options)
    buffer.extend(rows_of(range(30), 10))
    return buffer


def test_a_plain_buffer_says_it_beside_the_batch_the_other_one_within() -> None:
    batch, info = filled(ReplayBuffer).sample(return_info=True)
    assert ("next", "truncated") not in batch.keys(True)
    within = filled(TensorDictReplayBuffer).sample()
    assert torch.equal(batch["number"], within["number"])
    for name in ("truncated", "done", "terminated"):
        assert torch.equal(info["next", name], within["next", name])


def test_the_same_slices_come_from_threads_that_prefetch() -> None:
    plain, ahead = filled(TensorDictReplayBuffer), filled(TensorDictReplayBuffer, prefetch=3)
    for _ in range(10):
        assert torch.equal(plain.sample()["number"], ahead.sample()["number"])


def test_transforms_see_slices() -> None:
    buffer = filled(TensorDictReplayBuffer, transform=lambda batch: batch.set("twice", batch["number"] * 2))
    batch = buffer.sample()
    assert torch.equal(batch["twice"], batch["number"] * 2)
    assert batch["next", "truncated"].flatten().tolist() == [False, False, True] * 2


def test_buffers_on_one_storage_may_begin_at_the_same_time() -> None:
    number = torch.arange(200_000)
    rows = TensorDict({"number": number, "episode": number // 7}, [len(number)])
    for _ in range(10):
        where = TensorStorage(rows)
        samplers = [SliceSampler(slice_len=2) for _ in range(4)]
        barrier = threading.Barrier(len(samplers))
        threads = [threading.Thread(target=begin, args=(sampler, where, barrier)) for sampler in samplers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG)
        table = samplers[0].trajectories(where)
        assert table.count == -(-len(number) // 7)
        assert all(sampler.trajectories(where) is table for sampler in samplers)


def begin(sampler: SliceSampler, where: TensorStorage, barrier: threading.Barrier) -> None:
    barrier.wait(HANG)
    sampler.sample(where, 8)


def sample_and_write(buffer: Any, queue: Any) -> None:
    queue.put(buffer.sample()["number"].tolist())
    buffer.extend(rows_of(range(30, 60), 30))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_other_processes_sample_and_what_they_write_is_seen(method: str) -> None:
    context = multiprocessing.get_context(method)
    buffer, queue = filled(TensorDictReplayBuffer, shared=True), context.Queue()
    buffer.sample()
    process = context.Process(target=sample_and_write, args=(buffer, queue))
    process.start()
    found = torch.tensor(queue.get(timeout=HANG)).view(2, 3)
    process.join(HANG)
    assert process.exitcode == 0
    assert (found // 10 == found[:, :1] // 10).all()
    assert (found.diff(dim=1) == 1).all()
    assert buffer.sampler.trajectories(buffer.storage).count == 1
    assert buffer.sample()["number"].min() >= 30


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


@pytest.mark.parametrize("generator", ["cpu", pytest.param("cuda", marks=cuda)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda)])
def test_slices_lie_where_the_rows_lie(device: str, generator: str) -> None:
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(30, device=device),
        sampler=SliceSampler(slice_len=3),
        batch_size=6,
        generator=torch.Generator(generator).manual_seed(0),
    )
    buffer.extend(rows_of(range(40), 10))
    batch = buffer.sample()
    assert {value.device.type for value in batch.values(True, True)} == {device}
    assert (batch["number"].view(2, 3).diff(dim=1) == 1).all()
    assert (batch["episode"].view(2, 3).diff(dim=1) == 0).all()


@pytest.mark.parametrize("make", [SliceSampler, SliceSamplerWithoutReplacement])
@pytest.mark.parametrize(
    "given",
    [
        {"traj_key": "episode", "truncated_key": "cut"},
        {"traj_key": ("collector", "traj_ids"), "truncated_key": None},
        {"end_key": ("next", "done")},
        {"end_keys": ["done", ("next", "truncated")]},
    ],
)
def test_keys_are_returned_as_they_were_given(make: Any, given: dict[str, Any]) -> None:
    sampler = make(slice_len=2, **given)
    for name in ("traj_key", "end_key", "end_keys", "truncated_key"):
        assert getattr(sampler, name) == given.get(name, ("next", "truncated") if name == "truncated_key" else None)
