"""Any episodes, in any variant of D4RL's layout, come back as they were."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from d4rl_files import Episode, after_final_step, flat, plain_rows, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import rbtool
from rbtool.converters.d4rl.reader import D4rlReader
from rbtool.core.format.contracts import Piece
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.ted.schema import REWARD

DTYPES = st.sampled_from(["float32", "float64"])
HORIZON = 6


@st.composite
def episode_sets(draw: st.DrawFn) -> list[Episode]:
    """Episodes of up to six steps, with any numbers in them; only the last may be without an end."""
    dtype, shape = draw(DTYPES), draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
    lengths = draw(st.lists(st.integers(1, HORIZON), min_size=1, max_size=8))
    found = []
    for number, length in enumerate(lengths):
        last = number == len(lengths) - 1
        full = length == HORIZON
        kinds = ["terminal", *(["timeout", "both"] if full else []), *(["none"] if last and not full else [])]
        kind = draw(st.sampled_from(kinds))
        numbers = npst.arrays(dtype, (length + 1, *shape), elements=st.floats(-8, 8, width=32))
        found.append(
            Episode(
                draw(numbers), draw(npst.arrays("float32", (length, 2), elements=st.floats(-1, 1, width=32))),
                draw(npst.arrays(dtype, length, elements=st.floats(width=32, allow_nan=False))),
                kind in ("terminal", "both"), kind in ("timeout", "both"),
            )
        )  # fmt: skip
    return found


def ends_of(episodes: list[Episode]) -> list[int]:
    return (np.cumsum([len(episode) for episode in episodes]) - 1).tolist()


def joined(pieces: list[Piece]) -> dict[str, bytes]:
    return {
        "observation": b"".join(piece.rows_before(("observation",)).tobytes() for piece in pieces),
        "next": b"".join(piece.rows_after(("observation",)).tobytes() for piece in pieces),
        "action": b"".join(piece.columns[("action",)].tobytes() for piece in pieces),
        "reward": b"".join(piece.columns[REWARD].tobytes() for piece in pieces),
        "terminated": b"".join(piece.terminated.tobytes() for piece in pieces),
    }


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    episodes=episode_sets(), timeouts=st.booleans(), following=st.booleans(), piece=st.integers(1, 400),
    choice=st.sampled_from(["auto", "drop", "repeat"]), packed=st.booleans(),
)  # fmt: skip
def test_pieces_are_the_rows_that_were_written(
    episodes: list[Episode], timeouts: bool, following: bool, piece: int, choice: str, packed: bool
) -> None:
    columns = flat(episodes, timeouts=timeouts, following=following)
    options = {} if timeouts else {"horizon": HORIZON}
    expected = plain_rows(columns, ends_of(episodes))
    if choice == "auto":
        expected = after_final_step(expected)
    elif choice == "drop":
        expected = [row for row in expected if row["next"] is not None]
    else:
        expected = [{**row, "next": row["observation"] if row["next"] is None else row["next"]} for row in expected]
    with tempfile.TemporaryDirectory() as folder:
        packing = {"compression": "gzip", "chunks": True} if packed else {}
        file = write(Path(folder) / "a.hdf5", columns, **packing)
        kind = type("Small", (D4rlReader,), {"piece_bytes": piece})
        with kind(file, final_step=choice, options=options) as reader:
            facts, pieces, table = reader.facts(), list(reader.pieces()), reader.episode_table()
    assert facts.steps == table.steps == len(expected)
    found = joined(pieces)
    assert (
        list(facts.episode_numbers) == table.episode.tolist() == list(dict.fromkeys(row["episode"] for row in expected))
    )
    for name in ("observation", "next", "action", "reward"):
        assert found[name] == b"".join(np.asarray(row[name]).tobytes() for row in expected), name
    assert found["terminated"] == b"".join(np.bool_(row["terminated"]).tobytes() for row in expected)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(episodes=episode_sets())
def test_a_conversion_keeps_every_episode_with_its_end(episodes: list[Episode]) -> None:
    columns = flat(episodes, following=True)
    with tempfile.TemporaryDirectory() as folder:
        result = rbtool.convert(write(Path(folder) / "a.hdf5", columns), Path(folder) / "out")
        with TedReader(result.path) as reader:
            table, steps = reader.episodes, reader.manifest.steps
            for name, key in (("observations", ("observation",)), ("next_observations", ("next", "observation"))):
                assert reader.read(key, 0, steps).tobytes() == columns[name].tobytes()
            assert table.length.tolist() == [len(episode) for episode in episodes]
            assert table.terminated.tolist() == [episode.terminated for episode in episodes]
            ended = [episode.timed_out or not episode.terminated for episode in episodes]
            assert table.truncated.tolist() == ended
