"""N-step transitions against a plain loop; those of a buffer against those of all steps at once."""

from __future__ import annotations

import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer
from rbtool.core.errors import MissingKeyError, SchemaError, UsageError
from rbtool.core.samplers.uniform import SamplerWithoutReplacement
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.transforms.base import Compose
from rbtool.core.transforms.returns import MultiStep, MultiStepTransform


def steps(ends: list[bool], *, first: float = 0, truncated: bool = False) -> TensorDict:
    """Steps whose observations count up, also over the ends of trajectories; rewards are all different."""
    done = torch.tensor(ends)[:, None]
    observation = first + torch.arange(len(ends), dtype=torch.float64)[:, None]
    none = torch.zeros_like(done)
    flags = {"done": done, "terminated": none if truncated else done, "truncated": done if truncated else none}
    after = {"observation": observation + 1, "reward": (observation + 1) ** 2, **flags}
    return TensorDict({"observation": observation, "action": -observation, "next": after}, [len(ends)])


def expected(ends: list[bool], n: int, gamma: float) -> list[tuple[float, float, int]]:
    """Next observation, return and length of every window."""
    out = []
    for t in range(len(ends)):
        m = 1
        while m < n and t + m < len(ends) and not ends[t + m - 1]:
            m += 1
        out.append((t + m, sum(gamma**i * (t + i + 1.0) ** 2 for i in range(m)), m))
    return out


@settings(max_examples=150)
@given(st.lists(st.booleans(), min_size=1, max_size=20), st.integers(1, 25), st.sampled_from([1.0, 0.5, 0.0]))
def test_windows_are_those_of_a_loop(ends: list[bool], n: int, gamma: float) -> None:
    td = steps(ends)
    before = td.clone()
    found = MultiStep(gamma, n)(td)
    for t, (after, reward, m) in enumerate(expected(ends, n, gamma)):
        assert found["next", "observation"][t].item() == after
        torch.testing.assert_close(found["next", "reward"][t].item(), reward)
        assert (found["steps_to_next_obs"][t], found["nonterminal"][t]) == (m, m > 1)
        torch.testing.assert_close(found["gamma"][t].item(), gamma**m)
        assert found["multi_step", "done"][t].item() == ends[t + m - 1]
        assert found["multi_step", "cut"][t].item() == (m < n and not ends[t + m - 1])
    assert (td == before).all()
    assert (found["next", "original_reward"] == td["next", "reward"]).all()
    assert (found["next", "done"] == td["next", "done"]).all()
    rows = MultiStep(gamma, n)(torch.stack((td, td)))
    assert (rows[1] == found).all()


def test_the_documented_case() -> None:
    td = steps([place in (3, 7) for place in range(8)])
    td["next", "reward"] = torch.ones(8, 1)
    found = MultiStep(0.5, 3)(td)
    assert found["next", "observation"].flatten().tolist() == [3, 4, 4, 4, 7, 8, 8, 8]
    assert found["next", "reward"].flatten().tolist() == [1.75, 1.75, 1.5, 1] * 2
    assert found["gamma"].tolist() == [0.125, 0.125, 0.25, 0.5] * 2


def test_nan_stays_in_its_trajectory_and_integers_become_floats() -> None:
    td = steps([False, True, False, False])
    td["next", "reward"][2] = torch.nan
    assert MultiStep(1.0, 3)(td)["next", "reward"].isnan().flatten().tolist() == [False, False, True, False]
    td["next", "reward"] = torch.ones(4, 1, dtype=torch.int64)
    assert MultiStep(0.5, 2)(td)["next", "reward"].flatten().tolist() == [1.5, 1, 1.5, 1]


def test_a_discount_of_zero_ignores_even_infinite_later_rewards() -> None:
    td = steps([False, False, True])
    td["next", "reward"][1] = torch.inf
    td["next", "reward"][2] = torch.nan
    found = MultiStep(0, 3)(td)
    assert found["next", "reward"].flatten().tolist()[:2] == [1, torch.inf]
    assert found["next", "observation"].flatten().tolist() == [3, 3, 3]
    assert found["gamma"].tolist() == [0, 0, 0]


def test_windows_end_where_ids_or_masks_change() -> None:
    td = steps([False] * 6)
    td["collector", "traj_ids"] = torch.tensor([7, 7, 7, 3, 3, 3])
    td["collector", "mask"] = torch.tensor([True, True, True, True, True, False])
    found = MultiStep(0.9, 4)(td)
    assert found["steps_to_next_obs"].tolist() == [3, 2, 1, 2, 1, 1]
    assert found["nonterminal"].tolist() == [True, True, False, True, False, False]
    assert found["multi_step", "cut"].all()


