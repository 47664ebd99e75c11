"""A Minari dataset does not bring other files of the machine into the result."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from gymnasium import spaces
from minari_oracle import make_episode, write_minari

from rbtool import CorruptDataError
from rbtool.core.verbs.convert import convert
from rbtool.core.verbs.inspect import inspect

BOX = spaces.Box(-np.inf, np.inf, (3,), np.float64)
STEPS = 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    episode = make_episode(BOX, BOX, STEPS, np.random.default_rng(3))
    return write_minari(tmp_path, "made/box-v0", BOX, BOX, [episode], data_format="hdf5")


def _external_storage(h5: h5py.File, secret: Path) -> None:
    del h5["episode_0/rewards"]
    h5.create_dataset("episode_0/rewards", (STEPS,), np.uint8, external=[(str(secret), 0, STEPS)])


def _external_link(h5: h5py.File, secret: Path) -> None:
    del h5["episode_0/rewards"]
    h5["episode_0/rewards"] = h5py.ExternalLink(str(secret), "/rewards")


def _virtual_dataset(h5: h5py.File, secret: Path) -> None:
    layout = h5py.VirtualLayout((STEPS,), float)
    layout[:] = h5py.VirtualSource(str(secret), "rewards", (STEPS,))
    del h5["episode_0/rewards"]
    h5.create_virtual_dataset("episode_0/rewards", layout)


def _unread_link(h5: h5py.File, secret: Path) -> None:
    h5["beside"] = h5py.ExternalLink(str(secret), "/")


@pytest.mark.parametrize("trick", [_external_storage, _external_link, _virtual_dataset, _unread_link])
@pytest.mark.parametrize("kind", ["file", "fifo", "nothing"])
def test_no_other_file_is_read(trick: Callable[[h5py.File, Path], None], kind: str, folder: Path) -> None:
    secret = folder.parent / "secret"
    if kind == "file":
        with h5py.File(secret, "w") as h5:
            h5["rewards"] = np.arange(1.0, STEPS + 1)
    elif kind == "fifo":
        os.mkfifo(secret)
    with h5py.File(folder / "data" / "main_data.hdf5", "r+") as h5:
        trick(h5, secret)
    for verb in (lambda: convert(folder, folder.parent / "ted"), lambda: inspect(folder)):
        with pytest.raises(CorruptDataError, match="plain groups and datasets whose data are in the file itself"):
            verb()
    assert not (folder.parent / "ted").exists()
