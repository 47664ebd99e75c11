"""The manifest: the file that makes a folder a dataset or a checkpoint, and states its contents."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from ..declarations import default_layout
from ..errors import CorruptDataError, DatasetNotFoundError, FormatError, SchemaError
from ..ted.episodes import BoundaryCounts
from ..ted.schema import Field, Key
from . import fs
from .documents import (
    NOT_IN_JSON,
    Check,
    Count,
    FieldEntry,
    decode,
    document_digest,
    dump_json,
    is_sound_field,
    json_file,
    load_json,
    newer_version,
    parse_json,
    plain,
)
from .files import FileRecord, digest_bytes, digest_files
from .memmap.tree import FieldRange, require_own_files
from .syncing import write_file

_ELEMENTS = 1 << 31
"""Limit on the number of elements of a row."""


def _is_bound(value: Any) -> bool:
    """Return whether this is a number or a rectangular nested list of numbers; infinities may be strings."""
    try:
        array = np.asarray(value)
        return array.dtype.kind in "biuf" or len(list(_numbers(value))) == array.size
    except (ValueError, TypeError, OverflowError):
        return False


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, list | tuple):
        for part in value:
            yield from _numbers(part)
    elif isinstance(value, str) and value not in ("inf", "-inf", "nan"):
        raise ValueError(f"{value!r} is not a number")
    else:
        yield float(value)


def _are_whole(value: Any) -> bool:
    try:
        return np.asarray(value).dtype.kind in "iu" or value == []
    except ValueError:
        return False


def _is_type(name: str) -> bool:
    try:
        return np.dtype(name).kind in "biufc"
    except (TypeError, ValueError):
        return False


_Type: TypeAlias = Annotated[str, Check("an element type", _is_type)]
_Shape: TypeAlias = Annotated[
    tuple[Count, ...],
    Check("a shape", lambda shape: len(shape) <= 32 and math.prod(max(1, size) for size in shape) < _ELEMENTS),
]
_Bound: TypeAlias = Annotated[Any, Check("a number, or lists of numbers", _is_bound)]
_Wholes: TypeAlias = Annotated[Any, Check("a whole number, or lists of them", _are_whole)]


@dataclass(frozen=True, slots=True)
class _Space:
    """The entries of all types of spaces; code that uses a space checks that its type has the entries it needs."""

    type: str
    dtype: _Type | None = None
    shape: _Shape | None = None
    low: _Bound | None = None
    high: _Bound | None = None
    n: Count | _Shape | None = None
    nvec: _Wholes | None = None
    start: _Wholes | None = None
    min_length: Count | None = None
    max_length: Count | None = None
    subspaces: Mapping[str, Any] | tuple[Any, ...] | None = None


def require_space(document: Any, origin: str) -> None:
    """Raise FormatError, which names `origin`, unless a document describes a space; its subspaces may be null."""
    space = decode(_Space, document, origin)
    for name in ("low", "high"):
        bound = np.shape(document.get(name) or 0)
        if space.type == "Box" and space.shape is not None and bound not in {(), space.shape}:
            raise FormatError(f"{origin} has a Box of shape {list(space.shape)} whose {name} is of {list(bound)}")
    children = () if space.subspaces is None else space.subspaces
    if space.type == "Dict" and not isinstance(children, Mapping):
        raise FormatError(f"{origin} has a Dict whose subspaces are a list, expected an object")
    named: Iterable[tuple[object, Any]] = children.items() if isinstance(children, Mapping) else enumerate(children)
    for place, child in named:
        if child is not None:
            require_space(child, f"{origin}, at {place},")


def is_space(document: Any) -> bool:
    """Return whether this is the document of a space, or null."""
    try:
        if document is not None:
            require_space(document, "")
    except FormatError:
        return False
    return True


_NOT_SHOWN = frozenset({"type", "dtype", "charset", "n", "nvec"})


def space_text(space: Any) -> str:
    """Describe a space in words: `Box(39) float64 unbounded`, `Discrete(2)`, `Dict(goal: Box(2) …, …)`."""
    if not isinstance(space, Mapping):
        return str(space)
    kind = str(space.get("type", "space"))
    parts = space.get("subspaces")
    if isinstance(parts, Mapping):
        return f"{kind}({', '.join(f'{name}: {space_text(part)}' for name, part in parts.items())})"
    if isinstance(parts, list):
        return f"{kind}({', '.join(map(space_text, parts))})"
    if kind == "Box":
        return f"Box({', '.join(map(str, space.get('shape', ())))}) {space.get('dtype', '')} {_bounds(space)}".strip()
    sizes = [str(space[name]) for name in ("n", "nvec") if name in space]
    rest = [f"{name} {value}" for name, value in space.items() if name not in _NOT_SHOWN and not _is_zero(name, value)]
    return f"{kind}({', '.join([*sizes, *rest])})"


def _is_zero(name: str, value: Any) -> bool:
    return name == "start" and not any(_numbers(value))


def _bounds(space: Mapping[str, Any]) -> str:
    low, high = (list(_numbers(space.get(side, ()))) for side in ("low", "high"))
    if not low or not high:
        return ""
    least, most = min(low), max(high)
    if least == float("-inf") and most == float("inf"):
        return "unbounded" if max(low) == least and min(high) == most else "bounded in part"
    text = f"[{least:.4g}, {most:.4g}]"
    return text if least == max(low) and most == min(high) else f"within {text}"


FORMAT_VERSION = 1
HIDDEN = ".rbtool"
"""The folder for rbtool's own files inside a dataset; tensordict and TorchRL ignore it."""
MANIFEST = f"{HIDDEN}/manifest.json"
TRANSFERS = f"{HIDDEN}/transfers.jsonl"
"""The record of uploads and downloads: the one file in a dataset that its manifest never lists."""

