"""Tables with changed bytes, of every kind: reading one gives rows or one of our errors, in bounded time."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import LONGEST, mutated, processor_seconds
from table_files import WRITERS, column_map, flat, named, random_episodes, tables

from rbtool.converters.openml.reader import ArffFile
from rbtool.converters.table.reader import TableReader, overview
from rbtool.core.errors import RbtoolError
from rbtool.core.format.files import understood

STEPS = (5, 1, 7, 4)


def read_table(path: Path, options: dict[str, Any]) -> None:
    with understood(path):
        overview(path)
    with TableReader(path, options=options) as reader:
        facts = reader.facts()
        steps = sum(map(len, reader.pieces()))
        assert steps == facts.steps == reader.episode_table().steps


def read_arff(path: Path) -> None:
    with understood(path):
        for block in ArffFile(path).blocks():
            assert block


def of_kind(kind: str, folder: Path) -> tuple[Path, Callable[[], None]]:
    """A sound input: the file to change, and how to read all of it."""
    if kind == "arff":
        (folder / "a.arff").write_bytes(tables()["adult"].arff())
        return folder / "a.arff", lambda: read_arff(folder / "a.arff")
    columns = named(flat(random_episodes(STEPS)), traj=np.repeat(np.arange(4), STEPS))
    path = WRITERS[kind](folder / "a", columns)
    options = {"map": column_map(kind), "ends": "dead,late", "episode_key": "traj"}
    return path / "obs.npy" if kind == "npy" else path, lambda: read_table(path, options)


def strike(kind: str, count: int, folder: Path) -> None:
    target, read = of_kind(kind, folder)
    data, chance = target.read_bytes(), random.Random(f"{kind} {count}")
    read()
    for number in range(count):
        target.write_bytes(mutated(data, chance))
        started, said = processor_seconds(), ""
        try:
            read()
        except RbtoolError as error:
            said = error.message
        except Exception as error:
            raise AssertionError(f"{kind}, mutation {number}: {error!r}") from error
        assert "\n" not in said, (kind, number, said)
        assert processor_seconds() - started < LONGEST, (kind, number)


@pytest.mark.parametrize("kind", [*WRITERS, "arff"])
def test_a_few_mutations(kind: str, tmp_path: Path) -> None:
    strike(kind, 40, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*WRITERS, "arff"])
def test_many_mutations(kind: str, tmp_path: Path) -> None:
    strike(kind, 1_700, tmp_path)
