from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from function_blocks import block_of, part_of, runs_of, started, values_of

from rbtool.core.preprocess.failures import FunctionFailed, ResultRefused
from rbtool.core.preprocess.processor import Block, BlockColumn

Y = ("observation", "y")


def keeping(rows: list[int]) -> Callable[[Any], Any]:
    return lambda td: td[torch.tensor(rows, dtype=torch.long)]


def ends(block: Block) -> dict[str, list[int]]:
    return {
        name: np.flatnonzero(block.columns["next", name].values).tolist()
        for name in ("done", "terminated", "truncated")
    }


def test_all_rows_stay_in_their_pieces_whatever_they_bear() -> None:
    block = part_of(block_of([4, 3, 2]), 2, 8)
    expected = runs_of(block)
    result = started(lambda td: td.set_("episode", td["episode"] * 0).flip(0)).apply(block)
    assert runs_of(result) == expected == [(0, 2, False, True), (1, 3, True, True), (2, 1, True, False)]
    assert result.columns[Y].values.tolist() == [7, 6, 5, 4, 3, 2]
    assert ends(result) == {"done": [1, 4], "terminated": [1, 4], "truncated": []}


@pytest.mark.parametrize(
    ("kept", "rows", "marked"),
    [
        ([0, 3, 4, 6], [2, 2, 0], []),
        ([0, 1, 2, 4, 5, 7, 8], [3, 2, 2], [2, 4]),
        ([8], [0, 0, 1], []),
        ([5, 5, 5], [0, 3, 0], [2]),
        (list(range(7)), [4, 3, 0], []),
        ([], [0, 0, 0], []),
    ],
)
def test_episodes_keep_the_rows_that_bear_their_number(kept: list[int], rows: list[int], marked: list[int]) -> None:
    result = started(keeping(kept)).apply(block_of([4, 3, 2]))
    assert runs_of(result) == [(number, count, True, True) for number, count in enumerate(rows)]
    assert result.columns[Y].values.tolist() == kept
    found = ends(result)
    assert found["truncated"] == marked
    assert found["terminated"] == [place for place, row in enumerate(kept) if row in (3, 6, 8)]
    assert found["done"] == sorted(found["terminated"] + found["truncated"])


def test_an_end_in_another_block_is_not_marked() -> None:
    result = started(keeping([0, 1])).apply(part_of(block_of([4]), 0, 3))
    assert runs_of(result) == [(0, 2, True, False)]
    assert ends(result)["truncated"] == []


def test_an_end_that_bore_no_flag_is_not_marked() -> None:
    block = block_of([4])
    for name in ("done", "terminated"):
        block.columns["next", name].values[:] = False
    assert ends(started(keeping([0, 1])).apply(block))["truncated"] == []


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
def test_flags_of_other_types_are_marked_with_one(dtype: torch.dtype) -> None:
    key = ("next", "truncated")
    result = started(lambda td: td.set(key, td[key].to(dtype))[:2]).apply(block_of([4]))
    column = result.columns[key]
    bits = 0x3F80 if dtype is torch.bfloat16 else 1
    assert column.values.tolist() == [[0], [bits]]


