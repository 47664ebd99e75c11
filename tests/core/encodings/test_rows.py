"""Tables of rows: reading, comparing, and text with a value a row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cases import each
from hypothesis import given
from hypothesis import strategies as st

from rbtool import CorruptDataError
from rbtool.core.encodings.compact import Boundaries, Difference, compare_steps, differing_rows, with_ends, without_ends
from rbtool.core.format.episodes import EPISODES, EpisodeRow, EpisodeTable
from rbtool.core.open_steps import open_steps
from rbtool.core.ted.episodes import EndReason
from rbtool.core.ted.schema import encode_text, text_fields
from rbtool.core.testing.datasets import DatasetPlan, PlannedLeaf, relist, write_plan

lengths_of_episodes = st.lists(st.integers(1, 5), min_size=1, max_size=8)
shapes = st.sampled_from([(), (1,), (3,), (2, 2), (0,)])


def table(lengths: list[int]) -> EpisodeTable:
    return EpisodeTable.from_rows(
        [EpisodeRow(i, n, 0.0, True, False, EndReason.TERMINATED) for i, n in enumerate(lengths)]
    )


@given(lengths_of_episodes, shapes, st.data())
def test_rows_with_ends_are_what_a_loop_over_episodes_gives(lengths, shape, data) -> None:
    steps, size = sum(lengths), int(np.prod(shape))
    root = np.arange(steps * size, dtype=np.int32).reshape(steps, *shape)
    after, bounds = root + 1000, Boundaries(table(lengths), steps, "here")
    start = data.draw(st.integers(0, steps - 1))
    stop = data.draw(st.integers(start + 1, steps))
    last = set((np.cumsum(lengths) - 1).tolist())
    slow = [row for t in range(start, stop) for row in ([root[t], after[t]] if t in last else [root[t]])]
    ends = bounds.ends(start, stop)
    rows = with_ends(root[start:stop], after[start:stop], ends)
    np.testing.assert_array_equal(rows, np.stack(slow))
    np.testing.assert_array_equal(without_ends(rows, ends), root[start:stop])


@given(lengths_of_episodes)
def test_every_step_has_its_episode(lengths: list[int]) -> None:
    bounds = Boundaries(table(lengths), sum(lengths), "here")
    expected = np.repeat(np.arange(len(lengths)), lengths)
    np.testing.assert_array_equal(bounds.episode_of(np.arange(sum(lengths))), expected)
    assert [bounds.before(step) for step in range(sum(lengths))] == expected.tolist()


@each("lengths", [[2, 0, 1], [3, 1]])
def test_lengths_that_do_not_add_up_are_refused(lengths: list[int]) -> None:
    with pytest.raises(CorruptDataError, match="here: start and length"):
        Boundaries(table(lengths), 3, "here")


@each("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
def test_bits_are_compared(dtype: str) -> None:
    one = np.array([[0.0, 1.0], [np.nan, 1.0], [0.0, 1.0], [5.0, 1.0]], dtype)
    other = np.array([[0.0, 1.0], [np.nan, 1.0], [-0.0, 1.0], [5.0, 2.0]], dtype)
    assert differing_rows(one, other).tolist() == [2, 3]


@each(
    ("dtype", "shape"),
    [("uint8", (3,)), ("uint8", ()), ("bool", (5, 1)), ("int16", (3,)), ("int64", ()), ("int8", (0,))],
)
def test_rows_of_every_width_are_compared(dtype: str, shape: tuple[int, ...]) -> None:
    one = np.ones((6, *shape), dtype)
    other = one.copy()
    other[[1, 4]] = 0
    assert differing_rows(one, other).tolist() == ([1, 4] if one.size else [])
    assert differing_rows(one, one.copy()).tolist() == []


LEAVES = (PlannedLeaf(("observation",), "float32", (2,), "state"), PlannedLeaf(("mask",), "int16", (), "root"))
PLAN = DatasetPlan((3, 4, 2), ("terminated", "open", "both"), (False,) * 3, LEAVES, text=True, seed=4)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("one", "other"):
        write_plan(PLAN, tmp_path / name)
    return tmp_path / "one", tmp_path / "other"


def compare(one: Path, other: Path) -> list[Difference]:
    with open_steps(one) as here, open_steps(other) as there:
        return compare_steps(here, there)


def test_equal_data_differ_in_nothing_but_the_sign_of_zero(pair: tuple[Path, Path]) -> None:
    assert compare(*pair) == []
    for folder, zero in zip(pair, (0.0, -0.0), strict=True):
        path = folder / "observation.memmap"
        rows = np.fromfile(path, np.float32)
        rows[2] = zero
        path.write_bytes(rows.tobytes())
    assert compare(*pair) == [Difference("observation", "rows differ", 1, 1, 3)]


@pytest.mark.parametrize("chunk", [1, 60, 1 << 20])
def test_rows_that_differ_are_named(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr("rbtool.core.encodings.compact.CHUNK_BYTES", chunk)
    path = pair[1] / "mask.memmap"
    rows = np.fromfile(path, np.int16)
    rows[[4, 5, 8]] += 1
    path.write_bytes(rows.tobytes())
    assert compare(*pair) == [Difference("mask", "rows differ", 3, 4, 13)]


def test_columns_of_the_episode_table_are_compared(pair: tuple[Path, Path]) -> None:
    path = pair[1] / EPISODES / "has_seed.memmap"
    path.write_bytes(bytes([1, 1, 0]))
    relist(pair[1])
    assert compare(*pair) == [Difference("episodes.has_seed", "False against True", 2, 3, 13)]


def test_text_of_episodes_is_compared(pair: tuple[Path, Path]) -> None:
    path = pair[1] / ".rbtool/episodes_text.jsonl"
    path.write_text(path.read_text().replace("13", "14"))
    relist(pair[1])
    assert compare(*pair) == [Difference("episodes_text", "text differs", 1, 3, 13)]
    (pair[1] / ".rbtool/episodes_text.jsonl").unlink()
    relist(pair[1])
    assert compare(*pair) == [Difference("episodes_text", "text differs", 3, 0, 3)]


WIDER = replace(PLAN, leaves=(replace(LEAVES[0], shape=(3,)),))
LONGER = replace(PLAN, lengths=(3, 4, 3))
FEWER = replace(PLAN, lengths=(3, 6), endings=("open",) * 2, jumps=(False,) * 2)
WIDE = "float32 [2] against float32 [3]"


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (WIDER, {"observation": WIDE, "next.observation": WIDE, "mask": "int16 [] against nothing"}),
        (LONGER, {"steps": "9 against 10", "episodes.length": "2 against 3", "mask": None}),
        (FEWER, {"episodes": "3 against 2"}),
    ],
)
def test_other_fields_steps_and_episodes_are_named(plan: DatasetPlan, expected: dict, tmp_path: Path) -> None:
    write_plan(PLAN, tmp_path / "one")
    write_plan(plan, tmp_path / "other")
    found = {difference.key: difference.what for difference in compare(tmp_path / "one", tmp_path / "other")}
    assert {key: found.get(key) for key in expected} == expected


# Text with a value a row: bytes padded with zeros, and their number.


def test_text_has_two_fields_and_comes_back() -> None:
    strings = [b"", b"a\0b", "schließen".encode(), b"pick up\0"]
    characters, lengths = encode_text(strings, 12)
    assert (characters.shape, characters.dtype, lengths.dtype) == ((4, 12), "uint8", "int32")
    assert [row[:size].tobytes() for row, size in zip(characters, lengths, strict=True)] == strings
    fields = text_fields(("observation", "task"), 12)
    assert [(field.name, field.dtype, field.shape) for field in fields] == [
        ("observation.task", "uint8", (12,)),
        ("observation.task_length", "int32", ()),
    ]
