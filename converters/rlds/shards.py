"""Reads the files that TensorFlow Datasets prepares: `features.json`, `dataset_info.json`, and shards of records.

Features are nested: dictionaries, sequences, and leaves, which are tensors, text, class labels or images. The name of
a leaf in an Example is its path, joined by slashes. The feature `steps` is the sequence of the steps.

A TFRecord file is a sequence of records with checksums, which are compared:

    length (uint64, little-endian) | masked CRC-32C of the length | data | masked CRC-32C of the data

ArrayRecord files are read by their library.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import os
import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import google_crc32c
import numpy as np

from ...core.errors import CorruptDataError, FormatError, UsageError, did_you_mean
from ...core.format.contracts import Closing
from ...core.format.documents import load_json, parse_json
from ...core.format.files import open_regular, refuse_pointer
from ...core.format.manifest import is_inside
from ...core.ted.schema import DTYPES, file_stem

FEATURES, STEPS = "features.json", "steps"
LeafKind: TypeAlias = Literal["numbers", "text", "image"]
_LONGEST_NAME = 240
"""Limit in bytes for a part of a key as a file name, which leaves room for suffixes such as `_length.memmap`."""
_ENCODINGS = ("none", "bytes", "zlib")
_MOST_VALUES = 1 << 28
_CLASS = "pythonClassName"
_ENTRIES = {
    "FeaturesDict": "featuresDict", "Sequence": "sequence", "Dataset": "sequence", "Tensor": "tensor",
    "Scalar": "tensor", "Image": "image", "Text": "text", "ClassLabel": "classLabel",
}  # fmt: skip
"""By the name of a feature's class, the entry that describes it."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf of the features.

    Attributes:
        path: names from the top, or from a step.
        kind: numbers, text or image.
        dtype: the element type.
        shape: the shape of one value, without the steps; -1 stands for an unknown length.
        nested: the number of ragged sequences around it, without the steps.
        encoding: how a tensor is encoded: `none`, `bytes` or `zlib`.
        why: why it cannot be read, "" if it can.
    """

    path: tuple[str, ...]
    kind: LeafKind
    dtype: str
    shape: tuple[int, ...] = ()
    nested: int = 0
    encoding: str = "none"
    why: str = ""

    @property
    def name(self) -> str:
        """The path, joined by slashes."""
        return "/".join(self.path)

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy type of a value."""
        return DTYPES[self.dtype]

    @property
    def size(self) -> int:
        """The number of elements of a value, -1 if a length is unknown."""
        return -1 if min(self.shape, default=0) < 0 else math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Features:
    """The leaves of a step and of an episode, sorted by name."""

    steps: tuple[Leaf, ...]
    episode: tuple[Leaf, ...]


def load_features(folder: Path) -> Features:
    """Read `features.json` in a folder; FormatError if it has no steps, CorruptDataError if it is empty."""
    path = folder / FEATURES
    if not path.is_file():
        raise FormatError(f"{folder} has no {FEATURES}, which is needed to read records", hint="copy it there, too")
    return parse_features(load_document(path), str(path))


def parse_features(document: Any, origin: str) -> Features:
    """Return the features in a JSON document; FormatError if it has no steps."""
    if not isinstance(document, dict):
        raise FormatError(f"{origin} is not a JSON object")
    top = dict(_dictionary(_newer(document, origin), origin))
    if STEPS not in top:
        raise FormatError(
            f"{origin} has no feature 'steps': it is a dataset of TensorFlow Datasets, but not of episodes"
        )
    steps = top.pop(STEPS)
    inner = steps.get("sequence") if isinstance(steps, dict) else None
    step = inner.get("feature") if isinstance(inner, dict) else None
    if not isinstance(step, dict) or "featuresDict" not in step:
        raise FormatError(f"{origin}: 'steps' is not a sequence of dictionaries")
    return Features(
        tuple(sorted(_leaves(step, (), origin), key=lambda leaf: leaf.path)),
        tuple(
            sorted(
                (leaf for name, part in top.items() for leaf in _leaves(part, (name,), origin)),
                key=lambda leaf: leaf.path,
            )
        ),
    )