VIDEOS = f"{HIDDEN}/videos/"
"""Prefix of the paths of videos that are kept, and of their indexes."""
SCORES = f"{HIDDEN}/scores/"
"""Prefix of the paths of the scores of episodes."""
SOURCE_DOCUMENTS = f"{HIDDEN}/source/"
"""Prefix of the paths of the source's own metadata files."""
ENV_METADATA = "env_metadata.json"
SHARDS_DOCUMENT = "shards.json"
"""The document with the first episodes of the shards in which a stream reads the source."""

Layout: TypeAlias = Literal["ted", "packed", "flat", "nested", "h5", "npz", "parquet"]
Bytes: TypeAlias = bytes  # the property of that name hides the type inside Manifest
Kind: TypeAlias = Literal["dataset", "checkpoint"]
_PATH_PARTS = 100
_NAME_BYTES = 255


def is_inside(path: str) -> bool:
    """Return whether a relative path, with `/` between its parts, stays inside its folder.

    False also for paths that no file system accepts: with a NUL, a lone surrogate, or parts too long or too many.
    """
    parts = path.split("/")
    if len(parts) > _PATH_PARTS or {"", ".", ".."} & set(parts) or "\0" in path:
        return False
    try:
        return max(len(part.encode()) for part in parts) <= _NAME_BYTES
    except UnicodeEncodeError:
        return False


def _need_files_of_their_own(leaves: Iterable[Field]) -> bool:
    keys = [leaf.key for leaf in leaves]
    try:
        require_own_files(keys)
    except SchemaError:
        return False
    return len(set(keys)) == len(keys)


ListedFile: TypeAlias = Annotated[FileRecord, Check("a path inside the folder", lambda file: is_inside(file.path))]
Fields: TypeAlias = Annotated[
    tuple[FieldEntry, ...], Check("a list of leaves that each have a file of their own", _need_files_of_their_own)
]


SpaceDocument: TypeAlias = Annotated[Any, Check("the document of a space", is_space)]


class _Bounds(NamedTuple):
    """The smallest and the largest value in the entry of a leaf."""

    min: int | float | None
    max: int | float | None

    @property
    def range(self) -> FieldRange:
        return None if self.min is None or self.max is None else (self.min, self.max)


