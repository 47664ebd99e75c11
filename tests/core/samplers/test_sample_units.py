"""Sample units against a slow model: windows of steps at boundaries, wraps and in lanes."""

from __future__ import annotations

import pickle
from itertools import groupby, product
from typing import Any

import numpy as np
import pytest
import torch
from cases import each
from tensordict import TensorDict

from rbtool import LazyTensorStorage, ListStorage, MissingKeyError, SchemaError, Sequence, TensorStorage, Transition
from rbtool.core.samplers.trajectories import find_start_stop_traj
from rbtool.core.testing.slice_samplers import CONTENTS, SITUATIONS, Coordinates, RingModel, Slice, situation

BOUNDARIES = ("pad", "stop", "include_reset")
SHAPES = [
    {"length": 1},
    {"length": 3},
    {"length": 2, "burn_in": 2},
    {"length": 2, "burn_in": 1, "bootstrap": 2},
    {"length": 3, "dilation": 2, "burn_in": 1},
    {"length": 30, "burn_in": 3, "bootstrap": 1},
]


def runs_of(model: RingModel, *, across: bool) -> list[Slice]:
    """Return the steps that may be in one window: of an episode, or with `across` of all of a lane."""
    if not across:
        groups = [groupby(run, key=lambda place: model.step_at(place).trajectory) for run in model.runs("either")]
        return [tuple(part) for runs in groups for _, part in runs]
    runs: list[Slice] = []
    for lane in range(model.lanes):
        slots = sorted((slot for slot in range(model.capacity) if model.times[slot] >= 0), key=model.times.__getitem__)
        for number, slot in enumerate(slots):
            place = (slot, lane) if model.ndim > 1 else (slot,)
            before = slots[number - 1] if number else None
            if before is not None and (before + 1) % model.capacity == slot:
                runs[-1] += (place,)
            else:
                runs.append((place,))
    return runs


def window_of(run: Slice, anchor: Coordinates, unit: Sequence) -> tuple[list[Coordinates], list[bool]]:
    """Return the places of the rows of a window, step by step, and which of them are steps of their own."""
    at, ahead = run.index(anchor), (unit.length + unit.bootstrap - 1) * unit.dilation
    while unit.episode_boundary == "stop" and at > 0 and at + ahead >= len(run):
        at -= 1
    wanted = [at + (number - unit.burn_in) * unit.dilation for number in range(unit.width)]
    places = [run[min(max(number, 0), len(run) - 1)] for number in wanted]
    return places, [0 <= number < len(run) for number in wanted]


def assert_windows(model: RingModel, unit: Sequence, index: Any, info: dict[Any, Any]) -> None:
    """Hold the windows of an index against those that the model has for their anchors."""
    parts = index if isinstance(index, tuple) else (index,)
    places = [tuple(row) for row in torch.stack(parts, -1).tolist()]
    anchors = [tuple(row) for row in info["anchor_index"].reshape(len(places), -1).tolist()]
    runs = runs_of(model, across=unit.episode_boundary == "include_reset" or unit.done_key is None)
    valid = info["validity_mask"].tolist()
    for start in range(0, len(places), unit.width):
        here = slice(start, start + unit.width)
        assert len(set(anchors[here])) == 1
        (run,) = [run for run in runs if anchors[start] in run]
        assert (places[here], valid[here]) == window_of(run, anchors[start], unit)


RINGS = [
    (name, contents, 1 + (number + turn) % 2, boundary)
    for number, (name, contents) in enumerate(product(SITUATIONS, CONTENTS))
    for turn, boundary in enumerate(BOUNDARIES)
]


@each(("name", "contents", "ndim", "boundary"), RINGS)
def test_windows_of_all_elements(name: str, contents: str, ndim: int, boundary: Any) -> None:
    twin = situation(name, contents, lanes=ndim, ndim=ndim)
    storage, shape = twin.buffer.storage, twin.buffer.storage.shape
    anchors = torch.stack(torch.unravel_index(torch.randperm(shape.numel()), shape), -1)
    index = tuple(anchors.unbind(-1)) if ndim > 1 else anchors[:, 0]
    for arguments in SHAPES:
        unit = Sequence(episode_boundary=boundary, **arguments)
        found, info = unit.expand(index, {}, storage)
        assert_windows(twin.model, unit, found, info)
        assert info["anchor_index"][:: unit.width].reshape(len(anchors), -1).equal(anchors)


