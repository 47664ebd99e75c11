"""The folder of a saved buffer, and dumps that finish in the background.

    storage/                  written by the storage's checkpointer; missing if the buffer has no rows
    writer/  sampler/         states of the parts; no sampler/ for a sampler without state
    buffer_metadata.json      {"batch_size": …, "consume_after_n_samples": …}; "writer": false if it has no state
    rng_state/                state of the generator, as a memory-mapped tensordict with one leaf
    transform.t               state of the transforms, tensors and numbers only
    prefetch.json             indices that were drawn and not delivered yet
    .rbtool/digests.json      digests of all files; required if the metadata says `"digests": true`

TorchRL writes the same files except the last two, and can read the storage if its checkpointer has `compatible=True`.
TorchRL's `prefetch.pkl` is a pickle and is never read.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from ..checkpointers.base import Captured, captured, strange_files
from ..encodings.compact import BUFFER, STORAGE_FOLDER
from ..encodings.saved_digests import noted_files, write_digests
from ..errors import CorruptDataError, DatasetNotFoundError, FormatError, RbtoolError, SchemaError, UsageError
from ..format import fs
from ..format.documents import Count, decode, dump_json, load_json
from ..format.files import open_folder
from ..format.manifest import HIDDEN, has_manifest
from ..format.memmap.tree import read_tree
from ..format.open_files import OpenFiles
from ..format.staging import Staging, is_ours, mend
from ..format.syncing import Durable, write_file
from ..open_steps import (
    DIGESTS_NOTED,
    PICKLED,
    WRITER_FOLDER,
    BufferSteps,
    is_storage,
    open_episodes,
    require_whole_buffer,
)
from ..samplers.base import Sampler
from ..state_folder import load_module_state, module_state_bytes
from ..storages.base import Storage
from ..storages.codec import dtype_named, tensor_bytes
from ..transforms.base import Compose
from ..writers.base import Writer
from .draws import Draw

_freed = threading.Condition()
_busy: set[str] = set()
_unseen: dict[Future[None], Path] = {}
"""Background dumps of which nobody has called `result` yet, and their destinations."""


class BackgroundDump:
    """A checkpoint that is being written in the background, as returned by `ReplayBuffer.dumps(path, background=True)`.

    It holds the rows as of that call, and replaces an older checkpoint only once it is complete. If it fails, `result`
    raises the error; if nobody calls `result`, a RuntimeWarning reports it when this object is deleted or the program
    ends. The program waits for unfinished dumps.
    """

    def __init__(self, path: Path, done: Future[None]) -> None:
        self.path = path
        self._done, self._process = done, os.getpid()
        _unseen[done] = path
        weakref.finalize(self, done.add_done_callback, _report).atexit = False  # now, or when it fails

    def done(self) -> bool:
        """Return whether the checkpoint is in place, or the dump has failed."""
        return self._done.done()

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is in place.

        Args:
            timeout: seconds to wait; default without limit.

        Raises:
            TimeoutError: it is not finished in time; it continues.
            UsageError: this is a forked process, and the dump runs in its parent.

        If the dump failed, its error is raised.
        """
        if self._process != os.getpid():
            raise UsageError(f"the dump to {self.path} runs in the process {self._process}", hint="call result() there")
        try:
            self._done.result(timeout)
        finally:
            if self._done.done():
                _unseen.pop(self._done, None)

    def __repr__(self) -> str:
        state = "in progress" if not self.done() else "failed" if self._done.exception() else "in place"
        return f"BackgroundDump({os.fspath(self.path)!r}, {state})"


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Reserve a destination within this process, after waiting for a dump to it that is in progress."""
    key = os.path.realpath(path)
    with _freed:
        while key in _busy:
            _freed.wait()
        _busy.add(key)
    try:
        yield
    finally:
        with _freed:
            _busy.discard(key)
            _freed.notify_all()


def in_background(path: Path, finish: Callable[[], object]) -> BackgroundDump:
    """Call `finish` in a thread, for which the program waits at exit; if no thread can be started, call it here."""
    done: Future[None] = Future()

    def work() -> None:
        try:
            finish()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    handle = BackgroundDump(path, done)
    try:
        threading.Thread(target=work, name="rbtool-dump").start()
    except (RuntimeError, MemoryError):  # too many threads, or the interpreter is shutting down
        work()
    return handle


def _report(done: Future[None]) -> None:
    """Warn about a failed dump of which nobody called `result`."""
    path = _unseen.pop(done, None)
    if path is not None and (error := done.exception()) is not None:
        warnings.warn(f"the background dump to {path} failed: {error!r}", RuntimeWarning, stacklevel=2)


def _report_all() -> None:
    for done in tuple(_unseen):
        _report(done)


def _forget() -> None:
    """In a forked process, forget the parent's dumps."""
    global _freed
    _freed = threading.Condition()
    _busy.clear()
    _unseen.clear()


