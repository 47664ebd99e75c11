"""HDF5 files with changed bytes: reading one gives its rows or one of our errors, in time.

With the damaged heaps of `test_h5_heap_mutations`, 11,000 of robomimic and 6,900 of RoboSet, each reader gets 10,000
mutations or more in `make test-all`.
"""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest
from damage import LONGEST, mutated, processor_seconds

from rbtool.converters.aloha.reader import AlohaReader
from rbtool.converters.d4rl.reader import D4rlReader
from rbtool.converters.robomimic.reader import RobomimicReader
from rbtool.converters.roboset.reader import RobosetReader
from rbtool.core.errors import RbtoolError
from rbtool.core.format.converter import Reader

DATA = Path(__file__).parents[1] / "data"
D4RL = ("hopper_random-v2", "hopper_random_v0", "door_demos", "antmaze_like_goal", "kitchen_like_no_timeouts")
FILES: dict[str, tuple[type[Reader], Path, int]] = {
    **{name: (D4rlReader, DATA / "d4rl" / f"{name}.hdf5", 2_000) for name in D4RL},
    "low_dim": (RobomimicReader, DATA / "robomimic" / "low_dim_v15.hdf5", 1_700),
    "isaac": (RobomimicReader, DATA / "robomimic" / "isaac_stack_cube.hdf5", 1_700),
    "mobile aloha": (AlohaReader, DATA / "aloha" / "mobile_aloha" / "episode_0.hdf5", 4_000),
    "sim aloha": (AlohaReader, DATA / "aloha" / "sim_transfer_cube" / "episode_0.hdf5", 3_000),
    "robotwin": (AlohaReader, DATA / "aloha" / "robotwin2" / "data" / "episode0.hdf5", 3_000),
    "roboset": (RobosetReader, DATA / "roboset" / "DAPG(expert)" / "door_v2d-v1" / "door_v2d-v1_seed1.h5", 3_400),
}
"""A reader, a file, and how many mutations of it in `make test-all`."""


def read_all(kind: type[Reader], path: Path) -> None:
    if not kind.recognises(path):
        return
    horizon = kind is D4rlReader and b"timeouts" not in path.read_bytes()
    with kind(path, options={"horizon": 50} if horizon else {}) as reader:
        whole = reader.stated()
        for number in whole.episode_numbers:
            with contextlib.suppress(RbtoolError):
                steps = sum(map(len, reader.pieces([number])))
                assert steps == reader.episode_table([number]).steps
        facts = reader.facts()
        assert facts.steps == sum(map(len, reader.pieces()))


def strike(name: str, count: int, folder: Path) -> None:
    kind, source, _ = FILES[name]
    data, path, chance = source.read_bytes(), folder / "a.hdf5", random.Random(f"{name} {count}")
    for number in range(count):
        path.write_bytes(mutated(data, chance))
        started, text = processor_seconds(), ""
        try:
            read_all(kind, path)
        except RbtoolError as error:
            text = error.message
        except Exception as error:
            raise AssertionError(f"{name}, mutation {number}: {error!r}") from error
        assert "\n" not in text, (name, number)
        assert processor_seconds() - started < LONGEST, (name, number)


@pytest.mark.parametrize("name", FILES)
def test_a_few_mutations(name: str, tmp_path: Path) -> None:
    strike(name, 40, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_many_mutations(name: str, tmp_path: Path) -> None:
    strike(name, FILES[name][-1], tmp_path)
