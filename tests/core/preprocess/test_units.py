from __future__ import annotations

import contextlib
import os
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from cases import each
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, tensorclass
from works import block_of, part_of, runs_of, started, values_of

from rbtool.core.engine.tasks import FunctionFailed, ResultRefused
from rbtool.core.preprocess.processor import Block, BlockColumn, Pieces
from rbtool.core.preprocess.units import (
    RandomState,
    chunk_of,
    columns_of,
    mixed_seed,
    preserved_generators,
    seed_generators,
)
from rbtool.core.ted.schema import DTYPES, Field

Y = ("observation", "y")


def keeping(rows: list[int]) -> Callable[[Any], Any]:
    return lambda td: td[torch.tensor(rows, dtype=torch.long)]


def ends(block: Block, name: str) -> list[int]:
    return np.flatnonzero(block.columns["next", name].values).tolist()


def lengths_of(block: Block) -> list[int]:
    """The rows of each piece of whole episodes, which are numbered from 0."""
    found = runs_of(block)
    assert found == [(number, rows, True, True) for number, (_, rows, _, _) in enumerate(found)]
    return [rows for _, rows, _, _ in found]


def rows_of(*blocks: Block) -> dict[Any, list[Any]]:
    """The rows of consecutive blocks as lists."""
    found = [values_of(block) for block in blocks]
    return {key: [row for part in found for row in part[key][1]] for key in found[0]}


def cut_at(block: Block, borders: Iterable[int]) -> list[Block]:
    return [part_of(block, *edge) for edge in pairwise(sorted({0, *borders, block.rows}))]


@contextlib.contextmanager
def generators_untouched() -> Iterator[None]:
    """Fail if a global generator of torch, Python or NumPy has another state afterwards."""
    state = RandomState()
    yield
    assert not state.changed()


def test_all_rows_stay_in_their_pieces_whatever_they_bear() -> None:
    block = part_of(block_of([4, 3, 2]), 2, 8)
    expected = [(0, 2, False, True), (1, 3, True, True), (2, 1, True, False)]
    for vmap in (False, True):
        assert runs_of(started(mix, "row", vmap).apply(part_of(block_of([4, 3, 2]), 2, 8))) == expected
    result = started(lambda td: td.set_("episode", td["episode"] * 0).flip(0)).apply(block)
    assert runs_of(result) == expected
    assert result.columns[Y].values.tolist() == [7, 6, 5, 4, 3, 2]
    assert (ends(result, "done"), ends(result, "terminated"), ends(result, "truncated")) == ([1, 4], [1, 4], [])


@each(
    ("kept", "rows", "marked"),
    [
        ([0, 3, 4, 6], [2, 2, 0], []), ([0, 1, 2, 4, 5, 7, 8], [3, 2, 2], [2, 4]), ([8], [0, 0, 1], []),
        ([5, 5, 5], [0, 3, 0], [2]), (list(range(7)), [4, 3, 0], []), ([], [0, 0, 0], []),
    ],
)  # fmt: skip
def test_episodes_keep_the_rows_that_bear_their_number(kept: list[int], rows: list[int], marked: list[int]) -> None:
    result = started(keeping(kept)).apply(block_of([4, 3, 2]))
    assert lengths_of(result) == rows
    assert result.columns[Y].values.tolist() == kept
    terminated = [place for place, row in enumerate(kept) if row in (3, 6, 8)]
    assert (ends(result, "truncated"), ends(result, "terminated")) == (marked, terminated)
    assert ends(result, "done") == sorted(terminated + marked)