def load_document(path: Path) -> dict[str, Any]:
    """Read a JSON object; CorruptDataError for an empty file or a git-lfs pointer."""
    refuse_pointer(path)
    if not path.stat().st_size:
        raise CorruptDataError(f"{path} is an empty file", hint="copy or fetch the file again")
    document = load_json(path)
    if not isinstance(document, dict):
        raise FormatError(f"{path} is not a JSON object")
    return document


def _newer(node: Any, origin: str) -> Any:
    """Return a node in the form that TensorFlow Datasets writes since version 4.6.

    Older versions wrote the name of the class as `type`, and a `content` with plain values; with `proto_cls`, the
    content is the present form, perhaps as JSON in a string.
    """
    if not isinstance(node, dict) or _CLASS in node or "type" not in node or "content" not in node:
        return node
    content, name = node["content"], _ENTRIES.get(str(node["type"]).rpartition(".")[2], "")
    if isinstance(content, str):
        content = parse_json(content, f"the content of {str(node['type'])[:80]} in {origin}")
    found: dict[str, Any] = {_CLASS: str(node["type"])}
    if not name or not isinstance(content, dict):
        return found
    if "proto_cls" not in node:
        if name == "featuresDict":
            content = {"features": {part: _newer(inner, origin) for part, inner in content.items()}}
        elif name == "sequence":
            content = {**content, "feature": _newer(content.get("feature"), origin)}
        elif isinstance(content.get("shape"), list):
            content = {**content, "shape": {"dimensions": content["shape"]}}
    return {**found, name: content}


def _dictionary(node: Mapping[str, Any], origin: str) -> Iterator[tuple[str, Any]]:
    inner = node.get("featuresDict")
    parts = inner.get("features", {}) if isinstance(inner, dict) else None
    if not isinstance(parts, dict):
        raise FormatError(f"{origin} is not a dictionary of features")
    yield from parts.items()


def _leaves(node: Any, path: tuple[str, ...], origin: str) -> Iterator[Leaf]:
    """Yield the leaves below a node."""
    what = f"{origin}: {'/'.join(path) or STEPS!r}"
    if not isinstance(node, dict):
        raise FormatError(f"{what} is not a feature")
    if "featuresDict" in node:
        for name, part in _dictionary(node, what):
            yield from _leaves(part, (*path, *_parts(name, what)), origin)
    elif "sequence" in node:
        inner = node["sequence"]
        if not isinstance(inner, dict):
            raise FormatError(f"{what} is not a sequence")
        length = _whole(inner.get("length", "-1"), what)
        for leaf in _leaves(inner.get("feature"), path, origin):
            yield _in_sequence(leaf, length)
    else:
        yield _named(_leaf(node, path, what))


def _parts(name: str, what: str) -> tuple[str, ...]:
    parts = tuple(name.split("/"))
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise FormatError(f"{what} has a name that is not text") from error
    if not all(parts):
        raise FormatError(f"{what} has a part without a name")
    return parts


def _named(leaf: Leaf) -> Leaf:
    longest = max((len(file_stem(part).encode()) for part in leaf.path), default=0)
    return leaf if longest <= _LONGEST_NAME else _unread(leaf.path, f"its name has more than {_LONGEST_NAME} bytes")


def _in_sequence(leaf: Leaf, length: int) -> Leaf:
    """Return a leaf as part of a sequence, where only numbers can be read."""
    if leaf.why:
        return leaf
    if leaf.kind != "numbers" or leaf.encoding != "none":
        return _unread(leaf.path, f"it is a sequence of {'encoded tensors' if leaf.kind == 'numbers' else leaf.kind}")
    if leaf.nested:
        return _unread(leaf.path, "it is a sequence of sequences")
    if length < 0:
        return Leaf(leaf.path, leaf.kind, leaf.dtype, leaf.shape, 1)
    return _sized(Leaf(leaf.path, leaf.kind, leaf.dtype, (length, *leaf.shape)))


def _unread(path: tuple[str, ...], why: str) -> Leaf:
    return Leaf(path, "numbers", "uint8", why=why)


