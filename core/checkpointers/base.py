"""The contract of checkpointers, which save and load storages, and what all folders that they write have in common.

A folder records which class has written it, and atomically replaces an older checkpoint.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ..encodings.compact import ENSEMBLE_FILE, SEGMENTS_FILE, STORAGE
from ..encodings.foreign import foreign_form
from ..encodings.saved_digests import DIGESTS, noted_files, require_digests, write_digests
from ..errors import (
    CorruptDataError,
    DatasetNotFoundError,
    FormatError,
    RbtoolError,
    SchemaError,
    UsageError,
    warn_caller,
)
from ..format import fs
from ..format.contracts import FinalMethodError, delegate, own_attributes, refuse_overrides
from ..format.documents import Count, decode, dump_json, load_json
from ..format.episodes import EPISODES
from ..format.manifest import HIDDEN, MANIFEST, Manifest, has_manifest
from ..format.memmap.tree import tree_files
from ..format.open_files import OpenFiles
from ..format.staging import Staging, files_below, is_ours, mend
from ..format.syncing import Durable, write_file
from ..open_steps import open_steps
from ..options import PathLike
from ..storages.base import Storage
from ..storages.cursors import newest_row
from ..storages.list_storage import ListStorage
from ..storages.pytree import tree_spec_of
from ..ted.schema import key_name
from .storage_rows import article, replace_rows

LIST_FILE = "items.json"
_TENSORS = "TensorStorageCheckpointer"
_TENSORS_FILE = "storage_metadata.json"
PACKED_FILE = "packed.json"
STREAM_FILE = "stream.json"
COMPRESSED_FILES: tuple[str, str] = ("metadata.json", "data_indices.json")

_WRITERS = {
    "ListStorageCheckpointer": (LIST_FILE,),
    "PackedStorageCheckpointer": (PACKED_FILE,),
    "StreamStorageCheckpointer": (STREAM_FILE,),
    "StorageEnsembleCheckpointer": (ENSEMBLE_FILE,),
    "CompressedListStorageCheckpointer": COMPRESSED_FILES,
    _TENSORS: (_TENSORS_FILE,),
}
"""The files by which the checkpointer that wrote a folder is recognised.

