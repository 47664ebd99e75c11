"""Checkpoints of buffers, ours and TorchRL's: their steps are opened as a dataset has them."""

from __future__ import annotations

from pathlib import Path

from ..checkpoint import BUFFER, STORAGE, STORAGE_FOLDER, STORAGE_METADATA, BufferSteps, find_torchrl, open_steps
from ..dataset import StepReader, has_manifest, is_ours, load_json, mend
from ..errors import RbtoolError

__all__ = ["is_of_buffer", "open_saved"]

_CURSOR = "writer/metadata.json"


def is_of_buffer(path: Path) -> bool:
    """Tell whether the checkpoint of a buffer or a storage of steps lies at `path`."""
    return _own_steps(path) is not None or _tensors(path) is not None


def open_saved(path: Path) -> StepReader:
    """Open a dataset or a checkpoint as `open_steps` does, and that of a buffer or a storage as a dataset has it.

    `path` may also be the folder of a buffer, whatever saved its storage, as long as that holds steps of episodes.
    """
    mend(path)
    tensors = _tensors(path)
    if tensors is not None:
        from ..checkpointers.tensor_rows import SavedTensorRows  # loads torch, which nothing else here needs

        return BufferSteps(SavedTensorRows(tensors, _cursor(tensors)))
    reader = open_steps(_own_steps(path) or path)
    manifest = reader.manifest
    return BufferSteps(reader) if (manifest.kind, manifest.request.source) == ("checkpoint", STORAGE) else reader


def _own_steps(path: Path) -> Path | None:
    """Where in the folder of a buffer, or of a storage, one of our forms of whole episodes lies."""
    if not path.is_dir() or has_manifest(path):
        return None
    folder = path / STORAGE_FOLDER if (path / BUFFER).is_file() else path
    if folder != path and is_ours(folder):
        return folder
    files = sorted(folder.glob("*.h5")) if folder.is_dir() else []
    return files[0] if len(files) == 1 and is_ours(files[0]) else None


def _tensors(path: Path) -> Path | None:
    """Where the rows of a storage of tensors lie, one after the other as they lay in memory."""
    if not path.is_dir() or find_torchrl(path) is not None:
        return None
    folder = path / STORAGE_FOLDER if (path / BUFFER).is_file() else path
    return folder if (folder / STORAGE_METADATA).is_file() and not has_manifest(folder) else None


def _cursor(folder: Path) -> int | None:
    """The row that the writer beside a storage would have written next; None where nobody knows."""
    file = folder.parent / _CURSOR
    try:
        found = load_json(file) if file.is_file() and (folder.parent / BUFFER).is_file() else None
    except RbtoolError:
        return None
    cursor = found.get("cursor") if isinstance(found, dict) else None
    return cursor if type(cursor) is int and cursor >= 0 else None
