"""Layout `ted`: every TED leaf whole, as in a dataset."""

from __future__ import annotations

from pathlib import Path

from ..dataset import FileRecord, StepReader
from ..progress import Progress
from .folder_sink import FolderSink
from .rows import CHUNK_BYTES

__all__ = ["write_ted"]


def write_ted(source: StepReader, folder: Path, progress: Progress) -> list[FileRecord]:
    """Write the TED rows of a dataset or a checkpoint into a folder; return its data files."""
    with FolderSink(folder) as sink:
        for field in source.fields:
            sink.create(field, source.manifest.steps)
        for start, stop in source.chunks(CHUNK_BYTES):
            for field in source.fields:
                sink.append(field, source.read(field.key, start, stop))
            progress.advance(stop - start)
        records, leaves = sink.finish_leaves()
        return [*records, *sink.write_meta(leaves, (source.manifest.steps,))]
