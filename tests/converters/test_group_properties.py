"""Any episodes, written in the layouts of robomimic and RoboSet, come back as they were."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from group_files import Array, Demo, after_final_step, write_groups
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from rbtool.converters.robomimic.reader import RobomimicReader
from rbtool.converters.roboset.reader import RobosetReader
from rbtool.core.format.contracts import Piece
from rbtool.core.format.reader import Reader
from rbtool.core.ted.schema import Key

PACKINGS = st.sampled_from([{}, {"compression": "gzip", "chunks": True}, {"chunks": True, "shuffle": True}])
SHAPES = st.sampled_from([(), (1,), (3,), (2, 2)])
DTYPES = st.sampled_from(["float32", "float64", ">f4", "int16", "uint8", "bool"])
CHOICES = st.sampled_from(["auto", "drop", "repeat"])
LENGTHS = st.dictionaries(st.integers(0, 130), st.integers(0, 7), min_size=1, max_size=6)


def numbers(length: int, dtype: str, shape: tuple[int, ...], seed: int) -> Array:
    return np.random.default_rng(seed).integers(0, 2**16, (length, *shape)).astype(dtype)


def joined(pieces: list[Piece], key: Key, when: str) -> bytes:
    """The rows of one episode before steps, after them, or those of a step or a result."""
    rows = {"before": Piece.rows_before, "after": Piece.rows_after, "with": lambda piece, key: piece.columns[key]}[when]
    return b"".join(rows(piece, key).tobytes() for piece in pieces)


def pieces_of(reader: Reader) -> dict[int, list[Piece]]:
    found: dict[int, list[Piece]] = {}
    for piece in reader.pieces():
        found.setdefault(piece.episode, []).append(piece)
    return found


def small(kind: type[Reader], size: int) -> type[Reader]:
    return type("Small", (kind,), {"piece_bytes": size})


def native(values: Array) -> bytes:
    return values.astype(values.dtype.newbyteorder("=")).tobytes()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=LENGTHS, dtype=DTYPES, shape=SHAPES, rewards=st.booleans(), following=st.booleans(),
    piece=st.integers(1, 400), choice=CHOICES, packing=PACKINGS, wins=st.sets(st.integers(0, 130)),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_demonstrations_of_robomimic(
    lengths: Mapping[int, int], dtype: str, shape: tuple[int, ...], rewards: bool, following: bool, piece: int,
    choice: str, packing: Mapping[str, Any], wins: set[int], seed: int,
) -> None:  # fmt: skip
    demos: dict[int, dict[str, Array]] = {}
    for number, length in lengths.items():
        seen = numbers(length + 1, dtype, shape, seed + number)
        columns = {"obs/a/b": seen[:-1], "actions": numbers(length, "float32", (2,), seed + number + 1)}
        columns |= {"states": numbers(length, "float64", (3,), seed), "extra": numbers(length, dtype, shape, seed)}
        columns |= {"next_obs/a/b": seen[1:]} if following else {}
        if rewards:
            columns |= {"rewards": np.zeros(length), "dones": np.zeros(length, "u1")}
            columns["rewards"][length - 1 :], columns["dones"][length - 1 :] = number in wins, 1
        demos[number] = columns
    there = sorted(number for number, length in lengths.items() if length)
    if not there:
        return
    with tempfile.TemporaryDirectory() as folder:
        groups = {f"data/demo_{number}": Demo(columns) for number, columns in demos.items()}
        file = write_groups(Path(folder) / "a.hdf5", groups, **packing)
        with small(RobomimicReader, piece)(file, final_step=choice) as reader:
            facts, found, table = reader.facts(), pieces_of(reader), reader.episode_table()
    expected = {}
    for number in there:
        rows = after_final_step(demos[number], terminated=rewards and number in wins, choice=choice)
        expected[number] = {**demos[number], "next:obs/a/b": demos[number]["next_obs/a/b"]} if following else rows
    expected = {number: rows for number, rows in expected.items() if len(rows["actions"])}
    assert list(facts.episode_numbers) == list(found) == table.episode.tolist() == list(expected)
    assert facts.steps == table.steps == sum(len(rows["actions"]) for rows in expected.values())
    for number, rows in expected.items():
        assert joined(found[number], ("observation", "a", "b"), "before") == native(rows["obs/a/b"])
        assert joined(found[number], ("observation", "a", "b"), "after") == native(rows["next:obs/a/b"])
        assert joined(found[number], ("action",), "with") == native(rows["actions"])
        assert joined(found[number], ("state",), "with") == native(rows["states"])
        assert joined(found[number], ("info", "extra"), "with") == native(rows["extra"])
        ends = np.concatenate([one.terminated for one in found[number]])
        whole = len(rows["actions"]) == lengths[number]
        assert ends.tolist() == [False] * (len(ends) - 1) + [rewards and number in wins and whole]
        if rewards:
            assert joined(found[number], ("reward",), "with") == native(rows["rewards"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    files=st.lists(LENGTHS, min_size=1, max_size=3), shape=SHAPES, piece=st.integers(1, 400), choice=CHOICES,
    packing=PACKINGS, ends=st.sampled_from([None, "truncated"]), flags=npst.arrays(bool, (400, 7)),
)  # fmt: skip
def test_trials_of_roboset(
    files: list[Mapping[int, int]], shape: tuple[int, ...], piece: int, choice: str, packing: Mapping[str, Any],
    ends: str | None, flags: Array,
) -> None:  # fmt: skip
    trials: list[tuple[int, dict[str, Array]]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed, lengths in enumerate(files):
            groups = {}
            for number, length in sorted(lengths.items()):
                columns = {
                    "observations": numbers(length, "float64", shape, seed + number),
                    "actions": numbers(length, "float32", (2,), number), "done": flags[seed * 131 + number, :length],
                    "rewards": numbers(length, "float64", (), seed),
                    "env_infos/x/y": numbers(length, "int32", shape, number),
                }  # fmt: skip
                groups[f"Trial{number}"] = Demo(columns)
                trials += [(number, columns)] if length else []
            write_groups(Path(folder) / f"a_seed{seed}.h5", groups, **packing)
        if not trials:
            return
        options = {"ends": ends} if ends else {}
        with small(RobosetReader, piece)(Path(folder), final_step=choice, options=options) as reader:
            facts, found, table = reader.facts(), pieces_of(reader), reader.episode_table()
    expected = {}
    for count, (number, columns) in enumerate(trials):
        last = bool(columns["done"][-1]) and ends is None
        rows = after_final_step(columns, terminated=last, choice=choice)
        if len(rows["actions"]):
            expected[count if len(files) > 1 else number] = rows
    assert list(facts.episode_numbers) == list(found) == table.episode.tolist() == list(expected)
    for number, rows in expected.items():
        for name, key in (("observations", ("observation",)), ("env_infos/x/y", ("info", "x", "y"))):
            assert joined(found[number], key, "before") == native(rows[name])
            assert joined(found[number], key, "after") == native(rows[f"next:{name}"])
        assert joined(found[number], ("action",), "with") == native(rows["actions"])
        assert joined(found[number], ("reward",), "with") == native(rows["rewards"])
        terminated = np.concatenate([one.terminated for one in found[number]])
        truncated = np.concatenate([one.truncated for one in found[number]])
        done = rows["done"]
        assert terminated.tolist() == (done & (ends is None)).tolist()
        assert truncated[:-1].tolist() == (done & (ends is not None))[:-1].tolist()
        assert truncated[-1] or terminated[-1]
