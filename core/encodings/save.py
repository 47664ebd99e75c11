"""Writes checkpoints of steps, and datasets from checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import CorruptDataError, FormatError
from ..format.contracts import Array, PassedSteps, StepReader
from ..format.digest import FileRecord, Hasher, bytes_of
from ..format.episodes import write_episode_text
from ..format.manifest import FORMAT_VERSION, Kind, Manifest, Provenance, content_digest, content_files
from ..format.memmap.builder import created_by, provenance_step, write_documents
from ..format.memmap.reader import FolderReader, TedReader
from ..format.memmap.tree import leaf_path, write_tree_meta
from ..format.open_files import changed
from ..format.packed.reader import PackedReader
from ..format.videos import refuse_videos, write_videos
from ..progress import Progress, Silent
from ..ted.schema import Key
from .compact import STORAGE, CompactForm, FilledStorage, Form, LeafProgress
from .flat import LeafFolderSink, write_flat
from .h5_layout import Compression
from .rows import leaf_parts


def write_ted(source: StepReader, folder: Path, progress: Progress) -> list[FileRecord]:
    """Write the TED rows of a dataset or a checkpoint into a folder; return its data files."""
    with LeafFolderSink(folder) as sink:
        counter = LeafProgress(progress, len(source.fields))
        for field in source.fields:
            sink.create(field, source.manifest.steps)
            for start, stop in leaf_parts(source.manifest.steps, field.row_bytes):
                sink.append(field, source.read(field.key, start, stop))
                counter.advance(stop - start)
        records, leaves = sink.finish_leaves()
        return records + write_tree_meta(folder, leaves, (source.manifest.steps,))


class VerifyingReader(PassedSteps):
    """Passes the rows of a dataset in layout `ted` on. `verify_files` then reads only what was not read in order."""

    source: TedReader

    def __init__(self, source: TedReader) -> None:
        super().__init__(source)
        self._rows: dict[Key, int] = {}
        self._hashers: dict[Key, Hasher] = {}

    def read(self, key: Key, start: int, stop: int) -> Array:
        """View rows of one leaf, and add them to its digest if they follow those added before.

        The array cannot be written: it shows the file, of which nothing is copied.
        """
        rows = self.source.view(key, start, stop)
        if self._rows.setdefault(key, 0) == start:
            self._hashers.setdefault(key, Hasher()).update(bytes_of(rows))
            self._rows[key] = stop
        return rows

    def verify_files(self) -> None:
        files = self.manifest.files
        self.source.listed.check_sizes()
        whole = self.verify_read()
        self.source.listed.verify(file for file in files if file.path not in whole)

    def verify_read(self) -> set[str]:
        """Raise CorruptDataError for the first of the leaves read in order whose bytes differ; return their files."""
        whole = {leaf_path(key): key for key, rows in self._rows.items() if rows == self.manifest.steps}
        for file in self.manifest.files:
            if file.path in whole and self._hashers[whole[file.path]].digest != file.digest:
                raise changed(self.path / file.path)
        return set(whole)


SAVE = "checkpoint save"
LOAD = "checkpoint load"
_SAME_STEPS = frozenset({SAVE, LOAD, "convert"})
"""Verbs that keep every step."""


def dataset_digest(manifest: Manifest) -> str:
    """The content digest of the dataset that these are the rows of: its own, or the one a checkpoint was saved from."""
    if manifest.kind == "dataset" and manifest.files:
        return manifest.content_digest
    for step in reversed(manifest.provenance):
        if step.verb == SAVE and "content_digest" in step.inputs:
            return step.inputs["content_digest"]
    if manifest.request.source == STORAGE:
        raise FormatError(
            "these steps are the checkpoint of a buffer, not of a dataset",
            hint="make a dataset of them first: rbtool checkpoint load PATH DEST",
        )
    raise FormatError(
        "no manifest vouches for these steps: only what rbtool wrote can be saved as a checkpoint",
        hint="convert the dataset first: rbtool convert PATH DEST",
    )


def dataset_digests(manifest: Manifest) -> frozenset[str]:
    """The content digests, in whatever layout, of datasets that have the very steps of this one.

    They are its own and those that its provenance names as long as nothing but the layout changed.
    """
    found = {manifest.content_digest} if manifest.kind == "dataset" else set()
    for step in reversed(manifest.provenance):
        if step.verb not in _SAME_STEPS or "content_digest" not in step.inputs:
            break
        found.add(step.inputs["content_digest"])
    return frozenset(found)


def steps_digest(source: StepReader) -> str:
    """As `dataset_digest`; of a packed dataset the digest that it has in layout `ted`, for which all rows are read."""
    return source.ted_digest if isinstance(source, PackedReader) else dataset_digest(source.manifest)


def save_checkpoint(
    source: StepReader,
    target: Path,
    form: Form,
    *,
    compression: Compression | None = None,
    arguments: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Write a checkpoint of a dataset, or of another checkpoint, to `target`.

    `target` is a folder in a staging area, or for form `h5` a file in one. The bytes that are read are compared
    with their digests; what next observations do not follow is stored in full and counted in the manifest's
    boundary report. Raises CorruptDataError for a damaged source, OutOfSpaceError.
    """
    progress = progress or Silent()
    digest = steps_digest(source)
    step = provenance_step(SAVE, arguments or {}, {"content_digest": digest})
    if form == "ted":
        return _save_ted(source, target, "checkpoint", step, progress)
    checked = source
    if isinstance(source, TedReader):
        checked = VerifyingReader(source)
    else:
        source.verify_files()
    progress.start(f"saving {form}", source.manifest.steps, "steps")
    filled = FilledStorage.of_dataset(source.manifest.steps)
    manifest = save_compact(checked, target, form, filled, compression or Compression(), step, progress)
    if checked is not source:
        checked.verify_files()
    progress.done()
    return manifest


