"""Any episodes, in any kind of table, come back as they were."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from table_files import WRITERS, after_final_step, column_map, flat, named, plain_rows, random_episodes

from rbtool.converters.table.reader import TableReader
from rbtool.core.ted.schema import REWARD

ENDS = st.sampled_from(["terminal", "timeout", "both"])


def kept(rows: list[dict[str, Any]], choice: str) -> list[dict[str, Any]]:
    """What becomes of plain rows whose last step of an episode has no next observation."""
    if choice == "auto":
        return after_final_step(rows)
    if choice == "drop":
        return [row for row in rows if row["next"] is not None]
    return [{**row, "next": row["observation"] if row["next"] is None else row["next"]} for row in rows]


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=8), seed=st.integers(0, 99), data=st.data(),
    kind=st.sampled_from(sorted(WRITERS)), following=st.booleans(), piece=st.integers(1, 400),
    choice=st.sampled_from(["auto", "drop", "repeat"]), numbered=st.booleans(),
)  # fmt: skip
def test_pieces_are_the_rows_that_were_written(
    lengths: list[int], seed: int, data: st.DataObject, kind: str, following: bool, piece: int, choice: str,
    numbered: bool,
) -> None:  # fmt: skip
    ends = [*data.draw(st.lists(ENDS, min_size=len(lengths) - 1, max_size=len(lengths) - 1)), "none"]
    if data.draw(st.booleans()):
        ends[-1] = data.draw(ENDS)
    episodes = random_episodes(lengths, seed=seed, ends=ends, dtype="float64")
    columns = flat(episodes, following=following)
    numbers = data.draw(st.lists(st.integers(0, 1 << 40), min_size=len(lengths), max_size=len(lengths), unique=True))
    stops = (np.cumsum(lengths) - 1).tolist()
    expected = kept(plain_rows(columns, stops), choice)
    options: dict[str, Any] = {"map": column_map(kind, following=following), "ends": "dead,late"}
    if numbered:
        options["episode_key"] = "traj"
        expected = [{**row, "episode": numbers[row["episode"]]} for row in expected]
    with tempfile.TemporaryDirectory() as folder:
        path = WRITERS[kind](Path(folder) / "a", named(columns, traj=np.repeat(numbers, lengths)))
        reader = type("Small", (TableReader,), {"piece_bytes": piece})
        with reader(path, final_step=choice, options=options) as opened:
            facts, table = opened.facts(), opened.episode_table()
            pieces = list(opened.pieces())
            backwards = [list(opened.pieces([number])) for number in reversed(facts.episode_numbers)]
    assert facts.steps == table.steps == len(expected)
    found = list(dict.fromkeys(row["episode"] for row in expected))
    assert list(facts.episode_numbers) == table.episode.tolist() == found
    assert [number for one in backwards for number in {part.episode for part in one}] == found[::-1]
    assert sum(len(part) for one in backwards for part in one) == len(expected)
    for name, rows in (
        ("observation", [part.rows_before(("observation",)) for part in pieces]),
        ("next", [part.rows_after(("observation",)) for part in pieces]),
        ("action", [part.columns[("action",)] for part in pieces]),
        ("reward", [part.columns[REWARD] for part in pieces]),
        ("terminated", [part.terminated for part in pieces]),
    ):
        there = np.concatenate(rows) if rows else np.zeros(0)
        assert there.tolist() == [np.asarray(row[name]).tolist() for row in expected], name
