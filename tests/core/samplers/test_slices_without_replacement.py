"""`SliceSamplerWithoutReplacement`: epochs over trajectories that grow and disappear, and their states."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import each
from tensordict import TensorDict

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.errors import CorruptDataError, DatasetNotFoundError, SchemaError, UsageError
from rbtool.core.samplers.slices import SliceSampler, SliceSamplerWithoutReplacement
from rbtool.core.samplers.uniform import SamplerWithoutReplacement
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.testing.slice_samplers import Twin, episodes, rows_of

CASES = Path(__file__).parents[2] / "data" / "torchrl_checkpoints"

LENGTHS = [4, 5, 6, 4, 1]


def sampler_of(slice_len: int = 3, **options: Any) -> SliceSamplerWithoutReplacement:
    return SliceSamplerWithoutReplacement(slice_len=slice_len, end_key=("next", "done"), **options)


def twin_of(sampler: SliceSamplerWithoutReplacement, lengths: list[int] = LENGTHS, capacity: int = 40) -> Twin:
    twin = Twin(capacity, sampler)
    write(twin, lengths)
    return twin


def write(twin: Twin, lengths: list[int], ending: Any = "terminated") -> None:
    steps = sum(lengths)
    twin.extend(rows_of([episodes(lengths, [ending])], steps))


def first_steps(twin: Twin, slices: int = 2) -> list[int]:
    return [part[0][0] for part in twin.draw(3 * slices)[0]]


# Epochs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "slices", "expected"),
    [
        ({}, 2, [2, 2]),  # the one of a single step takes nobody's place, where TorchRL's batches shrink
        ({"strict_length": False}, 2, [2, 2, 1]),
        ({"strict_length": False, "drop_last": True}, 2, [2, 2]),
        ({"drop_last": True}, 3, [3]),
        ({}, 8, [4]),
    ],
)
def test_batches_of_an_epoch(options: dict[str, bool], slices: int, expected: list[int]) -> None:
    twin = twin_of(sampler_of(**options))
    sampler, left = twin.buffer.sampler, len(expected)
    assert sampler._remaining_batches > 2**60
    for _ in range(3):
        for number, count in enumerate(expected, 1):
            assert len(twin.draw(3 * slices)[0]) == count
            assert (sampler.ran_out, sampler._remaining_batches) == (number == left, left - number or left)


def test_trajectories_come_in_the_order_of_time_without_shuffling() -> None:
    twin = twin_of(sampler_of(shuffle=False, anchor="start", strict_length=False))
    assert [first_steps(twin) for _ in range(4)] == [[0, 4], [9, 15], [19], [0, 4]]


def test_all_orders_are_equally_likely() -> None:
    twin = twin_of(sampler_of(anchor="start"), [3, 3, 3])
    twin.buffer.set_rng(torch.Generator().manual_seed(2))
    counts = Counter(tuple(first_steps(twin, 3)) for _ in range(600))
    assert len(counts) == 6
    assert sum((count - 100) ** 2 / 100 for count in counts.values()) < 30


def test_iteration_over_a_buffer_ends_with_the_epoch() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(40), sampler=sampler_of(), batch_size=6)
    buffer.extend(TensorDict({"next": {"done": torch.arange(1, 13).reshape(12, 1) % 4 == 0}}, [12]))
    assert [len(batch) for batch in buffer] == [6, 3]
    assert [len(batch) for batch in buffer] == [6, 3]


def test_late_trajectories_come_in_the_same_epoch() -> None:
    twin = twin_of(sampler_of(shuffle=False, anchor="start"))
    seen = first_steps(twin)
    write(twin, [3, 2, 3])
    assert [seen, first_steps(twin), first_steps(twin)] == [[0, 4], [9, 15], [20, 25]]
    assert twin.buffer.sampler.ran_out is True


def test_a_trajectory_that_grows_comes_once() -> None:
    twin = twin_of(sampler_of(shuffle=False, anchor="start"), [3, 2])
    for steps in (2, 1, 5):  # the last one begins, becomes long enough, and goes on
        seen = first_steps(twin, 1)
        assert (seen, twin.buffer.sampler.ran_out) == ([0], True) if steps == 2 else seen
        write(twin, [steps], "nothing")
    assert Counter(first_steps(twin, 1)[0] for _ in range(4)) == {0: 2, 5: 2}


def test_overwritten_trajectories_no_longer_come() -> None:
    twin = twin_of(sampler_of(shuffle=False, anchor="start"), [4, 4, 4], capacity=12)
    assert first_steps(twin, 1) == [0]
    write(twin, [5])  # over the first trajectory, and a step of the second
    assert [first_steps(twin, 1), first_steps(twin, 1), first_steps(twin, 1)] == [[5], [8], [0]]
    assert twin.buffer.sampler.ran_out is True


def test_a_trajectory_that_the_ring_has_cut_short_no_longer_comes() -> None:
    twin = twin_of(sampler_of(shuffle=False, anchor="start"), [4, 4, 4], capacity=12)
    write(twin, [2])
    assert [first_steps(twin, 1), first_steps(twin, 1)] == [[4], [8]]
    assert twin.buffer.sampler.ran_out is True


def test_another_storage_begins_an_epoch() -> None:
    sampler = sampler_of(shuffle=False, anchor="start")
    one, other = twin_of(sampler), twin_of(sampler)
    for twin in (one, other, one):
        index, _ = sampler.sample(twin.buffer.storage, 6)
        assert index[0][::3].tolist() == [0, 4]


def test_slices_of_another_length_leave_the_epoch_as_it_is() -> None:
    twin = twin_of(SliceSamplerWithoutReplacement(num_slices=1, shuffle=False, anchor="start", traj_key="episode"))
    drawn = [twin.draw(length)[0][0][0][0] for length in (3, 5, 2, 1, 1)]
    assert drawn == [0, 4, 9, 15, 19]


def test_refused_batches_change_nothing() -> None:
    twin = twin_of(sampler_of(shuffle=False, anchor="start", drop_last=True))
    assert first_steps(twin) == [0, 4]
    with pytest.raises(ValueError, match="a batch has 5 slices, expected at most 4"):
        first_steps(twin, 5)
    with pytest.raises(RuntimeError, match="not divisible"):
        twin.draw(7)
    assert first_steps(twin) == [9, 15]


def test_replacement_false_makes_this_sampler() -> None:
    sampler = SliceSampler(slice_len=2, replacement=False, shuffle=False, drop_last=True)
    assert type(sampler) is SliceSamplerWithoutReplacement
    assert isinstance(sampler, SliceSampler)
    assert isinstance(sampler, SamplerWithoutReplacement)
    assert (sampler.shuffle, sampler.drop_last) == (False, True)
    assert type(SliceSampler(slice_len=2, replacement=True)) is SliceSampler


def test_short_trajectories_are_padded_on_request() -> None:
    twin = twin_of(sampler_of(strict_length=False, pad_output=True, shuffle=False, anchor="end"))
    index, info = twin.sample(15)
    assert index[0].tolist() == [1, 2, 3, 6, 7, 8, 12, 13, 14, 16, 17, 18, 19, 19, 19]
    assert info["collector", "mask"].tolist() == [True] * 13 + [False] * 2


# State -----------------------------------------------------------------------------------------------


def copied(sampler: SliceSamplerWithoutReplacement, way: str, folder: Path) -> SliceSamplerWithoutReplacement:
    other = sampler_of(strict_length=sampler.strict_length)
    if way == "folder":
        sampler.dumps(folder)
        other.loads(folder)
    elif way == "state":
        other.load_state_dict(sampler.state_dict())
    else:
        other = pickle.loads(pickle.dumps(sampler))
    return other


@each("way", ["folder", "state", "pickle"])
@each("drawn", [0, 1, 2, 5])
@each("strict", [True, False])
def test_a_restored_sampler_draws_the_same_next(tmp_path: Path, way: str, drawn: int, strict: bool) -> None:
    twin = twin_of(sampler_of(strict_length=strict), capacity=30)
    twin.buffer.set_rng(torch.Generator().manual_seed(3))
    for _ in range(drawn):
        first_steps(twin)
    write(twin, [2, 5, 1, 6])  # the ring has come round, and the sampler has not seen it yet
    again = copied(twin.buffer.sampler, way, tmp_path)
    other = twin.loaded(30)
    other.buffer.set_sampler(again)
    other.buffer.sampler._rng = torch.Generator()
    other.buffer.sampler._rng.set_state(twin.buffer.sampler._rng.get_state())
    for number in range(40):
        assert other.draw(6)[0] == twin.draw(6)[0]
        assert other.buffer.sampler.ran_out == twin.buffer.sampler.ran_out
        if number % 3 == 0:
            for one in (twin, other):
                write(one, [1 + number % 5], "terminated" if number % 2 else "nothing")


def test_saving_the_state_changes_no_draw() -> None:
    drawn = []
    for ask in (True, False):
        twin = twin_of(sampler_of())
        twin.buffer.set_rng(torch.Generator().manual_seed(3))
        for number in range(12):
            drawn.append(first_steps(twin))
            write(twin, [3 + number % 2])
            if ask:
                twin.buffer.sampler.state_dict()
    assert drawn[:12] == drawn[12:]


def test_a_state_of_other_trajectories_begins_an_epoch() -> None:
    twin, other = twin_of(sampler_of(shuffle=False, anchor="start")), twin_of(sampler_of(anchor="start"), [4] * 3)
    first_steps(twin)
    other.buffer.sampler.load_state_dict(twin.buffer.sampler.state_dict())
    assert (first_steps(other), first_steps(other)) == ([0, 4], [8])


@pytest.mark.parametrize(
    "wrong",
    [
        {"len_storage": 3},
        {"_sample_list": torch.tensor([0.5])},
        {"_sample_list": torch.tensor([[1]])},
        {"_sample_list": torch.tensor([5])},
        {"_sample_list": torch.tensor([-1])},
        {"_sample_list": torch.tensor([1, 1])},
        {"_waiting": torch.tensor([2])},
    ],
)
def test_refused_states_change_nothing(wrong: dict[str, Any]) -> None:
    twin = twin_of(sampler_of(shuffle=False, anchor="start"))
    first_steps(twin)
    with pytest.raises(SchemaError):
        twin.buffer.sampler.load_state_dict(twin.buffer.sampler.state_dict() | wrong)
    with pytest.raises(SchemaError, match="drop_last, _ran_out is missing"):
        twin.buffer.sampler.load_state_dict({"len_storage": 1, "_sample_list": None})
    assert first_steps(twin) == [9, 15]


def test_a_damaged_folder_changes_nothing(tmp_path: Path) -> None:
    twin = twin_of(sampler_of(shuffle=False, anchor="start"))
    first_steps(twin)
    with pytest.raises(DatasetNotFoundError):
        twin.buffer.sampler.loads(tmp_path)
    twin.buffer.sampler.dumps(tmp_path)
    (tmp_path / "len_storage.memmap").write_bytes(np.int64(2).tobytes())
    with pytest.raises(CorruptDataError):
        twin.buffer.sampler.loads(tmp_path)
    assert first_steps(twin) == [9, 15]


# TorchRL ---------------------------------------------------------------------------------------------


def test_folders_of_torchrl_are_read() -> None:
    case = CASES / "sampler_slice_without_replacement"
    facts, expected = json.loads((case / "case.json").read_text()), np.load(case / "expected_sampler.npz")
    sampler = sampler_of(strict_length=False)
    buffer = ReplayBuffer(storage=LazyMemmapStorage(facts["capacity"]), sampler=sampler, batch_size=6)
    buffer.loads(case / "checkpoint")
    state = sampler.state_dict()
    assert state["_sample_list"].tolist() == expected["remaining"].tolist() == [0, 4, 2]
    assert (state["len_storage"], sampler.ran_out) == (int(expected["len_storage"]), bool(expected["ran_out"]))
    drawn = [set(sampler.sample(buffer.storage, 6)[0][0].tolist()) for _ in range(2)]
    assert drawn[0] > {13, 14, 15}
    assert drawn[0] - {13, 14, 15} <= {0, 1, 2, 3}
    assert (drawn[1], sampler.ran_out) == ({7}, True)


def test_trajectories_have_the_numbers_of_torchrl(tmp_path: Path) -> None:
    # The ring has come round: the trajectory that lies across its end is the first one, by the row of its last step.
    twin = twin_of(sampler_of(1, shuffle=False), [5, 2, 3, 2, 4], capacity=14)
    write(twin, [2])
    assert twin.model.runs("done")[0] == ((4,),)
    twin.draw(1)
    twin.buffer.sampler.dumps(tmp_path)
    saved = TensorDict.load_memmap(tmp_path)
    assert saved["_sample_list"].tolist() == [3, 4, 5, 0, 1]
    assert (int(saved["len_storage"]), bool(saved["drop_last"]), bool(saved["_ran_out"])) == (6, False, False)


@pytest.mark.peer
@pytest.mark.parametrize("drawn", [0, 1])
def test_torchrl_reads_ours(tmp_path: Path, drawn: int) -> None:
    data = pytest.importorskip("torchrl.data.replay_buffers")
    theirs = data.SliceSamplerWithoutReplacement(slice_len=3, end_key=("next", "done"))
    twin = twin_of(sampler_of(drop_last=True))
    for _ in range(drawn):
        first_steps(twin)
    twin.buffer.sampler.dumps(tmp_path)
    theirs.loads(tmp_path)
    assert str(theirs._sample_list) == str(twin.buffer.sampler.state_dict()["_sample_list"])
    assert bool(theirs.drop_last) is True
    theirs.load_state_dict(twin.buffer.sampler.state_dict())


def test_arguments_without_sense_are_refused() -> None:
    with pytest.raises(UsageError):
        sampler_of(pad_output=True)
    with pytest.raises(TypeError):
        SliceSamplerWithoutReplacement()
    with pytest.raises(TypeError, match="span"):
        SliceSamplerWithoutReplacement(slice_len=2, span=True)  # type: ignore[call-arg]
