"""Opens the steps at any path: a dataset, a checkpoint, or a file or folder that TorchRL saved."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from .declarations import title_of
from .encodings.compact import BUFFER, STORAGE, STORAGE_FOLDER, flags_at
from .encodings.flat import CutFlatReader, FlatReader
from .encodings.foreign import ForeignReader, foreign_form
from .encodings.h5 import H5Reader
from .encodings.saved_digests import DIGESTS, require_digests
from .errors import CorruptDataError, DatasetNotFoundError, FormatError, RbtoolError, UsageError
from .format.contracts import Array, PassedSteps, StepReader
from .format.documents import load_json
from .format.episodes import EpisodeTable
from .format.locate import find_steps, reader_class, reader_names, refuse_empty
from .format.manifest import HIDDEN, MANIFEST, Manifest, Request, has_manifest
from .format.memmap.reader import FolderReader, PlainReader, TedReader
from .format.mixture import refuse_mixture
from .format.open_files import ListedFiles, one_generation
from .format.packed.reader import CutPackedReader, PackedReader
from .format.packed.recording import COMMITS, unfinished_recording
from .format.staging import PARTS_FILE, is_ours, mend
from .options import PathLike
from .ted.episodes import EndReason
from .ted.schema import EPISODE, NEXT_DONE, NEXT_TERMINATED, NEXT_TRUNCATED, Field, Key

SOURCE = "buffer"
"""The source in the request of a dataset that was made from a buffer's checkpoint."""


