"""A user's machine that uploads to a stand-in hub, and the datasets it has."""

from __future__ import annotations

import hashlib
from pathlib import Path

from download_machine import Machine
from hub_uploads import WRITER, UploadHub

import rbtool
from rbtool.core.format.manifest import TRANSFERS
from rbtool.core.testing.datasets import ODD_LEAVES, DatasetPlan, write_plan, write_walks

__all__ = ["ODD_PLAN", "Uploader", "files_of", "write_layouts"]

ODD_PLAN = DatasetPlan(
    (3, 1, 4), ("terminated", "truncated", "both"), (False, True, False), ODD_LEAVES, text=True, documents=True
)
"""Leaves of every kind, of which some have no elements; names that files cannot have; text; an empty document."""


class Uploader(Machine):
    """Runs commands with a token that may write."""

    def __init__(self, hub: UploadHub, folder: Path) -> None:
        super().__init__(hub, folder)
        self.variables |= {"HF_TOKEN": WRITER}


def write_layouts(folder: Path) -> dict[str, Path]:
    """Write datasets of each layout, by name: an hour's walk in three of them, an odd one, and one without a step."""
    found = {name: folder / name for name in ("ted", "packed", "compressed", "odd", "empty")}
    write_walks(found["ted"], [(400, "terminated"), (1, "truncated"), (700, "both")])
    rbtool.convert(found["ted"], found["packed"], layout="packed")
    rbtool.convert(found["ted"], found["compressed"], layout="packed", compress=["observation=zstd:3"])
    write_plan(ODD_PLAN, found["odd"])
    write_walks(found["empty"], [])
    return found


def files_of(folder: Path) -> dict[str, str]:
    """The digest of every file of a dataset, but for the record of its transfers."""
    files = (path for path in folder.rglob("*") if path.is_file())
    found = {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    found.pop(TRANSFERS, None)
    return found