def _leaf(node: Mapping[str, Any], path: tuple[str, ...], what: str) -> Leaf:
    if "text" in node:
        return Leaf(path, "text", "uint8")
    if "classLabel" in node:
        return Leaf(path, "numbers", "int64")
    if "image" in node:
        image = _object(node["image"], what)
        dtype = str(image.get("dtype") or "uint8")
        if dtype not in ("uint8", "uint16", "float32"):
            return _unread(path, f"its images are of type {dtype[:40]}")
        pixels = _shape(image, what) or (-1, -1, -1)
        if len(pixels) not in (2, 3):
            return _unread(path, f"its images have the shape {list(pixels)}")
        return _sized(Leaf(path, "image", dtype, pixels))
    if "tensor" in node:
        tensor = _object(node["tensor"], what)
        dtype, encoding = str(tensor.get("dtype")), str(tensor.get("encoding") or "none").lower()
        shape = _shape(tensor, what)
        if dtype in ("string", "object"):
            return _unread(path, "it is an array of strings") if shape else Leaf(path, "text", "uint8")
        if dtype not in DTYPES or dtype == "bfloat16" or (encoding == "none" and "complex" in dtype):
            return _unread(path, f"its values are of type {dtype[:40]}")
        if encoding not in _ENCODINGS:
            return _unread(path, f"its encoding is {encoding[:40]}")
        return _sized(Leaf(path, "numbers", dtype, shape, encoding=encoding))
    kind = str(node.get(_CLASS, "")).rpartition(".")[2][:60]
    return _unread(path, f"it is a feature of the kind {kind or '(none is stated)'}")


def _sized(leaf: Leaf) -> Leaf:
    if math.prod(abs(part) for part in leaf.shape) > _MOST_VALUES:
        return _unread(leaf.path, f"its shape is {list(leaf.shape)}: at most {_MOST_VALUES:,} values per step are read")
    if leaf.size < 0 and leaf.kind == "numbers" and leaf.encoding == "none":
        return _unread(leaf.path, f"its shape is {list(leaf.shape)}: unknown lengths are not supported")
    return leaf


def _object(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"{what} is not described by an object")
    return value


def _shape(node: Mapping[str, Any], what: str) -> tuple[int, ...]:
    stated = _object(node.get("shape") or {}, what).get("dimensions", [])
    if not isinstance(stated, list) or len(stated) > 16:
        raise FormatError(f"{what} has a shape that is not a list of lengths")
    return tuple(_whole(one, what) for one in stated)


def _whole(value: Any, what: str) -> int:
    """Parse a length, a string or a number; -1 for an unknown one."""
    text = str(value)
    if text in ("-1", "None"):
        return -1
    if isinstance(value, bool) or not text.isascii() or not text.isdigit() or len(text) > 12:
        raise FormatError(f"{what} has the length {text[:40]!r}")
    return int(text)


_HEAD = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
_LARGEST = 0x7FFFF000
"""Limit in bytes for a record: messages of protobuf have at most 2 GiB."""
_MASK = 0xA282EAD8
_SMALL, _AHEAD = 16 << 10, 64 << 10
"""After a record of fewer than `_SMALL` bytes, `_AHEAD` bytes are read at once: a call takes longer than a copy."""
AGAIN = "copy or fetch the file again, whole"


class RecordPlace(NamedTuple):
    """The place of a record in its shard: offset and size of its data; in an ArrayRecord file, its number."""

    position: int
    size: int