class BufferSteps(PassedSteps):
    """The rows of a buffer's checkpoint or of a TED tree, completed to the rows of a dataset.

    Such rows may lack end flags and episode numbers, and the last episode may be unfinished:

    - the last step of an unfinished episode becomes `truncated` and `done`, with the end reason "end of file";
    - a missing `terminated` or `truncated` follows from `done`, a missing `done` from the ends of the episodes;
    - a missing `episode` is taken from the episode table.
    """

    def __init__(self, rows: StepReader) -> None:
        super().__init__(rows)
        self._known = {field.key for field in rows.fields}
        shape = next((field.shape for field in rows.fields if field.key == NEXT_DONE), (1,))
        made = [Field(EPISODE, "int64", (), "id")] if EPISODE not in self._known else []
        lacking = [key for key in (NEXT_DONE, NEXT_TERMINATED, NEXT_TRUNCATED) if key not in self._known]
        made += [Field(key, "bool", shape, "done") for key in lacking]
        request = rows.manifest.request
        if request.source == STORAGE:
            request = Request(SOURCE, str(self.path), self.path.name)
        self.manifest = replace(rows.manifest, fields=(*rows.fields, *made), request=request)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.source,)

    @cached_property
    def episodes(self) -> EpisodeTable:
        """The episode table; the numbers are those in the rows, if they are unique."""
        columns = self.source.episodes.columns() | {"episode": self._numbers}
        for key in (NEXT_TERMINATED, NEXT_TRUNCATED):
            if key not in self._known:
                columns[key[1]] = flags_at(self, key, self._ends)
        columns["truncated"] = columns["truncated"] | np.isin(self._ends, self._unfinished)
        return EpisodeTable.from_columns(columns)

    @property
    def planned(self) -> Manifest:
        """The manifest with a note on unfinished episodes, for which all flags have to be read."""
        count = len(self._unfinished)
        if not count:
            return self.manifest
        some = "an episode that was not finished ends"
        what = some if count == 1 else f"{count:,} episodes that were not finished end"
        return replace(self.manifest, notes=(*self.manifest.notes, f"{what} truncated: the flags were set"))

    def read(self, key: Key, start: int, stop: int) -> Array:
        leaf = self._leaf(key, start, stop)
        if key in self._known:
            rows = self.source.read(key, start, stop)
        elif key == EPISODE:
            return self._numbers[np.searchsorted(self._ends, np.arange(start, stop))]
        else:
            rows = self._made_flags(key, start, stop).reshape(stop - start, *leaf.shape)
        low, high = np.searchsorted(self._unfinished, (start, stop))
        if key in {NEXT_DONE, NEXT_TRUNCATED} and low < high:
            rows = rows.copy()  # the array may be the memory of the storage itself
            rows[self._unfinished[low:high] - start] = True
        return rows

    def _made_flags(self, key: Key, start: int, stop: int) -> Array:
        """Compute a missing flag: where `done` is set, an episode is terminated unless it is truncated, and vice versa.

        If both are missing, every end is a termination.
        """
        if NEXT_DONE in self._known:
            done: Array = self.source.read(NEXT_DONE, start, stop) != 0
        else:
            done = np.zeros((stop - start, 1), bool)
            finished = np.setdiff1d(self._ends, self._unfinished)
            low, high = np.searchsorted(finished, (start, stop))
            done[finished[low:high] - start] = True
            for flag in (NEXT_TERMINATED, NEXT_TRUNCATED):  # which may be set inside an episode, too
                if flag in self._known:
                    flags: Array = self.source.read(flag, start, stop)
                    done |= flags.reshape(len(flags), math.prod(flags.shape[1:])).any(1, keepdims=True)
        if key == NEXT_DONE:
            return done
        other = NEXT_TRUNCATED if key == NEXT_TERMINATED else NEXT_TERMINATED
        if other in self._known:
            flags = self.source.read(other, start, stop) != 0
            if flags.size != done.size:  # a flag for each agent, but a single `done`
                flags = flags.reshape(len(flags), -1).any(1).reshape(-1, *[1] * (done.ndim - 1))
            else:
                flags = flags.reshape(done.shape)
            done &= ~flags
            return done
        return done if key == NEXT_TERMINATED else np.zeros_like(done)

    @cached_property
    def _ends(self) -> Array:
        table = self.source.episodes
        ends: Array = table.start + table.length - 1
        return ends

    @cached_property
    def _unfinished(self) -> Array:
        """The last steps of episodes that no flag ends."""
        table = self.source.episodes
        flagged = table.terminated | table.truncated | (table.end_reason != EndReason.END_OF_FILE)
        unfinished: Array = self._ends[~flagged]
        return unfinished

    @cached_property
    def _numbers(self) -> Array:
        """The episode numbers in the rows; the table's if the rows have none, or two episodes have the same."""
        table = self.source.episodes
        field = next((field for field in self.source.fields if field.key == EPISODE), None)
        if field is None or field.shape not in {(), (1,)} or "int" not in field.dtype:
            return table.episode
        rows = [self.source.read(EPISODE, int(start), int(start) + 1).reshape(1) for start in table.start]
        numbers = np.concatenate(rows).astype(np.int64) if rows else table.episode
        return numbers if len(np.unique(numbers)) == len(numbers) else table.episode


def whole_episodes(reader: StepReader) -> StepReader:
    """Complete the rows of a buffer, or of a TED tree that another program wrote, to rows of a dataset.

    Returns `reader` itself if it is a dataset, or the checkpoint of one.
    """
    of_buffer = reader.manifest.kind == "checkpoint" and reader.manifest.request.source == STORAGE
    return BufferSteps(reader) if of_buffer or isinstance(reader, PlainReader) else reader


class ForeignSteps(BufferSteps):
    """The rows of a `ForeignReader`, opened without root flags, completed to rows of a dataset."""

    def __init__(self, rows: ForeignReader) -> None:
        self._theirs = rows
        super().__init__(rows)
        self.manifest = replace(self.manifest, request=rows.manifest.request)

    @cached_property
    def _unfinished(self) -> Array:
        """The last steps of episodes that no flag ends."""
        unfinished: Array = self._ends[~self._theirs.flagged]
        return unfinished


_TREE = "meta.json"


