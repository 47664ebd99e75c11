"""Text with a value a row: bytes padded with zeros, and their number."""

from __future__ import annotations

from rbtool.core.ted.schema import encode_text, text_fields


def test_strings_come_back_from_their_bytes_and_lengths() -> None:
    strings = [b"", b"a\0b", "schließen".encode(), b"pick up\0"]
    characters, lengths = encode_text(strings, 12)
    assert (characters.shape, characters.dtype, lengths.dtype) == ((4, 12), "uint8", "int32")
    assert [row[:size].tobytes() for row, size in zip(characters, lengths, strict=True)] == strings


def test_a_text_has_two_fields() -> None:
    fields = text_fields(("observation", "task"), 12)
    assert [(field.name, field.dtype, field.shape) for field in fields] == [
        ("observation.task", "uint8", (12,)),
        ("observation.task_length", "int32", ()),
    ]
