"""Keys, fields and schemas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rbtool import MissingKeyError, SchemaError
from rbtool.core.ted.episodes import end_reason
from rbtool.core.ted.schema import (
    Field,
    as_numbers,
    dtype_name,
    field_named,
    file_stem,
    key_from_stem,
    key_name,
    numpy_dtype,
    role_of,
    row_bytes,
    safe_part,
    state_keys,
    ted_fields,
)

POSITION = Field(("observation", "pos"), "float32", (2,), "observation")
ACTION = Field(("action",), "int64", (), "action")
REWARD = Field(("reward",), "float64", (), "reward")


def test_source_fields_are_laid_out_as_ted() -> None:
    fields = ted_fields([(POSITION, "state"), (ACTION, "step"), (REWARD, "result")])
    assert [field.name for field in fields] == [
        "action", "episode", "observation.pos", "next.observation.pos",
        "next.reward", "next.done", "next.terminated", "next.truncated",
    ]  # fmt: skip
    assert {field.name: field.shape for field in fields if field.role in ("reward", "done")} == {
        "next.reward": (1,), "next.done": (1,), "next.terminated": (1,), "next.truncated": (1,),
    }  # fmt: skip
    assert row_bytes(fields) == 8 + 8 + 8 + 8 + 8 + 3


@pytest.mark.parametrize("key", [("next", "x"), ("done",), ("episode",)])
def test_a_source_cannot_have_fields_that_ted_adds(key: tuple[str, ...]) -> None:
    with pytest.raises(SchemaError, match="which TED adds"):
        ted_fields([(Field(key, "bool", (), "info"), "step")])


def test_states_are_leaves_that_are_the_same_on_both_sides() -> None:
    wide = Field(("next", "other"), "float64", (2,), "info")
    narrow = Field(("other",), "float32", (2,), "info")
    flags = [Field((*side, "done"), "bool", (1,), "done") for side in ((), ("next",))]
    fields = [*ted_fields([(POSITION, "state"), (ACTION, "step")]), wide, narrow, *flags[:1]]
    assert state_keys(fields) == [("observation", "pos")]


@pytest.mark.parametrize(("name", "near"), [("speed", ""), ("acton", "; did you mean 'action'?")])
def test_a_missing_field_is_named_with_those_there_are(name: str, near: str) -> None:
    with pytest.raises(MissingKeyError) as caught:
        field_named([POSITION, ACTION], (name,))
    assert str(caught.value) == f"field {name!r} not found{near}"
    assert caught.value.__notes__ == ["hint: fields are observation.pos, action"]
    assert isinstance(caught.value, KeyError)


@pytest.mark.parametrize(
    ("key", "role"),
    [
        (("next", "done"), "done"), (("reward",), "reward"), (("episode",), "id"), (("info", "x"), "info"),
        (("next", "action"), "action"), (("pixels",), "observation"), (("next",), "observation"),
    ],
)  # fmt: skip
def test_roles_are_read_from_keys(key: tuple[str, ...], role: str) -> None:
    assert role_of(key) == role


def test_types_of_elements_are_named_and_bfloat16_is_its_bits() -> None:
    assert dtype_name(np.dtype(">f4")) == "float32"
    for dtype in ("U3", "O", "M8[s]", "longdouble"):
        with pytest.raises(SchemaError, match="cannot be stored"):
            dtype_name(np.dtype(dtype))
    bits = np.array([0x3F80, 0xC000], np.uint16)
    assert numpy_dtype("bfloat16") == np.uint16
    assert as_numbers(bits, "bfloat16").tolist() == [1.0, -2.0]


def test_ends_and_keys_have_names() -> None:
    ends = [end_reason(*flags).name for flags in ((True, False), (False, True), (True, True), (False, False))]
    assert ends == ["TERMINATED", "TRUNCATED", "BOTH", "END_OF_FILE"]
    assert key_name(("next", "observation", "pos")) == "next.observation.pos"


@pytest.mark.parametrize(
    ("part", "stem"),
    [
        ("pos", "pos"), ("a.b", "a.b"), ("", "%"), (".", "%2E"), ("..", "%2E%2E"), ("a/b", "a%2Fb"),
        ("a b", "a%20b"), ("50%", "50%25"), ("\x00\x1f\x7f", "%00%1F%7F"), ("naïve", "naïve"),
    ],
)  # fmt: skip
def test_parts_become_file_names_by_tensordict_s_rule(part: str, stem: str) -> None:
    assert file_stem(part) == stem
    assert key_from_stem(stem) == part


@given(st.text())
def test_no_part_can_leave_its_folder_and_each_comes_back(part: str) -> None:
    stem = file_stem(part)
    assert "/" not in stem
    assert stem not in {"", ".", ".."}
    assert key_from_stem(stem) == part


@given(st.sets(st.sampled_from(["shape", "shape_", "shape__", "device", "_type", "_type_", "pos"])))
def test_renaming_reserved_parts_never_merges_two(parts: set[str]) -> None:
    assert len({safe_part(part) for part in parts}) == len(parts)
    assert not {safe_part(part) for part in parts} & {"shape", "device", "_type"}
