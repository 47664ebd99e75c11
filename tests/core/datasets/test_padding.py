"""Padded trajectories: exact at every boundary, and the same as TorchRL's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from rbtool.core.datasets.storage import padded, trajectory_lengths

LENGTHS = st.lists(st.integers(1, 7), min_size=1, max_size=8)


def _rows(steps: int) -> TensorDict:
    numbers = torch.arange(1, steps + 1)
    inner = TensorDict({"observation": numbers.unsqueeze(1) * torch.tensor([1.0, -1.0])}, [steps])
    wide = (numbers + 70_000).numpy().astype(np.uint32)
    return TensorDict({"action": numbers.to(torch.bfloat16), "wide": torch.from_numpy(wide), "next": inner}, [steps])


@given(LENGTHS)
def test_every_step_is_once_in_its_place(lengths: list[int]) -> None:
    rows = _rows(sum(lengths))
    found = padded(rows, np.array(lengths))
    assert found.batch_size == found["next"].batch_size == (len(lengths), max(lengths))
    starts = np.cumsum([0, *lengths])
    for number, (start, length) in enumerate(zip(starts, lengths, strict=False)):
        assert found["mask"][number].tolist() == [step < length for step in range(max(lengths))]
        assert found["traj_ids"][number].tolist() == [number] * length + [0] * (max(lengths) - length)
        for key in ("action", ("next", "observation")):
            assert torch.equal(found[key][number, :length], rows[key][start : start + length])
            assert not found[key][number, length:].any()
        assert found["wide"][number].tolist()[:length] == rows["wide"].tolist()[start : start + length]


@given(LENGTHS, st.data())
def test_a_trajectory_ends_with_its_episode_and_with_done(lengths: list[int], data: st.DataObject) -> None:
    done = np.array(data.draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths))))
    kept = done.copy()
    found = trajectory_lengths(np.array(lengths), done)
    ends = {*np.cumsum(lengths).tolist(), *(np.flatnonzero(done) + 1).tolist()}
    assert np.cumsum(found).tolist() == sorted(ends)
    assert (done == kept).all()


def test_episodes_without_steps_end_nothing() -> None:
    assert trajectory_lengths(np.array([0, 3, 0, 2, 0]), np.zeros(5, bool)).tolist() == [3, 2]


def test_one_trajectory_is_a_row() -> None:
    found = padded(_rows(3), np.array([3]))
    assert (found.batch_size, found["mask"].tolist()) == ((1, 3), [[True] * 3])


@pytest.mark.parametrize("name", ["mask", "traj_ids"])
def test_an_entry_in_the_way_is_named(name: str) -> None:
    rows = TensorDict({name: torch.arange(3)}, [3])
    with pytest.raises(RuntimeError, match=f"entry '{name}' of its own"):
        padded(rows, np.array([3]))
    padded(TensorDict({"info": rows}, [3]), np.array([3]))  # deeper down it is in nobody's way


@pytest.mark.peer
@pytest.mark.parametrize("lengths", [[4, 4, 2], [3], [2, 2], [1, 5, 1]])
def test_as_torchrl_splits(lengths: list[int]) -> None:
    collectors = pytest.importorskip("torchrl.collectors.utils")
    rows = _rows(sum(lengths)).exclude("wide")
    done = torch.zeros(sum(lengths), 1, dtype=torch.bool)
    done[np.cumsum(lengths) - 1] = True
    rows["next", "done"] = done
    theirs, ours = collectors.split_trajectories(rows.clone()), padded(rows, np.array(lengths))
    assert (set(theirs.keys(True, True)), theirs.batch_size) == (set(ours.keys(True, True)), ours.batch_size)
    assert (theirs == ours).all()
