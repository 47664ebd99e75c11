"""The parts of a saved buffer or ensemble, and the rules of `check` about them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..encodings.compact import ENSEMBLE_FILE, SEGMENTS_FILE, STORAGE_FOLDER
from ..encodings.flat import STORAGE_METADATA, FlatReader
from ..encodings.foreign import ForeignReader, foreign_form
from ..encodings.h5 import H5Reader
from ..encodings.saved_digests import require_digests
from ..errors import CorruptDataError, RbtoolError
from ..format.contracts import Array, StepReader
from ..format.documents import Count, decode, load_json
from ..format.memmap.tree import batch_of, read_tree
from ..format.open_files import OpenFiles
from ..format.staging import is_ours
from ..open_steps import open_steps, require_whole_buffer
from ..ted.rules import RULE_BY_ID, RULES, Finding


class SavedFolders(NamedTuple):
    """The folders of a saved buffer, or of a member of a saved ensemble, with a `name` like `0` or `1.0`."""

    name: str
    storage: Path
    sampler: Path
    writer: Path

    @property
    def members(self) -> tuple[SavedFolders, ...]:
        """The members of an ensemble, () for a buffer; CorruptDataError if their list is damaged."""
        file = self.storage / ENSEMBLE_FILE
        if not file.is_file():
            return ()
        document = load_json(file)
        count = document.get("members") if isinstance(document, dict) else None
        with_rows = document.get("with_rows") if isinstance(document, dict) else None
        if type(count) is not int or not isinstance(with_rows, list):
            raise CorruptDataError(f"{file} does not list the members of an ensemble")
        for number in with_rows:
            if not (self.storage / str(number)).is_dir():
                raise CorruptDataError(f"{self.storage / str(number)} is missing, expected the rows of a member")
        prefix = f"{self.name}." if self.name else ""
        return tuple(
            SavedFolders(f"{prefix}{number}", *(part / str(number) for part in self[1:])) for number in range(count)
        )

    @property
    def leaves(self) -> tuple[SavedFolders, ...]:
        """The buffer itself, or the members that are not ensembles, at any depth."""
        members = self.members
        return tuple(leaf for member in members for leaf in member.leaves) if members else (self,)


def saved_folders(path: Path) -> SavedFolders:
    """Return the folders of the buffer or the ensemble that is saved at `path`."""
    return SavedFolders("", path / STORAGE_FOLDER, path / "sampler", path / "writer")


BUFFER_RULES = tuple(entry for entry in RULES if entry.about == "saved buffers")
NO_DIGESTS = (
    "these files have no digests, since TorchRL, tensordict and exports write none: changed bytes may go unnoticed"
)
_LISTS = ("items.json", "metadata.json")
Entries = TypeVar("Entries")


@dataclass(frozen=True, slots=True)
class Extent:
    """The size of a storage; entries that its files do not record are None.

    `length` is its number of elements, `rows` its capacity in rows, `lanes` the elements of a row, `most` its capacity
    in elements, and `cursor` the count of rows written, modulo the capacity the next row to write.
    """

    length: int
    rows: int | None = None
    lanes: int | None = None
    most: int | None = None
    cursor: int | None = None

    @property
    def filled(self) -> int:
        """The number of filled rows."""
        return self.length if self.lanes is None else self.length // self.lanes


def buffer_findings(path: Path) -> tuple[list[Finding], bool]:
    """Return findings about the parts of a saved buffer, and whether it has digests."""
    findings: list[Finding] = []
    noted = True
    try:
        noted = _verified(path)
    except RbtoolError as error:
        findings.append(_finding("BUF001", str(error)))
    try:
        for parts in saved_folders(path).leaves:
            extent = extent_of(parts.storage)
            problems = *_length_problems(parts.storage, extent), *_writer_problems(parts.writer, extent)
            findings += [_finding("BUF002", text) for text in problems]
            findings += [_finding("BUF003", text) for text in _sampler_problems(parts.sampler, extent)]
    except (RbtoolError, OSError) as error:
        findings.append(_finding("BUF002", str(error)))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        findings.append(_finding("BUF002", f"{path} has a part that cannot be read: {error!r}"))
    return findings, noted


def _finding(rule: str, message: str) -> Finding:
    return Finding(*RULE_BY_ID[rule].named, "error", message)


def _verified(path: Path) -> bool:
    """Compare all digests; return whether they cover every part."""
    noted, whole = require_whole_buffer(path), saved_folders(path)
    if noted and whole.members:
        require_digests(whole.storage)
    for parts in whole.leaves:
        own = _own(parts.storage)
        if own is not None:
            with own as reader:
                reader.verify_files()
        elif noted and parts.storage.is_dir():
            require_digests(parts.storage)
            _verify_tensors(parts.storage)
    return noted


def _verify_tensors(storage: Path) -> None:
    """Compare the leaves of a storage of tensors with their digests, if it is of rbtool's format."""
    theirs = (storage / STORAGE_METADATA).is_file() and foreign_form().find(storage) is None
    if theirs or (storage / SEGMENTS_FILE).is_file():
        from ..checkpointers.tensor import verify_tensors  # lazy: imports torch

        verify_tensors(storage)


