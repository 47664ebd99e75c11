"""Writes a checkpoint from the steps of a dataset, and a dataset from the steps of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import CorruptDataError, FormatError
from ..format.contracts import Array, PassedSteps, StepReader
from ..format.episodes import write_episode_text
from ..format.files import FileRecord, Hasher, bytes_of
from ..format.manifest import FORMAT_VERSION, Kind, Manifest, Provenance, content_digest, content_files
from ..format.memmap.builder import created_by, provenance_step, write_documents
from ..format.memmap.reader import FolderReader, TedReader
from ..format.memmap.tree import leaf_path, write_tree_meta
from ..format.open_files import changed
from ..format.packed.reader import PackedReader
from ..format.videos import refuse_videos, write_videos
from ..progress import Progress, Silent
from ..ted.schema import Key
from .compact import STORAGE, CompactForm, FilledStorage, Form, LeafProgress, leaf_parts
from .flat import LeafFolderSink, write_flat
from .h5 import Compression


def write_ted(source: StepReader, folder: Path, progress: Progress) -> list[FileRecord]:
    """Write the TED rows of a dataset or a checkpoint to a folder; return its data files."""
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
    """Reads the rows of a dataset in layout `ted`, and computes digests of leaves that are read in order.

    `verify_files` then compares these digests, and only reads the other files again.
    """

    source: TedReader

    def __init__(self, source: TedReader) -> None:
        super().__init__(source)
        self._rows: dict[Key, int] = {}
        self._hashers: dict[Key, Hasher] = {}

    def read(self, key: Key, start: int, stop: int) -> Array:
        """View rows of one leaf, and add them to its digest if they directly follow those added before.

        The array is a read-only view of the file.
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
        """Compare the digests of all leaves that were read in order, and return their files.

        Raises:
            CorruptDataError: the bytes of a leaf differ.
        """
        whole = {leaf_path(key): key for key, rows in self._rows.items() if rows == self.manifest.steps}
        for file in self.manifest.files:
            if file.path in whole and self._hashers[whole[file.path]].digest != file.digest:
                raise changed(self.path / file.path)
        return set(whole)


SAVE = "checkpoint save"
LOAD = "checkpoint load"
_SAME_STEPS = frozenset({SAVE, LOAD, "convert"})
"""Verbs whose result has exactly the steps of their input."""


def dataset_digest(manifest: Manifest) -> str:
    """Return the content digest of a dataset, or of the dataset from which a checkpoint was saved."""
    if manifest.kind == "dataset" and manifest.files:
        return manifest.content_digest
    for step in reversed(manifest.provenance):
        if step.verb == SAVE and "content_digest" in step.inputs:
            return step.inputs["content_digest"]
    if manifest.request.source == STORAGE:
        raise FormatError(
            "these steps are the checkpoint of a buffer, not of a dataset",
            hint="first make a dataset of them: rbtool checkpoint load PATH DEST",
        )
    raise FormatError(
        "these steps have no manifest: only data written by rbtool can be saved as a checkpoint",
        hint="convert the dataset first: rbtool convert PATH DEST",
    )


def dataset_digests(manifest: Manifest) -> frozenset[str]:
    """Return the content digests of datasets with exactly the same steps, in any layout.

    These are its own digest, and the digests in its provenance back to the first verb that changed steps.
    """
    found = {manifest.content_digest} if manifest.kind == "dataset" else set()
    for step in reversed(manifest.provenance):
        if step.verb not in _SAME_STEPS or "content_digest" not in step.inputs:
            break
        found.add(step.inputs["content_digest"])
    return frozenset(found)


def steps_digest(source: StepReader) -> str:
    """Return the content digest of the steps in layout `ted`, as `dataset_digest` does.

    For a packed dataset, all rows are read to compute it.
    """
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
    """Write a checkpoint of a dataset, or of another checkpoint.

    The bytes of the source are compared with their digests. Episodes whose next observations are stored explicitly are
    counted in the boundary report of the manifest.

    Args:
        source: the rows.
        target: a folder in a staging area; for the form `h5` a file in one.
        form: the form of the checkpoint.
        compression: for the form `h5`.
        arguments: recorded in the provenance.
        progress: reports progress.

    Raises:
        CorruptDataError: the source is damaged.
        OutOfSpaceError: the disk is full.
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
    """Write the dataset that a checkpoint was saved from to `folder`; its files are the same byte for byte.

    Raises:
        CorruptDataError: the content digest differs from the dataset's; nothing is published.
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
    """Write rows from any source in compact form.

    Args:
        source: the rows.
        target: see `save_checkpoint`.
        form: the form.
        filled: the storage that the rows fill.
        compression: for the form `h5`.
        step: the last step of the provenance.
        progress: reports progress.
    """
    if form == "h5":
        refuse_videos(source, "a checkpoint in one file")
        from .h5 import write_h5  # imports h5py, which nothing else here needs

        def seal(data: FileRecord, explicit: int, parts: tuple[FileRecord, ...]) -> Manifest:
            return replace(_manifest(source, "checkpoint", form, [data], explicit, step), parts=parts)

        return write_h5(source, target, compression, filled, seal, progress)
    records, explicit = write_flat(source, target, form, filled, progress)
    records += _write_rest(source, target)
    manifest = _manifest(source, "checkpoint", form, records, explicit, step)
    manifest.save(target)
    return manifest


def _save_ted(source: StepReader, target: Path, kind: Kind, step: Provenance, progress: Progress) -> Manifest:
    """Write all rows in layout `ted`, with the documents, and compare their content digest with the source's.

    The content digest covers the rows and the episode table; the other files of the source are verified separately.
    """
    if not isinstance(source, FolderReader) or isinstance(source, PackedReader):
        source.verify_files()  # first, so that HDF5 and decompression never get damaged data
    progress.start("saving ted" if kind == "checkpoint" else "loading", source.manifest.steps, "steps")
    records = [*write_ted(source, target, progress), *_write_rest(source, target)]
    progress.done()
    manifest = _manifest(source, kind, "ted", records, None, step)
    if manifest.content_digest != steps_digest(source):
        source.verify_files()  # raises an error that names the damaged file, if there is one
        raise CorruptDataError(
            f"{source.path} does not restore the data that it was saved from: the digest is {manifest.content_digest}, "
            f"expected {steps_digest(source)}"
        )
    if isinstance(source, FolderReader):
        files = source.manifest.files
        source.listed.verify(file for file in files if file not in content_files(files))
    manifest.save(target)
    return manifest


def _write_rest(source: StepReader, folder: Path) -> list[FileRecord]:
    """Write the episode table, the texts of episodes, documents and videos."""
    return [
        *source.episodes.save(folder),
        *write_episode_text(folder, source.episode_text or ()),
        *write_documents(folder, source.documents()),
        *write_videos(folder, source.videos()),
    ]


def _manifest(
    source: StepReader, kind: Kind, layout: Form, records: list[FileRecord], explicit: int | None, step: Provenance
) -> Manifest:
    """Return the manifest of the written files, derived from the manifest of `source`.

    `explicit` is the number of episodes whose next rows are stored explicitly; None in layout `ted`.
    """
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
