"""Files that a new dataset shares with its source: only where neither can change the other, and only equal ones."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damage import flip

import rbtool
from rbtool.core.datasets.storage import DatasetStorage
from rbtool.core.engine.workspace import placed_folder, result_folder, revert_publication
from rbtool.core.errors import CorruptDataError, UsageError
from rbtool.core.format import staging
from rbtool.core.format.manifest import Manifest
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.format.memmap.tree import leaf_sizes
from rbtool.core.format.staging import share_blocks, share_files
from rbtool.core.testing.datasets import write_walks

LEAF = "observation.memmap"


def walks(folder: Path, *, read_only: bool = True, seed: int = 0) -> Path:
    write_walks(folder, [(600, "terminated"), (1, "truncated"), (700, "truncated")], seed=seed)
    if read_only:
        freeze(folder)
    return folder


def freeze(folder: Path) -> None:
    for leaf in folder.rglob("*.memmap"):
        leaf.chmod(0o444)


def more(rows: Any) -> Any:
    rows["extra"] = rows["observation"] * 2
    return rows


def prepared(source: Path, dest: Path, **options: Any) -> Any:
    return rbtool.preprocess(source, more, dest, num_workers=0, **options)


def linked(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file() and file.stat().st_nlink > 1}


def require_sound(*folders: Path) -> None:
    for folder in folders:
        with TedReader(folder) as reader:
            reader.verify_files()
        assert not list(folder.rglob("*.shared"))


# Hard links ------------------------------------------------------------------------------------------


def test_leaves_that_stay_the_same_are_links_to_read_only_ones(tmp_path: Path) -> None:
    source, made = walks(tmp_path / "source"), tmp_path / "made"
    result = prepared(source, made)
    assert {LEAF, "action.memmap", "next/observation.memmap"} <= linked(made)
    assert "extra.memmap" not in linked(made)
    assert linked(made) == linked(source)
    assert result.shared_bytes == sum((made / name).stat().st_size for name in linked(made))
    require_sound(source, made)
    shutil.copytree(source, tmp_path / "copy", copy_function=shutil.copyfile)
    assert prepared(tmp_path / "copy", tmp_path / "other").content_digest == result.content_digest
    assert not linked(tmp_path / "other")


def test_files_that_may_be_written_to_are_never_linked(tmp_path: Path) -> None:
    source, made = walks(tmp_path / "source", read_only=False), tmp_path / "made"
    assert prepared(source, made).shared_bytes == 0
    assert not linked(made)
    for mode in (0o644, 0o464, 0o446):
        (source / LEAF).chmod(mode)
        prepared(source, made, force=True)
        assert not linked(made)


def test_what_others_own_is_not_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, made = walks(tmp_path / "source"), tmp_path / "made"
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert prepared(source, made).shared_bytes == 0
    assert not linked(made)


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOSPC])
def test_where_there_are_no_links_there_are_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    source, made = walks(tmp_path / "source"), tmp_path / "made"

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    assert prepared(source, made).shared_bytes == 0
    require_sound(source, made)


def test_either_dataset_can_go(tmp_path: Path) -> None:
    source, made = walks(tmp_path / "source"), tmp_path / "made"
    prepared(source, made)
    shutil.rmtree(source)
    require_sound(made)
    again = tmp_path / "again"
    prepared(made, again, force=True)
    prepared(walks(tmp_path / "other", seed=5), made, force=True)
    require_sound(made, again)


def test_damage_does_not_spread(tmp_path: Path) -> None:
    """A source that is damaged after it was read: what was written from sound rows stays."""
    source, made = walks(tmp_path / "source", read_only=False), tmp_path / "made"
    prepared(source, made)
    flip(source / LEAF, 100)
    freeze(source)
    with TedReader(source) as reader:
        assert share_files(made, Manifest.load(made), [reader], links=True) > 0
    assert LEAF not in linked(made)
    require_sound(made)
    with pytest.raises(CorruptDataError):
        require_sound(source)


def test_a_symbolic_link_in_the_source_is_not_linked(tmp_path: Path) -> None:
    source, made = walks(tmp_path / "source"), tmp_path / "made"
    (source / LEAF).rename(tmp_path / "elsewhere")
    (source / LEAF).symlink_to(tmp_path / "elsewhere")
    prepared(source, made)
    assert linked(made)
    assert LEAF not in linked(made)
    require_sound(made)


def test_conversions_make_copies_that_can_be_edited(tmp_path: Path) -> None:
    source, made = walks(tmp_path / "source"), tmp_path / "made"
    for layout in ("ted", "packed"):
        rbtool.convert(source, made, layout=layout, force=True)
        assert not linked(made)


def test_packed_datasets_are_not_linked(tmp_path: Path) -> None:
    packed, made = tmp_path / "packed", tmp_path / "made"
    rbtool.convert(walks(tmp_path / "source"), packed, layout="packed")
    for file in packed.rglob("*"):
        if file.is_file():
            file.chmod(0o444)
    assert rbtool.merge([packed, walks(tmp_path / "other", seed=3)], made, layout="packed").shared_bytes == 0
    assert prepared(packed, tmp_path / "prepared").shared_bytes == 0
    assert not linked(made) | linked(tmp_path / "prepared")


def test_shared_rows_are_not_edited(tmp_path: Path) -> None:
    source, made = walks(tmp_path / "source"), tmp_path / "made"
    prepared(source, made)
    for folder in (source, made):
        with pytest.raises(UsageError, match=r"r\+"):
            DatasetStorage(folder, mode="r+")
    for leaf in made.rglob("*.memmap"):  # and with permission, they are still those of the source
        leaf.chmod(0o644)
    with pytest.raises(UsageError, match="part of other datasets"):
        DatasetStorage(source, mode="r+")
    rbtool.convert(made, tmp_path / "copy", layout="ted")
    DatasetStorage(tmp_path / "copy", mode="r+")[0:5]["observation"].fill_(7)
    require_sound(source, made)


def test_a_run_that_resumes_writes_into_no_shared_file(tmp_path: Path) -> None:
    """A process that was killed between linking and publishing, or right after the old result moved aside."""
    source, made, work = walks(tmp_path / "source"), tmp_path / "made", tmp_path / "work"
    prepared(source, made)
    manifest = Manifest.load(made)
    placed_folder(work).parent.mkdir(parents=True)
    made.rename(result_folder(work))
    revert_publication(work, leaf_sizes(manifest.fields, manifest.steps))
    left = {file.name for file in placed_folder(work).rglob("*") if file.is_file()}
    assert "extra.memmap" in left
    assert LEAF not in left
    require_sound(source)


# Blocks ----------------------------------------------------------------------------------------------


class Kernel:
    """Stands in for a file system that shares blocks: compares, counts, and refuses what it is set to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int = 1 << 30, refused: int = 0) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.most, self.refused = most, refused
        monkeypatch.setattr(fcntl, "ioctl", self.answer)

    def answer(self, one: int, request: int, about: bytearray, _: bool) -> int:
        assert request == 0xC0189436
        if self.refused:
            raise OSError(self.refused, os.strerror(self.refused))
        fields = list(staging._RANGE.unpack(about))
        start, size, other, at = fields[0], fields[1], fields[5], fields[6]
        assert (fields[2], at) == (1, start)
        size = min(size, self.most)
        equal = os.pread(one, size, start) == os.pread(other, size, start)
        fields[7:9] = (size, 0) if equal else (0, 1)
        staging._RANGE.pack_into(about, 0, *fields)
        if equal:
            self.ranges.append((start, size))
        return 0


