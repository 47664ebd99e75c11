"""What a dataset is, whatever layout it lies in: the content digest that it has in layout `ted`."""

from __future__ import annotations

from .contracts import StepReader
from .digest import FileRecord, Hasher, bytes_of, digest_bytes
from .episodes import EPISODES, EPISODES_TEXT, column_fields, episode_text_bytes
from .manifest import content_digest
from .tree import Leaf, leaf_path, tree_documents

__all__ = ["ted_digest"]


def ted_digest(reader: StepReader) -> str:
    """Return the content digest of the dataset in layout `ted` that has these rows, episodes and text.

    Reads every row once; memory is bounded by a chunk.
    """
    steps, table = reader.manifest.steps, reader.episodes
    hashers = {field.key: Hasher() for field in reader.fields}
    for start, stop in reader.chunks(4 << 20):
        for field in reader.fields:
            rows = reader.read(field.key, start, stop)
            if rows.size:
                hashers[field.key].update(bytes_of(rows))
    records = [
        FileRecord(leaf_path(field.key), steps * field.row_bytes, hashers[field.key].digest)
        for field in reader.fields
        if steps * field.row_bytes
    ]
    leaves = {field.key: Leaf(field.dtype, (steps, *field.shape)) for field in reader.fields}
    records += [_document(path, data) for path, data in tree_documents(leaves, (steps,)).items()]
    for name, column in table.columns().items():
        if column.size:
            records.append(_document(f"{EPISODES}/{leaf_path((name,))}", bytes(bytes_of(column))))
    columns = {field.key: Leaf(field.dtype, (len(table),)) for field in column_fields(table)}
    records += [_document(f"{EPISODES}/{path}", data) for path, data in tree_documents(columns, (len(table),)).items()]
    text = episode_text_bytes(reader.episode_text or ())
    records += [_document(EPISODES_TEXT, text)] if text else []
    return content_digest(tuple(records))


def _document(path: str, data: bytes) -> FileRecord:
    return FileRecord(path, len(data), digest_bytes(data))