def test_ends_are_marked_only_where_flags_were_lost() -> None:
    result = started(keeping([0, 1])).apply(part_of(block_of([4]), 0, 3))
    assert (runs_of(result), ends(result, "truncated")) == ([(0, 2, True, False)], [])
    block = block_of([4])
    for name in ("done", "terminated"):
        block.columns["next", name].values[:] = False
    assert ends(started(keeping([0, 1])).apply(block), "truncated") == []
    mine = torch.zeros(2, 1, dtype=torch.bool)
    result = started(lambda td: td[:2].set(("next", "truncated"), mine)).apply(block_of([4]))
    assert (ends(result, "truncated"), mine.any().item()) == ([1], False)
    key = ("next", "truncated")
    for dtype, one in ((torch.uint8, 1), (torch.bfloat16, 0x3F80), (torch.float32, 1)):
        result = started(lambda td, dtype=dtype: td.set(key, td[key].to(dtype))[:2]).apply(block_of([4]))
        assert result.columns[key].values.tolist() == [[0], [one]], dtype


@each(
    ("function", "message"),
    [
        (lambda td: td[:2].exclude("episode"), "2 rows for 9 steps without .* 'episode', or use --unit episode"),
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


def test_episodes_that_cannot_be_separated_are_refused() -> None:
    with pytest.raises(ResultRefused, match=r"several episodes are numbered 5; .* use --unit episode"):
        started(keeping([0])).apply(block_of([2, 2], ids=[5, 5]))
    block = block_of([2, 2])
    bare = Block({Y: BlockColumn("int32", block.columns[Y].values)}, block.pieces, 0)
    assert started(lambda td: td.clone()).apply(bare).rows == 4
    with pytest.raises(ResultRefused, match="without a column 'episode'"):
        started(keeping([0])).apply(bare)


def test_pieces_and_flags_are_those_of_before_the_function_edits_them() -> None:
    def spoil(td: Any) -> Any:
        kept = td[:3].clone()
        td.zero_()
        return kept

    result = started(spoil).apply(block_of([4, 3]))
    assert (lengths_of(result), ends(result, "truncated")) == ([3, 0], [2])


@each(("error", "text"), [(ValueError("bad\nrow"), "ValueError: bad"), (SystemExit(3), "SystemExit: 3")])
def test_errors_of_the_function_state_the_steps(error: BaseException, text: str) -> None:
    def fail(td: Any) -> Any:
        raise error

    with pytest.raises(FunctionFailed) as caught:
        started(fail).apply(block_of([4], first=10))
    assert (caught.value.steps, caught.value.text) == ((10, 14), text)
    assert "in fail" in caught.value.trace


def test_output_of_the_function_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    started(lambda td: (print("hello"), td)[1]).apply(block_of([2]))
    assert capsys.readouterr() == ("", "hello\n")


def test_a_child_that_the_function_forks_ends_with_the_call() -> None:
    mine = os.getpid()
    children: list[int] = []

    def fork(td: Any) -> Any:
        children.append(os.fork())
        return td

    started(fork).apply(block_of([2]))
    assert os.getpid() == mine  # in a child this line would never be reached
    assert os.waitpid(children[0], 0) == (children[0], 0)


def test_random_numbers_depend_on_the_seed_and_the_first_step() -> None:
    def draw(td: Any) -> Any:
        rows = len(td)
        return {
            "t": torch.rand(rows),
            "p": torch.full((rows,), random.random()),
            "n": torch.tensor(np.random.rand(rows)),  # noqa: NPY002
        }

    def drawn(seed: int, first: int) -> Any:
        return values_of(started(draw, seed=seed).apply(block_of([2], first=first)))

    with generators_untouched():
        assert drawn(0, 0) == drawn(0, 0)
        assert all(drawn(0, 0)[key] != other[key] for other in (drawn(1, 0), drawn(0, 1)) for key in other)


def oracle(x: list[float], y: int) -> dict[tuple[str, ...], tuple[str, Any]]:
    """What `mix` does to a row, in plain Python."""
    return {
        ("cat",): ("float32", [*x, float(y)]), ("deep", "flag"): ("bool", y % 2 == 0),
        ("deep", "sum"): ("float64", sum(x)), ("y",): ("int32", y),
    }  # fmt: skip


def mix(row: Any) -> Any:
    x, y = row["observation", "x"], row["observation", "y"]
    deep = {"flag": y % 2 == 0, "sum": x.double().sum()}
    return {"cat": torch.cat([x, y.float()[None]]), "deep": deep, "y": y}


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=30), first=st.integers(0, 400), vmap=st.booleans())
@settings(deadline=None, max_examples=25)
def test_rows_come_out_as_the_oracle_says(lengths: list[int], first: int, vmap: bool) -> None:
    block = block_of(lengths, first)
    found = values_of(started(mix, "row", vmap).apply(block_of(lengths, first)))
    xs, ys = (block.columns["observation", name].values.tolist() for name in "xy")
    rows = [oracle(x, y) for x, y in zip(xs, ys, strict=True)]
    assert found == {key: (rows[0][key][0], [row[key][1] for row in rows]) for key in rows[0]}