atexit.register(_report_all)
os.register_at_fork(after_in_child=_forget)


_TRANSFORMS, _AHEAD, _GENERATOR = "transform.t", "prefetch.json", "rng_state"
_KNOWN = frozenset({HIDDEN, "storage", WRITER_FOLDER, "sampler", PICKLED, BUFFER, _TRANSFORMS, _AHEAD, _GENERATOR})


class _BufferStaging(Staging):
    """A staging folder that may only replace buffer checkpoints and empty folders."""

    def __init__(self, destination: Path, durable: Durable) -> None:
        super().__init__(destination, replace=True, durable=durable)

    def refuse_if_taken(self) -> None:
        path = self.destination
        around = next((folder for folder in (path, *path.parents) if has_manifest(folder)), None)
        if around is not None:
            raise UsageError(
                f"{path} is inside the dataset {around}, which must not be changed", hint="choose another folder"
            )
        # Another process may be replacing the checkpoint, so that older files vanish while they are listed: list again.
        if all((strange := _strange_in(path)) is not None for _ in range(_LISTINGS)):
            raise UsageError(
                f"{path} holds {strange}, and only buffer checkpoints are replaced", hint="choose another folder"
            )


_LISTINGS = 3
"""How often the files of a destination are listed before it is refused."""


def _strange_in(path: Path) -> str | None:
    """Return the path of a file that does not belong to a buffer checkpoint; None if there is no such file."""
    try:
        names = {entry.name for entry in path.iterdir()}
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        return path.name
    if names and not (BUFFER in names and names <= _KNOWN):
        return min(names - _KNOWN, default=path.name)
    if not noted_files(path):  # a checkpoint of TorchRL, which has no list of its files
        return None
    strange = strange_files(path, [path / name for name in _KNOWN])
    return strange[0].relative_to(path).as_posix() if strange else None


class StagedBuffer:
    """A buffer that was written to a staging folder; captured `rows` are written when it is published."""

    def __init__(self, staging: Staging, rows: Captured | None) -> None:
        self._staging, self._rows = staging, rows

    def publish(self) -> None:
        """Write the remaining rows, and put the checkpoint in place."""
        if self._rows is not None:
            self._rows.write()
        write_digests(self._staging.path)
        self._staging.publish()


class SavedBuffer(Protocol):
    """The parts of a buffer that a checkpoint saves, besides its generator and the draws prepared ahead."""

    @property
    def storage(self) -> Storage: ...

    @property
    def sampler(self) -> Sampler: ...

    @property
    def writer(self) -> Writer: ...

    @property
    def transform(self) -> Compose: ...

    @property
    def batch_size(self) -> int | None: ...

    def folder_notes(self) -> dict[str, Any]:
        """Return notes about this buffer for a checkpoint, besides the state of its parts."""


