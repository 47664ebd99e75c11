"""Cat and flatten: one field of several."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rbtool.core.engine.tasks import ResultRefused
from rbtool.core.errors import UsageError

IMAGES = {
    name: np.arange(5 * 2 * 3).reshape(5, 2, 3).astype(np.uint8) + shift
    for shift, name in enumerate(["observation.image", "next.observation.image"])
}


def test_cat_joins_in_the_order_given_on_both_sides(rows, do):
    made = rows([4, 3])
    before, after = do(made, select="observation"), do(made, cat="state=observation.position,observation.count")
    for side in ("", "next."):
        parts = [before[f"{side}observation.{name}"].reshape(7, -1) for name in ("position", "count")]
        np.testing.assert_array_equal(after[f"{side}state"], np.concatenate(parts, 1))
    assert not [name for name in after if "position" in name]
    swapped = do(made, cat="state=observation.count,observation.position")["state"]
    np.testing.assert_array_equal(swapped[:, 1:], after["state"][:, :3])


def test_a_group_is_joined_by_name_and_may_give_its_name(rows, do):
    made = rows([4])
    found, expected = do(made, cat="observation=observation"), do(made, cat="s=observation.count,observation.position")
    np.testing.assert_array_equal(found["observation"], expected["s"])
    assert "next.observation" in found


def test_cast_and_cat_together_are_what_they_are_one_by_one(rows, do):
    made = rows([6])
    found = do(made, cast=["observation.position=float32", "observation.count=int32"], cat="s=observation")["s"]
    assert found.dtype == np.float64  # of int32 and float32
    np.testing.assert_array_equal(found[:, 1:], do(made, select="observation")["observation.position"].astype("f4"))


def test_where_next_lacks_a_part_it_keeps_what_it_has(rows, do):
    found = do(rows([3]), cat="inputs=observation.position,action")
    assert "next.inputs" not in found
    assert "next.observation.position" in found
    assert found["inputs"].shape == (3, 5)


def test_leaves_of_more_dimensions_are_joined_along_the_last(rows, do):
    made = rows([5], **IMAGES)
    found = do(made, rename="observation.image=image", cat={"pair": ["image", "image"]})
    assert found["pair"].shape == (5, 2, 3)
    made = rows([5], **{**IMAGES, "mask": np.zeros((5, 2, 1), np.float32)})
    assert do(made, cat="both=observation.image,mask")["both"].dtype == np.float32


def test_flatten_makes_one_vector_by_name(rows, do):
    made = rows([5], **IMAGES)
    before, after = do(made, select="observation"), do(made, flatten=True)
    for side in ("", "next."):
        parts = [before[f"{side}observation.{name}"].reshape(5, -1) for name in ("count", "image", "position")]
        np.testing.assert_array_equal(after[f"{side}observation"], np.concatenate(parts, 1))
    assert after["observation"].dtype == np.float64
    small = do(made, cast="observation.position=float32", flatten=True)["observation"]
    assert (small.dtype, small.shape) == (np.float32, (5, 10))


def test_flatten_refuses_numbers_that_would_be_rounded(rows, do):
    made = rows([2], **{"observation.count": np.array([2**40 + 1, 1]), "next.observation.count": np.array([1, 2])})
    with pytest.raises(ResultRefused, match="1099511627777 of 'observation' need not be exact in float32"):
        do(made, cast="observation.position=float32", flatten=True)


def test_flatten_leaves_alone_what_stands_at_the_root_only(rows, do):
    made = rows([3], goal=np.arange(6.0).reshape(3, 2))
    found = do(made, flatten=True)
    assert found["goal"].shape == (3, 2)
    assert found["observation"].shape == (3, 4)


@pytest.mark.parametrize(
    ("more", "renamed"),
    [
        ((), "mission"),
        (("mission",), "observation_mission"),
        (("mission.of",), "observation_mission"),
    ],
)
def test_flatten_says_what_to_do_with_text(rows, do, more, renamed):
    text, length = np.zeros((3, 8), np.uint8), np.zeros((3, 1), np.int64)
    parts = {"observation.mission": text, "observation.mission_length": length}
    parts |= {f"next.{name}": values for name, values in parts.items()} | {name: np.arange(3) for name in more}
    fields, block = rows([3], **parts)
    roles = {"mission": "text", "mission_length": "info"}
    made = tuple(replace(f, role=roles.get(f.key[-1], f.role) if len(f.key) > 1 else f.role) for f in fields), block
    with pytest.raises(UsageError, match=r"a group in which observation.mission would stay behind") as caught:
        do(made, flatten=True)
    assert caught.value.hint == f"add --rename observation.mission={renamed}, too"
    found = do(made, rename=f"observation.mission={renamed}", flatten=True)
    assert (found["observation"].shape, found[f"next.{renamed}"].shape) == ((3, 4), (3, 8))


@pytest.mark.parametrize(
    ("operations", "words"),
    [
        ({"cat": "s=observation.position,next.observation.count"}, "next alone"),
        ({"cat": "s=action,reward"}, "stay apart"),
        ({"cat": "s=action,done"}, "stay apart|no number to learn from"),
        ({"cat": "action=observation.position,observation.count"}, "already exists"),
        ({"cat": "s=episode,action"}, "no number to learn from"),
        ({"cat": "s=observation.image,action"}, r"last dimension of observation.image \[2, 3\], action \[2\]"),
        ({"cat": "observation=observation.image"}, "a group too"),
        ({"cat": "s="}, "it is written new=part,part"),
        ({"cat": "s=a,,b"}, "empty name"),
    ],
)
def test_what_cannot_be_joined(rows, do, operations, words):
    with pytest.raises(UsageError, match=words):
        do(rows([5], **IMAGES), **operations)
