"""What becomes of the columns of a dataset of text: their keys, and how long the longest text of each is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...core.errors import FormatError
from ...core.format.manifest import Dropped
from ...core.ted.schema import FLAGS, LONGEST_ROW, NEXT, REWARD, Key, dtype_name, length_key, safe_part
from .parts import TextPart, is_number, is_text

SPLIT: Key = ("split",)
_TAKEN = {NEXT, "episode", *SPLIT, *REWARD, *(key[0] for key in FLAGS)}


@dataclass(frozen=True, slots=True)
class TextColumns:
    """The columns by their keys: `text` with the bytes of the longest, `numbers` with their element type.

    `names` are the columns' own names, `rows` the number of rows of every file.
    """

    text: Mapping[Key, int]
    numbers: Mapping[Key, str]
    names: Mapping[Key, str]
    rows: Sequence[int]
    dropped: tuple[Dropped, ...]

    @property
    def renamed(self) -> dict[str, str]:
        """Names of columns that are called something else here."""
        return {name: key[0] for key, name in self.names.items() if key[0] != name}

    def rows_of(self, parts: Sequence[TextPart], split: str) -> list[int]:
        """The number of rows of the files of one split."""
        return [rows for part, rows in zip(parts, self.rows, strict=True) if part.split == split]


def columns_of(parts: Sequence[TextPart], progress: Callable[[int], None]) -> TextColumns:
    """Read all text once. FormatError without a column of text or without rows, for a missing value and long text."""
    schema = parts[0].schema
    text = [field.name for field in schema if is_text(field.type)]
    numbers = [field.name for field in schema if is_number(field.type)]
    if len(set(schema.names)) < len(schema.names):
        raise FormatError(f"{parts[0].path} has two columns of one name")
    if not text:
        raise FormatError(f"{parts[0].path} has no column of text; it has {', '.join(schema.names) or 'no columns'}")
    longest, rows = dict.fromkeys(text, 1), []
    for part in parts:
        rows.append(0)
        for batch in part.batches([*text, *numbers]):
            for name in text:
                longest[name] = max(longest[name], *map(len, part.text_of(batch, name)), 0)
                _require_room(part, name, longest[name])
            for name in numbers:
                part.numbers_of(batch, name)
            rows[-1] += batch.num_rows
            progress(batch.num_rows)
    if not sum(rows):
        raise FormatError(f"{parts[0].path} has no rows")
    keys = _keys(text, numbers)
    types = {name: dtype_name(np.dtype(schema.field(name).type.to_pandas_dtype())) for name in numbers}
    others = [field for field in schema if field.name not in keys]
    return TextColumns(
        text={keys[name]: longest[name] for name in text},
        numbers={keys[name]: types[name] for name in numbers},
        names={key: name for name, key in keys.items()},
        rows=rows,
        dropped=tuple(Dropped(one.name, f"its values are {one.type}, neither text nor numbers") for one in others),
    )


def _require_room(part: TextPart, name: str, longest: int) -> None:
    if longest > LONGEST_ROW:
        raise FormatError(
            f"{part.path} has a text of {longest:,} bytes in {name!r}; at most {LONGEST_ROW:,} are read, for every row "
            "takes the space of the longest"
        )


def _keys(text: Sequence[str], numbers: Sequence[str]) -> dict[str, Key]:
    """Give every column its key: its name, with a `_` behind one that is taken."""
    taken: set[Key] = {(name,) for name in _TAKEN}
    keys: dict[str, Key] = {}
    for name in (*text, *numbers):
        key = (safe_part(name),)
        while key in taken or (name in text and length_key(key) in taken):
            key = (key[0] + "_",)
        keys[name] = key
        taken |= {key, length_key(key)} if name in text else {key}
    return keys