A checkpoint of tensors in segments has `SEGMENTS_FILE` instead.
"""

_SEGMENT = re.compile(r"segment-[0-9]{5,}\.memmap")
_DOCUMENTS: dict[str, tuple[str, Callable[[Any], Iterable[str]]]] = {
    SEGMENTS_FILE: ("rows", lambda _: ()),
    LIST_FILE: ("kinds", lambda _: ["items.memmap"]),
    PACKED_FILE: ("content_digest", lambda _: ()),
    STREAM_FILE: ("address", lambda _: ()),
    ENSEMBLE_FILE: ("members", lambda found: (f"{number}_transform.pt" for number in range(found["members"]))),
    _TENSORS_FILE: ("metadata", lambda _: ()),
    f"{HIDDEN}/storage.json": ("leaves", lambda found: (leaf["file"] for leaf in found["leaves"])),
    f"{HIDDEN}/maps.json": ("leaves", lambda found: (leaf[0] for leaf in found["leaves"])),
    f"{HIDDEN}/rows.json": ("writer", lambda _: ()),
}
"""The documents of checkpoints: an entry by which each is recognised, and the files that it names."""


_WRITERS_OF_LAYOUTS = {
    "flat": "FlatStorageCheckpointer",
    "nested": "NestedStorageCheckpointer",
    "h5": "H5StorageCheckpointer",
}


class CheckpointStaging(Staging):
    """A `Staging` folder for the checkpoint of a storage.

    Publishing it atomically replaces an older checkpoint of any storage, or an empty folder. If anything else is at the
    destination, or if an older checkpoint there contains files of others, UsageError is raised.
    """

    def __init__(self, destination: PathLike, durable: Durable = "full") -> None:
        super().__init__(Path(destination), replace=True, durable=durable)

    def refuse_if_taken(self) -> None:
        """Raise UsageError if the destination must not be replaced."""
        place = self.destination
        around = next((folder for folder in (place, *place.parents) if has_manifest(folder)), None)
        if around is not None and not (around == place and _is_of_storage(place)):
            raise UsageError(f"{place} is inside the dataset {around}", hint="choose another destination")
        if not os.path.lexists(place):
            return
        empty = place.is_dir() and not any(place.iterdir())
        try:
            known = empty or (place.is_file() and _is_h5_of_storage(place)) or writer_of(place) is not None
        except FormatError as error:
            raise UsageError(f"{error}; nothing was replaced", hint="choose another destination") from error
        if not known:
            raise UsageError(
                f"{place} already exists and is not the checkpoint of a storage; left unchanged",
                hint="choose another destination",
            )
        if place.is_file():
            return
        strange = next((file for file in strange_files(place) if not _is_h5_of_storage(file)), None)
        if strange is not None:
            raise UsageError(f"{strange} is not part of the checkpoint around it; nothing was replaced")

    def publish_noted(self, *, covered: Collection[str] = (), known: Mapping[str, str] | None = None) -> None:
        """Record the digests of all files, then put the folder in place; see `write_digests`."""
        write_digests(self.path, covered=covered, known=known)
        self.publish()


def strange_files(folder: Path, allowed: Collection[Path] = ()) -> list[Path]:
    """List the files in the folder of a checkpoint that are neither part of it nor allowed there, in order."""
    # Nearly always all files have digests, and `own_files` is not needed, which reads every document in the folder.
    left = set(files_below(folder)).difference(allowed, _noted_below(folder))
    return sorted(left - own_files(folder)) if left else []


def _noted_below(folder: Path) -> set[Path]:
    """List the files whose digests were noted in a folder, and in the folders below it whose notes have digests."""
    noted = noted_files(folder)
    found = {folder / DIGESTS, *(folder / name for name in noted)}
    if SEGMENTS_FILE in noted:
        found |= _segments_in(folder)
    return found.union(*(_noted_below((folder / name).parents[1]) for name in noted if name.endswith(f"/{DIGESTS}")))


def _segments_in(folder: Path) -> set[Path]:
    """List all segments by their names: a damaged document may not list all of them."""
    return {file for file in folder.iterdir() if _SEGMENT.fullmatch(file.name)}


def own_files(folder: Path) -> set[Path]:
    """List the files of a checkpoint: those with recorded digests, and those that its documents name."""
    if has_manifest(folder):
        with contextlib.suppress(RbtoolError, OSError):
            return {folder / file.path for file in Manifest.load(folder).files} | {folder / MANIFEST}
        return {folder / MANIFEST}
    found = _noted_below(folder)
    for name in noted_files(folder):
        if name.endswith((f"/{DIGESTS}", f"/{MANIFEST}")):  # it has the digests of all files of a folder
            found |= own_files((folder / name).parents[1])
    with contextlib.suppress(RbtoolError, OSError), OpenFiles(folder) as files:
        found |= {folder / name for name in tree_files(files)}
    for name, (entry, names_in) in _DOCUMENTS.items():
        with contextlib.suppress(RbtoolError, OSError, LookupError, TypeError, ValueError):
            document = load_json(folder / name)
            if document[entry] is not None:
                found |= {folder / name, *(folder / other for other in names_in(document))}
    if folder / SEGMENTS_FILE in found:
        found |= _segments_in(folder)
    # Checkpoints of TorchRL have no digests. Their files are the leaves of a nest of dicts and lists, with dots in
    # their names in place of folders, ...
    with contextlib.suppress(RbtoolError, OSError, LookupError, TypeError, ValueError):
        leaves = load_json(folder / _TENSORS_FILE)["metadata"]
        for file in folder.rglob("*.memmap"):
            if key_name(file.relative_to(folder).with_suffix("").parts) in leaves:
                found.add(file)
    # ... the items of a compressed list, and the members of an ensemble
    parts = [part for part in folder.iterdir() if part.name.isdecimal() and part.is_dir() and not part.is_symlink()]
    with contextlib.suppress(RbtoolError, OSError):
        if all(isinstance(load_json(folder / name), list) for name in COMPRESSED_FILES):
            stack = folder / "compressed_data"
            found |= {*(folder / name for name in COMPRESSED_FILES), stack / "meta.json"}
            parts += [part for part in stack.iterdir() if part.name.isdecimal() and part.is_dir()]
    return found.union(*map(own_files, parts))


def _manifest_of(path: Path) -> Manifest | None:
    """Read the manifest of one of our folders or HDF5 files; None if there is none, or it is damaged."""
    if not is_ours(path):
        return None
    try:
        if path.is_dir():
            return Manifest.load(path)
        with open_steps(path) as reader:
            return reader.manifest
    except (RbtoolError, OSError):
        return None


def _is_of_storage(path: Path) -> bool:
    manifest = _manifest_of(path)
    return manifest is not None and manifest.kind == "checkpoint" and manifest.request.source == STORAGE


def _is_h5_of_storage(file: Path) -> bool:
    """Whether a file is an H5 checkpoint of a storage, ours or TorchRL's."""
    return _is_of_storage(file) or (file.is_file() and foreign_form().form_at(file) == "h5")


