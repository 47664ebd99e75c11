"""Trajectories in rows of their own, against a plain loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from rbtool.core.errors import MissingKeyError, SchemaError
from rbtool.core.trajectories import split_trajectories


def steps(
    ids: list[list[int]] | list[int] | None, ends: list[list[bool]] | list[bool], flag: str = "done"
) -> TensorDict:
    done = torch.tensor(ends)
    number = torch.arange(done.numel()).reshape(done.shape) + 1
    td = TensorDict({"observation": number.float()[..., None], "next": {flag: done[..., None]}}, done.shape)
    if ids is not None:
        td["collector", "traj_ids"] = torch.tensor(ids)
    return td


def runs(labels: list[list[tuple[int, bool]]], by_id: bool) -> list[list[int]]:
    """The step numbers of every trajectory, row by row of the batch, found with a loop."""
    found, number = [], 0
    for row in labels:
        for place, (label, _) in enumerate(row):
            number += 1
            new = place == 0 or (label != row[place - 1][0] if by_id else row[place - 1][1])
            found.append([number]) if new else found[-1].append(number)
    return found


rows = st.integers(1, 7).flatmap(
    lambda time: st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=time, max_size=time), min_size=1, max_size=3
    )
)


@settings(max_examples=150, deadline=None)
@given(rows, st.booleans())
def test_every_trajectory_gets_its_row(labels: list[list[tuple[int, bool]]], by_id: bool) -> None:
    ids, ends = ([[part[i] for part in row] for row in labels] for i in (0, 1))
    expected = runs(labels, by_id)
    found = split_trajectories(steps(ids if by_id else None, ends))  # type: ignore[arg-type]
    mask = found["collector", "mask"] if by_id else found["mask"]
    assert found.shape == (len(expected), max(map(len, expected)))
    assert [row[keep].tolist() for row, keep in zip(found["observation"][..., 0], mask, strict=True)] == expected
    assert not found["observation"][~mask].any()
    again = split_trajectories(found)
    assert (again == found).all()


@settings(max_examples=40, deadline=None)
@given(rows, st.sampled_from([True, torch.jagged]))
def test_ragged_rows_are_the_same(labels: list[list[tuple[int, bool]]], nested: bool) -> None:
    found = split_trajectories(steps(None, [[end for _, end in row] for row in labels]), as_nested=nested)
    assert [row.flatten().tolist() for row in found["observation"].unbind()] == runs(labels, by_id=False)
    assert "mask" not in found
    assert found.batch_size[0] == len(found["observation"].unbind())


def test_the_documented_case() -> None:
    ends = [place in (3, 7) for place in range(10)]
    td = steps(None, ends)
    found = split_trajectories(td)
    assert found.shape == (3, 4)
    assert found["mask"].sum(-1).tolist() == [4, 4, 2]
    assert found["traj_ids"][:, 0].tolist() == [0, 1, 2]
    assert "traj_ids" not in td


@pytest.mark.parametrize("key", ["nope", ("collector", "nope")])
def test_a_key_of_ids_that_is_not_there_is_named(key: str | tuple[str, str]) -> None:
    td = steps([3, 3, 4], [False, True, False])
    before = td.clone()
    with pytest.raises(MissingKeyError, match=r"nope is not in the batch, which has observation, next\.done"):
        split_trajectories(td, trajectory_key=key, done_key="done")
    with pytest.raises(MissingKeyError, match="trajectory_key nope is not in the batch, which has no entries"):
        split_trajectories(TensorDict({}, [3]), trajectory_key="nope")
    assert (td == before).all()
    assert set(td.keys(True)) == set(before.keys(True))


@pytest.mark.parametrize("flag", ["truncated", "terminated"])
def test_any_flag_of_the_family_ends_a_trajectory(flag: str) -> None:
    td = steps(None, [False, True, False, False], flag)
    td["next", "done"] = torch.zeros(4, 1, dtype=torch.bool)
    assert split_trajectories(td)["mask"].sum(-1).tolist() == [2, 2]


def test_ids_that_come_again_are_other_trajectories() -> None:
    found = split_trajectories(steps([0, 0, 1, 1, 0, 0], [False] * 6))
    assert found["observation"][..., 0].tolist() == [[1, 2], [3, 4], [5, 6]]


def test_rows_that_are_full_come_back_with_a_mask() -> None:
    found = split_trajectories(steps([[4, 4], [4, 4]], [[False, False], [False, False]]))
    assert found["collector", "mask"].all()
    assert found["observation"][..., 0].tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("arguments", "mask"),
    [({"trajectory_key": ("meta", "run")}, ("meta", "mask")), ({"prefix": "lane"}, ("lane", "mask"))],
)
def test_the_mask_lies_beside_the_ids(arguments: dict[str, object], mask: tuple[str, str]) -> None:
    td = steps(None, [False, True, False])
    td[arguments.get("trajectory_key", ("lane", "traj_ids"))] = torch.tensor([5, 6, 6])
    found = split_trajectories(td, **arguments)  # type: ignore[arg-type]
    assert found[mask].sum(-1).tolist() == [1, 2]


def test_other_done_keys_and_no_steps() -> None:
    td = steps(None, [False, True, False], "finished")
    assert split_trajectories(td, done_key="finished").shape == (2, 2)
    assert split_trajectories(td[:0], done_key="finished").shape == (0, 0)


def test_texts_are_padded_with_texts() -> None:
    td = steps(None, [True, False, False])
    td["text"] = NonTensorStack("a", "b", "c")
    assert split_trajectories(td)["text"].tolist() == [["a", "a"], ["b", "c"]]
    with pytest.raises(SchemaError, match="text is not a tensor"):
        split_trajectories(td, as_nested=True)


def test_a_flag_of_any_agent_ends_a_trajectory() -> None:
    flags = torch.tensor([[False, False], [True, False], [False, False]]).unsqueeze(-1)
    found = split_trajectories(TensorDict({"step": torch.arange(3), "next": {"done": flags}}, [3]))
    assert found["mask"].sum(-1).tolist() == [2, 1]


def test_batches_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(MissingKeyError, match=r"next\.done not found"):
        split_trajectories(TensorDict({"next": {"reward": torch.zeros(3, 1)}}, [3]))
    with pytest.raises(SchemaError, match="no batch dimension"):
        split_trajectories(TensorDict())
    with pytest.raises(SchemaError, match="a dict"):
        split_trajectories({})  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="no steps, but ragged"):
        split_trajectories(steps(None, [True])[:0], as_nested=True)