def test_every_reward_keeps_its_own_original() -> None:
    td = steps([False, False, True])
    td["next", "team", "reward"] = torch.tensor([[1.0, 10], [2, 20], [3, 30]])[..., None]
    found = MultiStep(1.0, 2)(td)
    assert found["next", "team", "reward"].flatten().tolist() == [3, 30, 5, 50, 3, 30]
    assert found["next", "team", "original_reward"].flatten().tolist() == [1, 10, 2, 20, 3, 30]
    td["next", "cost"] = td["next", "reward"] * 2
    made = MultiStepTransform(1, 1.0, reward_keys=["reward", "cost"]).inv(td)
    assert made is not None
    assert (made["next", "original_cost"] == 2 * made["next", "original_reward"]).all()


@pytest.mark.parametrize(("gamma", "n"), [(-0.1, 3), (1.5, 3), (0.9, 0), (0.9, True), (float("nan"), 3), (0.9, 1.5)])
def test_arguments_out_of_range_are_refused(gamma: float, n: int) -> None:
    with pytest.raises(UsageError):
        MultiStep(gamma, n)
    with pytest.raises(UsageError):
        MultiStepTransform(n, gamma)


@pytest.mark.parametrize("transform", [False, True])
def test_flags_of_several_agents_end_a_window_where_any_is_set(transform: bool) -> None:
    flag = torch.tensor([[False, False], [False, True], [False, False], [False, False]])[..., None]
    after = {"observation": torch.arange(1.0, 5), "reward": torch.ones(4, 2, 1), "done": flag}
    td = TensorDict({"observation": torch.arange(4.0), "next": after}, [4])
    made = MultiStepTransform(3, 1.0)
    assert not transform or made.inv(td[:3]) is None
    found = torch.cat([made.inv(td[3:]), made.flush()]) if transform else MultiStep(1.0, 3)(td)  # type: ignore[list-item]
    assert found["steps_to_next_obs"].tolist() == [2, 1, 2, 1]
    assert found["next", "reward"][..., 0].tolist() == [[2, 2], [1, 1], [2, 2], [1, 1]]
    assert torch.equal(found["multi_step", "done"], flag[[1, 1, 3, 3]])


@pytest.mark.parametrize(
    ("named", "missing", "meant"),
    [
        ({"reward_keys": ["rewrad"]}, "next.rewrad", "next.reward"),
        ({"reward_keys": "rewards"}, "next.rewards", "next.reward"),
        ({"reward_keys": ["reward", ("team", "reward")]}, "next.team.reward", "next.reward"),
        ({"done_key": "doen"}, "next.doen", "next.done"),
        ({"done_keys": ["done", "truncatd"]}, "next.truncatd", "next.truncated"),
        ({"done_keys": "ended"}, "next.ended", "next.done"),
        ({"mask_key": "msk"}, "msk", "mask"),
    ],
)
def test_a_misspelt_key_is_named_with_the_first_steps(named: Any, missing: str, meant: str) -> None:
    td = steps([False, True])
    td["next", "truncated"], td["mask"] = ~td["next", "done"], torch.ones(2, dtype=torch.bool)
    transform = MultiStepTransform(1, 0.9, **named)
    with pytest.raises(MissingKeyError) as caught:
        transform.inv(td)
    assert str(caught.value) == f"{missing} is not in the batch; did you mean {meant!r}?"
    assert transform.held == 0


def test_steps_without_rewards_are_refused() -> None:
    td = steps([False, True]).exclude(("next", "reward"))
    with pytest.raises(MissingKeyError, match=r"next\.reward"):
        MultiStepTransform(1, 0.9).inv(td)
    assert MultiStepTransform(1, 0.9, reward_keys=()).inv(td)["steps_to_next_obs"].tolist() == [1]


def test_batches_of_other_shapes_are_refused() -> None:
    td = steps([False, True])
    td["mask"] = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(SchemaError, match=r"mask is \[2, 3\]"):
        MultiStepTransform(1, 0.9).inv(td)
    words = steps([False, True])
    words["next", "text"] = NonTensorStack("a", "b")
    with pytest.raises(SchemaError, match="transitions need tensors"):
        MultiStep(0.9, 2)(words)
    with pytest.raises(MissingKeyError, match=r"next\.done"):
        MultiStep(0.9, 2)(TensorDict({"observation": torch.zeros(3)}, [3]))
    with pytest.raises(SchemaError, match="no batch dimension"):
        MultiStep(0.9, 2)(td[0])