@dataclass(frozen=True, slots=True)
class Request:
    """What a verb was asked for. Two requests are equal if everything except `asked` and `origin` is.

    `final_step` is the choice for last steps without an observation after them. `options` holds the given options of
    the format, and options of the verb that choose episodes, such as `skip_bad`.
    """

    source: str
    asked: str
    id: str
    revision: str | None = None
    episodes: str | None = None
    layout: str = "ted"
    origin: Literal["remote", "local", "file"] = "file"
    final_step: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry in a manifest; `final_step` and `options` only if they are not the default."""
        defaults = {"final_step": "auto", "options": {}}
        return {key: value for key, value in asdict(self).items() if key not in defaults or value != defaults[key]}

    def identity(self) -> str:
        """Return a digest that is the same for equal requests."""
        parts = {key: value for key, value in self.to_dict().items() if key not in {"asked", "origin"}}
        return digest_bytes(dump_json(dict(sorted(parts.items()))).encode())

    @property
    def whole(self) -> bool:
        """Whether this asks for all of the latest revision in the default layout."""
        plain = self.layout == default_layout(self.source) and self.final_step == "auto" and not self.options
        return plain and self.revision is None and self.episodes is None


@dataclass(frozen=True, slots=True)
class Dropped:
    """A key of the source that could not be kept, and why."""

    key: str
    why: str


@dataclass(frozen=True, slots=True)
class Provenance:
    """One step in the history of the data: a verb with its arguments; `inputs` maps what was read to its digest."""

    verb: str
    arguments: Mapping[str, Any]
    version: str
    inputs: Mapping[str, str]
    time: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that the folder records about itself; the documentation of the format describes each entry.

    `ranges` holds (min, max) of each numeric leaf, ignoring NaN; None if it has no values. `parts` lists the small
    parts of a checkpoint that is a single file, each with a digest, so that they can be verified before the rest.
    """

    kind: Kind
    layout: Layout
    request: Request
    steps: Count
    episodes: Count
    fields: Fields
    files: tuple[ListedFile, ...]
    content_digest: str
    created_by: str
    resolved_revision: str | None = None
    ranges: Mapping[Key, FieldRange] = field(default_factory=dict, metadata=NOT_IN_JSON)
    spaces: Mapping[str, SpaceDocument] = field(default_factory=dict)
    renamed_keys: Mapping[str, str] = field(default_factory=dict)
    dropped_keys: tuple[Dropped, ...] = ()
    notes: tuple[str, ...] = ()
    boundary: BoundaryCounts = field(default_factory=BoundaryCounts)
    provenance: tuple[Provenance, ...] = ()
    parts: tuple[ListedFile, ...] = ()
    format_version: int = FORMAT_VERSION

    @property
    def bytes(self) -> int:
        """Bytes of all files the manifest lists."""
        return sum(file.size for file in self.files)

    @property
    def inputs(self) -> dict[str, str]:
        """The inputs of a result made from this dataset: the digest of the content, and of the scores if any."""
        scores = [file for file in self.files if file.path.startswith(SCORES)]
        return {"content_digest": self.content_digest} | ({"scores": digest_files(scores)} if scores else {})

    def to_dict(self) -> dict[str, Any]:
        """Return the document as it is written, including `manifest_digest`."""
        document: dict[str, Any] = {}
        for part in fields(self):
            value = getattr(self, part.name)
            if part.name == "fields":
                document["fields"] = [self._field_to_dict(leaf) for leaf in value]
            elif part.name == "files" or (part.name == "parts" and value):
                document[part.name] = [file._asdict() for file in value]
            elif part.name == "boundary":
                document["boundary"] = value.to_dict()
            elif part.name == "request":
                document["request"] = value.to_dict()
            elif part.name in {"dropped_keys", "provenance"}:
                document[part.name] = [{f.name: getattr(item, f.name) for f in fields(item)} for item in value]
            elif part.name not in {"ranges", "parts"}:
                document[part.name] = value
        document = plain({"format_version": document.pop("format_version"), **document})
        document["manifest_digest"] = document_digest(document, "manifest_digest")
        return document

    def _field_to_dict(self, leaf: Field) -> dict[str, Any]:
        low, high = self.ranges.get(leaf.key) or (None, None)
        return {"key": leaf.key, "dtype": leaf.dtype, "shape": leaf.shape, "role": leaf.role, "min": low, "max": high}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any], origin: str) -> Manifest:
        """Read the document back; `origin` names it in errors. Refuses newer versions and changed documents."""
        version = document.get("format_version") if isinstance(document, dict) else None
        if not isinstance(version, int):
            raise FormatError(f"{origin} is not an rbtool manifest: it has no format_version")
        if version > FORMAT_VERSION:
            raise newer_version(origin, version, FORMAT_VERSION, "format version")
        if document.get("manifest_digest") != document_digest(document, "manifest_digest"):
            raise CorruptDataError(f"{origin} was changed after it was written: its digest does not match")
        found = decode(cls, document, origin)
        found._require_consistent(origin)
        bounds = (decode(_Bounds, entry, origin) for entry in document["fields"])
        ranges = {leaf.key: bound.range for leaf, bound in zip(found.fields, bounds, strict=True)}
        return replace(found, ranges=ranges)

    def _require_consistent(self, origin: str) -> None:
        """Refuse a content digest that does not follow from the listed files, as it would identify other data."""
        names = {file.path for file in self.files}
        if len(names) < len(self.files):
            raise CorruptDataError(f"{origin} lists a file twice, each file is listed once")
        expected = content_digest(self.files)
        if self.content_digest != expected:
            raise CorruptDataError(
                f"{origin} has the content digest {self.content_digest}, but its listed files give {expected}"
            )

    def to_bytes(self) -> Bytes:
        """Return the document as it is written to disk."""
        return json_file(self.to_dict())

    def save(self, folder: Path, *, at_once: bool = False) -> None:
        """Write the manifest of the dataset in `folder`, after all other files.

        With `at_once` it is written atomically, for a folder that others can already see. SchemaError for a field with
        which the manifest could not be read again, such as one with an empty name.
        """
        odd = next((field for field in self.fields if not is_sound_field(field)), None)
        if odd is not None:
            raise SchemaError(
                f"the field {odd.key!r}, {odd.dtype} {list(odd.shape)}, cannot be stored", hint="rename it"
            )
        fs.make_folder(folder / HIDDEN)
        (fs.replace_file if at_once else write_file)(folder / MANIFEST, self.to_bytes())

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Read the manifest of the dataset in `folder`."""
        path = folder / MANIFEST
        if not path.is_file():
            raise DatasetNotFoundError(f"{folder} is not an rbtool dataset: it has no {MANIFEST}")
        return cls.from_dict(load_json(path), str(path))


def has_manifest(folder: Path) -> bool:
    """Return whether a dataset or a checkpoint folder is at `folder`."""
    return (folder / MANIFEST).is_file()


def is_canonical(data: bytes) -> bool:
    """Return whether a manifest is byte for byte as it was written; its own digest ignores white space."""
    return json_file(parse_json(data, MANIFEST)) == data


def content_digest(files: tuple[FileRecord, ...]) -> str:
    """Return the content digest: the digest of the data and episode files, which identifies a dataset."""
    return digest_files(content_files(files))


def content_files(files: Iterable[FileRecord]) -> list[FileRecord]:
    """Return the data and episode files: all but the source's own metadata, `env_metadata.json`, videos and scores.

    Videos are covered all the same, because rows contain their ids, which are parts of their digests.
    """
    return [file for file in files if not (is_source_document(file.path) or file.path.startswith((VIDEOS, SCORES)))]


def is_source_document(path: str) -> bool:
    """Return whether a listed file is the source's own metadata, or `env_metadata.json`."""
    return path.startswith(SOURCE_DOCUMENTS) or path == ENV_METADATA
