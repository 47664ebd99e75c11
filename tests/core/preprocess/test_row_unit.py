from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from function_blocks import block_of, part_of, runs_of, started, values_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rbtool.core.preprocess.failures import FunctionFailed, ResultRefused
from rbtool.core.preprocess.processor import Block, BlockColumn, Pieces
from rbtool.core.ted.schema import DTYPES, numpy_dtype

Y = ("observation", "y")


def oracle(x: list[float], y: int) -> dict[tuple[str, ...], tuple[str, Any]]:
    """What `mix` does to a row, in plain Python."""
    return {
        ("cat",): ("float32", [*x, float(y)]),
        ("deep", "flag"): ("bool", y % 2 == 0),
        ("deep", "sum"): ("float64", sum(x)),
        ("y",): ("int32", y),
    }


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


@pytest.mark.parametrize("function", [noise, sometimes])
@given(borders=st.sets(st.integers(1, 299)))
@settings(deadline=None, max_examples=5)
def test_random_rows_do_not_depend_on_the_blocks(function: Callable[[Any], Any], borders: set[int]) -> None:
    block = block_of([100, 150, 50])
    whole = values_of(started(function, "row", False).apply(part_of(block, 0, 300)))
    unit, edges = started(function, "row", False), [0, *sorted(borders), 300]
    parts = [values_of(unit.apply(part_of(block, *edge))) for edge in pairwise(edges)]
    assert {key: [row for part in parts for row in part[key][1]] for key in whole} == {
        key: rows for key, (_, rows) in whole.items()
    }
    drawn = whole[("torch",) if function is noise else ("lucky",)][1]
    assert len({str(value) for value in drawn}) == (300 if function is noise else 7)


def test_random_rows_depend_on_the_seed_and_leave_the_generators_alone() -> None:
    before = torch.get_rng_state(), random.getstate()
    one, other, again = (values_of(started(noise, "row", seed=seed).apply(block_of([5]))) for seed in (0, 1, 0))
    assert one == again
    assert all(one[key] != other[key] for key in one if key != ("y",))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


def test_a_row_that_is_done_again_sees_what_it_saw_first() -> None:
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


@pytest.mark.parametrize("vmap", [False, True])
def test_rows_stay_in_their_pieces(vmap: bool) -> None:
    block = part_of(block_of([4, 3, 2]), 2, 8)
    expected = runs_of(block)
    assert runs_of(started(mix, "row", vmap).apply(block)) == expected


@pytest.mark.parametrize("name", DTYPES)
def test_every_element_type_comes_out_bit_for_bit(name: str) -> None:
    size = numpy_dtype(name).itemsize
    values = np.random.default_rng(0).integers(0, 2, (40, 2 * size), np.uint8).view(numpy_dtype(name))
    block = Block({("a", "b"): BlockColumn(name, values.copy())}, Pieces.of([0], [40], [True], [True]), 0)
    ((key, column),) = started(lambda row: row.clone(), "row", False).apply(block).columns.items()
    assert (key, column.dtype, column.values.tobytes()) == (("a", "b"), name, values.tobytes())


@pytest.mark.parametrize(
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


def test_memory_that_is_used_again_is_copied_in_time() -> None:
    mine = torch.zeros(2)
    found = started(lambda row: {"x": mine.copy_(row["observation", "x"])}, "row", False).apply(block_of([20]))
    assert found.columns["x",].values[:, 0].tolist() == list(range(20))


def from_row_11(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda row: change(row) if int(row["observation", "y"]) >= 11 else row


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: None, "it returned None, expected a tensordict of one step"),
        (lambda row: row["action"], "it returned Tensor, expected a tensordict of one step"),
        (lambda row: {}, "it returned no tensors"),
        (
            lambda row: row.unsqueeze(0),
            r"a tensordict of batch size \[1\], expected exactly one step, \[\]",
        ),
        (lambda row: row.exclude("action"), "the result lacks action; it must have the keys of the first row"),
        (lambda row: row.set("x", row["action"]), "the result has besides x;"),
        (lambda row: row.set("episode", row["episode"].float()), r"'episode' came out as float32 \[\], .* had int64"),
        (
            lambda row: row.set(("observation", "x"), torch.zeros(3)),
            r"'observation.x' came out as float32 \[3\], where the first row had float32 \[2\]",
        ),
        (lambda row: row.set("episode", torch.zeros(2, 2).to_sparse()), "nested or sparse tensor under 'episode'"),
        (lambda row: row.to("meta"), "without data"),
        (lambda row: row.set("episode", "text"), "it returned str|under 'episode', expected a tensor"),
        (lambda row: {**row, 3: row["action"]}, "it returned the key 3 of type int"),
    ],
)
def test_rows_that_are_refused_are_named(change: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ResultRefused, match=message) as caught:
        started(from_row_11(change), "row", False).apply(part_of(block_of([9, 9]), 2, 18))
    assert caught.value.steps == (11, 12)


def test_a_row_that_fails_is_named() -> None:
    def fail(row: Any) -> Any:
        return 1 / (int(row["observation", "y"]) - 11) and row

    with pytest.raises(FunctionFailed, match="ZeroDivisionError: division by zero") as caught:
        started(fail, "row", False).apply(part_of(block_of([9, 9]), 2, 18))
    assert caught.value.steps == (11, 12)


@pytest.mark.parametrize(
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
@pytest.mark.parametrize("rows", [1, 40])
def test_vmap_is_taken_where_rows_come_out_alike(function: Callable[[Any], Any], answer: bool, rows: int) -> None:
    block = block_of([rows])
    before, states = values_of(block), (torch.get_rng_state(), random.getstate())
    assert started(function, "row", None).probe(block) is answer
    assert values_of(block) == before
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (lambda row: {"x": torch.tensor(row["action"].item())}, FunctionFailed),
        (lambda row: torch.stack([row, row]), ResultRefused),
    ],
)
def test_vmap_that_is_asked_for_and_impossible(function: Callable[[Any], Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        started(function, "row", True).apply(block_of([4]))


def test_rows_under_vmap_draw_numbers_of_their_own() -> None:
    one, again = (started(lambda row: {"x": torch.rand(2)}, "row", True).apply(block_of([50])) for _ in range(2))
    assert values_of(one) == values_of(again)
    assert len(np.unique(one.columns["x",].values)) == 100
