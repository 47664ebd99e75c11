"""Saved data: find out what a path holds, and open its steps."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .declarations import title_of
from .encodings.compact import BUFFER, ENSEMBLE_FILE, SEGMENTS_FILE, STORAGE_FOLDER
from .encodings.flat import STORAGE_METADATA
from .encodings.foreign import foreign_form
from .encodings.h5 import read_block
from .encodings.save import VerifyingReader
from .errors import FormatError, RbtoolError, UsageError
from .format.contracts import StepReader
from .format.documents import load_json
from .format.episodes import EpisodeTable, parse_episodes, select_episodes
from .format.locate import conversion_hint, dataset_around, inside_hint, reader_names, recognised, refuse_empty
from .format.manifest import HIDDEN, has_manifest
from .format.memmap.reader import TedReader
from .format.open_files import one_generation
from .format.staging import is_ours, mend
from .open_steps import (
    BufferSteps,
    is_steps,
    is_storage,
    open_steps,
    refuse_several,
    require_whole_buffer,
    whole_episodes,
)

_DEEPEST = 4
"""How many levels up the folder of a dataset is searched for: files of nested observations lie deep."""


def has_steps(path: Path, *, raw: bool = False, format: str | None = None) -> bool:
    """Return whether `path` is to be opened as a dataset or a checkpoint of steps; False for a raw dataset.

    True also for damaged data and for a file in an unknown format: opening it gives the best error message.

    Args:
        path: a file or folder.
        raw: whether the caller accepts raw datasets.
        format: the format of a raw dataset; it is then not detected.

    Raises:
        UsageError: it is a mixture, the folder of a split, a raw dataset without `raw`, a single file of a raw dataset,
            or the checkpoint of a buffer without steps of its own.
        DatasetNotFoundError: it is an empty folder.
        FormatError: it is anything else.
    """
    _refuse_part_of_ours(path)
    found = is_steps(path, format)
    if not found or is_storage(path):
        _refuse_buffer(path)
    if found or (path / HIDDEN).is_dir():
        return True
    form = format or recognised(path)
    if form is None and path.is_file():
        _refuse_part_of_raw(path)
        _refuse_unknown_file(path)
        return True
    if form is None:
        refuse_empty(path)
        raise _unknown(path)
    if not raw:
        raise UsageError(
            f"a TED dataset is needed; {path} is {title_of(form)}",
            hint=f"convert it first: rbtool convert {shlex.quote(str(path))} DEST",
        )
    return False


def is_unknown(path: Path) -> bool:
    """Return whether `path` is in no known format; UsageError for a part of a buffer or of a raw dataset."""
    _refuse_part_of_ours(path)
    if is_steps(path) or (path / HIDDEN).is_dir() or recognised(path) is not None:
        return False
    _refuse_buffer(path)
    if path.is_file():
        _refuse_part_of_raw(path)
    return True


def _refuse_part_of_raw(path: Path) -> None:
    """Raise UsageError for a file of a raw dataset, CorruptDataError for an empty one."""
    refuse_empty(path)
    if (found := dataset_around(path)) is not None:
        hint = f"name the folder of the dataset: {shlex.quote(str(found[1]))}"
        raise UsageError(f"{path} is one file of a {title_of(found[0])} dataset, not all of it", hint=hint)


def _refuse_part_of_ours(path: Path) -> None:
    """Raise UsageError for a path inside the folder of a dataset, unless it is a dataset itself."""
    full = path.absolute()
    around = next((folder for folder in list(full.parents)[:_DEEPEST] if has_manifest(folder)), None)
    if around is not None and (HIDDEN in full.relative_to(around).parts or not is_ours(path)):
        whole = str(around) if path.is_absolute() else os.path.relpath(around)
        raise UsageError(f"{path} is part of a dataset", hint=f"name its folder: {shlex.quote(whole)}")


def _refuse_unknown_file(path: Path) -> None:
    """Raise FormatError for a file that rbtool did not write, with the way to convert it."""
    try:
        read_block(path)
    except FormatError as error:
        error.hint = error.hint or conversion_hint(path) or "rbtool list --formats shows what can be read"
        raise


def _unknown(path: Path) -> FormatError:
    if inside := inside_hint(path):
        return FormatError(f"{path} is not a dataset or checkpoint, but there are some in it", hint=inside)
    formats = ", ".join(reader_names())
    return FormatError(
        f"{path} is not a dataset or checkpoint, and its format is unknown; supported: {formats}",
        hint="name the folder of the dataset itself; `rbtool list` shows which ones are stored",
    )


def _refuse_buffer(path: Path) -> None:
    """Raise UsageError for several datasets, and for the checkpoint of a buffer, of a part of one, or of a storage."""
    refuse_several(path)
    _refuse_ensemble(path)
    buffer = next((folder for folder in (path, path.parent) if (folder / BUFFER).is_file()), None)
    if buffer is not None:
        places = (buffer / STORAGE_FOLDER, *(buffer / STORAGE_FOLDER).glob("*.h5"))
        steps = next((str(place) for place in places if is_ours(place)), None)
        raise UsageError(
            f"{path} is {'' if buffer == path else 'part of '}the checkpoint of a replay buffer, expected a "
            "dataset or a checkpoint of steps",
            hint=f"create the buffer, then load it: rb.loads({str(buffer)!r})"
            + (f"; its steps alone are in {shlex.quote(steps)}" if steps else ""),
        )
    if is_storage(path):
        raise UsageError(
            f"{path} is the checkpoint of a storage, expected a dataset or a checkpoint of steps",
            hint=f"create the storage, then load it: storage.loads({str(path)!r})",
        )


def rows_of_episodes(reader: StepReader, episodes: str | None) -> NDArray[np.int64]:
    """Return the rows of the episode table that a selection like `0:100,250` takes, all for None, in storage order.

    UsageError for a selection that is not understood or takes no episode, and where several episodes have one number.
    """
    numbers = reader.episodes.episode.tolist()
    if episodes is None:
        return np.arange(len(numbers))
    if len(set(numbers)) != len(numbers):
        raise UsageError(f"--episodes cannot choose here: several episodes of {reader.path} have one number")
    chosen = set(select_episodes(parse_episodes(episodes), numbers))
    return np.flatnonzero([number in chosen for number in numbers])


def row_of_episode(table: EpisodeTable, number: int) -> int:
    """Return the row of the episode table of the episode `number`; UsageError if it is not there."""
    found = np.flatnonzero(table.episode == number)
    if not len(found):
        known = f"{int(table.episode.min())} to {int(table.episode.max())}" if len(table) else "none"
        raise UsageError(f"episode {number} is not there: there are {len(table)} ({known})")
    return int(found[0])


_WRITER, _WRITER_FILE = "writer", "metadata.json"


def is_of_buffer(path: Path) -> bool:
    """Return whether `path` is the checkpoint of a buffer or of a storage of steps."""
    return (path / BUFFER).is_file() or own_steps(path) is not None or _tensors(path) is not None


def open_saved(path: Path, *, damaged: bool = False) -> StepReader:
    """Open a dataset or a checkpoint like `open_steps`, and a saved buffer or storage as the steps of a dataset.

    `path` may be the folder of a buffer in any layout. UsageError if its storage does not hold steps of episodes, or if
    its rows are ranked and therefore not in temporal order.
    """
    return one_generation(path, lambda: _open(path, damaged))


def _open(path: Path, damaged: bool) -> StepReader:
    mend(path)
    if (path / BUFFER).is_file():
        require_whole_buffer(path)
    _refuse_ensemble(path)
    tensors, own = _tensors(path), own_steps(path)
    if tensors is not None:
        from .checkpointers.tensor import SavedTensorRows  # lazy: imports torch

        writer = _writer_of(tensors)
        _refuse_ranked(tensors, writer)
        cursor = writer.get("cursor")
        return BufferSteps(SavedTensorRows(tensors, cursor if type(cursor) is int and cursor >= 0 else None))
    if own is None and foreign_form().find(path) is None and (path / BUFFER).is_file():
        has_steps(path, raw=True)  # raises: this buffer has no steps
    place = own or path
    _refuse_ranked(place, _writer_of(place if place.is_dir() else place.parent))
    return whole_episodes(open_steps(place, damaged=damaged))


def _refuse_ensemble(path: Path) -> None:
    """Raise UsageError for the checkpoint of an ensemble; the hint names its members that have rows."""
    folder = path / STORAGE_FOLDER if (path / BUFFER).is_file() else path
    if not (folder / ENSEMBLE_FILE).is_file():
        return
    document = load_json(folder / ENSEMBLE_FILE)
    found = document.get("with_rows", ()) if isinstance(document, dict) else ()
    members = [shlex.quote(str(folder / str(number))) for number in found]
    raise UsageError(
        f"{path} is the checkpoint of an ensemble, expected the checkpoint of one of its members",
        hint=f"name a member: {' or '.join(members)}" if members else "no member has rows",
    )


def require_verified(reader: StepReader) -> None:
    """Compare all files with their digests; UsageError if there are none, CorruptDataError if one differs."""
    if not reader.has_digests:
        hint = "leave verifying out, or convert it: a dataset has digests"
        raise UsageError(f"{reader.path} has no digests to compare its files with", hint=hint)
    reader.verify_files()


@contextlib.contextmanager
def verified_steps(reader: StepReader) -> Iterator[StepReader]:
    """Yield a reader of the same steps with verified digests; CorruptDataError if one does not match.

    Layout `ted` is verified while it is read, which saves a second pass; unread files at the end. Other layouts are
    verified before.
    """
    if isinstance(reader, TedReader):
        checked = VerifyingReader(reader)
        yield checked
        checked.verify_files()
    else:
        reader.verify_files()
        yield reader


def own_steps(path: Path) -> Path | None:
    """Return the checkpoint of whole episodes inside the folder of a buffer or storage; None if it holds none."""
    if not path.is_dir() or has_manifest(path):
        return None
    folder = path / STORAGE_FOLDER if (path / BUFFER).is_file() else path
    if folder != path and is_ours(folder):
        return folder
    files = sorted(folder.glob("*.h5")) if folder.is_dir() else []
    return files[0] if len(files) == 1 and is_ours(files[0]) else None


def _tensors(path: Path) -> Path | None:
    """Return the folder of a saved storage of tensors, whose rows are in memory order; None for anything else."""
    if not path.is_dir() or foreign_form().find(path) is not None:
        return None
    folder = path / STORAGE_FOLDER if (path / BUFFER).is_file() else path
    there = any((folder / name).is_file() for name in (STORAGE_METADATA, SEGMENTS_FILE))
    return folder if there and not has_manifest(folder) else None


def _writer_of(folder: Path) -> dict[str, Any]:
    """Return the metadata of the writer that was saved with a storage; {} if there is none."""
    buffer, member = folder.parent, Path()
    while (buffer / ENSEMBLE_FILE).is_file():  # the storage belongs to a member of an ensemble
        buffer, member, folder = buffer.parent, Path(folder.name) / member, buffer
    file = buffer / _WRITER / member / _WRITER_FILE
    try:
        found = load_json(file) if file.is_file() and (buffer / BUFFER).is_file() else None
    except RbtoolError:
        return {}
    return found if isinstance(found, dict) else {}


def _refuse_ranked(place: Path, writer: dict[str, Any]) -> None:
    if "rank_key" in writer:
        raise UsageError(
            f"{place} holds the highest-ranking rows, in no temporal order: they make up no episodes",
            hint="load them into a buffer with a TensorDictMaxValueWriter",
        )
