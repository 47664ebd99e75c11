"""A FIFO in the place of any file of a dataset ends a verb in a sentence, and never in a wait without end."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces
from minari_oracle import make_episode, write_minari
from waiting import HANG

import rbtool
from rbtool.core.encodings.save import save_checkpoint
from rbtool.core.errors import RbtoolError
from rbtool.core.open_steps import open_steps
from rbtool.core.testing.datasets import write_walks


@pytest.fixture(autouse=True)
def no_wait() -> Iterator[None]:
    signal.alarm(int(HANG))
    yield
    signal.alarm(0)


def _ted(place: Path) -> None:
    write_walks(place, [(3, "terminated"), (2, "open")])


def _packed(place: Path) -> None:
    _ted(place.with_name("plain"))
    rbtool.convert(_minari_of(place, "hdf5"), place, layout="packed")


def _saved(form: str) -> Callable[[Path], None]:
    def make(place: Path) -> None:
        _ted(place.with_name("plain"))
        with open_steps(place.with_name("plain")) as reader:
            save_checkpoint(reader, place, form)

    return make


def _minari_of(place: Path, form: str) -> Path:
    box = spaces.Box(-1, 1, (2,), np.float64)
    episodes = [make_episode(box, box, 3, np.random.default_rng(1))]
    return write_minari(place.parent, "made/box-v0", box, box, episodes, data_format=form)


def _minari(form: str) -> Callable[[Path], None]:
    return lambda place: shutil.move(_minari_of(place, form), place) and None


KINDS = {
    "ted": _ted, "packed": _packed, "flat": _saved("flat"), "nested": _saved("nested"), "h5": _saved("h5"),
    "hdf5": _minari("hdf5"), "arrow": _minari("arrow"), "parquet": _minari("parquet"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_may_be_a_fifo(kind: str, tmp_path: Path) -> None:
    KINDS[kind](tmp_path / "sound")
    files = [path for path in (tmp_path / "sound", *(tmp_path / "sound").rglob("*")) if path.is_file()]
    read: list[Callable[[Path], object]] = [rbtool.inspect]
    if kind in {"hdf5", "arrow", "parquet"}:
        read.append(lambda place: rbtool.convert(place, tmp_path / "made", force=True))
    else:
        read += [rbtool.check, rbtool.stats]
    for file in files:
        file.rename(tmp_path / "aside")
        os.mkfifo(file)
        for use in read:
            try:
                use(tmp_path / "sound")
            except (RbtoolError, FileNotFoundError):
                continue
        (tmp_path / "aside").replace(file)
