"""Layout `ted`: every TED leaf whole, as in a dataset."""

from __future__ import annotations

from pathlib import Path

from ..format import FileRecord, StepReader
from ..progress import Progress
from .compact import Told
from .folder_sink import FolderSink
from .rows import leaf_parts

__all__ = ["write_ted"]


def write_ted(source: StepReader, folder: Path, progress: Progress) -> list[FileRecord]:
    """Write the TED rows of a dataset or a checkpoint into a folder; return its data files."""
    with FolderSink(folder) as sink:
        told = Told(progress, len(source.fields))
        for field in source.fields:
            sink.create(field, source.manifest.steps)
            for start, stop in leaf_parts(source.manifest.steps, field.row_bytes):
                sink.append(field, source.read(field.key, start, stop))
                told.advance(stop - start)
        records, leaves = sink.finish_leaves()
        return [*records, *sink.write_meta(leaves, (source.manifest.steps,))]
