"""D4RL files with changed bytes: reading one gives its rows or one of our errors, in bounded time."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from damage import LONGEST, mutated, processor_seconds

from rbtool.converters.d4rl.reader import D4rlReader
from rbtool.core.errors import RbtoolError

DATA = Path(__file__).parents[1] / "data" / "d4rl"
FILES = ("hopper_random-v2", "hopper_random_v0", "door_demos", "antmaze_like_goal", "kitchen_like_no_timeouts")


def read_all(path: Path) -> None:
    if not D4rlReader.recognises(path):
        return
    with D4rlReader(path, options={"horizon": 50} if b"timeouts" not in path.read_bytes() else {}) as reader:
        facts = reader.facts()
        steps = sum(map(len, reader.pieces()))
        assert steps == facts.steps == reader.episode_table().steps


def strike(name: str, count: int, folder: Path) -> None:
    data, path, chance = (DATA / f"{name}.hdf5").read_bytes(), folder / "a.hdf5", random.Random(f"{name} {count}")
    for number in range(count):
        path.write_bytes(mutated(data, chance))
        started, said = processor_seconds(), ""
        try:
            read_all(path)
        except RbtoolError as error:
            said = error.message
        except Exception as error:
            raise AssertionError(f"{name}, mutation {number}: {error!r}") from error
        assert "\n" not in said, (name, number)
        assert processor_seconds() - started < LONGEST, (name, number)


@pytest.mark.parametrize("name", FILES)
def test_a_few_mutations(name: str, tmp_path: Path) -> None:
    strike(name, 40, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_many_mutations(name: str, tmp_path: Path) -> None:
    strike(name, 2_000, tmp_path)
