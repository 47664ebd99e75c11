"""Checkpoints of buffers, ours and TorchRL's: their steps are opened as a dataset has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..checkpoint import (
    BUFFER,
    STORAGE_FOLDER,
    STORAGE_METADATA,
    BufferSteps,
    find_torchrl,
    open_steps,
    require_digests,
    whole_episodes,
)
from ..dataset import StepReader, has_manifest, is_ours, load_json, mend, one_generation
from ..errors import RbtoolError, UsageError
from .readable import has_steps

__all__ = ["is_of_buffer", "open_saved"]

_WRITER = "writer/metadata.json"


def is_of_buffer(path: Path) -> bool:
    """Tell whether the checkpoint of a buffer, or of a storage of steps, lies at `path`."""
    return (path / BUFFER).is_file() or _own_steps(path) is not None or _tensors(path) is not None


def open_saved(path: Path, *, damaged: bool = False) -> StepReader:
    """Open a dataset or a checkpoint as `open_steps` does, and that of a buffer or a storage as a dataset has it.

    `path` may also be the folder of a buffer, whatever saved its storage, as long as that holds steps of episodes:
    UsageError for one that does not, and for one whose rows are ranked and so do not lie in the order of time.
    """
    return one_generation(path, lambda: _open(path, damaged))


def _open(path: Path, damaged: bool) -> StepReader:
    mend(path)
    if (path / BUFFER).is_file():
        require_digests(path)
    tensors, own = _tensors(path), _own_steps(path)
    if tensors is not None:
        from ..checkpointers.tensor_rows import SavedTensorRows  # loads torch, which nothing else here needs

        writer = _writer_of(tensors)
        _refuse_ranked(tensors, writer)
        cursor = writer.get("cursor")
        return BufferSteps(SavedTensorRows(tensors, cursor if type(cursor) is int and cursor >= 0 else None))
    if own is None and find_torchrl(path) is None and (path / BUFFER).is_file():
        has_steps(path, raw=True)  # says that this buffer has none
    place = own or path
    _refuse_ranked(place, _writer_of(place if place.is_dir() else place.parent))
    return whole_episodes(open_steps(place, damaged=damaged))


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


def _writer_of(folder: Path) -> dict[str, Any]:
    """What the writer beside a storage wrote down; nothing where that is not known."""
    file = folder.parent / _WRITER
    try:
        found = load_json(file) if file.is_file() and (folder.parent / BUFFER).is_file() else None
    except RbtoolError:
        return {}
    return found if isinstance(found, dict) else {}


def _refuse_ranked(place: Path, writer: dict[str, Any]) -> None:
    if "rank_key" in writer:
        raise UsageError(
            f"{place} holds the rows that rank highest, in no order of time: they make up no episodes",
            hint="load them into a buffer with a TensorDictMaxValueWriter",
        )
