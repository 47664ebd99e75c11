"""The process in which pylance reads and writes tables. The module `tables` starts it, and explains why.

Requests are lines of JSON on the standard input, with the `path` of a table, what to `do`, and arguments in `with`. An
answer is the length of its JSON, the JSON, and as many bytes as `bytes` in it states.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import pyarrow as pa

_BLOB_ENCODING = b"lance-encoding:blob"
_MEMORY = 4 << 30
_ROWS = 1024


class Refused(Exception):
    """A table refers to files outside its folder."""


class Table:
    """The newest version of a table."""

    def __init__(self, path: str) -> None:
        import lance  # only this process imports it

        self._table = lance.dataset(path)
        if self._table.base_paths():
            raise Refused("it has data in other folders, which are not read")
        self._blobs = {one.name for one in self._table.schema if _is_blob(one)}
        self._opened: tuple[str, int, Any] | None = None

    def describe(self) -> tuple[dict[str, Any], bytes]:
        """Answer with the number of rows, the columns of blobs, and the files; the data is the Arrow schema."""
        fields = [pa.field(one.name, _plain(one.type, one.name in self._blobs)) for one in self._table.schema]
        files = [
            name for fragment in self._table.get_fragments()
            for name in (*(f"data/{one.path}" for one in fragment.data_files()), fragment.deletion_file()) if name
        ]  # fmt: skip
        found = {
            "rows": int(self._table.count_rows()), "blobs": sorted(self._blobs), "files": files,
            "version": int(self._table.version),
        }  # fmt: skip
        return found, pa.schema(fields).serialize().to_pybytes()

    def read(self, names: list[str], start: int, stop: int) -> tuple[dict[str, Any], bytes]:
        """Answer with rows `[start, stop)` as an Arrow stream; blobs are included as bytes."""
        for name in self._blobs.intersection(names):
            self._require_own(name, start, stop)
        found = self._scan(names, start, stop, "all_binary")
        columns = [_storage(found.column(name)) for name in names]
        sink = pa.BufferOutputStream()
        table = pa.table(columns, names=names) if names else found
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return {"rows": found.num_rows}, sink.getvalue().to_pybytes()

    def blob(self, name: str, row: int, start: int, size: int) -> tuple[dict[str, Any], bytes]:
        """Answer with a range of the bytes of one blob."""
        if self._opened is None or self._opened[:2] != (name, row):
            self._require_own(name, row, row + 1)
            [found] = self._table.take_blobs(name, indices=[row])
            if found is None:
                raise Refused(f"{name!r} has no bytes in row {row}")
            self._opened = name, row, found
        found = self._opened[2]
        found.seek(start)
        return {"size": int(found.size())}, found.read(size)

    def _scan(self, names: list[str], start: int, stop: int, blobs: Any) -> Any:
        return self._table.scanner(
            columns=names, offset=start, limit=stop - start, scan_in_order=True, blob_handling=blobs,
            batch_size=max(1, min(stop - start, 1024)),
        ).to_table()  # fmt: skip

    def _require_own(self, name: str, start: int, stop: int) -> None:
        """Raise Refused for blobs that are stored in a file outside the table."""
        described = self._scan([name], start, stop, "blobs_descriptions").column(name)
        if pa.types.is_struct(described.type) and described.type.get_field_index("blob_uri") >= 0:
            for value in described.to_pylist():
                if value and value["blob_uri"]:
                    raise Refused(f"{name!r} refers to the file {value['blob_uri'][:200]!r}, which is not read")


def write_rows(path: str, files: list[str], names: list[str]) -> int:
    """Write the rows of Parquet files to a new table, with other names of columns; return the number of rows."""
    import lance
    import pyarrow.parquet as pq

    first = pq.read_schema(files[0])
    schema = pa.schema([field.with_name(name) for field, name in zip(first, names, strict=True)])
    batches = (
        pa.RecordBatch.from_arrays(batch.columns, schema=schema)
        for file in files for batch in pq.ParquetFile(file).iter_batches(_ROWS)
    )  # fmt: skip
    return int(lance.write_dataset(pa.RecordBatchReader.from_batches(schema, batches), path).count_rows())


def write_files(path: str, files: list[str], column: str, apart: bool, about: dict[str, list[Any]]) -> int:
    """Write a new table with one row for each file; return the number of rows.

    Args:
        path: the table.
        files: the files.
        column: the name of the column with their bytes.
        apart: whether the bytes are stored as blobs, apart from the rows.
        about: the other columns, with one value for each file.
    """
    import lance

    known = pa.table(about)
    kept = lance.blob_field(column) if apart else pa.field(column, pa.large_binary())
    schema = pa.schema([*known.schema, kept])

    def batches() -> Iterator[pa.RecordBatch]:
        for row, name in enumerate(files):
            with open(name, "rb") as file:
                data = [file.read()]
            content = lance.blob_array(data) if apart else pa.array(data, pa.large_binary())
            columns = [one.combine_chunks() for one in known.slice(row, 1).columns]
            yield pa.RecordBatch.from_arrays([*columns, content], schema=schema)

    return int(lance.write_dataset(pa.RecordBatchReader.from_batches(schema, batches()), path).count_rows())


_WRITERS: dict[str, Callable[..., int]] = {"write_rows": write_rows, "write_files": write_files}


def _is_blob(field: Any) -> bool:
    name = getattr(field.type, "extension_name", "")
    return name.startswith("lance.blob") or (field.metadata or {}).get(_BLOB_ENCODING) == b"true"


def _plain(kind: Any, is_blob: bool) -> Any:
    kind = pa.large_binary() if is_blob else kind
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _storage(column: Any) -> Any:
    if isinstance(column.type, pa.BaseExtensionType):
        return pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
    return column


def answers(requests: BinaryIO) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield the answer to each request in a file, and its data."""
    tables: dict[str, Table] = {}
    while line := requests.readline():
        asked = json.loads(line)
        try:
            path = asked["path"]
            if asked["do"] in _WRITERS:
                yield {"rows": _WRITERS[asked["do"]](path, *asked["with"])}, b""
                continue
            table = tables[path] = tables.get(path) or Table(path)
            yield getattr(table, asked["do"])(*asked["with"])
        except Refused as error:
            yield {"refused": str(error)}, b""
        except BaseException as error:  # a panic in Rust is not an Exception
            yield {"broken": " ".join(str(error).split())[:2000]}, b""


def serve() -> None:
    """Answer requests on the standard input until there are no more."""
    replies = io.BufferedWriter(io.FileIO(os.dup(1), "w"))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # prints of the library must not mix with answers
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for answer, data in answers(sys.stdin.buffer):
        text = json.dumps(answer | {"bytes": len(data)}).encode()
        replies.write(len(text).to_bytes(8, "little") + text + data)
        replies.flush()


if __name__ == "__main__":
    serve()
