"""Documents that others wrote, decoded by one schema."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import pytest
from cases import each

from rbtool import CorruptDataError, FormatError
from rbtool.core.format.documents import Count, FieldEntry, decode, dump_json, parse_json
from rbtool.core.format.manifest import is_space, require_space
from rbtool.core.ted.schema import Field


class Part(NamedTuple):
    path: str
    size: Count = 0


@dataclass(frozen=True)
class Document:
    count: Count
    parts: tuple[Part, ...]
    pair: tuple[float, float] | None
    fields: tuple[FieldEntry, ...] = ()
    kind: Literal["dataset", "checkpoint"] = "dataset"


SOUND: dict[str, Any] = {"count": 3, "parts": [{"path": "a"}], "pair": [1, "inf"]}
LEAF: dict[str, Any] = {"key": ["action"], "dtype": "float32", "shape": [2], "role": "action"}


def test_annotations_are_the_schema() -> None:
    found = decode(Document, SOUND | {"fields": [LEAF], "unknown": 1}, "here")
    assert found == Document(3, (Part("a"),), (1.0, math.inf), (Field(("action",), "float32", (2,), "action"),))


@each(
    ("change", "said"),
    [
        ({"count": -1}, "here has -1 as count, expected a count"),
        ({"count": True}, "has True as count, expected a whole number"),
        ({"count": 1 << 63}, "expected a count"),
        ({"parts": {}}, "as parts, expected a list"),
        ({"parts": [{"path": "a"}, {}]}, r"has {} as parts\[1\], expected an object with path"),
        ({"parts": [{"path": 1}]}, r"has 1 as parts\[0\].path, expected text"),
        ({"pair": [1]}, "as pair, expected a list of 2"),
        ({"pair": ["low", 1]}, r"has 'low' as pair\[0\], expected a number"),
        ({"pair": [10**400, 1]}, r"pair\[0\], expected a number of double precision"),
        ({"kind": "tree"}, "expected one of dataset, checkpoint"),
        ({"kind": ["dataset"]}, "expected one of dataset, checkpoint"),
        *(
            ({"fields": [LEAF | leaf]}, r"fields\[0\]")
            for leaf in (
                {"key": []}, {"key": ["next"]}, {"key": [""]}, {"key": ["\ud800"]}, {"dtype": "object"},
                {"shape": [-1]}, {"shape": [1 << 40, 1 << 40]}, {"shape": [0, 1 << 62]}, {"shape": [1] * 70},
                {"role": "none"},
            )
        ),
    ],
)  # fmt: skip
def test_values_of_other_types_are_named_with_their_place(change: dict[str, Any], said: str) -> None:
    with pytest.raises(FormatError, match=said):
        decode(Document, SOUND | change, "here")


@each("document", [None, [], 1, "text"])
def test_another_document_is_refused_with_the_requested_error(document: Any) -> None:
    with pytest.raises(CorruptDataError, match=r"here has .*, expected an object"):
        decode(Document, document, "here", CorruptDataError)


@each("text", ["[" * 100_000, "[" * 150 + "]" * 150, '{"a":' * 500 + "1" + "}" * 500])
def test_documents_that_nest_without_end_are_refused(text: str) -> None:
    with pytest.raises(FormatError, match="nests deeper than 100 levels"):
        parse_json(text, "here")
    assert parse_json(b"[" + b"[[1]]," * 500 + b"1]", "here")[-1] == 1


@each("text", ["caf\udce9", "\ud83d\ude00", "\ud83d and \ude00", "plain é"])
def test_lone_surrogates_are_written_as_escapes_and_come_back(text: str) -> None:
    written = dump_json({text: [text]}, indent=1).encode()
    back = json.loads(written)
    assert dump_json(back, indent=1).encode() == written
    assert list(back) == [text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")]


# Documents of spaces that others wrote are read by one schema.

BOX = {"type": "Box", "dtype": "float32", "shape": [2], "low": [0, 0], "high": [1, 1]}


@each(
    "entries",
    [
        {"low": "abc"}, {"high": ["0", "one"]}, {"low": [[0], [0, 1]]}, {"low": [0, 0, 0]}, {"low": {"0": 0}},
        {"shape": "2"}, {"shape": [-2]}, {"shape": [1 << 62, 1 << 62]}, {"dtype": 3}, {"type": ["Box"]},
        {"type": "Discrete", "n": "four"}, {"type": "MultiDiscrete", "nvec": [1, "2"]},
        {"type": "Dict", "subspaces": [BOX]}, {"type": "Tuple", "subspaces": [{**BOX, "low": "abc"}]},
    ],
)  # fmt: skip
def test_entries_of_another_type_are_format_errors_that_name_the_file(entries: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match="a file"):
        require_space({**BOX, **entries}, "a file")
    assert not is_space({**BOX, **entries})
    require_space(BOX, "a file")
    assert is_space(BOX)