def noise(row: Any) -> Any:
    return {
        "y": row["observation", "y"],
        "torch": torch.rand(2),
        "python": torch.tensor(random.random()),
        "numpy": torch.tensor(np.random.rand()),  # noqa: NPY002
        "gauss": torch.tensor(random.gauss(0, 1)),
    }


def sometimes(row: Any) -> Any:
    """Draws for every 50th row only, after the trial without seeding has long been passed."""
    lucky = random.random() if int(row["observation", "y"]) % 50 == 49 else 0.0
    return row.set("lucky", torch.tensor(lucky))


@pytest.mark.parametrize(("function", "key", "different"), [(noise, "torch", 300), (sometimes, "lucky", 7)])
@given(borders=st.sets(st.integers(1, 299)))
@settings(deadline=None, max_examples=5)
def test_random_rows_do_not_depend_on_the_blocks(
    function: Callable[[Any], Any], key: str, different: int, borders: set[int]
) -> None:
    block = block_of([100, 150, 50])
    whole = rows_of(started(function, "row", False).apply(part_of(block, 0, 300)))
    unit = started(function, "row", False)
    assert rows_of(*map(unit.apply, cut_at(block, borders))) == whole
    assert len({str(value) for value in whole[key,]}) == different


def test_random_rows_depend_on_the_seed_alone() -> None:
    with generators_untouched():
        one, other, again = (values_of(started(noise, "row", seed=seed).apply(block_of([5]))) for seed in (0, 1, 0))
    assert one == again
    assert all(one[key] != other[key] for key in one if key != ("y",))
    one, again = (started(lambda row: {"x": torch.rand(2)}, "row", True).apply(block_of([50])) for _ in range(2))
    assert values_of(one) == values_of(again)
    assert len(np.unique(one.columns["x",].values)) == 100


def test_a_row_that_is_computed_again_has_its_first_values() -> None:
    def edit(row: Any) -> Any:
        row["observation", "y"] += 1000
        return row.set("drawn", torch.rand(()))

    found = started(edit, "row", False).apply(block_of([20]))
    assert found.columns[Y].values.tolist() == list(range(1000, 1020))


def test_a_function_that_fails_by_chance_fails_by_its_seed() -> None:
    def unlucky(row: Any) -> Any:
        if random.random() < 0.02:
            raise ValueError("unlucky")
        return row

    places = []
    for _ in range(3):
        with pytest.raises(FunctionFailed, match="unlucky") as caught:
            started(unlucky, "row", False).apply(block_of([400]))
        places.append(caught.value.steps)
        random.random()
    assert len(set(places)) == 1


@each("name", DTYPES)
def test_every_element_type_goes_in_and_out_bit_for_bit(name: str) -> None:
    field = Field(("deep", "x"), name, (2,), "info")
    array = np.random.default_rng(0).integers(0, 2, (40, 2 * field.numpy.itemsize), np.uint8).view(field.numpy)
    block = Block({field.key: BlockColumn(name, array.copy())}, Pieces.of([0], [40], [True], [True]), 0)
    ((key, column),) = started(lambda row: row.clone(), "row", False).apply(block).columns.items()
    assert (key, column.dtype, column.values.tobytes()) == (field.key, name, array.tobytes())
    chunk = chunk_of({field.key: BlockColumn(name, array.copy())}, 40)
    assert (chunk.batch_size, str(chunk["deep", "x"].dtype)) == ((40,), f"torch.{name}")
    ((key, (found, back)),) = columns_of(chunk, 40).items()
    assert (key, found, back.dtype, back.tobytes()) == (field.key, name, field.numpy, array.tobytes())


