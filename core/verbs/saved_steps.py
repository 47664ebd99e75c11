"""Saved data: find out what a path holds, open its steps, and check the parts of a saved buffer."""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..encodings.digests import DIGESTS, require_digests
from ..encodings.flat import STORAGE_METADATA, FlatReader
from ..encodings.h5_reader import H5Reader
from ..encodings.save import VerifyingReader
from ..errors import CorruptDataError, DatasetNotFoundError, FormatError, RbtoolError, UsageError
from ..format.contracts import Array, StepReader
from ..format.documents import load_json
from ..format.locate import dataset_around, inside_hint, reader_names, recognised, refuse_empty
from ..format.manifest import HIDDEN, has_manifest
from ..format.open_files import OpenFiles, one_generation
from ..format.staging import is_ours, mend
from ..format.ted.reader import TedReader
from ..format.ted.tree import batch_of, read_tree
from ..opening import BufferSteps, is_steps, open_steps, refuse_several, whole_episodes
from ..ted.findings import Finding
from ..torchrl.reader import BUFFER, STORAGE_FOLDER, TorchrlReader, find_torchrl

_STORAGE = (f"{HIDDEN}/storage.json", DIGESTS)


def has_steps(path: Path, *, raw: bool = False, format: str | None = None) -> bool:
    """Return whether `path` is to be opened as a dataset or a checkpoint of steps; False for a raw dataset.

    True also for damaged data and for a file in an unknown format: opening it gives the best error message. `format`
    names the format of a raw dataset that need not be recognised in it.

    Raises UsageError for a mixture, the folder of a split, a raw dataset unless `raw` is set, a single file of one, and
    the checkpoint of a buffer without steps of its own; DatasetNotFoundError for an empty folder; else FormatError.
    """
    found = is_steps(path)
    if not found or _is_storage(path):
        _refuse_buffer(path)
    if found or (path / HIDDEN).is_dir():
        return True
    form = format or recognised(path)
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


def is_unknown(path: Path) -> bool:
    """Return whether nothing at `path` is known; UsageError for a part of a buffer or of a raw dataset."""
    if is_steps(path) or (path / HIDDEN).is_dir() or recognised(path) is not None:
        return False
    _refuse_buffer(path)
    if path.is_file():
        _refuse_part_of_raw(path)
    return True


def _is_storage(path: Path) -> bool:
    return any((path / name).is_file() for name in _STORAGE) and find_torchrl(path) is None


def _refuse_part_of_raw(path: Path) -> None:
    """Raise UsageError for a file of a raw dataset, CorruptDataError for an empty one."""
    refuse_empty(path)
    if (found := dataset_around(path)) is not None:
        hint = f"name the folder of the dataset: {shlex.quote(str(found[1]))}"
        raise UsageError(f"{path} is a file of a raw {found[0]} dataset, not all of it", hint=hint)


def _unknown(path: Path) -> DatasetNotFoundError | FormatError:
    if path.is_dir() and not any(path.iterdir()):
        return DatasetNotFoundError(f"{path} is an empty folder, a dataset or a checkpoint is expected")
    formats = ", ".join(reader_names())
    return FormatError(
        f"{path} is no dataset or checkpoint, and is in no format that is known here ({formats})",
        hint=inside_hint(path) or "name the folder of the dataset itself; `rbtool list` shows which ones are stored",
    )


def _refuse_buffer(path: Path) -> None:
    """Raise UsageError for several datasets, the checkpoint of a buffer, a part of one, and that of a storage."""
    refuse_several(path)
    buffer = next((folder for folder in (path, path.parent) if (folder / BUFFER).is_file()), None)
    if buffer is not None:
        places = (buffer / STORAGE_FOLDER, *(buffer / STORAGE_FOLDER).glob("*.h5"))
        steps = next((str(place) for place in places if is_ours(place)), None)
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


_WRITER = "writer/metadata.json"


def is_of_buffer(path: Path) -> bool:
    """Return whether `path` is the checkpoint of a buffer or of a storage of steps."""
    return (path / BUFFER).is_file() or _own_steps(path) is not None or _tensors(path) is not None