class RecordShard(Closing, ABC):
    """A file of records, open for reading. Methods raise CorruptDataError for damage."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def records(self) -> Iterator[tuple[RecordPlace, bytes | CorruptDataError]]:
        """Yield the records in order, with an error in place of damaged data.

        Raises CorruptDataError if the following records cannot be found.
        """

    @abstractmethod
    def count(self) -> int:
        """Count the records without reading their data."""

    @abstractmethod
    def read(self, place: RecordPlace) -> bytes:
        """Read the data of a record, and compare its checksum."""


def masked_crc(data: bytes) -> int:
    """Return the checksum of TFRecord: CRC-32C, rotated and increased by a constant."""
    crc: int = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


class TfRecordShard(RecordShard):
    """A TFRecord file; one record is in memory at a time."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        refuse_pointer(path)
        self._descriptor = open_regular(path)
        self._size = os.fstat(self._descriptor).st_size

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def records(self) -> Iterator[tuple[RecordPlace, bytes | CorruptDataError]]:
        position = number = first = 0
        block = os.pread(self._descriptor, _HEAD.size, 0)  # bytes of the file from offset `first` on
        while position < self._size:
            at = position - first
            place = self._place(block[at : at + _HEAD.size], position, number)
            begin, end = at + _HEAD.size, at + _HEAD.size + place.size
            if end + _CHECKSUM.size + _HEAD.size <= len(block):
                data, rest = block[begin:end], block[end : end + _CHECKSUM.size]
            else:
                first = place.position + place.size
                data = os.pread(self._descriptor, place.size, place.position)
                more = _AHEAD if place.size < _SMALL else _CHECKSUM.size + _HEAD.size  # with the head of the next one
                rest = block = os.pread(self._descriptor, more, first)
            position, number = place.position + place.size + _CHECKSUM.size, number + 1
            try:
                self._compare(place, data, rest)
            except CorruptDataError as error:
                yield place, error
            else:
                yield place, data

    def count(self) -> int:
        position = number = 0
        while position < self._size:
            place = self._place(os.pread(self._descriptor, _HEAD.size, position), position, number)
            position, number = place.position + place.size + _CHECKSUM.size, number + 1
        return number

    def read(self, place: RecordPlace) -> bytes:
        data = os.pread(self._descriptor, place.size, place.position)
        self._compare(place, data, os.pread(self._descriptor, _CHECKSUM.size, place.position + place.size))
        return data

    def _compare(self, place: RecordPlace, data: bytes, rest: bytes) -> None:
        """Raise CorruptDataError for data that is cut, or does not match the checksum after it."""
        if len(data) < place.size or len(rest) < _CHECKSUM.size:
            raise self._damaged(f"it ends inside the record at byte {place.position:,}")
        if masked_crc(data) != _CHECKSUM.unpack_from(rest)[0]:
            raise self._damaged(f"the checksum of the record at byte {place.position:,} does not match")

    def _place(self, head: bytes, position: int, number: int) -> RecordPlace:
        """Return the place of the record with this head, at a position in the file."""
        if len(head) < _HEAD.size:
            raise self._cut(number)
        size, checksum = _HEAD.unpack(head)
        if masked_crc(head[:8]) != checksum:
            raise self._damaged(
                f"the checksum of the length of record {number:,}, at byte {position:,}, does not match"
            )
        if size > _LARGEST:
            raise self._damaged(f"record {number:,} has {size:,} bytes, at most {_LARGEST:,} are read")
        if position + _HEAD.size + size + _CHECKSUM.size > self._size:
            raise self._cut(number)
        return RecordPlace(position + _HEAD.size, size)

    def _cut(self, number: int) -> CorruptDataError:
        return CorruptDataError(
            f"{self.path} is cut: it ends after {self._size:,} bytes, inside record {number:,}", hint=AGAIN
        )

    def _damaged(self, why: str) -> CorruptDataError:
        return CorruptDataError(f"{self.path} is damaged: {why}", hint=AGAIN)


class ArrayRecordShard(RecordShard):
    """An ArrayRecord file, which its library reads and verifies; one record is in memory at a time."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        refuse_pointer(path)
        os.close(open_regular(path))
        self._reader = self._opened()

    def _opened(self) -> Any:
        try:
            library = importlib.import_module("array_record.python.array_record_module")
        except ImportError as error:
            raise UsageError(
                f"{self.path} is an ArrayRecord file, and the package array-record is not installed",
                hint="pip install 'rbtool[array-record]'",
            ) from error
        try:
            reader = library.ArrayRecordReader(str(self.path), "readahead_buffer_size:0")
            if not reader.ok():
                reader.close()  # raises the error
        except Exception as error:  # the library raises exceptions of many types
            raise self._damaged(error) from error
        return reader

    def records(self) -> Iterator[tuple[RecordPlace, bytes | CorruptDataError]]:
        for number in range(self.count()):
            try:
                data = self.read(RecordPlace(number, 0))
            except CorruptDataError as error:
                yield RecordPlace(number, 0), error
            else:
                yield RecordPlace(number, len(data)), data

    def count(self) -> int:
        try:
            return int(self._reader.num_records())
        except Exception as error:  # as above
            raise self._damaged(error) from error

    def read(self, place: RecordPlace) -> bytes:
        try:
            [data] = self._reader.read([place.position])
        except Exception as error:  # as above
            raise self._damaged(error) from error
        return bytes(data)

    def close(self) -> None:
        with contextlib.suppress(Exception):  # raises an earlier error once more
            self._reader.close()

    def _damaged(self, error: Exception) -> CorruptDataError:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        return CorruptDataError(f"{self.path} is damaged: {said}", hint=AGAIN)


INFO = "dataset_info.json"
WRITTEN_HERE = "rbtool export: the last step of each episode is an observation only"
"""The description of datasets that `RldsExporter` writes."""
TRUNCATED = "truncated"
"""A flag of steps that `RldsExporter` may write beside the flags of RLDS."""
KINDS: Mapping[str, type[RecordShard]] = {"tfrecord": TfRecordShard, "array_record": ArrayRecordShard}
_SHARD = re.compile(
    r"(?P<name>.+?)-(?P<split>[^-.]+)\.(?P<kind>tfrecord|array_record)-(?P<number>\d{5,9})-of-(?P<count>\d{5,9})"
)
_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
_LOOKED_AT = 256
_MOST_SHARDS = 100_000
_DEPTH = 2
"""Levels of folders above the folder of a version: the dataset, and perhaps a configuration."""


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A shard of a split; `stated` is its number of records in `dataset_info.json`, None if not stated."""

    path: Path
    split: str
    kind: str
    stated: int | None

    def open(self) -> RecordShard:
        """Open the file."""
        return KINDS[self.kind](self.path)


