"""What is called how inside an H5 checkpoint."""

from __future__ import annotations

from ..ted import Key, file_stem

__all__ = ["DATA", "EPISODES", "SOURCE", "STORAGE", "TEXT", "h5_path"]

DATA = "data"
"""Name under which the manifest lists everything behind the user block."""
EPISODES = "episodes"
TEXT = "episodes_text"
SOURCE = "source"
STORAGE = "storage"


def h5_path(place: Key) -> str:
    """Name of a leaf inside the file; no part of a key can name another group."""
    return "/".join(map(file_stem, place))