def open_saved(path: Path, *, damaged: bool = False) -> StepReader:
    """Open a dataset or a checkpoint like `open_steps`, and that of a buffer or a storage as the steps of a dataset.

    `path` may be the folder of a buffer in any layout, if its storage holds steps of episodes. Raises UsageError if it
    does not, and if its rows are ranked and therefore not in temporal order.
    """
    return one_generation(path, lambda: _open(path, damaged))


def _open(path: Path, damaged: bool) -> StepReader:
    mend(path)
    if (path / BUFFER).is_file():
        require_digests(path)
    tensors, own = _tensors(path), _own_steps(path)
    if tensors is not None:
        from ..checkpointers.tensor import SavedTensorRows  # lazy: imports torch

        writer = _writer_of(tensors)
        _refuse_ranked(tensors, writer)
        cursor = writer.get("cursor")
        return BufferSteps(SavedTensorRows(tensors, cursor if type(cursor) is int and cursor >= 0 else None))
    if own is None and find_torchrl(path) is None and (path / BUFFER).is_file():
        has_steps(path, raw=True)  # raises: this buffer has no steps
    place = own or path
    _refuse_ranked(place, _writer_of(place if place.is_dir() else place.parent))
    return whole_episodes(open_steps(place, damaged=damaged))


@contextlib.contextmanager
def verified_steps(reader: StepReader) -> Iterator[StepReader]:
    """Yield a reader of the same steps with verified digests; CorruptDataError if one does not match.

    Layout `ted` is verified while it is read, and at the end, which saves a second read; anything else before.
    """
    if isinstance(reader, TedReader):
        checked = VerifyingReader(reader)
        yield checked
        checked.verify_files()
    else:
        reader.verify_files()
        yield reader


def _own_steps(path: Path) -> Path | None:
    """Return the path of whole episodes in one of rbtool's own forms in the folder of a buffer or of a storage."""
    if not path.is_dir() or has_manifest(path):
        return None
    folder = path / STORAGE_FOLDER if (path / BUFFER).is_file() else path
    if folder != path and is_ours(folder):
        return folder
    files = sorted(folder.glob("*.h5")) if folder.is_dir() else []
    return files[0] if len(files) == 1 and is_ours(files[0]) else None


def _tensors(path: Path) -> Path | None:
    """Return the folder of a storage of tensors, whose rows are stored in memory order."""
    if not path.is_dir() or find_torchrl(path) is not None:
        return None
    folder = path / STORAGE_FOLDER if (path / BUFFER).is_file() else path
    return folder if (folder / STORAGE_METADATA).is_file() and not has_manifest(folder) else None


def _writer_of(folder: Path) -> dict[str, Any]:
    """Return the metadata of the writer that was saved with a storage; {} if there is none."""
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


# Rules for saved buffers -----------------------------------------------------------------------------

BUFFER_RULES = {"BUF001": "buffer digests", "BUF002": "buffer counts", "BUF003": "buffer sampler"}
NO_DIGESTS = (
    "there are no digests of these files, as TorchRL and tensordict write none: whether their bytes are those that "
    "were saved cannot be verified"
)
_LISTS = ("items.json", "metadata.json")


@dataclass(frozen=True, slots=True)
class _Extent:
    """Length, capacity in rows, lanes, capacity in elements and write cursor of a storage; None if not recorded."""

    length: int
    rows: int | None = None
    lanes: int | None = None
    most: int | None = None
    cursor: int | None = None

    @property
    def filled(self) -> int:
        """The most rows that can be filled."""
        return self.length if self.lanes is None else self.length // self.lanes


def buffer_findings(path: Path) -> tuple[list[Finding], bool]:
    """Return the inconsistencies in the folder of a saved buffer, and whether digests cover all of it."""
    findings: list[Finding] = []
    verified = False
    try:
        verified = _verified(path)
    except RbtoolError as error:
        findings.append(_finding("BUF001", str(error)))
    try:
        extent = _extent(path / STORAGE_FOLDER)
        findings += [
            _finding("BUF002", text) for text in (*_length_problems(path, extent), *_writer_problems(path, extent))
        ]
        findings += [_finding("BUF003", text) for text in _sampler_problems(path, extent)]
    except (RbtoolError, OSError) as error:
        findings.append(_finding("BUF002", str(error)))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        findings.append(_finding("BUF002", f"{path} has a part that cannot be read: {error!r}"))
    return findings, verified


