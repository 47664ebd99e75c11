"""Storages in TorchRL's flat, nested and H5 layouts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...encodings import CompactForm, Compression
from ...errors import FormatError, SchemaError
from ...progress import Silent
from ...storages import Storage, TensorStorage
from ...ted import NEXT, key_name
from ...torchrl import (
    OWN_FORM,
    TorchrlKeys,
    TorchrlReader,
    torchrl_form,
    write_torchrl,
)
from ..filling import fill_storage
from ..keys import require_keys
from ..other_rows import rows_of_storage
from ..restoring import held_keys

__all__ = ["is_compatible", "load_compatible", "open_compatible", "save_compatible"]

_FILE = "checkpoint.h5"


def is_compatible(folder: str | os.PathLike[str], form: CompactForm) -> bool:
    """Tell whether TorchRL's layout of a form lies at `folder`, for H5 the file or a folder with `checkpoint.h5`."""
    return torchrl_form(_place(folder, form, {})) == form


def load_compatible(
    storage: TensorStorage, folder: str | os.PathLike[str], form: CompactForm, options: Mapping[str, Any]
) -> None:
    """Put what TorchRL saved into a storage of any capacity that holds it, with the row that was written last.

    `options` are the arguments of the checkpointer: done_key, done_keys, reward_keys, shift_key, is_full_key,
    checkpoint_file. What the layout lost is lost: next observations that did not follow, root done flags (they come
    back false, and not at all into a storage without any), a root reward. FormatError and CorruptDataError (both
    ValueErrors) for what is not in that layout or was cut, SchemaError (a RuntimeError) for data of other keys, types
    or shapes and for more than there is room for; nothing has changed then.
    """
    with open_compatible(storage, folder, form, options) as reader:
        fill_storage(storage, reader, reader.filled)


def open_compatible(
    storage: Storage, folder: str | os.PathLike[str], form: CompactForm, options: Mapping[str, Any]
) -> TorchrlReader:
    """Open what TorchRL saved for a storage that is to take it; else as `load_compatible`."""
    place, keys = _place(folder, form, options), TorchrlKeys.of(options)
    found = torchrl_form(place)
    if found != form:
        raise FormatError(f"{place} is {f'in the layout {found}' if found else 'no checkpoint of TorchRL'}, not {form}")
    held = held_keys(storage)
    return TorchrlReader(place, keys, frozenset(keys.dones) - (frozenset(keys.dones) if held is None else held))


def save_compatible(
    storage: Storage, folder: str | os.PathLike[str], form: CompactForm, options: Mapping[str, Any]
) -> None:
    """Write a storage as TorchRL 0.14 does into an empty folder in a staging area; `options` as for `load_compatible`.

    For H5 `folder` may also be the file that is to be written; `h5_kwargs` of the options go to its data. SchemaError
    (a RuntimeError) for a storage that nothing was written to and for what TorchRL's layout cannot hold: nests and
    values that are no tensors, and what `core.torchrl.write_torchrl` names. OutOfSpaceError for want of room.
    """
    keys = TorchrlKeys.of(options)
    constants = isinstance(storage, TensorStorage) and storage.initialized and storage.structure.constants()
    constant = next(constants or iter(()), None)
    if constant is not None:
        raise SchemaError(f"{key_name(constant[0])} is no tensor, which TorchRL's layout cannot hold", hint=OWN_FORM)
    compression = Compression.from_h5_kwargs(options.get("h5_kwargs")) if form == "h5" else None
    asked = f"{form.capitalize()}StorageCheckpointer"
    with rows_of_storage(storage, [(NEXT, *keys.done)], options.get("reward_keys"), asked) as rows:
        require_keys(options.get("done_keys"), "done_keys", rows.fields, rows.path)
        rows.verify_files()
        write_torchrl(rows, _place(folder, form, options), form, rows.filled, keys, Silent(), compression)


def _place(folder: str | os.PathLike[str], form: CompactForm, options: Mapping[str, Any]) -> Path:
    place = Path(folder)
    return place / (options.get("checkpoint_file") or _FILE) if form == "h5" and place.is_dir() else place