def is_segmented(folder: Path) -> bool:
    """Whether a folder is a checkpoint of a tensor storage in segments."""
    return (folder / SEGMENTS_FILE).is_file()


def writer_of(folder: Path) -> str | None:
    """Return the name of the checkpointer that has written a folder; None if it is unknown, or the folder is damaged.

    Raises:
        FormatError: a newer version of rbtool wrote it with `write(rows, folder)`.
    """
    if not folder.is_dir():
        return None
    manifest = _manifest_of(folder)
    if manifest is not None:
        return _WRITERS_OF_LAYOUTS.get(manifest.layout) if manifest.kind == "checkpoint" else None
    if has_manifest(folder) or (folder / EPISODES).is_dir():
        return None  # opening it raises an error that describes the damage
    if (folder / RowsNote.FILE).is_file():
        try:
            return RowsNote.load(folder).writer
        except CorruptDataError:
            return None
    theirs = foreign_form().form_at(folder)
    if theirs is not None:
        return _WRITERS_OF_LAYOUTS[theirs]
    if is_segmented(folder):
        return _TENSORS
    for writer, files in _WRITERS.items():
        if all((folder / name).is_file() for name in files):
            return writer
    inside = [entry for entry in folder.iterdir() if entry.name != HIDDEN]
    return _WRITERS_OF_LAYOUTS["h5"] if len(inside) == 1 and _is_h5_of_storage(inside[0]) else None


@dataclass(frozen=True, slots=True)
class RowsNote:
    """The note in a checkpoint of a checkpointer that implements `write` and `read`.

    Attributes:
        writer: the name of the checkpointer's class.
        length: the number of elements.
        capacity: the capacity of the storage in rows.
        last_row: the row written last; None if unknown.
        objects: whether the rows are a list of objects.
        leaves: names, dtypes and shapes of the rows; for a list, the number of objects.
    """

    writer: str
    length: Count
    capacity: Count
    last_row: Count | None
    objects: bool
    leaves: tuple[str, ...]
    format_version: int = 1

    FILE: ClassVar[str] = f"{HIDDEN}/rows.json"

    @classmethod
    def of(cls, writer: str, storage: Storage, rows: Any) -> RowsNote:
        """Describe a storage whose rows are saved as `rows`, which are None if it is empty."""
        objects = holds_objects(storage)
        leaves = () if rows is None else _leaves(rows, objects)
        return cls(writer, len(storage), storage.capacity_rows, newest_row(storage), objects, leaves)

    def save(self, folder: Path) -> None:
        """Write the note."""
        fs.make_folder(folder / HIDDEN)
        write_file(folder / self.FILE, dump_json(asdict(self)).encode())

    @classmethod
    def load(cls, folder: Path) -> RowsNote:
        """Read the note; FormatError if a newer version wrote it, CorruptDataError if it is damaged."""
        path = folder / cls.FILE
        try:
            document = load_json(path)
        except FormatError as error:
            raise CorruptDataError(f"{path} is damaged: {error}") from error
        version = document.get("format_version") if isinstance(document, dict) else None
        if type(version) is int and version != 1:
            raise FormatError(
                f"{path} was written by a newer rbtool: it has format version {version}, this version reads 1",
                hint="update rbtool",
            )
        return decode(cls, document, str(path), CorruptDataError)

    def require_same(self, rows: Any, folder: Path, reader: str) -> None:
        """Raise CorruptDataError unless the rows that were read have the length, dtypes and shapes that were saved."""
        for found, saved in itertools.zip_longest(_leaves(rows, self.objects), self.leaves):
            if found != saved:
                raise CorruptDataError(f"{reader}.read() returned {found} for {folder}, but {saved} was saved")