def is_steps(path: PathLike, format: str | None = None) -> bool:
    """Whether `path` is a dataset, a recording, a checkpoint of rbtool or TorchRL, an export, or a tensordict folder.

    It may be damaged. If the user names a `format`, such as `table`, exports do not count: that format reads them.
    """
    path = Path(path)
    mend(path)
    if (
        is_ours(path)
        or any((path / name).is_file() for name in (_TREE, COMMITS))
        or foreign_form().find(path) is not None
    ):
        return True
    return format is None and not (path / HIDDEN).is_dir() and find_steps(path) is not None


def open_steps(path: PathLike, *, damaged: bool = False) -> StepReader:
    """Open a dataset, a checkpoint or an export, or a tensordict folder of one row a step that has no manifest.

    TorchRL's flat, nested and H5 layouts are opened, too, by the folder or file of a storage or the folder of a buffer.

    Args:
        path: a file or folder.
        damaged: also open data whose files of rows are cut or missing; then only reading lost rows raises
            CorruptDataError.

    Raises:
        DatasetNotFoundError: there is nothing at `path`.
        FormatError: rbtool and TorchRL did not write it, or a newer version did.
        CorruptDataError: files are missing, cut, or contradict the manifest.
    """
    path = Path(path)
    return one_generation(path, lambda: _open(path, damaged))


def _open(path: Path, damaged: bool) -> StepReader:
    mend(path)
    place = foreign_form().find(path)
    if place is not None:
        return ForeignSteps(foreign_form().open(place, held=()))
    refuse_several(path)
    if not is_ours(path) and not (path / _TREE).is_file() and (found := find_steps(path)) is not None:
        return found(path)
    if path.is_file():
        return H5Reader(path)
    if not path.exists():
        raise DatasetNotFoundError(f"{path} not found")
    refuse_empty(path)
    if not has_manifest(path) and (path / HIDDEN).is_dir():
        lost = CorruptDataError(f"{path} was an rbtool dataset or checkpoint, but {MANIFEST} is missing")
        raise unfinished_recording(path) or lost
    if not has_manifest(path) and (path / _TREE).is_file():
        return PlainReader(path)
    if not has_manifest(path):
        raise FormatError(f"{path} is neither a dataset nor a checkpoint: it has no {MANIFEST}")
    listed = ListedFiles(path)
    layout = listed.manifest.layout
    if layout == "ted":
        return TedReader(path, listed)
    if layout == "packed":
        return (CutPackedReader if damaged else PackedReader)(path, listed)
    if layout in {"flat", "nested"}:
        return (CutFlatReader if damaged else FlatReader)(path, listed)
    raise FormatError(f"{path} has layout {layout!r}, which is not read here")


def refuse_several(path: Path) -> None:
    """Raise UsageError for several datasets: the folder of a split, or a mixture file."""
    refuse_mixture(path)
    if (path / PARTS_FILE).is_file() and not has_manifest(path):
        parts = ", ".join(sorted(part.name for part in path.iterdir() if has_manifest(part)))
        raise UsageError(f"{path} holds the parts of a split, expected one of them: {parts}")


def open_dataset(path: Path) -> TedReader | PackedReader:
    """Open a dataset; UsageError states what to do with anything that is not an rbtool dataset."""
    reader = open_episodes(path)
    if isinstance(reader, TedReader | PackedReader) and reader.manifest.kind == "dataset":
        return reader
    with reader:
        quoted, layout = shlex.quote(str(path)), reader.manifest.layout
        if reader.manifest.kind == "checkpoint":
            what, verb = f"a checkpoint in the layout {layout}", "checkpoint load"
        else:
            what, verb = f"an export in the format {layout}", "convert"
        raise UsageError(
            f"{path} is {what}, expected a dataset", hint=f"make a dataset of it first: rbtool {verb} {quoted} DEST"
        )


