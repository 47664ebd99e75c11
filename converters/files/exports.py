"""Columns of an export: what the exporters of all formats share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...core.errors import CorruptDataError
from ...core.format.contracts import Array
from ...core.format.converter import Chosen
from ...core.ted.schema import Field, Key

FORMAT = "rbtool export"
"""Identifies a file or folder as an export."""


@dataclass(frozen=True, slots=True)
class ExportColumn:
    """A leaf of the data; for text, `length` is the leaf with the number of bytes of each row."""

    field: Field
    length: Field | None = None

    @property
    def bytes(self) -> int:
        """Bytes of a row as it is stored here."""
        return self.field.row_bytes + (self.length.row_bytes if self.length else 0)

    def chunks(self, chosen: Chosen) -> Iterator[Array | list[str]]:
        """Yield all rows in chunks: arrays, or strings where the leaf is text."""
        rows = chosen.chunks(self.field.key, self.bytes)
        if self.length is None:
            yield from rows
            return
        lengths = chosen.chunks(self.length.key, self.bytes)
        for characters, sizes in zip(rows, lengths, strict=True):
            yield decoded(characters, sizes, self.field.name)


def columns_of(fields: tuple[Field, ...]) -> list[ExportColumn]:
    """Pair text with its lengths; everything else is a column of its own."""
    by_key = {field.key: field for field in fields}
    texts: dict[Key, Field] = {}
    for field in fields:
        length = by_key.get((*field.key[:-1], field.key[-1] + "_length"))
        if field.role == "text" and field.dtype == "uint8" and len(field.shape) == 1 and length and not length.shape:
            texts[field.key] = length
    lengths = {length.key for length in texts.values()}
    return [ExportColumn(field, texts.get(field.key)) for field in fields if field.key not in lengths]


def decoded(characters: Array, lengths: Array, name: str) -> list[str]:
    """Return rows of UTF-8 bytes as strings."""
    try:
        return [row[:size].tobytes().decode() for row, size in zip(characters, lengths.tolist(), strict=True)]
    except UnicodeDecodeError as error:
        raise CorruptDataError(f"{name} is text, but not UTF-8: {error.reason}") from error
