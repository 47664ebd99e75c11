from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from function_blocks import block_of, part_of, runs_of, started, values_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rbtool.core.preprocess.failures import FunctionFailed, ResultRefused
from rbtool.core.preprocess.processor import Block

Y = ("observation", "y")


def ends(block: Block, name: str) -> list[int]:
    return np.flatnonzero(block.columns["next", name].values).tolist()


def runs(block: Block) -> list[tuple[int, int]]:
    found = runs_of(block)
    assert all(begins and finishes for _, _, begins, finishes in found)
    return [(episode, rows) for episode, rows, _, _ in found]


def test_it_sees_one_episode_at_a_time() -> None:
    seen: list[list[int]] = []
    result = started(lambda td: (seen.append(td[Y].tolist()), td)[1], "episode").apply(block_of([4, 1, 2]))
    assert seen == [[0, 1, 2, 3], [4], [5, 6]]
    assert values_of(result) == values_of(block_of([4, 1, 2]))
    assert runs(result) == [(0, 4), (1, 1), (2, 2)]


@pytest.mark.parametrize(
    ("function", "kept", "lengths", "truncated"),
    [
        (lambda td: td[:2], [0, 1, 4, 5, 7, 8], [2, 2, 2], [1, 3]),
        (lambda td: td[1:], [1, 2, 3, 5, 6, 8], [3, 2, 1], []),
        (lambda td: td[: 0 if len(td) == 3 else 9], [0, 1, 2, 3, 7, 8], [4, 0, 2], []),
        (lambda td: td if len(td) == 3 else td.select()[:0], [4, 5, 6], [0, 3, 0], []),
        (lambda td: td[torch.tensor([0, 0, 1])], [0, 0, 1, 4, 4, 5, 7, 7, 8], [3, 3, 3], [2, 5]),
    ],
)
def test_episodes_become_shorter_longer_and_none(
    function: Callable[[Any], Any], kept: list[int], lengths: list[int], truncated: list[int]
) -> None:
    result = started(function, "episode").apply(block_of([4, 3, 2]))
    assert runs(result) == list(enumerate(lengths))
    assert (result.columns[Y].values.tolist(), ends(result, "truncated")) == (kept, truncated)
    assert ends(result, "done") == sorted(truncated + ends(result, "terminated"))


def twice(td: Any) -> Any:
    return torch.cat([td, td])


def renumbered(td: Any) -> Any:
    other = td.clone()
    other["episode"] += 100
    return torch.cat([td[:2], other[1:3]])


@pytest.mark.parametrize(
    ("function", "expected", "truncated"),
    [
        (twice, [(0, 4), (0, 4), (1, 3), (1, 3)], []),
        (
            lambda td: torch.cat([td.exclude("observation"), td.exclude("observation")]),
            [(0, 4), (0, 4), (1, 3), (1, 3)],
            [],
        ),
        (renumbered, [(0, 2), (0, 2), (1, 2), (1, 2)], [1, 3, 5]),
        (lambda td: torch.cat([td[:-1], td[:-1]]), [(0, 6), (1, 4)], [5, 9]),
    ],
    ids=["flags", "flags without observations", "numbers", "nothing to see"],
)
def test_several_episodes_may_come_of_one(
    function: Callable[[Any], Any], expected: list[tuple[int, int]], truncated: list[int]
) -> None:
    result = started(function, "episode").apply(block_of([4, 3]))
    assert runs(result) == expected
    assert ends(result, "truncated") == truncated


def test_a_flag_in_the_middle_that_is_followed_by_the_next_row_stays() -> None:
    block = block_of([5])
    block.columns["next", "truncated"].values[2] = True
    result = started(lambda td: td, "episode").apply(block)
    assert (runs(result), ends(result, "truncated")) == ([(0, 5)], [2])


@pytest.mark.parametrize("marked", [True, False])
def test_an_end_without_a_flag_is_marked_where_there_was_one(marked: bool) -> None:
    block = block_of([4, 3])
    if not marked:
        started(unmark, "episode").apply(block)
    result = started(unmark, "episode").apply(block)
    assert ends(result, "done") == ends(result, "truncated") == ([3, 6] if marked else [])


def unmark(td: Any) -> Any:
    for name in ("done", "terminated"):
        td["next", name].zero_()
    return td


def test_what_began_and_ends_elsewhere_still_does() -> None:
    block = part_of(block_of([4, 3]), 1, 6)
    assert runs_of(started(twice, "episode").apply(block)) == [
        (0, 3, False, True), (0, 3, True, True), (1, 4, True, False),
    ]  # fmt: skip


@given(cut=st.integers(0, 5))
@settings(deadline=None)
def test_random_episodes_do_not_depend_on_the_blocks(cut: int) -> None:
    lengths = [3, 1, 4, 1, 5]
    border = sum(lengths[:cut])
    block, unit = block_of(lengths), started(draw, "episode")
    whole = values_of(unit.apply(part_of(block, 0, 14)))
    parts = [values_of(unit.apply(part_of(block, *edge))) for edge in ((0, border), (border, 14)) if edge[0] < edge[1]]
    assert {key: [row for part in parts for row in part[key][1]] for key in whole} == {
        key: rows for key, (_, rows) in whole.items()
    }


def draw(td: Any) -> Any:
    kept = td[: int(torch.randint(1, len(td) + 1, ()))]
    return kept.set("noise", torch.rand(len(kept)))


@pytest.mark.parametrize("lengths", [[3], [3, 3]])
def test_when_nothing_is_left_the_keys_still_are(lengths: list[int]) -> None:
    result = started(lambda td: td[:0], "episode").apply(block_of(lengths))
    assert (result.rows, runs(result)) == (0, [(number, 0) for number in range(len(lengths))])
    assert result.columns[Y].values.shape == (0,)


def test_memory_that_is_used_again_is_copied_in_time() -> None:
    mine = torch.zeros(50, dtype=torch.int32)
    result = started(lambda td: {"y": mine[: len(td)].copy_(td[Y])}, "episode").apply(block_of([4, 3]))
    assert result.columns["y",].values.tolist() == list(range(7))


def second(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda td: change(td) if int(td["episode"][0]) == 4 else td


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda td: None, "it returned None, expected a tensordict of some rows"),
        (lambda td: {}, "it returned no tensors"),
        (lambda td: td[0], "it returned no rows of"),
        (lambda td: td.exclude("action"), "the result lacks action; it must have the keys of the first episode"),
        (lambda td: td.set("q", td["action"]), "the result has besides q"),
        (lambda td: td.set("action", td["action"].float()), r"'action' came out as float32 \[\], .* had bfloat16"),
    ],
)
def test_episodes_that_are_refused_are_named(change: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ResultRefused, match=message) as caught:
        started(second(change), "episode").apply(block_of([4, 3, 2], first=100))
    assert caught.value.steps == (104, 107)


def test_an_episode_that_fails_is_named() -> None:
    with pytest.raises(FunctionFailed, match="ZeroDivisionError") as caught:
        started(second(lambda td: 1 / 0), "episode").apply(block_of([4, 3, 2], first=100))
    assert caught.value.steps == (104, 107)
