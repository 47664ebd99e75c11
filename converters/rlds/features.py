"""The document `features.json` of TensorFlow Datasets: which features a record has, and how each is stored.

Features are nested: dictionaries, sequences, and leaves, which are tensors, text, class labels or images. The name of
a leaf in an Example is its path, joined by slashes. `steps` is the sequence of the steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from ...core.errors import CorruptDataError, FormatError
from ...core.format.documents import load_json, parse_json
from ...core.format.files import refuse_pointer
from ...core.ted.schema import DTYPES, file_stem

FEATURES, STEPS = "features.json", "steps"
LeafKind: TypeAlias = Literal["numbers", "text", "image"]
_LONGEST_NAME = 240
"""Bytes of a part of a key as a file name, less suffixes such as `_length.memmap`."""
_ENCODINGS = ("none", "bytes", "zlib")
_MOST_VALUES = 1 << 28
_CLASS = "pythonClassName"
_ENTRIES = {
    "FeaturesDict": "featuresDict", "Sequence": "sequence", "Dataset": "sequence", "Tensor": "tensor",
    "Scalar": "tensor", "Image": "image", "Text": "text", "ClassLabel": "classLabel",
}  # fmt: skip
"""The entry that describes a feature, by the name of its class."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf of the features: `path` from the top, or from a step.

    `shape` is the shape of one value, without the steps; -1 is a length that is not stated. `nested` is how many
    sequences of any length it is in; the steps do not count. `encoding` is how a tensor is encoded: `none`, `bytes`
    or `zlib`. `why` states why it cannot be read, "" where it can.
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
        """How many numbers a value has; negative where a length is not stated."""
        return -1 if min(self.shape, default=0) < 0 else math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Features:
    """The leaves of a step and of an episode, in the order of their names."""

    steps: tuple[Leaf, ...]
    episode: tuple[Leaf, ...]


def load_features(folder: Path) -> Features:
    """Read `features.json` in a folder. FormatError for a document without steps, CorruptDataError for an empty one."""
    path = folder / FEATURES
    if not path.is_file():
        raise FormatError(f"{folder} has no {FEATURES}, which states how records are read", hint="copy it there, too")
    return parse_features(load_document(path), str(path))


def parse_features(document: Any, origin: str) -> Features:
    """Return the features that a JSON document describes; FormatError for one without steps."""
    if not isinstance(document, dict):
        raise FormatError(f"{origin} is no JSON object")
    top = dict(_dictionary(_newer(document, origin), origin))
    if STEPS not in top:
        raise FormatError(
            f"{origin} has no feature 'steps': it is a dataset of TensorFlow Datasets, but not of episodes"
        )
    steps = top.pop(STEPS)
    inner = steps.get("sequence") if isinstance(steps, dict) else None
    step = inner.get("feature") if isinstance(inner, dict) else None
    if not isinstance(step, dict) or "featuresDict" not in step:
        raise FormatError(f"{origin}: 'steps' is no sequence of dictionaries")
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
    """Read a JSON object. CorruptDataError for a file without a byte, or a git-lfs pointer in its place."""
    refuse_pointer(path)
    if not path.stat().st_size:
        raise CorruptDataError(f"{path} is an empty file", hint="copy or fetch the file again")
    document = load_json(path)
    if not isinstance(document, dict):
        raise FormatError(f"{path} is no JSON object")
    return document


def _newer(node: Any, origin: str) -> Any:
    """Return a node as TensorFlow Datasets has written it since 4.6.

    Before, it had the name of a class as its `type`, and a `content`: plain values, or with `proto_cls` what is now the
    entry of the class, perhaps as a text of JSON.
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
        raise FormatError(f"{origin} is no dictionary of features")
    yield from parts.items()


def _leaves(node: Any, path: tuple[str, ...], origin: str) -> Iterator[Leaf]:
    """Yield the leaves below a node."""
    what = f"{origin}: {'/'.join(path) or STEPS!r}"
    if not isinstance(node, dict):
        raise FormatError(f"{what} is no feature")
    if "featuresDict" in node:
        for name, part in _dictionary(node, what):
            yield from _leaves(part, (*path, *_parts(name, what)), origin)
    elif "sequence" in node:
        inner = node["sequence"]
        if not isinstance(inner, dict):
            raise FormatError(f"{what} is no sequence")
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
        raise FormatError(f"{what} has a name that is no text") from error
    if not all(parts):
        raise FormatError(f"{what} has a part without a name")
    return parts


def _named(leaf: Leaf) -> Leaf:
    longest = max((len(file_stem(part).encode()) for part in leaf.path), default=0)
    return leaf if longest <= _LONGEST_NAME else _unread(leaf.path, f"its name has more than {_LONGEST_NAME} bytes")


def _in_sequence(leaf: Leaf, length: int) -> Leaf:
    """The leaf as a part of a sequence; what is not numbers cannot be read there."""
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
    return _unread(path, f"it is a feature of the kind {kind or 'that has no name'}")


def _sized(leaf: Leaf) -> Leaf:
    if math.prod(abs(part) for part in leaf.shape) > _MOST_VALUES:
        return _unread(leaf.path, f"its shape is {list(leaf.shape)}: at most {_MOST_VALUES:,} values a step are read")
    if leaf.size < 0 and leaf.kind == "numbers" and leaf.encoding == "none":
        return _unread(leaf.path, f"its shape is {list(leaf.shape)}: lengths that are not stated are not read")
    return leaf


def _object(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"{what} is described by no object")
    return value


def _shape(node: Mapping[str, Any], what: str) -> tuple[int, ...]:
    stated = _object(node.get("shape") or {}, what).get("dimensions", [])
    if not isinstance(stated, list) or len(stated) > 16:
        raise FormatError(f"{what} has a shape that is no list of lengths")
    return tuple(_whole(one, what) for one in stated)


def _whole(value: Any, what: str) -> int:
    """A length that is written as a text or a number; -1 for one that is not stated."""
    text = str(value)
    if text in ("-1", "None"):
        return -1
    if isinstance(value, bool) or not text.isascii() or not text.isdigit() or len(text) > 12:
        raise FormatError(f"{what} has the length {text[:40]!r}")
    return int(text)