@dataclass(frozen=True, slots=True)
class VersionLayout:
    """A version of a dataset: its folder, its id, and the shards of its splits in order, which may be missing.

    `is_export` states that `RldsExporter` wrote it.
    """

    folder: Path
    id: str
    splits: tuple[str, ...]
    shards: tuple[ShardFile, ...]
    is_export: bool = False

    def documents(self) -> list[Path]:
        """Return the existing documents."""
        return [path for name in (FEATURES, INFO) if (path := self.folder / name).is_file()]

    def files(self) -> list[Path]:
        """Return the existing documents and shards."""
        return [*self.documents(), *(shard.path for shard in self.shards if shard.path.is_file())]

    def stored_bytes(self) -> int:
        """Return the bytes of the existing shards."""
        return sum(shard.path.stat().st_size for shard in self.shards if shard.path.is_file())

    def require_split(self, name: object) -> str:
        """Return the name of a split; UsageError if it does not exist."""
        if name not in self.splits:
            meant = did_you_mean(str(name), self.splits)
            raise UsageError(
                f"{self.folder} has no split {str(name)!r}{meant}", hint=f"splits are {', '.join(self.splits)}"
            )
        return str(name)


def looks_like_rlds(path: Path) -> bool:
    """Return whether a folder, or a folder of a version in it, has the files of a prepared dataset; raises OSError."""
    return next(_versions(path, _DEPTH), None) is not None


def layout_at(path: Path) -> VersionLayout:
    """Find the documents and shards of the dataset in a folder; shards may be missing.

    Raises FormatError for a folder without a dataset or with several ones, and for an invalid document.
    """
    found = sorted(_versions(path, _DEPTH))
    if not found:
        raise FormatError(f"{path} has no dataset, expected a folder with {FEATURES} and shards")
    if len(found) > 1:
        names = ", ".join(str(folder.relative_to(path)) for folder in found[:5]) + (", …" if len(found) > 5 else "")
        raise FormatError(f"{path} has {len(found)} datasets ({names})", hint=f"name one of them: {found[-1]}")
    [folder] = found
    if (folder / INFO).is_file():
        return _stated(folder)
    return _listed(folder)


def _versions(path: Path, depth: int) -> Iterator[Path]:
    """Yield the folders of versions in a folder, at most `depth` below it."""
    if not path.is_dir():
        return
    if _is_version(path):
        yield path
    elif depth:
        for entry in sorted(itertools.islice(path.iterdir(), _LOOKED_AT)):
            if not entry.name.startswith("."):
                yield from _versions(entry, depth - 1)


def _is_version(folder: Path) -> bool:
    there = [(folder / name).is_file() for name in (FEATURES, INFO)]
    return all(there) or (any(there) and next(_shard_names(folder), None) is not None)


def _shard_names(folder: Path) -> Iterator[re.Match[str]]:
    for entry in folder.iterdir():
        if found := _SHARD.fullmatch(entry.name):
            yield found


