"""RLDS datasets with changed bytes: reading one gives rows or one of our errors, in bounded time."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from damage import LONGEST, mutated, processor_seconds
from rlds_files import METADATA, RICH, random_episode, record, write_dataset, write_shard

from rbtool.converters.rlds.reader import RldsReader
from rbtool.core.errors import RbtoolError

KINDS = ("shards", "records", "compiled", "features", "info")
"""What is changed; of `records` the checksums are those of what is changed, so that all of it is parsed.

With `compiled` they are parsed by compiled loops.
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    records = [record(RICH, random_episode(length, RICH, seed=length), METADATA) for length in (5, 1, 7)]
    return write_dataset(tmp_path / "1.0.0", {"train": [records[:2], records[2:]]}, RICH, METADATA)


def changed(folder: Path, kind: str, number: int, chance: random.Random) -> Path:
    """Change something; return the file, which is another one the next time."""
    shards = sorted(folder.glob("*.tfrecord-*"))
    if kind in ("features", "info"):
        file = folder / ("features.json" if kind == "features" else "dataset_info.json")
        file.write_bytes(mutated(file.read_bytes(), chance))
    elif kind == "shards":
        file = shards[number % 2]
        file.write_bytes(mutated(file.read_bytes(), chance))
    else:
        file = shards[1]
        write_shard(file, [mutated(record(RICH, random_episode(7, RICH, seed=7), METADATA), chance)])
    return file


def read(folder: Path) -> None:
    RldsReader.recognises(folder)
    with RldsReader(folder) as reader:
        facts = reader.facts()
        steps = sum(map(len, reader.pieces()))
        assert steps == facts.steps == reader.episode_table().steps


def strike(folder: Path, kind: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "compiled":
        monkeypatch.setattr("rbtool.converters.rlds.reader.COMPILED_BYTES", 0)
    chance, refused = random.Random(f"{kind} {count}"), 0
    for number in range(count):
        held = {file: file.read_bytes() for file in folder.iterdir()}
        changed(folder, kind, number, chance)
        started, said = processor_seconds(), ""
        try:
            read(folder)
        except RbtoolError as error:
            said = error.message
        except Exception as error:
            raise AssertionError(f"{kind}, mutation {number}: {error!r}") from error
        finally:
            for file, data in held.items():
                file.write_bytes(data)
        refused += bool(said)
        assert "\n" not in said, (kind, number)
        assert processor_seconds() - started < LONGEST, (kind, number)
    assert refused > count // 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_mutations(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strike(folder, kind, 40, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_mutations(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strike(folder, kind, 2_000, monkeypatch)
