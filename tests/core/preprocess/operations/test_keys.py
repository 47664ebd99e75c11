"""Rename, select, exclude: which fields are there, and what becomes of what belongs to them under next."""

from __future__ import annotations

import numpy as np
import pytest

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
def test_what_is_kept(operations, kept, made, do):
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
        ({"rename": "next.observation=next.state"}, "has to stay like it"),
        ({"exclude": "done"}, "mark where episodes end"),
        ({"exclude": "next"}, "mark where episodes end"),
        ({"cast": "state=float32", "cat": "state=observation.position"}, "cat makes only after it"),
    ],
)
def test_what_makes_no_sense_is_told_before_a_row_is_read(operations, words, made, work):
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


def test_what_is_gone_is_named_with_why(made, work):
    known = work(made, rename="action=act", cat="state=observation.position", select="state,act", exclude="episode")
    assert known.left_out(made[0], known.fields) == {
        "observation.count": "not selected", "next.observation.count": "not selected", "episode": "excluded",
    }  # fmt: skip


def test_only_what_is_needed_is_read(made, work):
    known = work(made, select="action", exclude="reward", where="observation.count > 0")
    assert {".".join(key) for key in known.reads(made[0])} == {
        "action", "episode", "observation.count", "next.done", "next.terminated", "next.truncated",
    }  # fmt: skip


def test_fields_keep_their_roles(made, work):
    known = work(made, rename="action=act", n_step=2, gamma=0.9, flatten=True)
    roles = {field.name: field.role for field in known.fields}
    assert (roles["act"], roles["observation"], roles["gamma"], roles["multi_step.done"]) == (
        "action", "observation", "info", "info",
    )  # fmt: skip
