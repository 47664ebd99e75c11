"""Rename, select, exclude, cat and flatten: which fields are there, and what becomes of theirs under next."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rbtool.core.engine.tasks import ResultRefused
from rbtool.core.errors import UsageError

ROOT = {"action", "episode", "observation.position", "observation.count"}
ENDS = {"next.reward", "next.done", "next.terminated", "next.truncated"}
OBSERVATIONS = {"observation.position", "observation.count", "next.observation.position", "next.observation.count"}


@pytest.fixture(scope="module")
def made(rows):
    return rows([4, 2, 1])


@pytest.mark.parametrize(
    ("operations", "kept"),
    [
        ({"select": "action"}, {"action", "episode", *ENDS}),
        ({"select": ["observation", "action"]}, {*ROOT, *OBSERVATIONS, *ENDS}),
        ({"select": "observation.count"}, {"observation.count", "next.observation.count", "episode", *ENDS}),
        ({"select": "next.observation.count"}, {"next.observation.count", "episode", *ENDS}),
        ({"exclude": "observation,episode"}, {"action", *ENDS}),
        ({"exclude": "next.observation"}, {*ROOT, *ENDS}),
        ({"exclude": "reward"}, {*ROOT, *OBSERVATIONS, *ENDS} - {"next.reward"}),
        ({"select": "action", "return_to_go": True}, {"action", "episode", "return_to_go", *ENDS}),
        ({"select": "action", "return_to_go": True, "exclude": "return_to_go"}, {"action", "episode", *ENDS}),
    ],
)
def test_fields_are_kept_with_what_belongs_to_them(operations, kept, made, do):
    assert do(made, **operations).keys() == kept


@pytest.mark.parametrize(
    ("rename", "moved"),
    [
        ("action=act", {"action": "act"}),
        ("observation=state", {name: name.replace("observation", "state") for name in OBSERVATIONS}),
        ("observation.count=count", {"observation.count": "count", "next.observation.count": "next.count"}),
        ("reward=score", {"next.reward": "next.score"}),
        ("next.reward=next.info.reward", {"next.reward": "next.info.reward"}),
    ],
)
def test_rename_moves_values_on_both_sides(rename, moved, made, do):
    before, after = do(made, select="action,observation"), do(made, rename=rename)
    assert after.keys() == {moved.get(name, name) for name in before}
    for name, values in before.items():
        assert np.array_equal(after[moved.get(name, name)], values)


def test_the_length_of_a_text_goes_with_it(rows, work):
    fields, block = rows([3], **{"info.said": np.zeros((3, 4), np.uint8), "info.said_length": np.zeros(3, np.int32)})
    text = tuple(f if f.key != ("info", "said") else f.__class__(f.key, f.dtype, f.shape, "text") for f in fields)
    renamed = work((text, block), rename="info.said=info.words")
    assert {"info.words", "info.words_length"} <= {field.name for field in renamed.fields}
    assert not {"info.said_length"} & {field.name for field in renamed.fields}
    assert "info.said_length" not in {field.name for field in work((text, block), exclude="info.said").fields}
    assert "info.said_length" in {field.name for field in work((text, block), select="info.said").fields}


@pytest.mark.parametrize(
    ("operations", "words"),
    [
        ({"select": "acton"}, "field 'acton' not found; did you mean 'action'"),
        ({"exclude": "observation.cuont"}, "did you mean 'observation.count'"),
        ({"cast": "observaton=float32"}, "did you mean 'observation'"),
        ({"rename": "done=finished"}, "reserved for the layout"),
        ({"rename": "action=episode"}, "reserved for the layout"),
        ({"rename": "action=observation"}, "a group too"),
        ({"rename": "action=observation.count"}, "already exists"),
        ({"rename": "action=next.action"}, "stay apart"),
        ({"rename": "action=a..b"}, "not a valid field name"),
        ({"rename": "action=shape"}, "tensordict keeps 'shape'"),
        ({"rename": "next.observation=next.state"}, "must change with it"),
        ({"exclude": "done"}, "mark where episodes end"),
        ({"exclude": "next"}, "mark where episodes end"),
        ({"cast": "state=float32", "cat": "state=observation.position"}, "cat makes only after it"),
    ],
)
def test_names_that_make_no_sense_are_refused_before_a_row_is_read(operations, words, made, work):
    with pytest.raises(UsageError, match=words):
        work(made, **operations)


@pytest.mark.parametrize(
    ("operations", "words"),
    [
        ({"rename": "a.b=c"}, r"'a\.b' means both \('a', 'b'\) and \('a\.b',\)"),
        ({"rename": "x.a.b=x.c"}, r"'x\.a\.b' means both"),
        ({"cast": "a.b=float32"}, "means both"),
        ({"cast": "n.b=float64"}, "means both"),
        ({"cat": "z=a.b,action"}, "means both"),
        ({"where": "a.b[0] > 0"}, "means both"),
        ({"normalize": "x"}, r"two fields are called 'x\.a\.b'"),
    ],
)
def test_a_name_that_two_fields_share_is_refused(operations, words, rows, work):
    fields, block = rows([3])
    columns = dict(block.columns)
    for key in [("a.b",), ("a", "b"), ("x", "a.b"), ("x", "a", "b"), ("next", "n.b"), ("next", "n", "b")]:
        columns[key] = columns["action",]
        fields = (*fields, fields[0].__class__(key, "float32", (2,), "observation"))
    with pytest.raises(UsageError, match=words):
        work((fields, block.__class__(columns, block.pieces, 0)), **operations)


def test_fields_are_read_left_out_and_renamed_as_requested(made, work):
    known = work(made, select="action", exclude="reward", where="observation.count > 0")
    assert {".".join(key) for key in known.reads(made[0])} == {
        "action", "episode", "observation.count", "next.done", "next.terminated", "next.truncated",
    }  # fmt: skip
    known = work(made, rename="action=act", cat="state=observation.position", select="state,act", exclude="episode")
    assert known.left_out(made[0], known.fields) == {
        "observation.count": "not selected", "next.observation.count": "not selected", "episode": "excluded",
    }  # fmt: skip
    known = work(made, rename="action=act", n_step=2, gamma=0.9, flatten=True)
    roles = {field.name: field.role for field in known.fields}
    assert (roles["act"], roles["observation"], roles["gamma"], roles["multi_step.done"]) == (
        "action", "observation", "info", "info",
    )  # fmt: skip


# Cat and flatten: one field of several.

IMAGES = {
    name: np.arange(5 * 2 * 3).reshape(5, 2, 3).astype(np.uint8) + shift
    for shift, name in enumerate(["observation.image", "next.observation.image"])
}


def test_cat_joins_in_the_order_given_or_by_name(rows, do):
    made = rows([4, 3])
    before, after = do(made, select="observation"), do(made, cat="state=observation.position,observation.count")
    for side in ("", "next."):
        parts = [before[f"{side}observation.{name}"].reshape(7, -1) for name in ("position", "count")]
        np.testing.assert_array_equal(after[f"{side}state"], np.concatenate(parts, 1))
    assert not [name for name in after if "position" in name]
    swapped = do(made, cat="state=observation.count,observation.position")["state"]
    np.testing.assert_array_equal(swapped[:, 1:], after["state"][:, :3])
    made = rows([4])
    found, expected = do(made, cat="observation=observation"), do(made, cat="s=observation.count,observation.position")
    np.testing.assert_array_equal(found["observation"], expected["s"])
    assert "next.observation" in found


def test_cat_of_parts_that_next_lacks_or_of_more_dimensions(rows, do):
    found = do(rows([3]), cat="inputs=observation.position,action")
    assert "next.inputs" not in found
    assert "next.observation.position" in found
    assert found["inputs"].shape == (3, 5)
    made = rows([5], **IMAGES)
    found = do(made, rename="observation.image=image", cat={"pair": ["image", "image"]})
    assert found["pair"].shape == (5, 2, 3)
    made = rows([5], **{**IMAGES, "mask": np.zeros((5, 2, 1), np.float32)})
    assert do(made, cat="both=observation.image,mask")["both"].dtype == np.float32
    made = rows([6])
    found = do(made, cast=["observation.position=float32", "observation.count=int32"], cat="s=observation")["s"]
    assert found.dtype == np.float64  # of int32 and float32
    np.testing.assert_array_equal(found[:, 1:], do(made, select="observation")["observation.position"].astype("f4"))


def test_flatten_makes_one_vector_and_leaves_the_root_alone(rows, do):
    made = rows([5], **IMAGES)
    before, after = do(made, select="observation"), do(made, flatten=True)
    for side in ("", "next."):
        parts = [before[f"{side}observation.{name}"].reshape(5, -1) for name in ("count", "image", "position")]
        np.testing.assert_array_equal(after[f"{side}observation"], np.concatenate(parts, 1))
    assert after["observation"].dtype == np.float64
    small = do(made, cast="observation.position=float32", flatten=True)["observation"]
    assert (small.dtype, small.shape) == (np.float32, (5, 10))
    made = rows([3], goal=np.arange(6.0).reshape(3, 2))
    found = do(made, flatten=True)
    assert found["goal"].shape == (3, 2)
    assert found["observation"].shape == (3, 4)
    made = rows([2], **{"observation.count": np.array([2**40 + 1, 1]), "next.observation.count": np.array([1, 2])})
    with pytest.raises(ResultRefused, match="1099511627777 of 'observation' may not be exact in float32"):
        do(made, cast="observation.position=float32", flatten=True)


@pytest.mark.parametrize(
    ("more", "renamed"),
    [((), "mission"), (("mission",), "observation_mission"), (("mission.of",), "observation_mission")],
)
def test_flatten_hints_how_to_keep_a_text(rows, do, more, renamed):
    text, length = np.zeros((3, 8), np.uint8), np.zeros((3, 1), np.int64)
    parts = {"observation.mission": text, "observation.mission_length": length}
    parts |= {f"next.{name}": values for name, values in parts.items()} | {name: np.arange(3) for name in more}
    fields, block = rows([3], **parts)
    roles = {"mission": "text", "mission_length": "info"}
    made = tuple(replace(f, role=roles.get(f.key[-1], f.role) if len(f.key) > 1 else f.role) for f in fields), block
    with pytest.raises(UsageError, match=r"a group in which observation.mission would remain") as caught:
        do(made, flatten=True)
    assert caught.value.hint == f"add --rename observation.mission={renamed}"
    found = do(made, rename=f"observation.mission={renamed}", flatten=True)
    assert (found["observation"].shape, found[f"next.{renamed}"].shape) == ((3, 4), (3, 8))


@pytest.mark.parametrize(
    ("operations", "words"),
    [
        ({"cat": "s=observation.position,next.observation.count"}, "next alone"),
        ({"cat": "s=action,reward"}, "stay apart"),
        ({"cat": "s=action,done"}, "stay apart|no number to learn from"),
        ({"cat": "action=observation.position,observation.count"}, "already exists"),
        ({"cat": "s=episode,action"}, "not a number to learn from"),
        ({"cat": "s=observation.image,action"}, r"last dimension of observation.image \[2, 3\], action \[2\]"),
        ({"cat": "observation=observation.image"}, "a group too"),
        ({"cat": "s="}, "it is written new=part,part"),
        ({"cat": "s=a,,b"}, "empty name"),
    ],
)
def test_fields_that_cannot_be_joined_are_refused(rows, do, operations, words):
    with pytest.raises(UsageError, match=words):
        do(rows([5], **IMAGES), **operations)