def open_episodes(path: Path) -> StepReader:
    """Open a dataset, a checkpoint of steps or an export; UsageError states what to do with anything else."""
    quoted = shlex.quote(str(path))
    refuse_several(path)
    if (path / BUFFER).is_file():
        raise UsageError(f"{path} is the checkpoint of a buffer", hint="create the buffer, then load it: loads(path)")
    if is_storage(path):
        hint = "create the storage, then load it: storage.loads(path)"
        raise UsageError(f"{path} is the checkpoint of a storage", hint=hint)
    if not is_steps(path):
        form = next((name for name in reader_names() if reader_class(name).recognises(path)), None)
        if form is not None:
            raise UsageError(
                f"a TED dataset is needed; {path} is {title_of(form)}",
                hint=f"convert it first: rbtool convert {quoted} DEST",
            )
    elif _is_plain_tree(path):
        raise UsageError(
            f"{path} is a tensordict folder, and no dataset that rbtool made",
            hint="TensorStorage(TensorDict.load_memmap(path)) is a storage of it",
        )
    return whole_episodes(open_steps(path))


def is_storage(path: Path) -> bool:
    """Whether a folder is the checkpoint of a storage in a form that has rows, but no episodes."""
    noted = any((path / name).is_file() for name in (f"{HIDDEN}/storage.json", DIGESTS))
    return noted and not has_manifest(path) and foreign_form().find(path) is None


def _is_plain_tree(path: Path) -> bool:
    """Whether a folder is a tensordict folder that neither rbtool nor a checkpointer of TorchRL wrote."""
    own = is_ours(path) or (path / HIDDEN).is_dir()
    return (path / _TREE).is_file() and not own and foreign_form().find(path) is None


WRITER_FOLDER = "writer"
"""The folder of the writer in a saved buffer; it exists even if the writer has no state."""
DIGESTS_NOTED = "digests"
"""The entry of a saved buffer's metadata that says that there must be digests; buffers of TorchRL have none."""
PICKLED = "prefetch.pkl"
"""A file of TorchRL's that is never read."""


def require_whole_buffer(folder: Path) -> bool:
    """Check that a saved buffer is complete: compare all files but the storage's with their digests.

    Returns whether digests were recorded. CorruptDataError for files that are missing, cut, changed, or were not saved
    with the rest; also where the digests themselves are missing although the metadata requires them.
    """
    noted, metadata = require_digests(folder), load_json(folder / BUFFER)
    if noted is not None:
        _refuse_unnoted(folder, noted)
    elif isinstance(metadata, dict) and metadata.get(DIGESTS_NOTED) is True:
        raise CorruptDataError(
            f"{folder / DIGESTS} is missing: the digests of the checkpoint",
            hint="save the buffer again, or restore the file from a copy",
        )
    if not (folder / WRITER_FOLDER).is_dir():
        raise CorruptDataError(f"{folder} has no {WRITER_FOLDER}/: it was cut")
    return noted is not None


def _refuse_unnoted(folder: Path, noted: frozenset[str]) -> None:
    """Raise CorruptDataError for files without a digest; the storage lists its own files."""
    parts = {name.partition("/")[0] for name in noted} | {WRITER_FOLDER}
    for entry in folder.iterdir():
        files = [entry] if entry.name not in parts else []
        if entry.is_dir() and entry.name != STORAGE_FOLDER:
            files += [file for file in entry.rglob("*") if file.is_file()]
        strange = [file for file in files if file.relative_to(folder).as_posix() not in noted]
        if strange and entry.name != PICKLED and not entry.name.startswith("."):
            raise CorruptDataError(
                f"{strange[0]} was not saved with the rest of {folder}", hint="move it away to load the rest"
            )


def finished_manifest(path: PathLike) -> Manifest | None:
    """Return the manifest of the dataset or checkpoint at `path` if all its files exist in full length.

    None if rbtool wrote nothing there, or if it is damaged: neither is a finished result.
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
