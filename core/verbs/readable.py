"""What lies at a path: something whose steps a verb can read, or what else, and what to do with it."""

from __future__ import annotations

import shlex
from pathlib import Path

from ..checkpoint import DIGESTS, find_torchrl, is_steps
from ..dataset import HIDDEN, has_manifest, is_ours, reader_class, reader_names
from ..errors import DatasetNotFoundError, FormatError, UsageError

__all__ = ["has_steps"]

_BUFFER = "buffer_metadata.json"
_STORAGE = (f"{HIDDEN}/storage.json", DIGESTS)


def has_steps(path: Path, *, raw: bool = False) -> bool:
    """Tell whether to open `path` as a dataset or a checkpoint of steps; False for a raw dataset.

    What is damaged, and a file in no format that is known, is opened as well: that tells best what is wrong with it.
    UsageError for a raw dataset unless `raw` allows for one, for a file of one, and for the checkpoint of a buffer
    or a storage that has no steps in a form of their own; DatasetNotFoundError for an empty folder, FormatError for
    anything else.
    """
    found = is_steps(path)
    if not found or _is_storage(path):
        _refuse_buffer(path)
    if found or (path / HIDDEN).is_dir():
        return True
    form = _raw_form(path)
    if form is None and path.is_file():
        _refuse_part_of_raw(path)
        return True
    if form is None:
        raise _unknown(path)
    if not raw:
        raise UsageError(
            f"{path} is a raw {form} dataset, and steps are taken from datasets in TED",
            hint=f"convert it first: rbtool convert {shlex.quote(str(path))} DEST",
        )
    return False


def _is_storage(path: Path) -> bool:
    return any((path / name).is_file() for name in _STORAGE) and find_torchrl(path) is None


def _raw_form(path: Path) -> str | None:
    return next((name for name in reader_names() if reader_class(name).recognises(path)), None)


def _refuse_part_of_raw(path: Path) -> None:
    """Refuse a file of a raw dataset, whose folder is the one or two above."""
    for folder in reversed(path.parents[:2]):
        if form := _raw_form(folder):
            hint = f"name the folder of the dataset: {shlex.quote(str(folder))}"
            raise UsageError(f"{path} is a file of a raw {form} dataset, not all of it", hint=hint)


def _unknown(path: Path) -> DatasetNotFoundError | FormatError:
    if path.is_dir() and not any(path.iterdir()):
        return DatasetNotFoundError(f"{path} is an empty folder, a dataset or a checkpoint is expected")
    formats = ", ".join(reader_names())
    return FormatError(
        f"{path} is no dataset or checkpoint, and is in no format that is known here ({formats})",
        hint="name the folder of the dataset itself; `rbtool list` shows which ones are stored",
    )


def _refuse_buffer(path: Path) -> None:
    """Refuse the checkpoint of a buffer, a part of one, and the checkpoint of a storage."""
    buffer = next((folder for folder in (path, path.parent) if (folder / _BUFFER).is_file()), None)
    if buffer is not None:
        storage = buffer / "storage"
        steps = next((str(place) for place in (storage, *storage.glob("*.h5")) if is_ours(place)), None)
        raise UsageError(
            f"{path} is {'' if buffer == path else 'part of '}the checkpoint of a replay buffer, a dataset or a "
            "checkpoint of steps is expected",
            hint=f"make the buffer and have it load: rb.loads({str(buffer)!r})"
            + (f"; its steps alone are in {shlex.quote(steps)}" if steps else ""),
        )
    if _is_storage(path) and not has_manifest(path):
        raise UsageError(
            f"{path} is the checkpoint of a storage, a dataset or a checkpoint of steps is expected",
            hint=f"make the storage and have it load: storage.loads({str(path)!r})",
        )
