"""Selections of episodes, and what is read to tell equal ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rbtool import UsageError
from rbtool.core.format.episodes import expected_episodes, normal_form, parse_episodes, select_episodes


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("0:100,250", "0:100,250"), ("3", "3"), ("5,1,2,0:2", "0:3,5"), ("0:5,5:9", "0:9"), (" 7 , 2:4 ", "2:4,7"),
        (":3", "0:3"), ("0:", None), (":", None), ("4:,9", "4:"), ("1,1", "1"), ("0:9,2:3", "0:9"),
    ],
)  # fmt: skip
def test_a_selection_has_one_normal_form(text: str, normal: str | None) -> None:
    assert normal_form(parse_episodes(text)) == normal


@pytest.mark.parametrize("text", ["", "a", "-1", "1:2:3", "3:1", "2:2", "1,,2", "0x1", "1.5", "²"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_episodes(text)


def test_episodes_keep_their_storage_order() -> None:
    assert select_episodes(parse_episodes("8:10,2"), [9, 2, 4, 8]) == [9, 2, 8]
    with pytest.raises(UsageError, match=r"there are 0 \(none\)"):
        select_episodes(parse_episodes("0"), [])


@pytest.mark.parametrize(("text", "first"), [("25", 25), ("99", 99), ("0:30,27", 27), ("0:26,25", 25), ("1,77", 77)])
def test_missing_episodes_are_named(text: str, first: int) -> None:
    with pytest.raises(UsageError, match=rf"asks for episode {first}, which is not there: there are 25 \(0 to 24\)"):
        select_episodes(parse_episodes(text), range(25))


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("0:4", [0, 1, 3]), ("2:", [3, 8, 42]), ("42:", [42]), (":", [0, 1, 3, 8, 42]), ("7:9,0", [0, 8]),
        ("0:1000000000000", [0, 1, 3, 8, 42]), ("40:41,42", "episode 40"), ("4:8", "holds none"), ("43:", "holds none"),
        ("2,0:9", "episode 2"), ("0:9,2", "episode 2"),
    ],
)  # fmt: skip
def test_ranges_take_what_is_there_and_single_numbers_must_be_there(text: str, chosen: list[int] | str) -> None:
    numbers = [0, 1, 3, 8, 42]
    if isinstance(chosen, list):
        assert select_episodes(parse_episodes(text), numbers) == chosen
        return
    with pytest.raises(UsageError, match=rf"{chosen}.*: there are 5 \(0 to 42\)"):
        select_episodes(parse_episodes(text), numbers)


@given(st.lists(st.integers(0, 30), min_size=1, unique=True))
def test_single_numbers_select_just_themselves(chosen: list[int]) -> None:
    ranges = parse_episodes(",".join(map(str, chosen)))
    assert select_episodes(ranges, range(31)) == sorted(chosen)
    assert select_episodes(parse_episodes(normal_form(ranges) or ""), range(31)) == sorted(chosen)


@pytest.mark.parametrize(("text", "expected"), [("0:3", 3), ("2:,0", 4), ("70", 0), ("3:9,4", 2), ("7,8,9", 0)])
def test_the_number_of_chosen_episodes_is_estimated_from_their_count(text: str, expected: int) -> None:
    assert expected_episodes(parse_episodes(text), 5) == expected


@pytest.mark.parametrize(("text", "count"), [("7,8,9", 2), ("0:", 0)])
def test_a_choice_of_more_episodes_than_there_are_is_refused(text: str, count: int) -> None:
    with pytest.raises(UsageError, match=f"expected a choice of the {count} that there are"):
        expected_episodes(parse_episodes(text), count)
