"""Open X-Embodiment, Gen-DGRL, Atari and CALVIN with changed bytes: of archives and files, and inside of them.

A file is changed as it is on the disk, and what it holds is changed and packed again with checksums that fit: the cases
of a reader are 10,000 mutations together.
"""

from __future__ import annotations

import gzip
import io
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import shard_files
from damage import mutated, strike_in_folder

from rbtool.converters.atari.reader import AtariReader
from rbtool.converters.calvin.reader import CalvinReader
from rbtool.converters.gen_dgrl.reader import GenDgrlReader
from rbtool.converters.openx.reader import OpenXReader
from rbtool.core.format.converter import Reader

BATCHES = 5
SHARDS = ["robots_00000.tar", "robots_00001.tar"]
ARRAYS = [
    f"replay_logs/{shard_files.atari_name(name, 0)}"
    for name in (*shard_files.ATARI_NAMES, "add_count", "invalid_range")
]


FRAMES = ["episode_0000010.npz", "episode_0000012.npz", "ep_start_end_ids.npy", "ep_lens.npy"]


def openx(folder: Path) -> Path:
    shards = [shard_files.random_openx((3, 2)), shard_files.random_openx((2,), kind="JPEG")]
    return shard_files.write_openx(folder / "robots", shards)


def gen_dgrl(folder: Path, suffix: str = ".tar") -> Path:
    return shard_files.write_dgrl(folder / "dgrl" / f"bigfish{suffix}", shard_files.random_dgrl((3, 2, 4))).parent


def gen_dgrl_xz(folder: Path) -> Path:
    return gen_dgrl(folder, ".tar.xz")


def gen_dgrl_folder(folder: Path) -> Path:
    return shard_files.write_dgrl_folder(folder / "unpacked", shard_files.random_dgrl((3, 2, 4)))


def atari(folder: Path) -> Path:
    return shard_files.write_run(folder / "Pong" / "1", shard_files.random_rows((5, 7, 4), tail=3), [8])


def atari_rings(folder: Path) -> Path:
    return shard_files.write_rings(folder / "Pong" / "1", shard_files.random_rows((9, 4, 17), tail=14, blanks=3), 10)


def calvin(folder: Path) -> Path:
    spans = [(10, 12, "push", "a"), (11, 14, "pull", "b")]
    return shard_files.write_calvin(folder / "training", [(10, 14), (20, 22)], spans)


def in_archive(data: bytes, chance: random.Random) -> bytes:
    """Change a file in an archive, which stays sound."""
    held = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(data)) as source, tarfile.open(fileobj=held, mode="w") as target:
        members = source.getmembers()
        struck = chance.randrange(len(members))
        for number, member in enumerate(members):
            content = source.extractfile(member).read()  # type: ignore[union-attr]
            shard_files.add_member(target, member.name, mutated(content, chance) if number == struck else content)
    return held.getvalue()


def in_gzip(data: bytes, chance: random.Random) -> bytes:
    """Change what a file is when it is unpacked; its checksum is that of the change."""
    return gzip.compress(mutated(gzip.decompress(data), chance), 1)


class Case(NamedTuple):
    """A reader, a dataset, which of its files are changed, how, and how many times in `make test-all`."""

    kind: type[Reader]
    made: Callable[[Path], Path]
    files: list[str]
    change: Callable[[bytes, random.Random], bytes]
    count: int


CASES = {
    "openx": Case(OpenXReader, openx, SHARDS, mutated, 4_000),
    "openx pickles": Case(OpenXReader, openx, SHARDS, in_archive, 6_000),
    "gen_dgrl": Case(GenDgrlReader, gen_dgrl, ["bigfish.tar"], mutated, 2_500),
    "gen_dgrl xz": Case(GenDgrlReader, gen_dgrl_xz, ["bigfish.tar.xz"], mutated, 2_000),
    "gen_dgrl pickles": Case(GenDgrlReader, gen_dgrl, ["bigfish.tar"], in_archive, 4_500),
    "gen_dgrl folder": Case(GenDgrlReader, gen_dgrl_folder, [shard_files.name_of(0, 3)], mutated, 1_000),
    "calvin": Case(CalvinReader, calvin, FRAMES, mutated, 6_000),
    "calvin annotations": Case(CalvinReader, calvin, ["lang_annotations/auto_lang_ann.npy"], mutated, 4_000),
    "atari": Case(AtariReader, atari, ARRAYS, mutated, 2_000),
    "atari rings": Case(AtariReader, atari_rings, ARRAYS, mutated, 2_000),
    "atari arrays": Case(AtariReader, atari, ARRAYS, in_gzip, 6_000),
}
"""10,000 mutations a reader."""


def strike(name: str, folder: Path, total: int, batch: int) -> None:
    one = CASES[name]
    source, count = one.made(folder), -(-total // len(one.files))
    options = {} if one.kind is AtariReader else {"trust_pickle": True}
    whole = strike_in_folder(
        one.kind, source, one.files, folder, count, options=options, change=one.change, batch=batch
    )
    assert whole < total * 4 // 5


@pytest.mark.parametrize("name", CASES)
def test_a_few_mutations(name: str, tmp_path: Path) -> None:
    strike(name, tmp_path, 12, 0)


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(1, BATCHES + 1))
@pytest.mark.parametrize("name", CASES)
def test_many_mutations(name: str, batch: int, tmp_path: Path) -> None:
    strike(name, tmp_path, CASES[name].count // BATCHES, batch)