def test_windows_follow_the_writes_of_a_ring() -> None:
    unit, twin = Sequence(4, burn_in=2), situation("wrapped mid-episode", "ragged")
    more = situation("exactly full", "unterminated tail").model
    for _ in range(8):
        twin.extend([row for row in more.steps[:5] if row is not None])
        index, info = unit.expand(torch.arange(12), {}, twin.buffer.storage)
        assert_windows(twin.model, unit, index, info)


def test_without_done_key_all_steps_are_one_episode() -> None:
    unit, twin = Sequence(4, done_key=None, episode_boundary="stop"), situation("wrapped mid-episode", "ragged")
    assert_windows(twin.model, unit, *unit.expand(torch.arange(12), {}, twin.buffer.storage))
    storage = TensorStorage(torch.arange(5))
    assert Sequence(3, done_key=None).expand(torch.tensor([3]), {}, storage)[0].tolist() == [3, 4, 4]


def steps(*ends: int, count: int = 10, key: Any = ("next", "done")) -> TensorDict:
    flags = torch.zeros(count, 1, dtype=torch.bool)
    flags[list(ends)] = True
    return TensorDict({"number": torch.arange(count), key: flags}, [count])


def test_three_dimensions_have_the_windows_of_their_lanes() -> None:
    data = TensorDict({"next": {"done": torch.rand(6, 4, generator=torch.Generator().manual_seed(0)) < 0.4}}, [6, 4])
    deep, flat = TensorStorage(data.view(6, 2, 2), ndim=3), TensorStorage(data, ndim=2)
    rows, lanes = torch.cartesian_prod(torch.arange(6), torch.arange(4)).unbind(-1)
    unit = Sequence(3, burn_in=1)
    (row, lane), info = unit.expand((rows, lanes), {}, flat)
    index, deep_info = unit.expand((rows, lanes // 2, lanes % 2), {}, deep)
    assert [part.tolist() for part in index] == [row.tolist(), (lane // 2).tolist(), (lane % 2).tolist()]
    assert deep_info["anchor_index"].shape == (96, 3)
    assert deep_info["validity_mask"].equal(info["validity_mask"])
    assert lane.equal(lanes.repeat_interleave(4))


def test_info_marks_the_parts_of_a_window() -> None:
    unit = Sequence(2, burn_in=1, bootstrap=1)
    given = {"weight": torch.tensor([0.5, 2.0]), "pair": (torch.tensor([1, 2]),), "name": "x"}
    index, info = unit.expand((torch.tensor([4, 9]),), given, TensorStorage(steps(4, 9)))
    assert isinstance(index, tuple)
    assert [part.tolist() for part in index] == [[3, 4, 4, 4, 8, 9, 9, 9]]
    assert info["weight"].tolist() == [0.5] * 4 + [2.0] * 4
    assert info["pair"][0].tolist() == [1] * 4 + [2] * 4
    assert info["name"] == "x"
    assert info["sequence_id"].tolist() == [0] * 4 + [1] * 4
    assert info["step_in_sequence"].tolist() == [0, 1, 2, 3] * 2
    assert info["learning_mask"].tolist() == [False, True, True, False] * 2
    assert info["validity_mask"].tolist() == [True, True, False, False] * 2
    assert {key: info[key].dtype for key in ("anchor_index", "validity_mask")} == {
        "anchor_index": torch.int64,
        "validity_mask": torch.bool,
    }


def test_any_flag_and_ids_end_an_episode() -> None:
    data = steps(7)
    data["next", "truncated"] = steps(2)["next", "done"]
    data["episode"] = torch.tensor([0] * 5 + [1] * 5)
    found = Sequence(3).expand(torch.tensor([1, 3, 6]), {}, TensorStorage(data))[0]
    assert found.tolist() == [1, 2, 2, 3, 4, 4, 6, 7, 7]


def test_the_flag_can_have_another_name() -> None:
    storage = TensorStorage(steps(2, key=("stop",)))
    assert Sequence(2, done_key="stop").expand(torch.tensor([2]), {}, storage)[0].tolist() == [2, 2]
    with pytest.raises(MissingKeyError, match=r"'next\.end' is not in the storage"):
        Sequence(2, done_key=("next", "end")).expand(torch.tensor([2]), {}, storage)
    with pytest.raises(MissingKeyError, match="episodes cannot be separated"):
        Sequence(2).expand(torch.tensor([2]), {}, storage)


def test_lists_of_tensordicts_have_windows() -> None:
    storage = ListStorage(10)
    storage.set(range(10), list(steps(4, 9).unbind(0)))
    assert Sequence(3).expand(torch.tensor([3, 9]), {}, storage)[0].tolist() == [3, 4, 4, 9, 9, 9]


def test_edits_of_flags_are_seen() -> None:
    storage, unit = TensorStorage(steps(4)), Sequence(3)
    assert unit.expand(torch.tensor([0]), {}, storage)[0].tolist() == [0, 1, 2]
    storage.set(torch.tensor([1]), steps(0, count=1))
    assert unit.expand(torch.tensor([0]), {}, storage)[0].tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    "given",
    [
        {"length": 0}, {"length": True}, {"length": 1.5}, {"length": 1, "burn_in": -1}, {"length": 1, "bootstrap": -1},
        {"length": 1, "dilation": 0}, {"length": 1, "episode_boundary": "x"}, {"length": 1, "done_key": 3},
    ],
)  # fmt: skip
def test_arguments_without_sense_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        Sequence(**given)


def test_storages_without_windows_are_refused() -> None:
    for storage in (TensorStorage(torch.arange(5)), ListStorage(5)):
        storage.set(range(5), list(torch.arange(5)))
        for refused in ("needs tensordicts with 'next.done', the storage holds", "needs tensordicts with 'next.done'"):
            with pytest.raises(TypeError, match=refused):
                Sequence(2).expand(torch.tensor([0]), {}, storage)
            storage.empty()
    with pytest.raises(SchemaError, match="empty"):
        Sequence(2).expand(torch.tensor([0]), {}, LazyTensorStorage(5))
    for wrong, words in ((torch.tensor([10]), "10 was drawn"), ((torch.tensor([0]),) * 2, "2 coordinates")):
        with pytest.raises(IndexError, match=words):
            Sequence(2).expand(wrong, {}, TensorStorage(steps(4)))


def test_priorities_of_windows_are_those_of_their_anchors() -> None:
    info = {
        "anchor_index": torch.tensor([5, 5, 2, 2, 5, 5]),
        "validity_mask": torch.tensor([True, False, True, True, True, True]),
    }
    index, priority = Sequence(2).by_anchor(info, torch.tensor([1, 9, 3, 2, 4, 0]))
    assert (index.tolist(), priority.tolist()) == ([2, 5], [3.0, 4.0])
    info["anchor_index"] = torch.stack([info["anchor_index"], torch.arange(6) // 2], -1)
    index, priority = Sequence(2).by_anchor(info, torch.tensor([1.0, 9, 3, torch.nan, 4, 0]).view(6, 1))
    assert index.tolist() == [[2, 1], [5, 0], [5, 2]]
    assert priority[1:].tolist() == [1.0, 4.0]
    assert priority[0].isnan()
    with pytest.raises(SchemaError, match="there are 2 priorities, expected 6"):
        Sequence(2).by_anchor(info, torch.ones(2))
    with pytest.raises(MissingKeyError, match="validity_mask"):
        Sequence(2).by_anchor({"anchor_index": index}, torch.ones(3))


def test_units_are_pickled_and_shown_by_their_arguments() -> None:
    unit = Sequence(3, "stop", dilation=2)
    unit.expand(torch.tensor([0]), {}, TensorStorage(steps(4)))
    copy = pickle.loads(pickle.dumps(unit))
    assert repr(copy) == repr(unit)
    assert copy.expand(torch.tensor([0]), {}, TensorStorage(steps(4)))[0].tolist() == [0, 2, 4]
    assert repr(Transition()) == "Transition()"
    assert Transition().expand(torch.tensor([3]), {"a": 1}, TensorStorage(steps(4))) == (torch.tensor([3]), {"a": 1})


IDS = torch.tensor([1, 1, 0, 0, 1, 1, 1, 1, 1, 1])


def found(**arguments: Any) -> list[tuple[int, int, int]]:
    start, stop, length = find_start_stop_traj(**arguments)
    assert start.shape == stop.shape == (len(length), 1)
    return list(zip(start[:, 0].tolist(), stop[:, 0].tolist(), length.tolist(), strict=True))


@pytest.mark.parametrize(
    ("at_capacity", "cursor", "expected"),
    [
        (True, 1, [(4, 1, 8), (2, 3, 2)]),
        (True, torch.tensor([0, 1]), [(4, 1, 8), (2, 3, 2)]),
        (True, range(5, 8), [(8, 1, 4), (2, 3, 2), (4, 7, 4)]),
        (True, None, [(4, 1, 8), (2, 3, 2)]),
        (False, None, [(0, 1, 2), (2, 3, 2), (4, 9, 6)]),
        (False, 9, [(0, 1, 2), (2, 3, 2), (4, 9, 6)]),
    ],
)
def test_ids_change_where_trajectories_end(at_capacity: bool, cursor: Any, expected: list[Any]) -> None:
    assert found(trajectory=IDS, at_capacity=at_capacity, cursor=cursor) == expected


def test_a_lane_without_an_end_has_its_last_row_as_one() -> None:
    assert found(trajectory=torch.zeros(4), at_capacity=True) == [(0, 3, 4)]
    assert found(end=torch.zeros(4, dtype=torch.bool), at_capacity=True) == [(0, 3, 4)]


def test_flags_end_trajectories_that_continue_around_the_ring() -> None:
    end = torch.tensor([0, 1, 0, 0, 1, 0], dtype=torch.bool)
    assert found(end=end, at_capacity=True, cursor=2) == [(5, 1, 3), (2, 2, 1), (3, 4, 2)]
    assert found(end=end, at_capacity=False) == [(0, 1, 2), (2, 4, 3), (5, 5, 1)]


def test_lanes_come_one_after_the_other() -> None:
    end = torch.zeros(4, 2, dtype=torch.bool)
    end[1, 1] = True
    start, stop, length = find_start_stop_traj(end=end, at_capacity=False)
    assert start.tolist() == [[0, 0], [0, 1], [2, 1]]
    assert stop.tolist() == [[3, 0], [1, 1], [3, 1]]
    assert length.tolist() == [4, 2, 2]
    three = find_start_stop_traj(end=end.unsqueeze(1), at_capacity=False)
    assert three[0].tolist() == [[0, 0, 0], [0, 0, 1], [2, 0, 1]]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({}, TypeError, "either trajectory or end"),
        ({"trajectory": IDS, "end": IDS}, TypeError, "either trajectory or end"),
        ({"trajectory": torch.zeros(0)}, RuntimeError, r"the signal has the shape \[0\]"),
        ({"end": torch.tensor(True)}, RuntimeError, r"the signal has the shape \[\]"),
    ],
)
def test_missing_and_empty_signals_are_refused(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        find_start_stop_traj(at_capacity=True, **arguments)


@pytest.mark.parametrize(
    "cursor", [[], torch.tensor([], dtype=torch.int64), range(0), np.array([], int), slice(0, 0), (), "a", 6, -7]
)
def test_a_cursor_that_names_no_row_is_refused_where_it_counts(cursor: Any) -> None:
    end = torch.tensor([0, 0, 1, 0, 0, 1]).bool()
    with pytest.raises(RuntimeError, match="the cursor is"):
        find_start_stop_traj(end=end, at_capacity=True, cursor=cursor)
    assert find_start_stop_traj(end=end, at_capacity=False, cursor=cursor)[2].tolist() == [3, 3]


@pytest.mark.parametrize("cursor", [0, -6, range(4, 1, -4), torch.tensor([3, 0])])
def test_the_last_row_of_a_cursor_is_an_end(cursor: Any) -> None:
    end = torch.tensor([0, 0, 1, 0, 0, 1]).bool()
    row = 4 if isinstance(cursor, range) else 0
    assert [row] in find_start_stop_traj(end=end, at_capacity=True, cursor=cursor)[1].tolist()
