"""Text with a value a row, as two fields: UTF-8 bytes `[longest]`, padded with zeros, and how many of them count."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..format.contracts import Array
from ..ted.schema import Field, Key

LONGEST_ROW = 64 << 10
"""Largest row of text in bytes; every row of the dataset takes the space of the longest."""


def length_key(key: Key) -> Key:
    """Key of the lengths of a text."""
    return (*key[:-1], key[-1] + "_length")


def text_fields(key: Key, width: int) -> list[Field]:
    """The two fields of a text whose longest row has `width` bytes."""
    return [Field(key, "uint8", (width,), "text"), Field(length_key(key), "int32", (), "text")]


def encode_text(strings: Sequence[bytes], width: int) -> tuple[Array, Array]:
    """Return the strings as uint8 `[n, width]` and their lengths in bytes as int32 `[n]`."""
    lengths = np.fromiter(map(len, strings), np.int32, len(strings))
    characters = np.array(strings, f"S{width}").view(np.uint8).reshape(len(strings), width)
    return characters, lengths
