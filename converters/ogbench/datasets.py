"""The datasets that OGBench publishes: their ids, and the file of each."""

from __future__ import annotations

import functools
import re
from pathlib import Path

VALIDATION = "-val"
"""The end of the name of a validation file."""
_TABLE = Path(__file__).with_name("datasets.tsv")
_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+-v\d+", re.ASCII)


@functools.cache
def published() -> tuple[str, ...]:
    """The ids of all datasets, sorted."""
    return tuple(sorted(_TABLE.read_text(encoding="ascii").split()[1:]))


def is_id(name: str) -> bool:
    """Whether a name has the form of an id, like `cube-single-play-v0`."""
    return _ID.fullmatch(name) is not None


def is_large(dataset_id: str) -> bool:
    """Whether an id names an edition of 100 million steps, which is not published as two files."""
    return "100m" in dataset_id.split("-")


def names_task(dataset_id: str) -> bool:
    """Whether an id names one task of a dataset, whose rewards are not in the file."""
    return "singletask" in dataset_id.split("-")


def file_name(dataset_id: str) -> str:
    """Return the name of the file of a dataset, without its suffix.

    Ids of single tasks and of goal representations add words to the id of their file.
    """
    parts = dataset_id.split("-")
    for word in ("singletask", "oraclerep"):
        if word in parts:
            parts = [*parts[: parts.index(word)], parts[-1]]
    return "-".join(parts)