@each(
    "function",
    [
        lambda row: row.select("action", "episode"),
        lambda row: row.exclude("action"),
        lambda row: row.select("action", ("next", "observation")).exclude(("next", "observation", "x")),
        lambda row: TensorDict({"z": row["action"].requires_grad_(), "a": row["episode"]}),
        lambda row: {"n": np.asarray(row["observation", "x"]) * 2, "v": row["observation", "x"].flip(0)[:1]},
        lambda row: {"b": 1 + row["episode"], "a": {"c": row["episode"]}} if row["episode"] % 2 else
        {"a": {"c": row["episode"]}, "b": 1 + row["episode"]},
        lambda row: torch.stack([row, row])[0],
        lambda row: {"c": torch.complex(row["observation", "x"], row["observation", "x"]).conj()},
    ],
)  # fmt: skip
def test_many_kinds_of_results_are_taken(function: Callable[[Any], Any]) -> None:
    block = block_of([7, 5])
    found = started(function, "row", False).apply(part_of(block, 0, 12)).columns
    for place in range(12):
        alone = started(function, "row", False).apply(part_of(block, place, place + 1)).columns
        for key, column in alone.items():
            assert (found[key].dtype, found[key].values[place].tolist()) == (column.dtype, column.values[0].tolist())


def test_memory_that_the_function_reuses_is_copied_in_time() -> None:
    mine = torch.zeros(2)
    found = started(lambda row: {"x": mine.copy_(row["observation", "x"])}, "row", False).apply(block_of([20]))
    assert found.columns["x",].values[:, 0].tolist() == list(range(20))
    mine = torch.zeros(50, dtype=torch.int32)
    result = started(lambda td: {"y": mine[: len(td)].copy_(td[Y])}, "episode").apply(block_of([4, 3]))
    assert result.columns["y",].values.tolist() == list(range(7))