def _own(storage: Path) -> FlatReader | H5Reader | None:
    """Open the storage if it holds whole episodes in one of rbtool's own forms."""
    places = [storage, *sorted(storage.glob("*.h5"))] if storage.is_dir() else []
    place = next((place for place in places if is_ours(place)), None)
    reader = None if place is None else open_steps(place)
    return reader if isinstance(reader, FlatReader | H5Reader) else None


def extent_of(storage: Path) -> Extent:
    """Read the extent of a storage from its metadata, whatever its format."""
    if not storage.is_dir():
        return Extent(0)
    reader: StepReader | None = _own(storage)
    place = foreign_form().find(storage) if reader is None else None
    if place is not None:
        reader = foreign_form().open(place)
    if isinstance(reader, FlatReader | H5Reader | ForeignReader):
        with reader:
            filled = reader.filled
        lanes = math.prod(filled.shape[1:])
        return Extent(filled.length, filled.capacity // lanes, lanes, filled.capacity, filled.cursor)
    if (storage / SEGMENTS_FILE).is_file():
        return _segments_extent(storage)
    if (storage / STORAGE_METADATA).is_file():
        return _tensor_extent(storage)
    if (storage / "packed.json").is_file():
        return Extent(_read(_LengthEntry, storage / "packed.json").len)
    for name in _LISTS:
        if (storage / name).is_file():
            found = load_json(storage / name)
            items = found.get("items") if isinstance(found, dict) else found
            return Extent(len(decode(tuple[Any, ...], items, str(storage / name), CorruptDataError)))
    raise CorruptDataError(f"{storage} is not a saved storage: the files that describe one are missing")


@dataclass(frozen=True, slots=True)
class _LengthEntry:
    len: Count


@dataclass(frozen=True, slots=True)
class _LeafEntry:
    shape: tuple[Count, ...]


@dataclass(frozen=True, slots=True)
class _SegmentsEntry:
    """The entries of `SEGMENTS_FILE` that are checked."""

    length: Count
    capacity: Count
    ndim: Count
    leaves: tuple[_LeafEntry, ...]


@dataclass(frozen=True, slots=True)
class _TensorsEntry:
    """The entries of `STORAGE_METADATA`, which rbtool and TorchRL write, that are checked."""

    len: Count
    is_pytree: bool = False
    metadata: Mapping[str, _LeafEntry] = field(default_factory=dict)


def _read(kind: type[Entries], path: Path) -> Entries:
    """Read a JSON document as a `kind`; CorruptDataError if it is not one."""
    return decode(kind, load_json(path), str(path), CorruptDataError)


def _segments_extent(storage: Path) -> Extent:
    found = _read(_SegmentsEntry, storage / SEGMENTS_FILE)
    if not found.leaves:
        return Extent(found.length)
    lanes = math.prod(found.leaves[0].shape[: max(found.ndim - 1, 0)])
    return Extent(found.length, found.capacity, lanes, found.capacity * lanes)


def _tensor_extent(storage: Path) -> Extent:
    found = _read(_TensorsEntry, storage / STORAGE_METADATA)
    length = found.len
    if found.is_pytree:
        common = _common([entry.shape for entry in found.metadata.values()])
        return Extent(length, common[0] if common else None, None, math.prod(common) if common else None)
    if not (storage / "meta.json").is_file():
        return Extent(length)
    with OpenFiles(storage) as files:
        read_tree(files, exact=False)
    lead = batch_of(load_json(storage / "meta.json"), str(storage / "meta.json"))
    return Extent(length, lead[0], math.prod(lead[1:]), math.prod(lead)) if lead else Extent(length)


def _common(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the leading sizes that all shapes share."""
    found = []
    for sizes in zip(*shapes, strict=False):
        if len(set(sizes)) > 1:
            break
        found.append(sizes[0])
    return tuple(found)


def _length_problems(storage: Path, extent: Extent) -> Iterator[str]:
    if extent.most is not None and extent.length > extent.most:
        yield f"{storage} counts {extent.length:,} elements, its leaves have room for {extent.most:,}"
    elif extent.lanes and extent.length % extent.lanes:
        yield f"{storage} counts {extent.length:,} elements, which {extent.lanes:,} lanes do not share evenly"


def _writer_problems(folder: Path, extent: Extent) -> Iterator[str]:
    file = folder / "metadata.json"
    if not file.is_file():
        return
    document = _read(dict[str, Any], file)
    cursor: Any
    cursor, count = document.get("cursor"), document.get("write_count", 0)
    if any(type(number) is not int or number < 0 for number in (cursor, count)):
        yield f"{file} has the cursor {cursor!r} and the write count {count!r}, expected numbers from 0"
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
        found = _array(folder / "generation.memmap", np.dtype(np.int64), document["generation_shape"])
        if extent.rows is not None and len(found) < extent.filled:
            yield f"{folder} has generations of {len(found):,} rows, the storage holds {extent.filled:,}"
    if "rank_key" in document and document.get("shape") not in (None, [0]):
        ranked = document["shape"][0]
        if ranked > extent.length:
            yield f"{file} ranks {ranked:,} elements, the storage holds {extent.length:,}"


def _sampler_problems(folder: Path, extent: Extent) -> Iterator[str]:
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


@dataclass(frozen=True, slots=True)
class _PrioritiesEntry:
    """The entries of a prioritized sampler's state that are checked, under TorchRL's names."""

    _max_capacity: float
    _max_priority: tuple[float | None, float | None] | None = None


def _priority_problems(folder: Path, extent: Extent) -> Iterator[str]:
    found = _read(_PrioritiesEntry, folder / "sampler_metadata.json")
    capacity = int(found._max_capacity)
    if capacity < extent.length:
        yield f"{folder} has room for {capacity:,} priorities, the storage holds {extent.length:,} elements"
    sums, least = (_leaves(folder / name, capacity) for name in ("sumtree.memmap", "mintree.memmap"))
    if not np.isfinite(sums).all() or (sums < 0).any():
        yield f"{folder / 'sumtree.memmap'} has priorities that are not finite numbers from 0"
    elif ((sums != least) & (sums > 0)).any():
        which = int(((sums != least) & (sums > 0)).argmax())
        yield f"{folder} gives element {which:,} the priority {sums[which]:g} to draw it, {least[which]:g} to weigh it"
    most, number = found._max_priority or (None, None)
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
        raise CorruptDataError(f"{path} has {found:,} bytes, expected {expected:,}: it was cut or removed")
    return np.fromfile(path, dtype).reshape(shape)
