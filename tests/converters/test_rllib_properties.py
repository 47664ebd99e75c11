"""Random episodes written as RLlib's files, cut and mixed in any way, come back exactly."""

from __future__ import annotations

import random
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rllib_files import Row, as_batch, rows_of_episode, write_lines, write_parquet

from rbtool.converters.rllib.reader import RllibReader
from rbtool.core.format.contracts import Piece

ENDS = ("terminated", "truncated", "none")


def mixed(episodes: list[list[Row]], chance: random.Random, environments: int) -> list[Row]:
    """Put the rows of episodes one after the other as environments that take turns would."""
    streams: list[list[Row]] = [[] for _ in range(environments)]
    for number, rows in enumerate(episodes):
        streams[number % environments] += rows
    found: list[Row] = []
    while any(streams):
        stream = chance.choice([one for one in streams if one])
        count = chance.randint(1, len(stream))
        found += stream[:count]
        del stream[:count]
    return found


def write(folder: Path, rows: list[Row], form: str, chance: random.Random) -> None:
    """Cut rows into files, and the rows of a file into lines."""
    number = 0
    while rows:
        count = chance.randint(1, len(rows))
        part, rows = rows[:count], rows[count:]
        if form == "parquet":
            write_parquet(folder / f"worker-0_{number}.parquet", part, row_group_size=chance.randint(1, count))
        elif form == "rows":
            write_lines(folder / f"worker-0_{number}.jsonl", part)
        else:
            cuts = sorted({0, *(chance.randint(1, count) for _ in range(3)), count})
            lines = [as_batch(part[start:stop]) for start, stop in pairwise(cuts)]
            write_lines(folder / f"worker-0_{number}.json", lines)
        number += 1


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=7), form=st.sampled_from(["batches", "rows", "parquet"]),
    flags=st.sampled_from(["dones", "terminateds"]), following=st.booleans(), environments=st.integers(1, 3),
    piece=st.integers(1, 2000), seed=st.integers(0, 1000),
)  # fmt: skip
def test_random_episodes_come_back_exactly(
    lengths: list[int], form: str, flags: str, following: bool, environments: int, piece: int, seed: int
) -> None:
    chance = random.Random(seed)
    kinds = [chance.choice(ENDS) for _ in lengths]
    episodes = [
        rows_of_episode(1000 + number, length, end=kind, seed=number, flags=flags, following=following)
        for number, (length, kind) in enumerate(zip(lengths, kinds, strict=True))
    ]
    rows = mixed(episodes, chance, environments)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), rows, form, chance)
        kind = type("Small", (RllibReader,), {"piece_bytes": piece})
        with kind(Path(folder), final_step="repeat") as reader:
            facts, pieces, table = reader.facts(), list(reader.pieces()), reader.episode_table()
    ids = list(dict.fromkeys(row["eps_id"] for row in rows))
    assert facts.steps == len(rows) == table.steps
    assert list(facts.episode_numbers) == list(range(len(ids)))
    for number, eps_id in enumerate(ids):
        expected = episodes[eps_id - 1000]
        found = [one for one in pieces if one.episode == number]
        assert columns_of(found) == plain_columns(expected, following=following)
        kind_of_end = kinds[eps_id - 1000] if flags == "terminateds" or kinds[eps_id - 1000] == "none" else "terminated"
        assert bool(found[-1].terminated[-1]) == (kind_of_end == "terminated")
        assert bool(found[-1].truncated[-1]) == (kind_of_end == "truncated")


def columns_of(pieces: list[Piece]) -> dict[str, bytes]:
    key = ("observation",)
    return {
        "obs": b"".join(piece.rows_before(key).tobytes() for piece in pieces),
        "next": b"".join(piece.rows_after(key).tobytes() for piece in pieces),
        "actions": b"".join(piece.columns["action",].tobytes() for piece in pieces),
        "rewards": b"".join(piece.columns["reward",].tobytes() for piece in pieces),
        "t": b"".join(piece.columns["info", "t"].tobytes() for piece in pieces),
    }


def plain_columns(rows: list[Row], *, following: bool) -> dict[str, bytes]:
    observations = [row["obs"] for row in rows]
    after = [row["new_obs"] for row in rows] if following else [*observations[1:], observations[-1]]
    found = {"obs": np.array(observations), "next": np.array(after)}
    found |= {name: np.array([row[name] for row in rows]) for name in ("actions", "rewards", "t")}
    return {name: column.tobytes() for name, column in found.items()}
