import json

import pytest

from rbtool import CorruptDataError
from rbtool.core.encodings.compact import FilledStorage


@pytest.mark.parametrize(
    ("filled", "oldest", "last_row"),
    [
        (FilledStorage((5,), 8, 5), 0, 4),
        (FilledStorage((5,), 8, 2), 0, 1),
        (FilledStorage((8,), 8, 3), 3, 2),
        (FilledStorage((8,), 8, 0), 0, 7),
        (FilledStorage((8,), 8, None), 0, None),
        (FilledStorage((0,), 8, 0), 0, None),
        (FilledStorage((4, 2), 8, 1), 1, 0),
        (FilledStorage.of_dataset(6), 0, 5),
        (FilledStorage.of_dataset(0), 0, None),
    ],
)
def test_where_the_ring_begins(filled: FilledStorage, oldest: int, last_row: int | None) -> None:
    assert (filled.oldest, filled.last_row) == (oldest, last_row)
    assert FilledStorage.from_document(json.loads(filled.to_bytes()), filled.length, "here") == filled


@pytest.mark.parametrize(
    "change",
    [{"len": 4}, {"shape": [6]}, {"shape": []}, {"shape": "5"}, {"capacity": 4}, {"cursor": 6}, {"cursor": -1},
     {"cursor": True}, {"capacity": None}],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(change: dict[str, object]) -> None:
    document = json.loads(FilledStorage((5,), 8, 5).to_bytes()) | change
    with pytest.raises(CorruptDataError, match=r"^here"):
        FilledStorage.from_document(document, 5, "here")


def test_a_document_is_an_object() -> None:
    with pytest.raises(CorruptDataError, match="here does not describe a storage"):
        FilledStorage.from_document([], 5, "here")
