"""Compressed streams with changed bytes: reading one gives rows or one of our errors, in bounded time."""

from __future__ import annotations

import gzip
import lzma
import random
import time
from pathlib import Path

import pytest
from atari_files import random_rows, write_rings, write_run
from dgrl_files import random_episodes, write_archive, write_folder
from mutations import mutated
from openx_files import random_episodes as random_robot_episodes
from openx_files import write_shards

from rbtool.core.errors import RbtoolError
from rbtool.core.format.locate import reader_class

LONGEST = 10.0
KINDS = ("atari", "atari-rings", "atari-unpacked", "gen_dgrl", "gen_dgrl-unpacked", "gen_dgrl-tar", "openx")
OPTIONS = {"gen_dgrl": {"trust_pickle": True}, "openx": {"trust_pickle": True}}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A sound input of every kind; of `unpacked` ones the array inside is changed, and compressed again."""
    folder = tmp_path_factory.mktemp("originals")
    write_run(folder / "atari", random_rows((5, 9, 4), tail=3), (7, 14))
    write_rings(folder / "atari-rings", random_rows((9, 4, 17), tail=14, blanks=3), 10)
    write_run(folder / "atari-unpacked", random_rows((5, 9, 4), tail=3), (7,))
    for name in ("gen_dgrl", "gen_dgrl-unpacked"):
        write_archive(folder / name / "a.tar.xz", random_episodes((5, 1, 9)))
    write_archive(folder / "gen_dgrl-tar" / "a.tar", random_episodes((5, 1, 9)))
    write_folder(folder / "gen_dgrl-folder", random_episodes((5, 1, 9)))
    write_shards(folder / "openx", [random_robot_episodes((3, 1)), random_robot_episodes((2,), kind="JPEG")])
    return {path.name: path for path in folder.iterdir()}


def strike(original: Path, count: int) -> None:
    """Change one file after the other; all is recognised, read whole and summarised each time."""
    chance, refused = random.Random(f"{original.name} {count}"), 0
    form = original.name.partition("-")[0]
    kind, pack, unpack = reader_class(form), gzip.compress, gzip.decompress
    if form == "gen_dgrl":
        pack, unpack = lzma.compress, lzma.decompress
    files = sorted(file for file in original.rglob("*") if file.is_file())
    for number in range(count):
        file = files[number % len(files)]
        data = file.read_bytes()
        changed = mutated(unpack(data) if "unpacked" in original.name else data, chance)
        file.write_bytes(pack(changed) if "unpacked" in original.name else changed)
        started, said = time.monotonic(), ""
        try:
            path = file if form == "gen_dgrl" else original
            kind.recognises(path)
            with kind(path, options=OPTIONS.get(form)) as reader:
                facts = reader.facts()
                steps = sum(map(len, reader.pieces()))
                assert steps == facts.steps == reader.episode_table().steps
        except RbtoolError as error:
            said = error.message
        except Exception as error:
            raise AssertionError(f"{original.name}, mutation {number} of {file.name}: {error!r}") from error
        finally:
            file.write_bytes(data)
        refused += bool(said)
        assert "\n" not in said, (original.name, number)
        assert time.monotonic() - started < LONGEST, (original.name, number)
    assert refused > count // 5


@pytest.mark.parametrize("name", KINDS)
def test_a_few_mutations(name: str, originals: dict[str, Path]) -> None:
    strike(originals[name], 40)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_many_mutations(name: str, originals: dict[str, Path]) -> None:
    strike(originals[name], 3_400)