def _listed(folder: Path) -> VersionLayout:
    """Return the layout of a folder without `dataset_info.json`, from the names of its files: `-00000-of-00004`."""
    found: dict[tuple[str, str, str], int] = {}
    for name in _shard_names(folder):
        count, which = int(name["count"]), (name["name"], name["split"], name["kind"])
        if found.setdefault(which, count) != count or not int(name["number"]) < count <= _MOST_SHARDS:
            raise FormatError(f"{folder / name[0]} is one of {count:,} shards, and others are of {found[which]:,}")
    if len({which[0] for which in found}) > 1:
        raise FormatError(f"{folder} has shards of several datasets, and no {INFO} that names one")
    shards = [
        ShardFile(folder / f"{name}-{split}.{kind}-{number:05}-of-{count:05}", split, kind, None)
        for (name, split, kind), count in sorted(found.items())
        for number in range(count)
    ]
    title = next(iter(found), (folder.name,))[0]
    return VersionLayout(
        folder, f"{title}/{folder.name}", tuple(dict.fromkeys(shard.split for shard in shards)), tuple(shards)
    )


def _stated(folder: Path) -> VersionLayout:
    path = folder / INFO
    info = load_document(path)
    name, kind = _text(info, "name", path), info.get("fileFormat") or "tfrecord"
    if not isinstance(kind, str) or kind not in KINDS:
        raise FormatError(f"{path}: the file format is {str(kind)[:40]!r}, expected {' or '.join(KINDS)}")
    splits = info.get("splits", [])
    if not isinstance(splits, list) or not all(isinstance(split, dict) for split in splits):
        raise FormatError(f"{path}: splits are not a list of objects")
    names = [_text(split, "name", path) for split in splits]
    if len(set(names)) < len(names):
        raise FormatError(f"{path} names a split twice")
    shards = [shard for split in splits for shard in _shards_of(split, name, str(kind), path)]
    parts = (name, info.get("configName"), info.get("version") or folder.name)
    name = "/".join(str(part) for part in parts if part)
    return VersionLayout(folder, name, tuple(names), tuple(shards), info.get("description") == WRITTEN_HERE)


def _text(node: Mapping[str, Any], name: str, path: Path) -> str:
    value = node.get(name)
    if not isinstance(value, str) or not value or not is_inside(value) or "/" in value:
        raise FormatError(f"{path}: {name} is {str(value)[:80]!r}, expected a plain name")
    return value


def _shards_of(split: Mapping[str, Any], dataset: str, kind: str, path: Path) -> Iterator[ShardFile]:
    """Yield the shards of a split, with file names from its template."""
    name = str(split["name"])
    lengths: Sequence[int | None] = _lengths(split, path)
    template = split.get("filepathTemplate") or _TEMPLATE
    if not isinstance(template, str):
        raise FormatError(f"{path}: the split {name!r} has names of files that are not text")
    for number in range(len(lengths)):
        file = template
        values = {
            "DATASET": dataset, "SPLIT": name, "FILEFORMAT": kind, "SHARD_INDEX": f"{number:05}",
            "NUM_SHARDS": f"{len(lengths):05}", "SHARD_X_OF_Y": f"{number:05}-of-{len(lengths):05}",
        }  # fmt: skip
        for key, value in values.items():
            file = file.replace(f"{{{key}}}", value)
        if "/" in file or "\0" in file or not is_inside(file):
            raise FormatError(f"{path}: the split {name!r} has a file {file[:80]!r}, which leads out of the folder")
        yield ShardFile(path.parent / file, name, kind, lengths[number])


def _lengths(split: Mapping[str, Any], path: Path) -> list[int | None]:
    """Return the number of records of each shard, None if only the number of shards is stated."""
    lengths = split.get("shardLengths")
    if lengths is None:
        count = str(split.get("numShards", 0))
        if not count.isascii() or not count.isdigit() or len(count) > 5:
            raise FormatError(f"{path}: the split {split['name']!r} has {count[:40]!r} shards")
        return [None] * int(count)
    if not isinstance(lengths, list) or len(lengths) > _MOST_SHARDS:
        raise FormatError(f"{path}: shardLengths of the split {split['name']!r} are not a list of numbers")
    found: list[int | None] = []
    for length in lengths:
        text = str(length)
        if isinstance(length, bool) or not text.isascii() or not text.isdigit() or len(text) > 12:
            raise FormatError(f"{path}: the split {split['name']!r} has a shard of {text[:40]!r} records")
        found.append(int(text))
    return found