def load_checkpoint(
    source: StepReader,
    folder: Path,
    *,
    arguments: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Write the dataset that a checkpoint was saved from to `folder`, file by file the same.

    Raises CorruptDataError, before the manifest is written, unless the content digest is that of the dataset.
    """
    step = provenance_step(LOAD, arguments or {}, {"content_digest": source.manifest.content_digest})
    return _save_ted(source, folder, "dataset", step, progress or Silent())


def save_compact(
    source: StepReader,
    target: Path,
    form: CompactForm,
    filled: FilledStorage,
    compression: Compression,
    step: Provenance,
    progress: Progress,
) -> Manifest:
    """Write rows, which fill the storage `filled`, to `target` without looking where they come from.

    `step` is how they came there; `target` is as for `save_checkpoint`.
    """
    if form == "h5":
        refuse_videos(source, "a checkpoint in one file")
        from .h5_writer import write_h5  # loads h5py, which nothing else here needs

        def seal(data: FileRecord, explicit: int, parts: tuple[FileRecord, ...]) -> Manifest:
            return replace(_manifest(source, "checkpoint", form, [data], explicit, step), parts=parts)

        return write_h5(source, target, compression, filled, seal, progress)
    records, explicit = write_flat(source, target, form, filled, progress)
    records += _write_rest(source, target)
    manifest = _manifest(source, "checkpoint", form, records, explicit, step)
    manifest.save(target)
    return manifest


def _save_ted(source: StepReader, target: Path, kind: Kind, step: Provenance, progress: Progress) -> Manifest:
    """Write all rows; the digest of what is written proves what was read, but not the documents."""
    if not isinstance(source, FolderReader) or isinstance(source, PackedReader):
        source.verify_files()  # first, so that HDF5 and decompression never see damaged data
    progress.start("saving ted" if kind == "checkpoint" else "loading", source.manifest.steps, "steps")
    records = [*write_ted(source, target, progress), *_write_rest(source, target)]
    progress.done()
    manifest = _manifest(source, kind, "ted", records, None, step)
    if manifest.content_digest != steps_digest(source):
        source.verify_files()  # names the file, if it is one
        raise CorruptDataError(
            f"{source.path} does not give the data it was saved from: their digest is {manifest.content_digest}, "
            f"expected {steps_digest(source)}"
        )
    if isinstance(source, FolderReader):
        files = source.manifest.files
        source.listed.verify(file for file in files if file not in content_files(files))
    manifest.save(target)
    return manifest


def _write_rest(source: StepReader, folder: Path) -> list[FileRecord]:
    """Write episode table, text and documents."""
    return [
        *source.episodes.save(folder),
        *write_episode_text(folder, source.episode_text or ()),
        *write_documents(folder, source.documents()),
        *write_videos(folder, source.videos()),
    ]


def _manifest(
    source: StepReader, kind: Kind, layout: Form, records: list[FileRecord], explicit: int | None, step: Provenance
) -> Manifest:
    """Carry the manifest of `source` over to what was written; `explicit` is the number of episodes kept in full."""
    files, boundary = tuple(sorted(records)), source.episodes.counts()
    return replace(
        source.manifest,
        kind=kind,
        layout=layout,
        files=files,
        content_digest=content_digest(files),
        created_by=created_by(),
        boundary=boundary if explicit is None else replace(boundary, explicit_next=explicit),
        provenance=(*source.manifest.provenance, step),
        parts=(),
        format_version=FORMAT_VERSION,
    )