def test_blocks_are_shared_before_links_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, made, kernel = walks(tmp_path / "source"), tmp_path / "made", Kernel(monkeypatch)
    result = prepared(source, made)
    assert result.shared_bytes == sum(size for _, size in kernel.ranges) > 0
    assert not linked(made)
    assert rbtool.convert(source, tmp_path / "copy", layout="ted").shared_bytes >= result.shared_bytes
    DatasetStorage(made, mode="r+")


def test_large_files_are_shared_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "other"):
        (tmp_path / name).write_bytes(bytes(range(256)) * 80 + b"end")
    kernel = Kernel(monkeypatch, most=8192)
    assert share_blocks(tmp_path / "one", tmp_path / "other") == 20483
    assert kernel.ranges == [(0, 8192), (8192, 8192), (16384, 4099)]


@pytest.mark.parametrize(("at", "expected"), [(0, 0), (9000, 8192)])
def test_what_differs_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, expected: int) -> None:
    for name in ("one", "other"):
        (tmp_path / name).write_bytes(bytes(20_000))
    flip(tmp_path / "other", at)
    Kernel(monkeypatch, most=8192)
    assert share_blocks(tmp_path / "one", tmp_path / "other") == expected


def test_a_merge_shares_the_beginning_of_its_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, other = walks(tmp_path / "source"), walks(tmp_path / "other", seed=4)
    Kernel(monkeypatch)
    found = rbtool.merge([source, other], tmp_path / "made")
    sizes = [leaf.stat().st_size for leaf in source.rglob("*.memmap")]
    assert found.shared_bytes == sum(size // 4096 * 4096 for size in sizes)
    require_sound(tmp_path / "made", source, other)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSPC])
def test_a_file_system_that_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    source, made = walks(tmp_path / "source"), tmp_path / "made"
    Kernel(monkeypatch, refused=code)
    assert prepared(source, made).shared_bytes > 0
    assert LEAF in linked(made)


@pytest.fixture
def btrfs(tmp_path: Path) -> Iterator[Path]:
    """A small file system that shares blocks."""
    image, place = tmp_path / "image", tmp_path / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(128 << 20)
    for words in (["mkfs.btrfs", "-q", str(image)], ["mount", "-o", "loop", str(image), str(place)]):
        try:
            done = subprocess.run(words, capture_output=True, check=False)
        except FileNotFoundError:
            pytest.skip(f"{words[0]} is not installed")
        if done.returncode:
            pytest.skip(f"a small Btrfs cannot be mounted here: {done.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def test_blocks_are_shared_on_btrfs(btrfs: Path) -> None:
    source, made = walks(btrfs / "source", read_only=False), btrfs / "made"
    result = prepared(source, made)
    assert result.shared_bytes > 0.9 * sum(
        leaf.stat().st_size for leaf in source.rglob("*.memmap") if leaf.stat().st_size > 4096
    )
    assert not linked(made)
    before = np.fromfile(source / LEAF, np.uint8)
    torch.from_file(str(made / LEAF), shared=True, size=100, dtype=torch.uint8).fill_(1)
    assert np.array_equal(np.fromfile(source / LEAF, np.uint8), before)
    require_sound(source)
    flip(source / "action.memmap", 10)
    with TedReader(made) as reader:
        reader.listed.verify([file for file in reader.manifest.files if file.path == "action.memmap"])
