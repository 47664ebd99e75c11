"""A root with datasets, and ways to put all else there that may lie below one."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

import rbtool
from rbtool.core.format import fs
from rbtool.core.format.converter import RemoteDataset, RemoteFile
from rbtool.core.format.episodes import EpisodeRow
from rbtool.core.format.manifest import Request
from rbtool.core.format.memmap.builder import DatasetBuilder, Origin
from rbtool.core.remote.originals import Originals
from rbtool.core.ted.episodes import EndReason
from rbtool.core.ted.schema import Field
from rbtool.core.testing.datasets import write_walks

DAY = 24 * 3600
Written = Callable[[Mapping[Field, np.ndarray], Sequence[int]], Path]


class Store:
    """A root below which two datasets are stored: `door`, deep down, and `cart`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.door = root / "minari" / "D4RL" / "door" / "human-v2"
        self.cart = root / "minari" / "cart-v0"
        write_walks(self.door, [(4, "open"), (3, "terminated")])
        write_walks(self.cart, [(2, "open")])

    def original(self, dataset_id: str, *, kept: bool, source: str = "minari") -> Originals:
        """Put an original there: whole where it is to be kept, else fetched in part."""
        originals = Originals(self.root, source, dataset_id)
        file = RemoteFile("data/main.bin", 3, f"sha256:{hashlib.sha256(b'abc').hexdigest()}", ())
        fs.make_folder(originals.folder)
        originals.begin(RemoteDataset(dataset_id, "hf://there", None, (file,)), [file.path], kept=kept)
        fs.make_folder(originals.files / "data")
        (originals.files / "data" / ("main.bin" if kept else "main.bin.part")).write_bytes(b"abc" if kept else b"ab")
        return originals

    def leftover(self, place: str = "minari/D4RL/door", name: str = ".human-v2.rbtool-new-01234567") -> Path:
        """Put there what a killed process leaves."""
        write_walks(self.root / place / name, [(2, "open")])
        return self.root / place / name

    def listing(self, *, days: float) -> Path:
        """Put a listing of a remote there that is so many days old."""
        path = self.root / "minari" / ".catalogue" / "0123456789abcdef.json"
        path.parent.mkdir(parents=True)
        path.write_text("{}")
        os.utime(path, (time.time() - days * DAY,) * 2)
        return path

    def shown(self) -> list[tuple[str, str]]:
        """Names and kinds of all that is there."""
        return [(entry.name, entry.what) for entry in rbtool.cache.ls(root=self.root).entries]

    def state(self) -> dict[str, bytes]:
        """Every file and its bytes."""
        return {str(path): path.read_bytes() for path in self.root.rglob("*") if path.is_file()}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "root")


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    """Write columns as a dataset with episodes of these lengths; what is remembered of it stays below `tmp_path`."""
    monkeypatch.setenv("RBTOOL_HOME", str(tmp_path / "home"))

    def write(columns: Mapping[Field, np.ndarray], lengths: Sequence[int]) -> Path:
        with DatasetBuilder(tmp_path / "written", list(columns)) as builder:
            builder.append({field.key: values for field, values in columns.items()})
            rows = [EpisodeRow(n, length, 0.0, True, False, EndReason.TERMINATED) for n, length in enumerate(lengths)]
            builder.finish(rows, Origin(Request("test", "test", "odd")))
        return tmp_path / "written"

    return write