def _finding(rule: str, message: str) -> Finding:
    return Finding(rule, BUFFER_RULES[rule], "error", message)


def _verified(path: Path) -> bool:
    """Compare all digests; return whether they cover every part."""
    noted = require_digests(path)
    storage = path / STORAGE_FOLDER
    own = _own(storage)
    if own is not None:
        with own as reader:
            reader.verify_files()
    elif noted is not None:
        require_digests(storage)
        _verify_tensors(storage)
    return noted is not None


def _verify_tensors(storage: Path) -> None:
    """Compare the leaves of a storage of tensors with their digests."""
    if (storage / STORAGE_METADATA).is_file() and find_torchrl(storage) is None:
        from ..checkpointers.tensor_reader import verify_tensors  # lazy: imports torch

        verify_tensors(storage)


def _own(storage: Path) -> FlatReader | H5Reader | None:
    """Open the storage if it holds whole episodes in one of rbtool's own forms."""
    places = [storage, *sorted(storage.glob("*.h5"))] if storage.is_dir() else []
    place = next((place for place in places if is_ours(place)), None)
    reader = None if place is None else open_steps(place)
    return reader if isinstance(reader, FlatReader | H5Reader) else None


def _extent(storage: Path) -> _Extent:
    """Read the extent of a storage from its metadata, whatever its format."""
    if not storage.is_dir():
        return _Extent(0)
    reader: StepReader | None = _own(storage)
    place = find_torchrl(storage) if reader is None else None
    if place is not None:
        reader = TorchrlReader(place)
    if isinstance(reader, FlatReader | H5Reader | TorchrlReader):
        with reader:
            filled = reader.filled
        lanes = math.prod(filled.shape[1:])
        return _Extent(filled.length, filled.capacity // lanes, lanes, filled.capacity, filled.cursor)
    if (storage / STORAGE_METADATA).is_file():
        return _tensor_extent(storage)
    if (storage / "packed.json").is_file():
        return _Extent(int(load_json(storage / "packed.json")["len"]))
    for name in _LISTS:
        if (storage / name).is_file():
            found = load_json(storage / name)
            return _Extent(len(found["items"] if isinstance(found, dict) else found))
    raise CorruptDataError(f"{storage} holds no storage: none of the files that describe one is there")


def _tensor_extent(storage: Path) -> _Extent:
    document = load_json(storage / STORAGE_METADATA)
    length = document["len"]
    if type(length) is not int or length < 0:
        raise CorruptDataError(f"{storage / STORAGE_METADATA} counts {length!r} elements, a number from 0 is expected")
    if document.get("is_pytree"):
        shapes = [tuple(entry["shape"]) for entry in document["metadata"].values()]
        common = _common(shapes)
        return _Extent(length, common[0] if common else None, None, math.prod(common) if common else None)
    if not (storage / "meta.json").is_file():
        return _Extent(length)
    with OpenFiles(storage) as files:
        read_tree(files, exact=False)
    lead = batch_of(load_json(storage / "meta.json"), str(storage / "meta.json"))
    return _Extent(length, lead[0], math.prod(lead[1:]), math.prod(lead)) if lead else _Extent(length)


def _common(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the leading sizes that all shapes share."""
    found = []
    for sizes in zip(*shapes, strict=False):
        if len(set(sizes)) > 1:
            break
        found.append(sizes[0])
    return tuple(found)


def _length_problems(path: Path, extent: _Extent) -> Iterator[str]:
    storage = path / STORAGE_FOLDER
    if extent.most is not None and extent.length > extent.most:
        yield f"{storage} counts {extent.length:,} elements, its leaves have room for {extent.most:,}"
    elif extent.lanes and extent.length % extent.lanes:
        yield f"{storage} counts {extent.length:,} elements, which {extent.lanes:,} lanes do not share evenly"


def _writer_problems(path: Path, extent: _Extent) -> Iterator[str]:
    file = path / "writer" / "metadata.json"
    if not file.is_file():
        return
    document = load_json(file)
    cursor, count = document.get("cursor"), document.get("write_count", 0)
    if any(type(number) is not int or number < 0 for number in (cursor, count)):
        yield f"{file} has the cursor {cursor!r} and the write count {count!r}, numbers from 0 are expected"
        return
    if extent.rows is not None and cursor >= max(extent.rows, 1):
        yield f"{file} has the cursor {cursor:,}, the storage has {extent.rows:,} rows"
    elif extent.rows is None or extent.filled < extent.rows:
        if cursor > extent.filled:
            yield f"{file} has the cursor {cursor:,}, the storage holds {extent.filled:,} rows"
    elif extent.cursor is not None and "rank_key" not in document and cursor != extent.cursor % extent.rows:
        yield f"{file} has the cursor {cursor:,}, the rows of the storage go on at {extent.cursor % extent.rows:,}"
    if "write_count" in document and count < cursor:
        yield f"{file} counts {count:,} writes, which do not reach the cursor {cursor:,}"
    if "generation_shape" in document:
        found = _array(path / "writer" / "generation.memmap", np.dtype(np.int64), document["generation_shape"])
        if extent.rows is not None and len(found) < extent.filled:
            yield f"{path / 'writer'} has generations of {len(found):,} rows, the storage holds {extent.filled:,}"
    if "rank_key" in document and document.get("shape") not in (None, [0]):
        ranked = document["shape"][0]
        if ranked > extent.length:
            yield f"{file} ranks {ranked:,} elements, the storage holds {extent.length:,}"


def _sampler_problems(path: Path, extent: _Extent) -> Iterator[str]:
    folder = path / "sampler"
    if (folder / "sampler_metadata.json").is_file():
        yield from _priority_problems(folder, extent)
    if (folder / "meta.json").is_file():
        with OpenFiles(folder) as files:
            leaves = read_tree(files)
        length = _number(folder, leaves, "len_storage")
        if length is not None and length > extent.length:
            yield f"{folder} draws from {length:,} elements, the storage holds {extent.length:,}"
        if ("_sample_list",) in leaves and length is not None:
            left = np.fromfile(folder / "_sample_list.memmap", np.int64)
            if ((left < 0) | (left >= length)).any():
                yield f"{folder} has elements left to draw outside of the {length:,} it draws from"


def _number(folder: Path, leaves: Any, name: str) -> int | None:
    if (name,) not in leaves:
        return None
    return int(np.fromfile(folder / f"{name}.memmap", np.int64)[0])


def _priority_problems(folder: Path, extent: _Extent) -> Iterator[str]:
    document = load_json(folder / "sampler_metadata.json")
    capacity = int(document["_max_capacity"])
    if capacity < extent.length:
        yield f"{folder} has room for {capacity:,} priorities, the storage holds {extent.length:,} elements"
    sums, least = (_leaves(folder / name, capacity) for name in ("sumtree.memmap", "mintree.memmap"))
    if not np.isfinite(sums).all() or (sums < 0).any():
        yield f"{folder / 'sumtree.memmap'} has priorities that are no finite numbers from 0"
    elif ((sums != least) & (sums > 0)).any():
        which = int(((sums != least) & (sums > 0)).argmax())
        yield f"{folder} gives element {which:,} the priority {sums[which]:g} to draw it, {least[which]:g} to weigh it"
    most, number = document.get("_max_priority") or (None, None)
    if number is not None and number >= capacity:
        yield f"{folder} has its largest priority {most!r} at element {int(number):,} of {capacity:,}"


def _leaves(path: Path, capacity: int) -> Array:
    """Read the leaves of a tree of priorities."""
    return _array(path, np.dtype(np.float64), [capacity])


def _array(path: Path, dtype: np.dtype[Any], shape: Any) -> Array:
    """Read a file of numbers; CorruptDataError if its size does not match `dtype` and `shape`."""
    expected = math.prod(shape) * dtype.itemsize
    found = path.stat().st_size if path.is_file() else 0
    if found != expected:
        raise CorruptDataError(f"{path} has {found:,} bytes, {expected:,} are expected: it was cut or removed")
    return np.fromfile(path, dtype).reshape(shape)