def holds_objects(storage: Storage) -> bool:
    """Whether a storage's rows are a list of objects."""
    return storage.returns_objects or isinstance(storage, ListStorage)


def _leaves(rows: Any, objects: bool) -> tuple[str, ...]:
    """Describe the leaves of rows, ordered by name."""
    if objects:
        return (f"{len(rows):,} objects",)
    structure = tree_spec_of(rows)
    pairs = zip(structure.paths(), structure.flatten(rows), strict=True)
    return tuple(sorted(f"{key_name(path)} {leaf.dtype} {list(leaf.shape)}" for path, leaf in pairs))


def open_rows(path: PathLike, writer: str) -> tuple[Path, RowsNote]:
    """Return the folder of a checkpoint that the `write` method of `writer` has written, and its note.

    Raises:
        DatasetNotFoundError: (a FileNotFoundError) the path does not exist.
        FormatError: another checkpointer, or none, wrote it.
        CorruptDataError: files were changed.
    """
    folder = _existing(path, writer)
    require_writer(folder, writer)
    if not (folder / RowsNote.FILE).is_file():
        raise _not_ours(folder, writer)
    return folder, RowsNote.load(folder)


def _existing(path: PathLike, writer: str) -> Path:
    folder = Path(path)
    mend(folder)
    if not os.path.lexists(folder):
        raise DatasetNotFoundError(f"{folder} not found, expected the checkpoint of a storage")
    if not folder.is_dir():
        theirs = _is_h5_of_storage(folder) or _manifest_of(folder) is not None
        what = "is a checkpoint that an H5StorageCheckpointer loads" if theirs else "is not a folder"
        raise FormatError(f"{folder} {what}; {article(writer)} writes a folder")
    require_digests(folder)  # first: a damaged folder may look like one of another checkpointer
    return folder


def _is_laid_out(folder: Path) -> bool:
    """Whether a folder holds whole episodes in a layout of TorchRL's.

    It is written either by TorchRL's checkpointers of episodes or by a checkpointer of tensors with hooks. The folder
    does not record which, and both can read it.
    """
    return (folder / _TENSORS_FILE).is_file() and foreign_form().form_at(folder) is not None


def require_writer(folder: Path, writer: str) -> str | None:
    """Raise FormatError if another checkpointer than `writer` wrote a folder; return `writer`, or None if unknown."""
    found = writer_of(folder)
    if found not in (writer, None):
        raise FormatError(f"{folder} was written by {article(found or '')}, and {article(writer)} cannot read it")
    return found


def open_folder(path: PathLike, writer: str, *, hooked: bool = False) -> Path:
    """Return the folder of a checkpoint that `writer` can read.

    Args:
        path: the folder.
        writer: the name of the checkpointer.
        hooked: whether there are load hooks, which can make rows of whole episodes.

    Raises:
        DatasetNotFoundError: (a FileNotFoundError) the path does not exist; also for a folder that is not a compressed
            list.
        FormatError: (a ValueError) it is a file, or another checkpointer, or none, wrote it.
        CorruptDataError: files differ from their recorded digests.
    """
    folder = _existing(path, writer)
    laid_out = _is_laid_out(folder)
    if laid_out and writer == _TENSORS and not hooked:
        form = foreign_form().form_at(folder)
        raise FormatError(
            f"{folder} holds whole episodes in the layout {form}; {article(writer)} reads rows",
            hint=f"load it with {article(writer_of(folder) or '')}, or register the load hooks that undo the layout",
        )
    found = writer if laid_out and writer == _TENSORS else require_writer(folder, writer)
    if writer in _WRITERS_OF_LAYOUTS.values():
        if found is None:
            raise _not_ours(folder, writer)
        return folder
    missing = [name for name in _WRITERS[writer] if not (folder / name).is_file()]
    if missing and not (writer == _TENSORS and is_segmented(folder)):
        # Programs for TorchRL catch a FileNotFoundError, which TorchRL raises for compressed lists.
        kind = DatasetNotFoundError if missing[0] in COMPRESSED_FILES else FormatError
        raise kind(f"{folder} lacks the {missing[0]} that {article(writer)} writes")
    return folder


