import pytest
from hypothesis import given
from hypothesis import strategies as st

from rbtool.core.ted.schema import file_stem, key_from_stem, key_name, safe_part


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


def test_keys_are_typed_with_dots() -> None:
    assert key_name(("next", "observation", "pos")) == "next.observation.pos"
