"""Builds a dataset folder in layout `ted`, row by row, without holding more than a buffer a leaf."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ..errors import FormatError
from ..ted import BoundaryCounts, Field, Key
from ..version import __version__
from . import fs
from .contracts import Array
from .digest import FileRecord
from .episodes import EpisodeRow, EpisodeTable, write_episode_text
from .leaf_writer import TreeWriter, record_file
from .manifest import (
    ENV_METADATA,
    SOURCE_DOCUMENTS,
    Dropped,
    FieldRange,
    Layout,
    Manifest,
    Provenance,
    Request,
    content_digest,
    is_inside,
)
from .times import written_time

__all__ = [
    "DatasetBuilder",
    "Origin",
    "RowBuilder",
    "created_by",
    "env_metadata_bytes",
    "provenance_step",
    "write_documents",
    "write_manifest",
]


def created_by() -> str:
    """Who writes: the entry `created_by` of a manifest."""
    return f"rbtool {__version__}"


def provenance_step(verb: str, arguments: Mapping[str, Any], inputs: Mapping[str, str]) -> Provenance:
    """Record one step of how data came to be, as of now (UTC)."""
    return Provenance(verb, dict(arguments), __version__, dict(inputs), written_time())


@dataclass(frozen=True, slots=True)
class Origin:
    """Where rows come from: everything of the manifest that the rows themselves do not tell."""

    request: Request
    provenance: tuple[Provenance, ...] = ()
    resolved_revision: str | None = None
    spaces: Mapping[str, Any] = field(default_factory=dict)
    renamed_keys: Mapping[str, str] = field(default_factory=dict)
    dropped_keys: tuple[Dropped, ...] = ()
    notes: tuple[str, ...] = ()
    documents: Mapping[str, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: Manifest, documents: Mapping[str, bytes]) -> Origin:
        """Carry over what another dataset or checkpoint says of itself."""
        return cls(
            manifest.request, manifest.provenance, manifest.resolved_revision, manifest.spaces,
            manifest.renamed_keys, manifest.dropped_keys, manifest.notes, documents,
        )  # fmt: skip


def write_documents(root: Path, documents: Mapping[str, bytes]) -> list[FileRecord]:
    """Keep the source's metadata files under `.rbtool/source/`, and `env_metadata.json` beside the data."""
    records = []
    for name, data in documents.items():
        if not is_inside(name):
            raise FormatError(f"{name!r} cannot be kept as a file: it leads out of its folder")
        path = ENV_METADATA if name == ENV_METADATA else f"{SOURCE_DOCUMENTS}{name}"
        fs.make_folder((root / path).parent)
        fs.write_file(root / path, data)
        records.append(record_file(root / path, path))
    return records


class RowBuilder(ABC):
    """Takes TED rows, then episodes and what is known of them. A context manager: leaving closes the files."""

    @abstractmethod
    def append(self, columns: Mapping[Key, Array], last: Array | None = None) -> None:
        """Append the same number of rows to every leaf; `last`, bool `[n]`, marks those that end an episode."""

    @abstractmethod
    def finish(
        self,
        episodes: EpisodeTable | Sequence[EpisodeRow],
        origin: Origin,
        text: Sequence[dict[str, str]] | None = None,
    ) -> Manifest:
        """Write the episode table, the text, the source's metadata and, last, the manifest."""

    @abstractmethod
    def close(self) -> None:
        """Close the files, finished or not."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class DatasetBuilder(RowBuilder):
    """Appends TED rows to a new folder in layout `ted`."""

    def __init__(self, folder: Path, fields: Sequence[Field]) -> None:
        self.folder = folder
        self.fields = tuple(fields)
        self._tree = TreeWriter(folder, fields)

    def append(self, columns: Mapping[Key, Array], last: Array | None = None) -> None:
        self._tree.append(columns)

    def finish(
        self,
        episodes: EpisodeTable | Sequence[EpisodeRow],
        origin: Origin,
        text: Sequence[dict[str, str]] | None = None,
    ) -> Manifest:
        """Write the episode table, the text, the source's metadata and, last, the manifest."""
        table = episodes if isinstance(episodes, EpisodeTable) else EpisodeTable.from_rows(episodes)
        data = self._tree.finish((table.steps,))
        return write_manifest(self.folder, self.fields, data, self._tree.ranges, table, origin, text)

    def close(self) -> None:
        self._tree.close()


def write_manifest(
    folder: Path,
    leaves: Sequence[Field],
    data: Sequence[FileRecord],
    ranges: Mapping[Key, FieldRange],
    table: EpisodeTable,
    origin: Origin,
    text: Sequence[dict[str, str]] | None = None,
    *,
    layout: Layout = "ted",
    boundary: BoundaryCounts | None = None,
    at_once: bool = False,
) -> Manifest:
    """Complete a folder whose data files are written: episodes, text, documents and, last, the manifest."""
    files = [*data, *table.save(folder), *write_episode_text(folder, text or ())]
    files += write_documents(folder, origin.documents)
    files.sort()
    manifest = Manifest(
        kind="dataset", layout=layout, request=origin.request, steps=table.steps, episodes=len(table),
        fields=tuple(leaves), files=tuple(files), content_digest=content_digest(tuple(files)), created_by=created_by(),
        resolved_revision=origin.resolved_revision, ranges=dict(ranges), spaces=origin.spaces,
        renamed_keys=origin.renamed_keys, dropped_keys=origin.dropped_keys, notes=origin.notes,
        boundary=boundary or table.counts(), provenance=origin.provenance,
    )  # fmt: skip
    manifest.save(folder, at_once=at_once)
    return manifest


def env_metadata_bytes(metadata: Mapping[str, Any]) -> bytes:
    """The bytes of `env_metadata.json`, as TorchRL reads it: unbounded spaces need the Infinity literal."""
    return json.dumps(metadata).encode()
