"""Archives of Gen-DGRL written by plain tarfile and NumPy."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from archive_files import add

Array = np.ndarray[Any, Any]
PIXELS = (3, 4, 4)


def random_episodes(
    lengths: Sequence[int], *, seed: int = 0, wide: bool = False, done: bool = True
) -> list[dict[str, Array]]:
    """Make episodes of these numbers of steps; `wide` gives actions and rewards a dimension of one."""
    draw = np.random.default_rng(seed)
    tail = (1,) if wide else ()
    return [
        {
            "observations": draw.integers(0, 256, (length + 1, *PIXELS), np.uint8),
            "actions": draw.integers(0, 15, (length, *tail)),
            "rewards": draw.normal(size=(length, *tail)).astype("f4"),
            "dones": ((np.arange(length) == length - 1) & done).astype("f4"),
        }
        for length in lengths
    ]


def name_of(number: int, length: int, total: float = 0.0) -> str:
    return f"bigfish/20230329T{number:06d}_{number}_{length}_{number + 7}_{total:.1f}.npy"


def saved(content: Any) -> bytes:
    """A `.npy` file of one Python object."""
    held = io.BytesIO()
    np.save(held, np.array(content, object), allow_pickle=True)
    return held.getvalue()


def add_episode(archive: tarfile.TarFile, number: int, observations: Array, actions: Array, rewards: Array) -> None:
    dones = (np.arange(len(rewards)) == len(rewards) - 1).astype("f4")
    found = {"observations": observations, "actions": actions, "rewards": rewards, "dones": dones}
    add(archive, name_of(number, len(rewards)), saved(found))


def write_archive(path: Path, episodes: Sequence[Any], *, form: int = tarfile.GNU_FORMAT) -> Path:
    """Write a file for each episode; the archive is compressed unless its name ends in `.tar`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w" if path.suffix == ".tar" else "w:xz", format=form) as archive:
        for number, episode in enumerate(episodes):
            length = len(episode["rewards"]) if isinstance(episode, dict) and "rewards" in episode else 0
            add(archive, name_of(number, length), saved(episode))
    return path


def write_folder(path: Path, episodes: Sequence[Any]) -> Path:
    """Write the files of an unpacked archive."""
    archive = write_archive(path.with_suffix(".tar"), episodes)
    with tarfile.open(archive) as opened:
        opened.extractall(path, filter="data")
    archive.unlink()
    return path