def from_row_11(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda row: change(row) if int(row["observation", "y"]) >= 11 else row


@each(
    ("change", "message"),
    [
        (lambda row: None, "it returned None, expected a tensordict of one step"),
        (lambda row: row["action"], "it returned Tensor, expected a tensordict of one step"),
        (lambda row: {}, "it returned no tensors"),
        (lambda row: row.unsqueeze(0), r"a tensordict of batch size \[1\], expected exactly one step, \[\]"),
        (lambda row: row.exclude("action"), "the result lacks action; it must have the keys of the first row"),
        (lambda row: row.set("x", row["action"]), "the result has besides x;"),
        (lambda row: row.set("episode", row["episode"].float()), r"'episode' came out as float32 \[\], .* had int64"),
        (lambda row: row.set(Y, torch.zeros(3)), r"'observation.y' came out as float32 \[3\], .* row had int32 \[\]"),
        (lambda row: row.set("episode", torch.zeros(2, 2).to_sparse()), "nested or sparse tensor under 'episode'"),
        (lambda row: row.to("meta"), "without data"),
        (lambda row: row.set("episode", "text"), "under 'episode', expected a tensor"),
        (lambda row: {**row, 3: row["action"]}, "it returned the key 3 of type int"),
    ],
)
def test_rows_that_are_refused_are_named(change: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ResultRefused, match=message) as caught:
        started(from_row_11(change), "row", False).apply(part_of(block_of([9, 9]), 2, 18))
    assert caught.value.steps == (11, 12)


def test_a_row_or_an_episode_that_fails_is_named() -> None:
    def fail(row: Any) -> Any:
        return 1 / (int(row["observation", "y"]) - 11) and row

    with pytest.raises(FunctionFailed, match="ZeroDivisionError: division by zero") as caught:
        started(fail, "row", False).apply(part_of(block_of([9, 9]), 2, 18))
    assert caught.value.steps == (11, 12)
    with pytest.raises(FunctionFailed, match="ZeroDivisionError") as caught:
        started(second(lambda td: 1 / 0), "episode").apply(block_of([4, 3, 2], first=100))
    assert caught.value.steps == (104, 107)


@each(
    ("function", "answer"),
    [
        (mix, True),
        (lambda row: row, True),
        (lambda row: row.set("x", torch.ones(2)), True),
        (lambda row: row.set("x", row["action"].float() / 3), True),
        (lambda row: row.apply(lambda leaf: leaf * 2 if leaf.dtype is torch.float32 else leaf), True),
        (noise, False),
        (lambda row: {"x": torch.rand(2)}, False),
        (lambda row: {"x": torch.full((2,), random.random())}, False),
        (lambda row: {"x": torch.tensor(float(row["action"]))}, False),
        (lambda row: row if row["action"] > 3 else row.clone(), False),
        (lambda row: {"x": torch.tensor(row["observation", "x"].numpy())}, False),
        (lambda row: {"x": row["observation", "x"].mean() * len(row["observation", "x"].storage())}, False),
        (lambda row: None, False),
        (lambda row: torch.stack([row, row]), False),
        (lambda row: 1 / 0, False),
    ],
)
@each("rows", [1, 40])
def test_vmap_is_taken_where_rows_come_out_alike(function: Callable[[Any], Any], answer: bool, rows: int) -> None:
    block = block_of([rows])
    before = values_of(block)
    with generators_untouched():
        assert started(function, "row", None).probe(block) is answer
    assert values_of(block) == before


def test_vmap_that_was_requested_but_is_impossible_is_an_error() -> None:
    with pytest.raises(FunctionFailed):
        started(lambda row: {"x": torch.tensor(row["action"].item())}, "row", True).apply(block_of([4]))
    with pytest.raises(ResultRefused):
        started(lambda row: torch.stack([row, row]), "row", True).apply(block_of([4]))


def test_episodes_are_seen_one_at_a_time_with_their_ends() -> None:
    seen: list[list[int]] = []
    result = started(lambda td: (seen.append(td[Y].tolist()), td)[1], "episode").apply(block_of([4, 1, 2]))
    assert seen == [[0, 1, 2, 3], [4], [5, 6]]
    assert values_of(result) == values_of(block_of([4, 1, 2]))
    assert lengths_of(result) == [4, 1, 2]
    block = block_of([5])
    block.columns["next", "truncated"].values[2] = True
    result = started(lambda td: td, "episode").apply(block)
    assert (lengths_of(result), ends(result, "truncated")) == ([5], [2])
    block = part_of(block_of([4, 3]), 1, 6)
    assert runs_of(started(twice, "episode").apply(block)) == [
        (0, 3, False, True), (0, 3, True, True), (1, 4, True, False),
    ]  # fmt: skip


@each(
    ("function", "kept", "lengths", "truncated"),
    [
        (lambda td: td[:2], [0, 1, 4, 5, 7, 8], [2, 2, 2], [1, 3]),
        (lambda td: td[1:], [1, 2, 3, 5, 6, 8], [3, 2, 1], []),
        (lambda td: td[: 0 if len(td) == 3 else 9], [0, 1, 2, 3, 7, 8], [4, 0, 2], []),
        (lambda td: td if len(td) == 3 else td.select()[:0], [4, 5, 6], [0, 3, 0], []),
        (lambda td: td[torch.tensor([0, 0, 1])], [0, 0, 1, 4, 4, 5, 7, 7, 8], [3, 3, 3], [2, 5]),
    ],
)
def test_episodes_may_become_shorter_longer_or_empty(function, kept, lengths, truncated) -> None:
    result = started(function, "episode").apply(block_of([4, 3, 2]))
    assert lengths_of(result) == lengths
    assert (result.columns[Y].values.tolist(), ends(result, "truncated")) == (kept, truncated)
    assert ends(result, "done") == sorted(truncated + ends(result, "terminated"))


def twice(td: Any) -> Any:
    return torch.cat([td, td])


def renumbered(td: Any) -> Any:
    other = td.clone()
    other["episode"] += 100
    return torch.cat([td[:2], other[1:3]])


@each(
    ("function", "expected", "truncated"),
    [
        (twice, [(0, 4), (0, 4), (1, 3), (1, 3)], []),
        (lambda td: twice(td.exclude("observation")), [(0, 4), (0, 4), (1, 3), (1, 3)], []),
        (renumbered, [(0, 2), (0, 2), (1, 2), (1, 2)], [1, 3, 5]),
        (lambda td: twice(td[:-1]), [(0, 6), (1, 4)], [5, 9]),  # nothing shows that there are two
    ],
)
def test_one_episode_may_become_several(function, expected, truncated) -> None:
    result = started(function, "episode").apply(block_of([4, 3]))
    assert runs_of(result) == [(*run, True, True) for run in expected]
    assert ends(result, "truncated") == truncated


def test_an_end_without_a_flag_is_marked_where_there_was_one() -> None:
    def unmark(td: Any) -> Any:
        for name in ("done", "terminated"):
            td["next", name].zero_()
        return td

    block = block_of([4, 3])
    for marked in ([3, 6], []):  # the first call takes the flags of the block away
        result = started(unmark, "episode").apply(block)
        assert ends(result, "done") == ends(result, "truncated") == marked


def test_random_episodes_do_not_depend_on_the_blocks() -> None:
    def draw(td: Any) -> Any:
        kept = td[: int(torch.randint(1, len(td) + 1, ()))]
        return kept.set("noise", torch.rand(len(kept)))

    block, unit = block_of([3, 1, 4, 1, 5]), started(draw, "episode")
    whole = rows_of(unit.apply(part_of(block, 0, 14)))
    for border in (0, 3, 4, 8, 9):
        assert rows_of(*map(unit.apply, cut_at(block, [border]))) == whole, border


@each("lengths", [[3], [3, 3]])
def test_keys_remain_if_no_row_is_left(lengths: list[int]) -> None:
    result = started(lambda td: td[:0], "episode").apply(block_of(lengths))
    assert (result.rows, lengths_of(result)) == (0, [0] * len(lengths))
    assert result.columns[Y].values.shape == (0,)


def second(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda td: change(td) if int(td["episode"][0]) == 4 else td


@each(
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


ROWS = 4
BASE = torch.arange(ROWS * 6, dtype=torch.float32).reshape(ROWS, 6)


def ragged() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that nested tensors are a prototype, once a process
        return torch.nested.nested_tensor([torch.zeros(row + 1) for row in range(ROWS)])


@tensorclass
class Step:
    x: torch.Tensor


@pytest.mark.parametrize(
    "value",
    [
        BASE[:, ::2], BASE.t()[:ROWS, :ROWS], BASE[:, :1].expand(ROWS, 5), (BASE * 2).requires_grad_(),
        torch.nn.Parameter(BASE.clone()), torch.complex(BASE, -BASE).conj(), torch.complex(BASE, -BASE).conj().imag,
        torch.zeros(ROWS, 0), torch.arange(ROWS, dtype=torch.bfloat16).flip(0), torch.arange(ROWS).view(torch.uint64),
    ],
    ids=lambda value: f"{value.dtype}{list(value.shape)}",
)  # fmt: skip
def test_views_of_any_kind_become_their_values(value: torch.Tensor) -> None:
    name, array = columns_of({"x": value}, ROWS)["x",]
    assert array.flags.c_contiguous
    back = torch.from_numpy(array.copy())
    back = back.view(torch.bfloat16) if name == "bfloat16" else back
    assert torch.equal(back, value.detach().resolve_conj().resolve_neg())


def test_dicts_arrays_tensorclasses_and_lazy_stacks_are_stored() -> None:
    found = columns_of({"a": np.arange(ROWS, dtype=">i2"), "b": {"c": Step(BASE, batch_size=[ROWS])}}, ROWS)
    assert {key: name for key, (name, _) in found.items()} == {("a",): "int16", ("b", "c", "x"): "float32"}
    assert found["a",][1].tolist() == [0, 1, 2, 3]
    lazy = LazyStackedTensorDict(*(TensorDict({"x": row}, []) for row in BASE))
    assert np.array_equal(columns_of(lazy, ROWS)["x",][1], BASE.numpy())


@each(
    ("result", "message"),
    [
        (None, "it returned None, expected a tensordict of 4 rows"),
        (BASE, "it returned Tensor, expected a tensordict"),
        ([{"x": BASE}], "it returned list"),
        ({}, "it returned no tensors"),
        (TensorDict({"a": {}}, [ROWS]), "it returned no tensors"),
        ({"x": BASE[:3]}, "it returned 3 rows of 'x' for 4 steps, expected as many"),
        ({"x": torch.tensor(1.0)}, "it returned no rows of 'x' for 4 steps"),
        ({"x": {"y": "text"}}, "it returned str under 'x.y', expected a tensor"),
        (TensorDict({"x": NonTensorData("text")}, [ROWS]), "under 'x', expected a tensor"),
        (TensorDict({"x": NonTensorStack(*"abcd")}, [ROWS]), "under 'x', expected a tensor"),
        ({"x": np.array(list("abcd"))}, "it returned 'x' as <U1, which cannot be stored"),
        ({"x": BASE.to(torch.float8_e5m2)}, "it returned 'x' as torch.float8_e5m2, which cannot be stored"),
        ({"x": BASE.to_sparse()}, "a nested or sparse tensor under 'x'"),
        ({"x": ragged()}, "a nested or sparse tensor under 'x'"),
        ({"x": BASE.to("meta")}, "without data"),
        ({3: BASE}, "the key 3 of type int; keys are strings"),
        ({"shape": BASE}, "the key 'shape', which tensordict keeps for itself; call it 'shape_'"),
        ({".rbtool": {"x": BASE}}, "the nested key '.rbtool', whose place in the folder is taken"),
    ],
)
def test_values_that_cannot_be_stored_are_named(result: object, message: str) -> None:
    with pytest.raises(ResultRefused, match=message):
        columns_of(result, ROWS)


def drawn() -> tuple[Any, ...]:
    return torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.standard_normal(3).tolist()  # noqa: NPY002


def test_mixed_seeds_are_fixed_and_far_apart() -> None:
    assert mixed_seed(0, 0) == 0xE220A8397B1DCDAF, "the first output of SplitMix64"
    assert mixed_seed(0, 1) == 0x6E789E6AA1B965F4, "the second one"
    bits = [mixed_seed(seed, number) for seed in range(-20, 20) for number in range(-1, 200)]
    assert len(set(bits)) == len(bits)
    assert all(0 <= value < 2**64 for value in bits)
    flips = [(one ^ other).bit_count() for one, other in pairwise(bits)]
    assert 30 < sum(flips) / len(flips) < 34
    assert min(flips) > 8
    with preserved_generators():
        seed_generators(mixed_seed(7, 0))
        one = drawn()
        drawn()
        seed_generators(mixed_seed(7, 0))
        assert drawn() == one
        seed_generators(mixed_seed(8, 0))
        assert all(new != old for new, old in zip(drawn(), one, strict=True))


def test_borrowed_generators_go_on_as_before() -> None:
    with preserved_generators():
        seed_generators(3)
        random.gauss(0, 1)  # keeps a second number back
        state = RandomState()
        expected = drawn()
        state.restore()
        with contextlib.suppress(ZeroDivisionError), preserved_generators():
            seed_generators(4)
            raise ZeroDivisionError(drawn())
        assert drawn() == expected


@each(
    "draw",
    [
        lambda: torch.rand(1),
        lambda: random.random(),
        lambda: np.random.rand(),  # noqa: NPY002
        lambda: np.random.randn(),  # noqa: NPY002
        lambda: torch.manual_seed(1),
        lambda: torch.nn.functional.dropout(torch.ones(4)),
    ],
)
def test_any_draw_is_noticed(draw: Any) -> None:
    with preserved_generators():
        state = RandomState()
        np.random.default_rng(0).random()
        torch.rand(1, generator=torch.Generator())
        assert not state.changed()
        draw()
        assert state.changed()