def _not_ours(folder: Path, writer: str) -> RbtoolError:
    try:
        manifest = Manifest.load(folder)  # raises an error that says what is wrong
    except DatasetNotFoundError:
        if (folder / HIDDEN).is_dir():
            return CorruptDataError(f"{folder} is a checkpoint of rbtool, but its manifest is missing")
    except RbtoolError as error:
        return error
    else:
        return FormatError(
            f"{folder} is a {manifest.kind} in layout {manifest.layout}, which {article(writer)} cannot read"
        )
    return FormatError(f"{folder} is not a checkpoint that {article(writer)} can read")


_FINAL = {
    "register_save_hook": "write(rows, folder)",
    "register_load_hook": "read(folder)",
    "dump": "write(rows, folder)",
    "save": "write(rows, folder)",
    "load": "read(folder)",
}
"""Methods that must not be overridden, because they are final or never called, and what to implement instead."""


class Captured(Protocol):
    """The rows of a storage as they were at one instant; leaving the context releases them.

    `write` saves the rows, in any thread, while other threads write to the storage.
    """

    def write(self) -> None:
        """Write the rows to the folder passed to `capture`."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *raised: object) -> None: ...


def captured(storage: Any, path: Path) -> Captured | None:
    """Capture the rows of a storage for the folder `path`; None if they have to be written now, with `dumps`."""
    capture = getattr(storage.checkpointer, "capture", None)  # TorchRL's checkpointers have none
    return None if capture is None else capture(storage, path)


class StorageCheckpointerBase(ABC):  # noqa: B024 - abstract at run time, see below `read`
    r"""Writes the rows of a storage to a folder and reads them again.

    A subclass implements two methods:

    - `write(rows, folder)` writes rows to an empty folder;
    - `read(folder)` returns them with the same keys, dtypes, shapes and values.

    Storages call `dumps` and `loads`, which do everything else: they call the hooks, publish a complete folder
    atomically, record and verify the digests of all files, record the length, the capacity and the row written last,
    and replace the contents of a storage only after all rows were read and have the saved dtypes and shapes.

    A checkpointer made for TorchRL overrides `dumps` and `loads`, and works, but has to do all of this itself. Other
    public methods must not be overridden: FinalMethodError (a TypeError) says what to implement instead.

    Data passes through the save hooks before it is written, and through the load hooks after it is read, in the order
    in which they were registered. Hooks belong to the object: they are neither saved nor pickled. Names and hooks
    follow TorchRL.

    >>> import tempfile
    >>> from rbtool import ListStorage
    >>> class Lines(StorageCheckpointerBase):
    ...     def write(self, rows, folder):
    ...         (folder / "rows.txt").write_text("\n".join(rows))
    ...
    ...     def read(self, folder):
    ...         return (folder / "rows.txt").read_text().split("\n")
    >>> saved, other = ListStorage(3), ListStorage(3)
    >>> saved.checkpointer = other.checkpointer = Lines()
    >>> saved.set(range(2), ["one", "two"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved.dumps(f"{folder}/lines")
    ...     other.loads(f"{folder}/lines")
    >>> other[:]
    ['one', 'two']
    """

    _save_hooks: Sequence[Callable[..., Any]] = ()
    _load_hooks: Sequence[Callable[..., Any]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = own_attributes(cls, StorageCheckpointerBase)
        refuse_overrides(cls, own, _FINAL)
        for override, replaced in (("dumps", "write"), ("loads", "read")):
            if override in own and replaced not in own:
                delegate(cls, replaced)
            elif replaced in own and getattr(cls, override) is not getattr(StorageCheckpointerBase, override):
                raise FinalMethodError(
                    f"{cls.__name__} implements {replaced}(), which its {override}() does not call",
                    hint="derive from StorageCheckpointerBase, whose dumps() and loads() call write() and read()",
                )

    def __init__(self) -> None:
        self._save_hooks, self._load_hooks = [], []

    # What a checkpointer implements -----------------------------------------------------------------

    def write(self, rows: Any, folder: Path) -> None:
        """Write `rows` to `folder`, which exists and is empty, and close all files.

        Args:
            rows: `storage[:]` after the save hooks, never empty: a tensordict `[length, ...]`, a tensor, a nest of
                tensors, or a list of objects. It may be memory of the storage, and must not be changed.
            folder: files and folders in it may have any names except `.rbtool`.

        Raises:
            SchemaError: the data cannot be written.
        """

    def read(self, folder: Path) -> Any:
        """Return the rows that `write` has written to `folder`, whose files were compared with their digests."""

    if not TYPE_CHECKING:  # type checkers cannot see that a class that overrides `dumps` gets its `write` at run time
        write, read = abstractmethod(write), abstractmethod(read)

    # What storages call -----------------------------------------------------------------------------

    def dumps(self, storage: Storage, path: PathLike, *, durable: Durable = "full") -> None:
        """Write the storage to the folder `path`, atomically replacing an older checkpoint.

        Args:
            storage: the storage.
            path: the folder.
            durable: what is synced to the disk first, in case the machine stops: files and folders (`"full"`), only the
                bytes of the files (`"data"`), or nothing (`"none"`).

        Raises:
            UsageError: there is something at `path` that is not the checkpoint of a storage.
        """
        rows = None
        if len(storage):
            rows = self._through_save_hooks(storage, storage[:], path)
        elif self._save_hooks:
            raise SchemaError("save hooks need data, but nothing was ever written to the storage")
        note = RowsNote.of(type(self).__name__, storage, rows)
        with CheckpointStaging(path, durable) as staging:
            if rows is not None:
                self.write(rows, staging.path)
            note.save(staging.path)
            staging.publish_noted()

    def capture(self, storage: Storage, path: Path) -> Captured | None:
        """Capture the rows for the folder `path`; None, the default, if they have to be written now, with `dumps`."""
        return None

    def loads(self, storage: Storage, path: PathLike) -> None:
        """Load the folder `path` into the storage. If this fails, nothing is changed.

        Raises:
            DatasetNotFoundError: (a FileNotFoundError) the path does not exist.
            FormatError: (a ValueError) another checkpointer wrote it.
            CorruptDataError: (a ValueError) files were changed, or rows have other dtypes or shapes than were saved.
            SchemaError: (a RuntimeError) the storage cannot hold the data.
        """
        folder, note = open_rows(path, type(self).__name__)
        if not note.length:
            storage.empty()
            return
        if note.objects != holds_objects(storage):
            kinds = ("a list of objects", "rows of tensors")
            saved, here = kinds if note.objects else reversed(kinds)
            raise SchemaError(f"{folder} holds {saved}; a {type(storage).__name__} holds {here}")
        rows = self.read(folder)
        note.require_same(rows, folder, type(self).__name__)
        if self._load_hooks:
            rows = self._through_load_hooks(rows, storage[:] if len(storage) else None)
        replace_rows(storage, rows, capacity=note.capacity, last_row=note.last_row)

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Write the result of `hook(data, path=...)` in place of `data`.

        If the hook has attributes `is_full` and `shift`, they are set before the call: `is_full` to whether the storage
        is full, and `shift` to the row after the one written last, which is the capacity after the last row. A hook
        whose `writes_in_place` is true gets None as the path.
        """
        _require_callable(hook)
        self._save_hooks = [*self._save_hooks, hook]

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Load the result of `hook(data, out=...)` in place of `data`.

        `out` is the present data of the storage; None if it has no tensors yet, or if `writes_in_place` of the hook is
        true.
        """
        _require_callable(hook)
        self._load_hooks = [*self._load_hooks, hook]

    def _through_save_hooks(self, storage: Storage, data: Any, path: PathLike) -> Any:
        for hook in self._save_hooks:
            if hasattr(hook, "is_full"):
                hook.is_full = len(storage) == storage.max_size
            if hasattr(hook, "shift"):
                hook.shift = _shift(storage)
            data = hook(data, path=None if _writes_in_place(hook) else path)
        return data

    def _through_load_hooks(self, data: Any, out: Any) -> Any:
        for hook in self._load_hooks:
            data = hook(data, out=None if _writes_in_place(hook) else out)
        return data

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in {"_save_hooks", "_load_hooks"}}


def _writes_in_place(hook: Any) -> bool:
    """Whether a hook writes to the path or data that it gets, so that a failure would leave them half-written."""
    return bool(getattr(hook, "writes_in_place", False))


def _require_callable(hook: Any) -> None:
    if not callable(hook):
        raise UsageError(f"a hook must be callable, found a {type(hook).__name__}")


def _shift(storage: Storage) -> int:
    row = newest_row(storage)
    if row is None:
        warn_caller("the row written last is unknown, so the first row of the storage is assumed to be the oldest")
        return 0
    return row + 1