# In a buffer ----------------------------------------------------------------------------------------


def buffer(n: int, gamma: float = 0.5, *, check_continuity: bool | None = None, **more: object) -> ReplayBuffer:
    transform = MultiStepTransform(n, gamma, check_continuity=check_continuity)
    return ReplayBuffer(storage=LazyTensorStorage(1000, **more), transform=transform, batch_size=2)


@settings(max_examples=60)
@given(st.lists(st.booleans(), min_size=1, max_size=24), st.integers(1, 6), st.lists(st.integers(1, 8), min_size=24))
def test_batches_give_the_same_transitions_as_all_steps_at_once(ends: list[bool], n: int, sizes: list[int]) -> None:
    td, rb, start = steps(ends), buffer(n), 0
    for size in sizes:
        if start < len(ends):
            written = len(rb)
            index = rb.extend(td[start : start + size])
            start = min(start + size, len(ends))
            assert len(rb) == max(start - n, 0)
            assert index.numel() == len(rb) - written
    assert len(rb.flush()) == min(n, len(ends))
    assert not len(rb.flush())
    assert (rb[:] == MultiStep(0.5, n)(td)).all()


def test_single_steps_and_lanes_have_the_same_windows() -> None:
    td = steps([place in (4, 6) for place in range(12)])
    rb = buffer(3)
    for step in td:
        rb.add(step)
    rb.flush()
    assert (rb[:] == MultiStep(0.5, 3)(td)).all()
    lanes = buffer(3, ndim=2)
    both = torch.stack((td, steps([place == 7 for place in range(12)], first=50)))
    for part in both.split(5, 1):
        lanes.extend(part)
    lanes.flush()
    assert (lanes[:] == MultiStep(0.5, 3)(both)).all()
    lanes.extend(both[:, :2])
    with pytest.raises(SchemaError, match="lanes"):
        lanes.extend(both[:1])


@pytest.mark.parametrize("with_ids", [True, False])
def test_windows_never_mix_sources_that_take_turns(with_ids: bool) -> None:
    rb, parts = buffer(3, check_continuity=None if with_ids else True), []
    for turn in range(3):
        for source in range(2):
            part = steps([False] * 4, first=1000.0 * source + 4 * turn)
            if with_ids:
                part["collector", "traj_ids"] = torch.full((4,), source)
            parts.append(part)
            rb.extend(part)
    rb.flush()
    assert (rb[:] == torch.cat([MultiStep(0.5, 3)(part) for part in parts])).all()
    assert rb[:]["multi_step", "cut"].sum() == 2 * len(parts)