def staged_buffer(
    stack: contextlib.ExitStack,
    buffer: SavedBuffer,
    generator: torch.Generator | None,
    path: Path,
    draws: list[Draw],
    capacity: int,
    durable: Durable,
    *,
    background: bool,
) -> StagedBuffer:
    """Write a buffer and its generator to a staging folder, which `publish` puts at `path`.

    When `stack` is left, the folder is removed if it was not published. With `background`, `publish` writes the rows if
    they can be captured; they are saved as they are now, even if writers continue.
    """
    staging = stack.enter_context(_BufferStaging(path, durable))
    folder = staging.path
    # This folder marks the checkpoint as complete, so it is made even for a writer without state.
    fs.make_folder(folder / WRITER_FOLDER)
    buffer.writer.dumps(folder / WRITER_FOLDER)
    buffer.sampler.dumps(folder / "sampler")
    metadata: dict[str, Any] = {"batch_size": buffer.batch_size, "consume_after_n_samples": None, DIGESTS_NOTED: True}
    metadata["consume_after_n_samples"] = getattr(buffer.sampler, "max_sample_count", None)
    metadata |= buffer.folder_notes()
    if not any((folder / WRITER_FOLDER).iterdir()):
        metadata[WRITER_FOLDER] = False
    if generator is not None:
        metadata["generator_device"] = str(generator.device)
        _write_generator(folder / _GENERATOR, generator.get_state())
    if state := buffer.transform.state_dict():
        write_file(folder / _TRANSFORMS, module_state_bytes(state))
    if draws:
        ahead = {"version": 1, "capacity": capacity, "queue": [_draw_to_json(draw) for draw in draws]}
        write_file(folder / _AHEAD, dump_json(ahead).encode())
    write_file(folder / BUFFER, dump_json(metadata).encode())
    # Capture the rows last: from then on, reads that hand out references to rows wait for the dump, so nothing slow
    # may happen between the capture and the start of the thread that writes the rows.
    rows = captured(buffer.storage, folder / STORAGE_FOLDER) if background else None
    if rows is not None:
        stack.enter_context(rows)
    elif getattr(buffer.storage, "initialized", True):
        buffer.storage.dumps(folder / STORAGE_FOLDER)
    return StagedBuffer(staging, rows)


def refuse_home_of(storage: Any, path: Path) -> None:
    """Raise UsageError for a checkpoint that would replace the folder in which the storage keeps its rows."""
    home = getattr(storage, "scratch_dir", None)
    if home is None:
        return
    destination, living = Path(os.path.realpath(path)), Path(os.path.realpath(home))
    if living == destination or destination in living.parents or living in destination.parents:
        raise UsageError(
            f"a checkpoint cannot replace {path}: the storage keeps its rows in {home}", hint="choose another folder"
        )


def _write_generator(folder: Path, state: torch.Tensor) -> None:
    leaf = {"device": "cpu", "shape": list(state.shape), "dtype": "torch.uint8", "is_nested": False}
    document = {_GENERATOR: leaf, "shape": [], "device": "cpu", "_type": "<class 'tensordict._td.TensorDict'>"}
    fs.make_folder(folder)
    write_file(folder / f"{_GENERATOR}.memmap", state.cpu().numpy().tobytes())
    write_file(folder / "meta.json", dump_json(document).encode())


@dataclass(frozen=True)
class SavedParts:
    """A saved buffer: the folders of its parts (None for parts without state), and everything else.

    Attributes:
        notes: what `folder_notes` returned.
        verify: whether to read rows that are only mapped, and compare their digests.
        confirm: raises CorruptDataError if another checkpoint was put in place during the load, because files of both
            may have been read.
    """

    storage: Path | None
    sampler: Path | None
    writer: Path | None
    transforms: dict[str, Any] | None
    generator: tuple[torch.Tensor, str] | None
    batch_size: int | None
    notes: Mapping[str, Any]
    verify: bool = False
    confirm: Callable[[], None] = lambda: None


