from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.errors import MissingKeyError
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.transforms.base import Transform
from rbtool.core.transforms.keyed import CatTensors, ExcludeTransform, Normalize, RenameTransform, SelectTransform


def steps(count: int = 4) -> TensorDict:
    """Steps in TED: two observations, an action, and what follows."""
    observations = {
        "a": torch.arange(count).float().unsqueeze(-1),
        "b": torch.ones(count, 2),
        "info": {"c": torch.zeros(count)},
    }
    flags = {name: torch.zeros(count, 1, dtype=torch.bool) for name in ("done", "terminated", "truncated")}
    following = observations | {"a": observations["a"] + 1} | flags | {"reward": torch.ones(count, 1)}
    return TensorDict(observations | {"action": torch.ones(count, 3), "next": following}, [count])


def keys(data: Any) -> set[str]:
    return {".".join((key,) if isinstance(key, str) else key) for key in data.keys(True, True)}


def sampled(transform: Transform) -> Any:
    """Draw a batch of a buffer that has this transform."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4), batch_size=3, transform=transform)
    buffer.extend(steps())
    return buffer.sample()


ENDS = {"next.done", "next.terminated", "next.truncated", "next.reward", "index"}


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (SelectTransform("a"), {"a", "next.a"} | ENDS),
        (SelectTransform("a", "absent"), {"a", "next.a"} | ENDS),
        (SelectTransform(("info", "c"), keep_dones=False), {"info.c", "next.info.c", "next.reward", "index"}),
        (SelectTransform("info", keep_rewards=False), {"info.c", "next.info.c", "index"} | ENDS - {"next.reward"}),
        (SelectTransform(("next", "a"), keep_dones=False, keep_rewards=False), {"next.a", "index"}),
    ],
)
def test_what_is_selected_of_the_root_is_selected_of_next(transform: Transform, expected: set[str]) -> None:
    assert keys(sampled(transform)) == expected


@pytest.mark.parametrize(
    ("transform", "gone"),
    [
        (ExcludeTransform("a"), {"a", "next.a"}),
        (ExcludeTransform("a", "b", "absent"), {"a", "next.a", "b", "next.b"}),
        (ExcludeTransform(("next", "a")), {"next.a"}),
        (ExcludeTransform("info"), {"info.c", "next.info.c"}),
        (ExcludeTransform("a", inverse=True), {"a", "next.a"}),
    ],
)
def test_what_is_excluded_of_the_root_is_excluded_of_next(transform: Transform, gone: set[str]) -> None:
    assert keys(sampled(transform)) == (keys(steps()) | {"index"}) - gone


def test_exclusion_on_the_way_in_leaves_the_storage_without_it() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4), transform=ExcludeTransform("a", inverse=True))
    data = steps()
    buffer.extend(data)
    assert "a" not in keys(buffer.storage[:])
    assert "a" in keys(data)


@pytest.mark.parametrize(
    ("transform", "so"),
    [
        (RenameTransform(["observaton"], ["seen"]), ", so it cannot be renamed to seen"),
        (CatTensors(["observaton", "action"], "all"), ", so it cannot be joined with others"),
        (Normalize(["observaton"]), ""),
    ],
)
def test_an_entry_that_is_not_there_is_named_with_the_nearest(transform: Any, so: str) -> None:
    with pytest.raises(MissingKeyError) as caught:
        transform(TensorDict(observation=torch.zeros(2, 3), action=torch.zeros(2, 1), batch_size=[2]))
    assert str(caught.value) == f"observaton is not in the batch{so}; did you mean 'observation'?"
    assert caught.value.__notes__ == ["hint: it has observation, action"]


@pytest.mark.parametrize("create_copy", [False, True])
def test_renaming_takes_next_along(create_copy: bool) -> None:
    batch = sampled(RenameTransform(["a", ("info", "c")], ["x", "c"], create_copy=create_copy))
    assert {"x", "next.x", "c", "next.c"} <= keys(batch)
    assert ({"a", "next.a", "info.c"} <= keys(batch)) is create_copy
    assert torch.equal(batch["next", "x"], batch["x"] + 1)


def test_renaming_works_on_the_way_in() -> None:
    transform = RenameTransform(["b"], ["z"], in_keys_inv=["stored"], out_keys_inv=["a"])
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4), transform=transform)
    buffer.extend(steps())
    assert {"stored", "next.stored"} <= keys(buffer.storage[:])
    assert "a" not in keys(buffer.storage[:])


def test_explicit_names_under_next_are_renamed_once() -> None:
    batch = RenameTransform(["a", ("next", "a")], ["x", ("next", "y")])(steps())
    assert {"x", "next.y"} <= keys(batch)
    assert "next.x" not in keys(batch)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((["a"], ["x", "y"]), ValueError, "1 in_keys and 2 out_keys"),
        ((["a", "b"], ["b", "c"]), ValueError, "b is in in_keys and in out_keys"),
        ((["a", "b"], ["x", "x"]), ValueError, "twice"),
        ((["a"], ["x"], ["y"]), ValueError, "both or neither"),
        (([7], ["x"]), ValueError, "the key is 7"),
    ],
)
def test_a_renaming_that_makes_no_sense_is_refused(arguments: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        RenameTransform(*arguments)


def test_a_missing_entry_is_a_key_error_unless_it_is_tolerated() -> None:
    transform = RenameTransform(["absent"], ["x"])
    with pytest.raises(KeyError, match="absent"):
        transform(steps())
    transform.missing_tolerance = True
    assert keys(transform(steps())) == keys(steps())


@pytest.mark.parametrize("sort", [True, False])
def test_joining_takes_next_along(sort: bool) -> None:
    batch = sampled(CatTensors(["b", "a"], out_key="observation", sort=sort))
    place = 0 if sort else 2
    assert batch["observation"].shape == (3, 3)
    assert torch.equal(batch["next", "observation"][:, place], batch["observation"][:, place] + 1)
    assert not {"a", "b", "next.a", "next.b"} & keys(batch)


def test_joined_parts_may_stay() -> None:
    assert {"a", "b", "next.a", "observation_vector"} <= keys(sampled(CatTensors(["a", "b"], del_keys=False)))


def test_parts_that_next_does_not_have_all_of_are_joined_at_the_root_alone() -> None:
    batch = CatTensors(["a", "action"], out_key="both")(steps())
    assert "both" in keys(batch)
    assert {"next.a"} <= keys(batch)
    assert "next.both" not in keys(batch)


def test_a_part_without_the_dimension_gets_one() -> None:
    batch = CatTensors(["a", ("info", "c")], out_key="x", dim=-1, unsqueeze_if_oor=True)(steps())
    assert batch["x"].shape == (4, 2)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: CatTensors()(steps()), ValueError, "no in_keys"),
        (lambda: CatTensors(["a", "absent"])(steps()), KeyError, "absent"),
        (lambda: CatTensors(["a", "b"], dim=0)(steps()), RuntimeError, "cannot be joined along dimension 0"),
        (lambda: SelectTransform("a")(torch.zeros(3)), RuntimeError, "needs a tensordict, found a Tensor"),
    ],
)
def test_what_cannot_be_is_told(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize(
    "transform", [SelectTransform("a"), ExcludeTransform("a"), RenameTransform(["a"], ["x"]), CatTensors(["a", "b"])]
)
def test_the_data_given_is_not_changed(transform: Transform) -> None:
    data = steps()
    transform(data)
    assert keys(data) == keys(steps())
    assert (data == steps()).all()