def rounded(count: int) -> TensorDict:
    """Steps whose next observations are not bit-equal to the observations that follow."""
    td = steps([place == count // 2 for place in range(count)])
    return td.set("observation", td["observation"] + 1e-9)


@pytest.mark.parametrize("write", ["add", "extend"])
def test_only_flags_end_the_windows_of_steps_that_come_one_by_one_and_a_mismatch_is_announced_once(write: str) -> None:
    td, rb = rounded(9), buffer(3)
    rb.extend(td[:1])
    with pytest.warns(UserWarning, match=r"windows reach across: .*check_continuity=True"):
        rb.extend(td[1:2])
    for step in td[2:]:
        rb.add(step) if write == "add" else rb.extend(step.unsqueeze(0))
    rb.flush()
    assert (rb[:] == MultiStep(0.5, 3)(td)).all()
    assert rb[:]["steps_to_next_obs"].tolist() == [3, 3, 3, 2, 1, 3, 3, 2, 1]


@pytest.mark.parametrize(("check_continuity", "windows"), [(True, [2, 1, 2, 1, 2, 1]), (False, [3, 3, 2, 1, 2, 1])])
def test_windows_are_cut_where_that_is_asked_for_and_nothing_is_announced(
    check_continuity: bool, windows: list[int]
) -> None:
    td = rounded(6)
    rb = buffer(3)
    rb.extend(td[:4])  # a flag ends the window here: nothing is announced without `check_continuity` either
    rb.extend(td[4:])
    rb.flush()
    assert (rb[:] == MultiStep(0.5, 3)(td)).all()
    rb = buffer(3, check_continuity=check_continuity)
    rb.extend(td[:2])
    rb.extend(td[2:])
    rb.flush()
    assert rb[:]["steps_to_next_obs"].tolist() == windows
    assert rb[:]["multi_step", "cut"].tolist() == [check_continuity] * 2 + [False, False, True, True]
    with pytest.raises(UsageError, match="check_continuity is 'yes'"):
        MultiStepTransform(3, 0.5, check_continuity="yes")  # type: ignore[arg-type]


def test_a_failed_write_loses_nothing() -> None:
    td, rb = steps([False] * 9), buffer(2)
    rb.extend(td[:4])
    odd = td[4:6].clone()
    odd["extra"] = torch.zeros(2)
    with pytest.raises(SchemaError, match="extra"):
        rb.extend(odd)
    wide = td[4:6].clone()
    wide["observation"] = torch.zeros(2, 5, dtype=torch.float64)
    with pytest.raises(SchemaError, match="differ from those held back"):
        rb.extend(wide)
    rb.append_transform(lambda data: {}["broken"], invert=True)
    for action in (lambda: rb.extend(td[4:]), lambda: rb.add(td[4])):
        with pytest.raises(KeyError, match="broken"):
            action()
    rb.transform.transforms.pop(1)
    rb.insert_transform(0, lambda data: {}["broken"], invert=True)
    for action in (lambda: rb.extend(td[4:]), rb.flush):
        with pytest.raises(KeyError, match="broken"):
            action()
    rb.transform.transforms.pop(0)
    rb.extend(td[4:])
    rb.flush()
    assert (rb[:] == MultiStep(0.5, 2)(td)).all()


@pytest.mark.parametrize("as_folder", [True, False])
def test_steps_held_back_are_saved(tmp_path: Path, as_folder: bool) -> None:
    td, rb, other = steps([False] * 9), buffer(3), buffer(3)
    rb.extend(td[:5])
    other.extend(steps([True] * 7))
    if as_folder:
        rb.dumps(tmp_path / "saved")
        other.loads(tmp_path / "saved")
    else:
        other.load_state_dict(copy.deepcopy(rb.state_dict()))
    for restored in (other, rb):
        restored.extend(td[5:])
        restored.flush()
        assert (restored[:] == MultiStep(0.5, 3)(td)).all()


def test_a_state_without_held_steps_forgets_them() -> None:
    rb = buffer(3)
    rb.extend(steps([False] * 5))
    rb.transform.load_state_dict({})
    assert rb.transform[0].held == 0


def test_steps_held_back_are_copies_and_emptying_drops_them() -> None:
    td, rb = steps([False] * 5), buffer(3)
    mine = td.clone()
    rb.extend(mine)
    mine.zero_()
    rb.flush()
    assert (rb[:] == MultiStep(0.5, 3)(td)).all()
    rb.extend(td)
    rb.empty()
    assert not len(rb.flush())


def test_texts_are_held_back_and_saved() -> None:
    td, transform, other = steps([False] * 5), MultiStepTransform(3, 0.5), MultiStepTransform(3, 0.5)
    td["text"] = NonTensorStack(*"abcde")
    first = transform.inv(td)
    other.load_state_dict(copy.deepcopy(transform.state_dict()))
    rest = other.flush()
    assert first is not None
    assert rest is not None
    assert [one.get("text").tolist() for one in (first, rest)] == [["a", "b"], ["c", "d", "e"]]


def test_finished_rows_pass_and_n_steps_can_be_set() -> None:
    td, transform = steps([False] * 6), MultiStepTransform(3, 0.5)
    made = MultiStep(0.5, 3)(td)
    assert transform.inv(made) is made
    transform.n_steps = 1
    assert len(transform.inv(td)) == 5  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        transform.n_steps = 0


def test_other_transforms_see_flushed_rows_once() -> None:
    td, rb = steps([False] * 4), buffer(2)
    rb.insert_transform(0, lambda data: data.set("reached", data["next", "observation"] * 10), invert=True)
    rb.extend(td)
    rb.flush()
    assert (rb[:]["reached"] == rb[:]["next", "observation"] * 10).all()
    assert len(rb) == 4


def prioritised(n: int, **more: object) -> TensorDictReplayBuffer:
    return TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(20, **more), transform=MultiStepTransform(n, 0.5),
        batch_size=2,
    )  # fmt: skip


def priorities_of(rb: TensorDictReplayBuffer) -> list[float]:
    return [round(weight, 4) for weight in rb.sampler.state_dict()["_sum_tree"][: len(rb)].tolist()]


def test_priorities_belong_to_the_rows_that_are_written() -> None:
    td, rb = steps([place == 4 for place in range(9)]), prioritised(2)
    td["td_error"] = torch.arange(1.0, 10)
    for start, stop in ((0, 1), (1, 4), (4, 5), (5, 9)):
        rb.extend(td[start:stop])
        assert priorities_of(rb) == [*range(1, max(stop - 2, 0) + 1)]
    assert len(rb.flush()) == 2
    assert priorities_of(rb) == [*range(1, 10)]
    assert (rb[:]["td_error"] == td["td_error"]).all()


def test_priorities_of_single_steps_and_of_lanes_that_are_held_back() -> None:
    td, rb = steps([False] * 6), prioritised(2)
    td["td_error"] = torch.arange(1.0, 7)
    for step in td:
        rb.add(step)
    rb.flush()
    assert priorities_of(rb) == [1, 2, 3, 4, 5, 6]
    lanes = prioritised(2, ndim=2)
    both = torch.stack((td, td.clone().set("td_error", td["td_error"] * 10)))
    lanes.extend(both[:, :4])
    lanes.extend(both[:, 4:])
    lanes.flush()
    assert priorities_of(lanes) == [value for step in range(1, 7) for value in (step, 10 * step)]


def test_priorities_can_be_left_at_the_default() -> None:
    td, rb = steps([False] * 6), prioritised(2)
    td["td_error"] = torch.arange(2.0, 8)
    rb.extend(td[:4], update_priority=False)
    rb.extend(td[4:])
    assert priorities_of(rb) == [1, 1, 4, 5]


@pytest.mark.parametrize("place", [1, -1, slice(0, 2), [0, 2], slice(None)])
def test_assigned_rows_take_no_part_in_windows(place: object) -> None:
    td, rb = steps([False] * 7), buffer(3)
    rb.extend(td[:6])
    rows = rb[place].clone()  # type: ignore[index]
    rows["action"] += 100
    rb[place] = rows
    assert (rb[place] == rows).all()  # type: ignore[index]
    assert (len(rb), rb.transform[0].held) == (3, 3)
    rb.extend(td[6:])
    rb.flush()
    expected = MultiStep(0.5, 3)(td)
    expected[:3][place] = rows  # type: ignore[index]
    assert (rb[:] == expected).all()


def test_plain_steps_cannot_be_assigned() -> None:
    td, rb = steps([False] * 7), buffer(3)
    rb.extend(td)
    before = rb[:].clone()
    with pytest.raises(SchemaError):
        rb[:2] = td[:2]
    assert (rb[:] == before).all()
    assert rb.transform[0].held == 3


def test_assigned_rows_pass_the_other_transforms() -> None:
    td, rb = steps([False] * 5), buffer(2)
    rb.insert_transform(0, lambda data: data.set("action", data["action"] * 10), invert=True)
    rb.append_transform(Compose(MultiStepTransform(2, 0.5)))
    rb.extend(MultiStep(0.5, 2)(td))
    rows = rb[:2].clone()
    rows["action"] = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    rb[:2] = rows
    assert rb[:]["action"].flatten().tolist() == [10, 20, -20, -30, -40]


def test_steps_held_back_cannot_be_shared() -> None:
    with pytest.raises(SchemaError, match="other writing processes"):
        ReplayBuffer(storage=LazyTensorStorage(10), transform=MultiStepTransform(2, 0.9), shared=True)


def test_samplers_draw_only_written_rows() -> None:
    sampler, transform = SamplerWithoutReplacement(), MultiStepTransform(2, 0.9)
    rb = ReplayBuffer(storage=LazyTensorStorage(50), sampler=sampler, transform=transform, batch_size=4)
    rb.extend(steps([False] * 10))
    seen = torch.cat([rb.sample()["observation"], rb.sample()["observation"]])
    assert sorted(seen.flatten().tolist()) == list(range(8))


def test_threads_that_write_at_the_same_time_lose_no_step_that_is_held_back() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(1_000), transform=MultiStepTransform(3, 0.9, check_continuity=False))

    def write(first: int) -> None:
        for start in range(first, first + 200, 4):
            rb.extend(steps([False] * 4, first=start))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, range(0, 800, 200)))
    finally:
        sys.setswitchinterval(interval)
    rb.flush()
    assert sorted(rb[:]["observation"].flatten().tolist()) == list(range(800))
