"""Digests of the files in a folder, after taking out what differs between two runs of the same code.

- JSON documents: the entries named in `VARYING`, and the path of the folder;
- entries of `.rbtool/digests.json` and of the files of a manifest: the digests of files that are normalised themselves;
- HDF5: the bytes depend on the version of the library; names, types, shapes, attributes and values are summed up, and
  the manifest in front is taken as a JSON document without the digests of the bytes behind it;
- NPZ and parquet: names, types, shapes and values, for the same reason.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow.parquet

VARYING = frozenset({"time", "version", "created_by", "manifest_digest", "files of the source", "fingerprint"})
"""Entries of JSON documents that differ from run to run, or from version to version, and sums over such entries.

The last two are in journals: times and inode numbers of files, and the digest of the code of a function.
"""
OF_BYTES = frozenset({"files", "content_digest"})
"""Entries of the manifest of an H5 checkpoint that depend on the bytes that HDF5 writes."""


def digests(folder: Path) -> dict[str, str]:
    """Map the path of every file in a folder to the digest of what is in it, normalised."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            found[_name(path.relative_to(folder))] = _digest(path, folder)
    return found


def _name(path: Path) -> str:
    """The path, without the random part of the names of folders that unfinished work is kept in."""
    return "/".join(re.sub(r"^(\.[^.]+)\..*", r"\1.*", part) for part in path.parts)


def _digest(path: Path, folder: Path) -> str:
    data = path.read_bytes()
    if b"\x89HDF\r\n\x1a\n" in data[: 1 << 16]:
        return "logical:" + digest_of(_h5(path, data, folder))
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return "logical:" + digest_of({name: array_digest(arrays[name]) for name in arrays.files})
    if path.suffix == ".parquet":
        table = pyarrow.parquet.read_table(path)
        columns = {name: [str(table[name].type), table[name].to_pylist()] for name in table.column_names}
        return "logical:" + digest_of(columns)
    if path.suffix == ".json":
        return digest_of(_plain(json.loads(data), folder))
    if path.suffix == ".jsonl" and b"{" in data and not data.startswith(b"{"):  # a journal: a digest before each line
        lines = [json.loads(line.partition(b" ")[2]) for line in data.splitlines()]
        return digest_of(_plain(lines, folder))
    return _sha(data)


def _plain(document: Any, folder: Path) -> Any:
    """Leave out what differs between two runs."""
    if isinstance(document, dict):
        if "covered" in document or {"path", "size", "digest"} <= document.keys():
            if _is_normalised(document["path"]):
                return {"path": document["path"]}
        elif "files" in document and "digest" in document:  # of what is normalised itself
            document = {name: value for name, value in document.items() if name != "digest"}
        return {name: _plain(value, folder) for name, value in document.items() if name not in VARYING}
    if isinstance(document, list):
        return [_plain(part, folder) for part in document]
    return document.replace(str(folder), "FOLDER") if isinstance(document, str) else document


def _is_normalised(path: str) -> bool:
    return path.endswith((".json", ".h5"))


def _h5(path: Path, data: bytes, folder: Path) -> Any:
    head: Any = None
    if data.startswith(b"{"):
        document = json.loads(data[: data.index(b"\x89HDF\r\n\x1a\n")])
        head = _plain({name: value for name, value in document.items() if name not in OF_BYTES}, folder)
    entries: dict[str, Any] = {}

    def visit(name: str, item: Any) -> None:
        attributes = {key: _value(item.attrs[key]) for key in sorted(item.attrs)}
        if isinstance(item, h5py.Dataset):
            stored = (item.dtype, item.shape, item.compression, item.compression_opts)
            entries[name] = [array_digest(item[()]), list(map(str, stored)), attributes]
        else:
            entries[name] = attributes

    with h5py.File(path) as file:
        entries["/"] = {key: _value(file.attrs[key]) for key in sorted(file.attrs)}
        file.visititems(visit)
    return [head, entries]


def _value(value: Any) -> Any:
    return array_digest(value) if isinstance(value, np.ndarray) else str(value)


def array_digest(value: Any) -> Any:
    """Return what sums up an array: type, shape and digest of the values."""
    if not isinstance(value, np.ndarray):
        return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    if value.dtype == object:
        return [str(value.shape), [str(part) for part in value.reshape(-1).tolist()]]
    return [str(value.dtype), list(value.shape), _sha(np.ascontiguousarray(value).tobytes())]


def digest_of(document: Any) -> str:
    """Digest of a JSON document."""
    return _sha(json.dumps(document, sort_keys=True, default=str).encode())


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