def test_marking_leaves_the_memory_of_the_function_alone() -> None:
    mine = torch.zeros(2, 1, dtype=torch.bool)
    result = started(lambda td: td[:2].set(("next", "truncated"), mine)).apply(block_of([4]))
    assert (ends(result)["truncated"], mine.any().item()) == ([1], False)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda td: td[:2].exclude("episode"),
            "returned 2 rows for 9 steps without .* 'episode', or use --unit episode",
        ),
        (lambda td: td[:2].set("episode", torch.zeros(2)), "without a column 'episode'"),
        (lambda td: td[:1].exclude("episode"), "returned 1 row for 9 steps without"),
        (lambda td: td.unsqueeze(0), r"returned the batch size \[1, 9\] for 9 steps, expected \[9\]"),
        (lambda td: {"x": torch.ones(3, 9)}, r"returned the batch size \[3, 9\] for 9 steps, expected \[9\]"),
        (lambda td: td[[0, 4, 1]], "the episode of row 2, 3, comes after a later one"),
        (lambda td: td[:2].set("episode", torch.tensor([3, 9])), "the episode of row 1, 9, is none of those given"),
        (lambda td: {"x": torch.ones(2), "y": torch.ones(3)}, "it returned 2 rows of 'x' and 3 of 'y'"),
        (lambda td: {"x": torch.ones(2), "y": torch.tensor(3)}, "it returned no rows of 'y'"),
        (lambda td: {"y": torch.tensor(3)}, "it returned no rows of 'y'"),
        (lambda td: None, "it returned None, expected a tensordict of some rows"),
        (lambda td: {}, "it returned no tensors"),
        (lambda td: td.select(), "it returned no tensors"),
    ],
)
def test_results_that_are_refused(function: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ResultRefused, match=message):
        started(function).apply(block_of([4, 3, 2]))


def test_episodes_of_one_number_cannot_be_separated() -> None:
    with pytest.raises(ResultRefused, match=r"several episodes are numbered 5; .* use --unit episode"):
        started(keeping([0])).apply(block_of([2, 2], ids=[5, 5]))


def test_what_was_given_is_known_though_the_function_edits_it() -> None:
    def spoil(td: Any) -> Any:
        kept = td[:3].clone()
        td.zero_()
        return kept

    result = started(spoil).apply(block_of([4, 3]))
    assert (runs_of(result)[0], ends(result)["truncated"]) == ((0, 3, True, True), [2])


def test_a_block_without_episodes_can_keep_all_rows_only() -> None:
    block = block_of([2, 2])
    bare = Block({Y: BlockColumn("int32", block.columns[Y].values)}, block.pieces, 0)
    assert started(lambda td: td.clone()).apply(bare).rows == 4
    with pytest.raises(ResultRefused, match="without a column 'episode'"):
        started(keeping([0])).apply(bare)


def test_what_the_function_raises_comes_with_the_steps() -> None:
    for error in (ValueError("bad\nrow"), SystemExit(3)):

        def fail(td: Any, error: BaseException = error) -> Any:
            raise error

        with pytest.raises(FunctionFailed) as caught:
            started(fail).apply(block_of([4], first=10))
        assert caught.value.steps == (10, 14)
        assert caught.value.text in ("ValueError: bad", "SystemExit: 3")
        assert "in fail" in caught.value.trace


def test_what_it_prints_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    started(lambda td: (print("hello"), td)[1]).apply(block_of([2]))
    assert capsys.readouterr() == ("", "hello\n")


def test_a_child_that_it_forks_does_not_go_on() -> None:
    mine = os.getpid()
    children: list[int] = []

    def fork(td: Any) -> Any:
        children.append(os.fork())
        return td

    started(fork).apply(block_of([2]))
    assert os.getpid() == mine  # in a child this line would never be reached
    assert os.waitpid(children[0], 0) == (children[0], 0)


def numpy_state() -> Any:
    return np.random.get_state()[1].tolist()  # type: ignore[union-attr,index]  # noqa: NPY002


def test_random_numbers_depend_on_the_seed_and_the_first_step_and_leave_the_rest_alone() -> None:
    def draw(td: Any) -> Any:
        rows = len(td)
        return {
            "t": torch.rand(rows),
            "p": torch.full((rows,), random.random()),
            "n": torch.tensor(np.random.rand(rows)),  # noqa: NPY002
        }

    def drawn(seed: int, first: int) -> Any:
        return values_of(started(draw, seed=seed).apply(block_of([2], first=first)))

    before = torch.get_rng_state(), random.getstate(), numpy_state()
    assert drawn(0, 0) == drawn(0, 0)
    assert all(drawn(0, 0)[key] != other[key] for other in (drawn(1, 0), drawn(0, 1)) for key in other)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), numpy_state())
