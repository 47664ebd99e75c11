"""The checkpointer of ensembles, which saves and loads each member with the member's own checkpointer."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from ..encodings.compact import ENSEMBLE_FILE
from ..errors import CorruptDataError, SchemaError, UsageError
from ..format.documents import Count, decode, dump_json, load_json
from ..format.syncing import Durable, write_file
from ..options import PathLike
from ..state_folder import load_module_state, module_state_bytes
from ..storages.base import Storage, register_checkpointer
from ..storages.ensemble import StorageEnsemble, all_or_none
from .base import Captured, CheckpointStaging, StorageCheckpointerBase, captured, open_folder


@dataclass(frozen=True, slots=True)
class _MemberNote:
    """The document `ensemble.json`: the number of members, and which of them have rows."""

    members: Count
    with_rows: tuple[Count, ...]
    format_version: int = 1


class StorageEnsembleCheckpointer(StorageCheckpointerBase):
    """Saves a `StorageEnsemble`: member i in the folder `i`, the state of its transform in `i_transform.pt`.

    A member without rows has no folder, and is empty after loading. Hooks have to be registered with the members:
    hooks of this checkpointer raise UsageError. Names follow TorchRL.
    """

    def dumps(self, storage: Storage, path: PathLike, *, durable: Durable = "full") -> None:
        """Write all members to the folder `path`, atomically replacing an older checkpoint."""
        ensemble = self._checked(storage)
        with CheckpointStaging(path, durable) as staging:
            for number in _write_about(ensemble, staging.path):
                ensemble.members[number].dumps(staging.path / str(number))
            staging.publish_noted()

    def capture(self, storage: Storage, path: Path) -> Captured | None:
        """Capture all rows; the rows of members that cannot be captured are written now.

        None for a class with its own `dumps`.
        """
        own = type(self).dumps is StorageEnsembleCheckpointer.dumps
        return _CapturedMembers(self._checked(storage), path) if own else None

    def loads(self, storage: Storage, path: PathLike) -> None:
        """Load all members and the states of their transforms. If this fails, nothing is changed.

        For this, copies of the replaced rows are kept until all members are loaded.

        Raises:
            DatasetNotFoundError: the path does not exist.
            FormatError: another checkpointer wrote it.
            CorruptDataError: it is damaged.
            SchemaError: the number of members differs, or the rows do not fit a member.
        """
        ensemble = self._checked(storage)
        folder = open_folder(path, "StorageEnsembleCheckpointer")
        saved = saved_members(folder, len(ensemble))
        states = [load_module_state(transform_file(folder, number)) for number in range(len(ensemble))]
        with all_or_none() as load:
            for transform, state in zip(ensemble.transforms, states, strict=True):
                if state is not None:
                    load(transform, partial(transform.load_state_dict, state))  # type: ignore[union-attr]
            for number, member in enumerate(ensemble.members):
                load(member, partial(member.loads, folder / str(number)) if number in saved else member.empty)

    def _checked(self, storage: Storage) -> StorageEnsemble:
        if not isinstance(storage, StorageEnsemble):
            raise UsageError(f"a StorageEnsembleCheckpointer saves ensembles, found a {type(storage).__name__}")
        if self._save_hooks or self._load_hooks:
            raise UsageError("an ensemble has no rows of its own for hooks", hint="register them on its members")
        return storage


class _CapturedMembers:
    """The captured rows of the members of an ensemble."""

    def __init__(self, ensemble: StorageEnsemble, path: Path) -> None:
        self._rows: list[Captured] = []
        with contextlib.ExitStack() as stack:
            self._staging = stack.enter_context(CheckpointStaging(path))
            for number in _write_about(ensemble, self._staging.path):
                member, place = ensemble.members[number], self._staging.path / str(number)
                rows = captured(member, place)
                if rows is None:
                    member.dumps(place)
                else:
                    self._rows.append(rows)
                    stack.enter_context(rows)
            self._open = stack.pop_all()

    def write(self) -> None:
        """Write the captured rows, and publish the checkpoint."""
        for rows in self._rows:
            rows.write()
        self._staging.publish_noted()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._open.close()


def _write_about(ensemble: StorageEnsemble, folder: Path) -> list[int]:
    """Write all files except rows; return the members that have rows."""
    with_rows = [number for number, member in enumerate(ensemble.members) if len(member)]
    for number, transform in enumerate(ensemble.transforms):
        state: dict[str, object] = getattr(transform, "state_dict", dict)()
        if state:
            write_file(transform_file(folder, number), module_state_bytes(state))
    note = {"format_version": 1, "members": len(ensemble), "with_rows": with_rows}
    write_file(folder / ENSEMBLE_FILE, dump_json(note).encode())
    return with_rows


def transform_file(folder: Path, member: int) -> Path:
    """Return the file with the state of a member's transform."""
    return folder / f"{member}_transform.pt"


def saved_members(folder: Path, count: int) -> frozenset[int]:
    """Return which members have rows in a checkpoint; SchemaError unless it has `count` members."""
    file = folder / ENSEMBLE_FILE
    note = decode(_MemberNote, load_json(file), str(file), CorruptDataError)
    if note.members != count:
        raise SchemaError(f"{folder} holds {note.members} members, this ensemble has {count}")
    return frozenset(note.with_rows)


register_checkpointer(StorageEnsemble, StorageEnsembleCheckpointer)
