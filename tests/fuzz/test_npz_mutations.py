"""Files of OGBench and V-D4RL with changed bytes: reading one gives rows or one of our errors, in bounded time."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from damage import LONGEST, mutated, processor_seconds
from shard_files import random_vd4rl, rows_of_shards, write_vd4rl, write_vd4rl_shards

from rbtool.converters.ogbench.reader import OgbenchReader
from rbtool.converters.vd4rl.reader import Vd4rlReader
from rbtool.core.errors import RbtoolError
from rbtool.core.format.converter import Reader

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A sound input of every kind: of the raw formats a folder, whose first file is changed."""
    folder = tmp_path_factory.mktemp("originals")
    shutil.copytree(DATA / "ogbench", folder / "ogbench", ignore=shutil.ignore_patterns("*.md"))
    with np.load(folder / "ogbench" / "hoppermaze-medium-navigate-v0.npz") as file:
        (folder / "ogbench-stored").mkdir()
        np.savez(folder / "ogbench-stored" / "a-v0.npz", **file)
    episodes = random_vd4rl((5, 9, 4), terminal=(False, True, False))
    write_vd4rl(folder / "vd4rl-files", episodes)
    write_vd4rl(folder / "vd4rl-stored", episodes, packed=False)
    write_vd4rl_shards(folder / "vd4rl-shards", rows_of_shards(episodes), (4, 14), compression="gzip", chunks=True)
    return {path.name: path for path in folder.iterdir()}


READERS: dict[str, type[Reader]] = {"ogbench": OgbenchReader, "vd4rl": Vd4rlReader}
KINDS = ("ogbench", "ogbench-stored", "vd4rl-files", "vd4rl-stored", "vd4rl-shards")


def strike(original: Path, count: int, folder: Path) -> None:
    """Change a file of a copy again and again; it is recognised, read whole and summarised each time."""
    place = Path(shutil.copytree(original, folder / original.name))
    chance, refused = random.Random(f"{original.name} {count}"), 0
    kind = READERS[original.name.partition("-")[0]]
    file = sorted(place.iterdir())[0]
    data = file.read_bytes()
    for number in range(count):
        file.write_bytes(mutated(data, chance))
        started, said = processor_seconds(), ""
        try:
            kind.recognises(place)
            with kind(place) as reader:
                facts = reader.facts()
                steps = sum(map(len, reader.pieces()))
                assert steps == facts.steps == reader.episode_table().steps
        except RbtoolError as error:
            said = error.message
        except Exception as error:
            raise AssertionError(f"{original.name}, mutation {number}: {error!r}") from error
        refused += bool(said)
        assert "\n" not in said, (original.name, number)
        assert processor_seconds() - started < LONGEST, (original.name, number)
    assert refused > count // 5


@pytest.mark.parametrize("name", KINDS)
def test_a_few_mutations(name: str, originals: dict[str, Path], tmp_path: Path) -> None:
    strike(originals[name], 50, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_many_mutations(name: str, originals: dict[str, Path], tmp_path: Path) -> None:
    strike(originals[name], 5_000 if name.startswith("ogbench") else 3_400, tmp_path)
