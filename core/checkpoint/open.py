"""Opens whatever rbtool wrote, recognised by its content."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import CorruptDataError, DatasetNotFoundError, FormatError, RbtoolError
from ..format import (
    COMMITS,
    HIDDEN,
    MANIFEST,
    CutPackedReader,
    FolderReader,
    ListedFiles,
    Manifest,
    PackedReader,
    PlainReader,
    StepReader,
    TedReader,
    has_manifest,
    is_ours,
    mend,
    one_generation,
    unfinished_recording,
)
from .flat import CutFlatReader, FlatReader
from .h5_reader import H5Reader
from .torchrl_reader import find_torchrl
from .torchrl_steps import TorchrlSteps

__all__ = ["is_steps", "open_steps", "standing"]

_TREE = "meta.json"


def is_steps(path: str | os.PathLike[str]) -> bool:
    """Tell whether `path` is a dataset, recording, checkpoint, one of TorchRL's, or tensordict folder, whole or not."""
    path = Path(path)
    mend(path)
    return is_ours(path) or any((path / name).is_file() for name in (_TREE, COMMITS)) or find_torchrl(path) is not None


def open_steps(path: str | os.PathLike[str], *, damaged: bool = False) -> StepReader:
    """Open a dataset or a checkpoint in any layout, or a tensordict folder of one row a step that has no manifest.

    TorchRL's flat, nested and H5 layouts are opened, too, by the folder or file of a storage or the folder of a buffer.
    Raises DatasetNotFoundError where nothing is, FormatError for what others wrote and for newer versions, and
    CorruptDataError for files that are missing, cut or contradict the manifest. With `damaged` the files of rows
    may be cut or missing, and only reading what is lost raises it.
    """
    path = Path(path)
    return one_generation(path, lambda: _open(path, damaged))


def _open(path: Path, damaged: bool) -> StepReader:
    mend(path)
    place = find_torchrl(path)
    if place is not None:
        return TorchrlSteps.at(place)
    if path.is_file():
        return H5Reader(path)
    if not path.exists():
        raise DatasetNotFoundError(f"there is nothing at {path}")
    if not any(path.iterdir()):
        raise DatasetNotFoundError(f"{path} is an empty folder, and no rbtool dataset")
    if not has_manifest(path) and (path / HIDDEN).is_dir():
        lost = CorruptDataError(f"{path} was an rbtool dataset or checkpoint, but {MANIFEST} is missing")
        raise unfinished_recording(path) or lost
    if not has_manifest(path) and (path / _TREE).is_file():
        return PlainReader(path)
    if not has_manifest(path):
        raise FormatError(f"{path} is no dataset and no checkpoint: it has no {MANIFEST}")
    listed = ListedFiles(path)
    layout = listed.manifest.layout
    if layout == "ted":
        return TedReader(path, listed)
    if layout == "packed":
        return (CutPackedReader if damaged else PackedReader)(path, listed)
    if layout in {"flat", "nested"}:
        return (CutFlatReader if damaged else FlatReader)(path, listed)
    raise FormatError(f"{path} has layout {layout!r}, which is not read here")


def standing(path: str | os.PathLike[str]) -> Manifest | None:
    """Return the manifest of the dataset or checkpoint at `path` if all its files are there in full length.

    None if nothing of ours is there, or if it is damaged: what stands there must not be taken for a finished result.
    """
    path = Path(path)
    mend(path)
    if not is_ours(path):
        return None
    try:
        with open_steps(path) as reader:
            if isinstance(reader, FolderReader):
                reader.listed.check_sizes()
            return reader.manifest
    except (RbtoolError, OSError):
        return None
