"""What is recorded in a folder: two files say it, so that it is known where one of them is damaged."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CorruptDataError, FormatError, RbtoolError
from ..ted import NEXT, Field
from .commits import COMMITS, COMMITS_COPY, schema_mark
from .decoding import FieldEntry, decode
from .digest import digest_bytes
from .manifest import HIDDEN, MANIFEST
from .packed_schema import SCHEMA, PackedSchema, SchemaDocument
from .regular import read_regular
from .strict_json import dump_json, parse_json

__all__ = ["RECORDING", "RecordedFields", "fields_bytes", "read_fields", "unfinished_recording"]

RECORDING = f"{HIDDEN}/recording.json"
_VERSION = 1


class _Recording(NamedTuple):
    """The document `recording.json`, but for its version and its digest."""

    fields: tuple[FieldEntry, ...]


class RecordedFields(NamedTuple):
    """The leaves of a recording and how they lie; `damaged` names the file, if one, that does not say so."""

    fields: tuple[Field, ...]
    schema: PackedSchema
    damaged: tuple[str, ...]


def fields_bytes(fields: Sequence[Field]) -> bytes:
    """The document that says what is recorded, with its own digest."""
    entries = [{"key": f.key, "dtype": f.dtype, "shape": f.shape, "role": f.role} for f in fields]
    document = {"format": "rbtool recording", "version": _VERSION, "fields": entries}
    return (dump_json({**document, "digest": _digest(document)}, indent=1) + "\n").encode()


def unfinished_recording(path: Path) -> CorruptDataError | None:
    """The error for a folder without a manifest in which something was recorded, however little of it is left."""
    if not any((path / name).is_file() for name in (RECORDING, COMMITS, COMMITS_COPY)):
        return None
    hint = f"restore it with: rbtool repair {shlex.quote(str(path))}"
    return CorruptDataError(f"{path} is a recording that was not finished: {MANIFEST} is missing", hint=hint)


def read_fields(folder: Path, mark: int | None) -> RecordedFields:
    """Read what is recorded in a folder from `recording.json`, or, where that is damaged, from `schema.json`.

    `mark` is what the log says of the schema, None where it does not. FormatError for a folder that nothing was
    recorded in, and for newer versions; CorruptDataError where neither file is whole.
    """
    if not any((folder / name).is_file() for name in (RECORDING, COMMITS, COMMITS_COPY)):
        raise FormatError(
            f"{folder} is no recording: it has no {RECORDING}",
            hint="what was converted or downloaded is made again from its source"
            if (folder / HIDDEN).is_dir()
            else "name the folder that episodes were recorded in",
        )
    for name, told in ((RECORDING, _described), (SCHEMA, _laid_out)):
        fields = told(folder / name)
        if fields is None:
            continue
        schema = PackedSchema.of(fields)
        if mark in {None, schema_mark(schema)}:
            whole = (folder / SCHEMA).is_file() and read_regular(folder / SCHEMA) == schema.to_bytes()
            return RecordedFields(fields, schema, (RECORDING,) if name == SCHEMA else () if whole else (SCHEMA,))
    raise CorruptDataError(
        f"{folder} does not say what was recorded: {RECORDING} and {SCHEMA} are both missing, damaged, or of another "
        "recording"
    )


def _described(path: Path) -> tuple[Field, ...] | None:
    """The leaves that `recording.json` names; None where it is not as it was written."""
    document = _document(path)
    if not isinstance(document, dict) or document.get("digest") != _digest(document):
        return None
    if document.get("version") != _VERSION:
        raise FormatError(
            f"{path} has version {document.get('version')}, this rbtool reads up to {_VERSION}",
            hint="upgrade with: pip install --upgrade rbtool",
        )
    try:
        fields = decode(_Recording, document, str(path)).fields
    except FormatError:
        return None
    return fields if fields_bytes(fields) == read_regular(path) else None  # a digest sees through white space


def _laid_out(path: Path) -> tuple[Field, ...] | None:
    """The leaves that `schema.json` has a place for, those under `next` last; None where it contradicts itself."""
    try:
        entries = decode(SchemaDocument, _document(path), str(path)).fields
        stored = [Field(entry.key, entry.dtype, entry.shape, entry.role) for entry in entries]
        after = [
            replace(field, key=(NEXT, *field.key))
            for field, entry in zip(stored, entries, strict=True)
            if entry.rows == "record"
        ]
        fields = (*stored, *after)
        return fields if PackedSchema.of(fields).to_bytes() == read_regular(path) else None
    except RbtoolError:
        return None


def _document(path: Path) -> Any:
    try:
        return parse_json(read_regular(path), str(path))
    except (FileNotFoundError, FormatError):
        return None


def _digest(document: Mapping[str, Any]) -> str:
    """Digest of a document, of which the field that holds it is left out."""
    rest = {key: value for key, value in document.items() if key != "digest"}
    return digest_bytes(dump_json(rest, sort_keys=True).encode())