class BufferFolder:
    """The folder of a saved buffer, as a context in which it is open for reading.

    Raises:
        DatasetNotFoundError: the folder does not exist.
        FormatError: it is not the folder of a saved buffer.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.replaced = False
        """Whether another checkpoint replaced it while it was open; set when it is closed."""
        self._descriptor = -1

    def __enter__(self) -> BufferFolder:
        mend(self.path)
        if not os.path.lexists(self.path):
            raise DatasetNotFoundError(f"{self.path} not found, expected the folder of a saved buffer")
        if not self.path.is_dir():
            raise _not_a_buffer(self.path)
        self._descriptor = open_folder(self.path)  # while it is open, its inode number is not reused
        try:
            self._open()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self._close()

    def _close(self) -> None:
        self.replaced = not self._in_place()
        os.close(self._descriptor)

    def _in_place(self) -> bool:
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def require_in_place(self) -> None:
        """Raise CorruptDataError if another checkpoint was put in place meanwhile, as the two may be mixed."""
        if not self._in_place():
            raise CorruptDataError(f"{self.path} was replaced while it was loaded", hint="load it again")

    def _open(self) -> None:
        if not (self.path / BUFFER).is_file():
            raise _not_a_buffer(self.path)
        require_whole_buffer(self.path)
        metadata = load_json(self.path / BUFFER)
        size = metadata.get("batch_size") if isinstance(metadata, dict) else "nothing"
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise FormatError(f"the batch size in {self.path / BUFFER} is {size!r}, expected a number")
        self.batch_size: int | None = size
        self.has_writer = metadata.get(WRITER_FOLDER) is not False or any((self.path / WRITER_FOLDER).iterdir())
        self._device = str(metadata.get("generator_device", "cpu"))
        self.metadata: dict[str, Any] = metadata

    def saved(self) -> SavedParts:
        """Return the parts that the folder holds."""
        found = {name: self.path / name if (self.path / name).is_dir() else None for name in ("storage", "sampler")}
        return SavedParts(
            storage=found["storage"],
            sampler=found["sampler"],
            writer=self.path / WRITER_FOLDER if self.has_writer else None,
            transforms=load_module_state(self.path / _TRANSFORMS),
            generator=self.generator(),
            batch_size=self.batch_size,
            notes=self.metadata,
            confirm=self.require_in_place,
        )

    def generator(self) -> tuple[torch.Tensor, str] | None:
        """Return the state of the generator, uint8 `[bytes]`, and its device."""
        folder = self.path / _GENERATOR
        if not folder.is_dir():
            return None
        with OpenFiles(folder) as files:
            leaf = read_tree(files).get((_GENERATOR,))
            if leaf is None or leaf.dtype != "uint8":
                raise CorruptDataError(f"{folder} is damaged, expected the bytes of a generator's state")
            state = np.frombuffer(bytearray(files.read(f"{_GENERATOR}.memmap")), np.uint8)
        return torch.from_numpy(state), self._device

    def drawn_ahead(self, batches: int) -> list[Draw]:
        """Return the draws that were not delivered, for a buffer that prepares `batches` batches ahead.

        Raises:
            SchemaError: (a RuntimeError) the saved buffer prepares another number of batches ahead, and has such draws.
        """
        file = self.path / _AHEAD
        if not file.is_file():
            return []
        ahead = decode(_Ahead, load_json(file), str(file))
        draws = [_draw_from_json(item, str(file)) for item in ahead.queue]
        if any(draw.size is None for draw in draws) and ahead.capacity != batches:
            raise SchemaError(
                f"{self.path} has {ahead.capacity} batches prepared ahead, this buffer prepares {batches}"
            )
        return draws


def _not_a_buffer(path: Path) -> FormatError:
    """Make the error for a path that is not a saved buffer; it says what the path holds and how to open that."""
    wanted = "expected the folder of a saved buffer"
    of_storage, what = is_storage(path), ""
    with contextlib.suppress(RbtoolError, OSError), open_episodes(path) as reader:
        kind, layout = reader.manifest.kind, reader.manifest.layout
        of_storage = type(reader) is BufferSteps
        what = f"a {kind} in the layout {layout}" if kind == "checkpoint" or is_ours(path) else f"an export to {layout}"
    if of_storage:
        hint = f"load the rows alone: buffer.storage.loads({str(path)!r}), with the checkpointer that saved them"
        return FormatError(f"{path} is the checkpoint of a storage, {wanted}", hint=hint)
    if what:
        return FormatError(f"{path} is {what}, {wanted}", hint=f"rbtool.load_dataset({str(path)!r}) opens it")
    what = f"has no {BUFFER}: it" if path.is_dir() else "is a file, and"
    return FormatError(f"{path} {what} is not the folder of a saved buffer")


_LOADS = 100
"""How often a load is tried while the checkpoint keeps being replaced."""


def load_folder(path: Path, load: Callable[[BufferFolder], None]) -> None:
    """Load a saved buffer, again if another checkpoint replaced it meanwhile; for errors see `BufferFolder`."""
    for left in reversed(range(_LOADS)):
        folder = BufferFolder(path)
        try:
            with folder:
                load(folder)
            return
        except (RbtoolError, OSError):
            if not (folder.replaced and left):
                raise


@dataclass(frozen=True, slots=True)
class _DrawEntry:
    """A draw in `prefetch.json`, whose values `_from_json` reads."""

    index: Any
    info: tuple[tuple[str | tuple[str, ...], Any], ...]
    last: bool
    parts: tuple[tuple[Count, Any], ...] = ()
    chances: Any = None
    size: Count | None = None


@dataclass(frozen=True, slots=True)
class _Ahead:
    """The content of `prefetch.json`."""

    queue: tuple[_DrawEntry, ...]
    capacity: Count


@dataclass(frozen=True, slots=True)
class _TensorEntry:
    """A tensor in `prefetch.json`."""

    dtype: str
    shape: tuple[Count, ...]
    base64: str


def _draw_to_json(draw: Draw) -> dict[str, Any]:
    if draw.parts:  # the index of an ensemble's draw is computed from its parts
        parts = [[member, _draw_to_json(part)] for member, part in draw.parts]
        return {"index": None, "info": [], "last": draw.last, "size": draw.size, "parts": parts}
    info = [[list(key) if isinstance(key, tuple) else key, _to_json(value)] for key, value in draw.info.items()]
    chances = {} if draw.chances is None else {"chances": _to_json(draw.chances)}
    return {"index": _to_json(draw.index), "info": info, "last": draw.last, "size": draw.size} | chances


def _draw_from_json(entry: _DrawEntry, origin: str) -> Draw:
    if entry.parts:
        parts = [(member, _draw_from_json(decode(_DrawEntry, part, origin), origin)) for member, part in entry.parts]
        return Draw(None, {}, entry.last, parts=parts, size=entry.size)
    info = {key: _from_json(value, origin) for key, value in entry.info}
    chances = None if entry.chances is None else _from_json(entry.chances, origin)
    return Draw(_from_json(entry.index, origin), info, entry.last, chances=chances, size=entry.size)


def generator_to_json(generator: torch.Generator | None) -> Any:
    """Convert the state of a generator (None if there is none) to JSON, for the notes about members of ensembles."""
    return None if generator is None else [_to_json(generator.get_state()), str(generator.device)]


def generator_from_json(item: Any, origin: str) -> tuple[torch.Tensor, str] | None:
    """Read what `generator_to_json` wrote; FormatError for anything else."""
    if item is None:
        return None
    state, device = decode(tuple[Any, str], item, origin)
    found = _from_json(state, origin)
    if not isinstance(found, torch.Tensor) or found.dtype != torch.uint8:
        raise FormatError(f"{origin} is damaged, expected the state of a generator")
    return found, device


def _to_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return {"tuple": [_to_json(part) for part in value]}
    if isinstance(value, torch.Tensor):
        data = base64.b64encode(tensor_bytes(value)).decode()
        return {"dtype": str(value.dtype), "shape": list(value.shape), "base64": data}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise UsageError(
        f"the sampler's info of a batch prepared ahead holds a {type(value).__name__}; only tensors and numbers "
        "can be saved"
    )


def _from_json(item: Any, origin: str) -> Any:
    if isinstance(item, dict) and "tuple" in item:
        return tuple(_from_json(part, origin) for part in decode(tuple[Any, ...], item["tuple"], origin))
    if isinstance(item, dict) and "value" in item:
        return item["value"]
    entry = decode(_TensorEntry, item, origin)
    try:
        data = np.frombuffer(base64.b64decode(entry.base64, validate=True), np.uint8).copy()
        return torch.from_numpy(data).view(dtype_named(entry.dtype)).reshape(entry.shape)
    except (ValueError, RuntimeError) as error:
        raise FormatError(f"{origin} is damaged: {error}") from error
