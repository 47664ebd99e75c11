"""Rollouts, as TorchRL's environments and collectors return them, become datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_envs import Recorded
from tensordict import NonTensorData, TensorDict

import rbtool


def rollout(done: list[list[bool]], **more: Any) -> TensorDict:
    """Lanes `[lanes, time]` whose observations count up by one step after the other."""
    ends = torch.tensor(done)[..., None]
    lanes, time = ends.shape[:2]
    counts = torch.arange(time).expand(lanes, time)[..., None] + 100 * torch.arange(lanes)[:, None, None]
    after = {"observation": counts + 1, "reward": counts.float(), "done": ends, "terminated": ends}
    root = {"observation": counts, "action": 2 * counts, "done": torch.zeros_like(ends)}
    return TensorDict({**root, "next": after, **more}, [lanes, time])


def lengths(dest: Path) -> tuple[list[int], list[int]]:
    recorded = Recorded(dest)
    return recorded.table.length.tolist(), recorded.table.end_reason.tolist()


def test_a_rollout_of_one_dimension(tmp_path: Path) -> None:
    td = rollout([[False, True, False, False, True, False]])[0]
    manifest = rbtool.record_rollout(td, tmp_path / "d")
    assert (manifest.steps, manifest.episodes) == (6, 3)
    assert lengths(tmp_path / "d") == ([2, 3, 1], [0, 0, 3])
    recorded = Recorded(tmp_path / "d")
    assert recorded.columns["next.observation"].ravel().tolist() == [1, 2, 3, 4, 5, 6]
    assert recorded.columns["next.truncated"].ravel().tolist() == [False] * 5 + [True]
    assert recorded.columns["episode"].tolist() == [0, 0, 1, 1, 1, 2]
    assert not rbtool.check(tmp_path / "d").errors
    assert len(rbtool.load_dataset(tmp_path / "d", batch_size=2).sample()) == 2


@settings(max_examples=20)
@given(
    done=st.integers(1, 5).flatmap(
        lambda time: st.lists(st.lists(st.booleans(), min_size=time, max_size=time), min_size=1, max_size=4)
    ),
    nested=st.booleans(),
)
def test_every_lane_keeps_its_episodes(
    tmp_path_factory: pytest.TempPathFactory, done: list[list[bool]], nested: bool
) -> None:
    dest = tmp_path_factory.mktemp("lanes") / "d"
    td = rollout(done)
    rbtool.record_rollout(td.reshape(1, *td.batch_size) if nested else td, dest)
    recorded = Recorded(dest)
    assert torch.equal(torch.from_numpy(recorded.columns["observation"]), td["observation"].reshape(-1, 1))
    expected = []
    for lane in done:
        open_steps = 0
        for ended in lane:
            open_steps += 1
            if ended:
                expected.append((open_steps, 0))
                open_steps = 0
        expected += [(open_steps, 3)] if open_steps else []
    assert list(zip(*(part for part in lengths(dest)), strict=True)) == expected


def test_padding_of_trajectories_is_left_out(tmp_path: Path) -> None:
    mask = torch.tensor([[True, True, True], [True, False, False]])
    td = rollout([[False, False, True], [True, False, False]], collector={"mask": mask})
    rbtool.record_rollout(td, tmp_path / "d")
    assert lengths(tmp_path / "d") == ([3, 1], [0, 0])
    assert Recorded(tmp_path / "d").columns["observation"].ravel().tolist() == [0, 1, 2, 100]


def test_another_trajectory_begins_an_episode(tmp_path: Path) -> None:
    ids = torch.tensor([[7, 7, 8, 8]])
    rbtool.record_rollout(rollout([[False] * 4], collector={"traj_ids": ids}), tmp_path / "d")
    assert lengths(tmp_path / "d") == ([2, 2], [3, 3])


def test_rows_around_padding_do_not_follow_each_other(tmp_path: Path) -> None:
    mask = torch.tensor([[True, False, True, True]])
    rbtool.record_rollout(rollout([[False, False, False, True]], mask=mask), tmp_path / "d")
    assert lengths(tmp_path / "d") == ([1, 2], [3, 0])
    assert Recorded(tmp_path / "d").columns["next.observation"].ravel().tolist() == [1, 3, 4]
    assert not rbtool.check(tmp_path / "d").findings


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16])
@pytest.mark.parametrize("shape", [(1, 5), (1, 5, 1)])
def test_another_number_begins_an_episode(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    numbers = torch.tensor([7, 7, 3, 3, 4], dtype=dtype).reshape(shape)
    manifest = rbtool.record_rollout(rollout([[False, False, False, True, True]], episode=numbers), tmp_path / "d")
    assert lengths(tmp_path / "d") == ([2, 2, 1], [3, 0, 0])
    recorded = Recorded(tmp_path / "d")
    assert (recorded.table.episode.tolist(), manifest.dropped_keys) == ([7, 3, 4], ())
    assert recorded.columns["episode"].tolist() == [7, 7, 3, 3, 4]
    assert "TED010" not in {one.rule for one in rbtool.check(tmp_path / "d").findings}


@pytest.mark.parametrize(
    ("numbers", "why"),
    [
        ([[0, 0, 1], [0, 0, 1]], "it gives several episodes the same number"),  # each lane counts for itself
        ([[0, 0, 0], [1, 1, 1]], "it gives several episodes the same number"),  # of which two are one by number
        ([[0.5, 0.5, 1.5], [2, 2, 3]], "it is not one whole number for each step"),
        ([[True, True, False], [True, True, False]], "it is not one whole number for each step"),
        ([[[0, 1]] * 3, [[1, 2]] * 3], "it is not one whole number for each step"),
    ],
)
def test_numbers_that_name_no_episode_are_left_out(tmp_path: Path, numbers: Any, why: str) -> None:
    td = rollout([[False, True, True]] * 2, episode=torch.tensor(numbers))
    manifest = rbtool.record_rollout(td, tmp_path / "d")
    assert [(one.key, one.why) for one in manifest.dropped_keys] == [("episode", why)]
    recorded = Recorded(tmp_path / "d")
    assert recorded.table.episode.tolist() == [0, 1, 2, 3]
    assert recorded.columns["episode"].tolist() == [0, 0, 1, 2, 2, 3]


def test_leaves_that_are_no_tensors_are_named(tmp_path: Path) -> None:
    td = rollout([[True]])
    td["note"] = NonTensorData("text", batch_size=td.batch_size)
    td["half"] = torch.ones(1, 1, 2, dtype=torch.bfloat16)
    manifest = rbtool.record_rollout(td, tmp_path / "d")
    assert [one.key for one in manifest.dropped_keys] == ["note"]
    assert np.array_equal(Recorded(tmp_path / "d").columns["half"], td["half"].view(torch.uint16).numpy()[0])


def test_what_is_no_rollout_is_refused(tmp_path: Path) -> None:
    for wrong, message in (
        ({}, "expected a rollout as a tensordict, found a dict"),
        (TensorDict({}, []), "expected 1 to 3 dimensions"),
        (TensorDict({"observation": torch.zeros(2)}, [2]), "say where and why episodes end"),
        (rollout([[True]])[:, :0], "the rollout has no step"),
    ):
        with pytest.raises(rbtool.SchemaError, match=message):
            rbtool.record_rollout(wrong, tmp_path / "d")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "file").touch()
    with pytest.raises(rbtool.UsageError):
        rbtool.record_rollout(rollout([[True]]), tmp_path / "d")
