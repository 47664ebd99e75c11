from __future__ import annotations

from collections import namedtuple

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass

from rbtool.core.errors import SchemaError
from rbtool.core.writers.base import batch_length, capacity_rows

Pair = namedtuple("Pair", ["left", "right"])


@tensorclass
class Step:
    action: torch.Tensor


def td(rows: int, *more: int) -> TensorDict:
    return TensorDict({"a": torch.arange(rows)}, [rows, *more][:1])


BATCHES = [
    torch.zeros(3, 2),
    td(3),
    Step(torch.zeros(3), batch_size=[3]),
    LazyStackedTensorDict.lazy_stack([td(2)[0], td(2)[1], td(2)[0]]),
    [1, "two", None],
    [torch.zeros(5)] * 3,
    {"a": torch.zeros(3), "b": [torch.zeros(3, 1), (np.zeros(3), td(3))]},
    (torch.zeros(3), {"a": torch.zeros(3, 4)}),
    Pair(torch.zeros(3), torch.zeros(3)),
    range(3),
    {7, 8, 9},
    np.arange(3),
]


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: type(batch).__name__)
def test_a_batch_is_counted_along_its_first_dimension(batch: object) -> None:
    assert batch_length(batch) == 3


def test_edge_01_8_leaves_that_disagree_are_named() -> None:
    batch = {"a": torch.zeros(3), "b": (torch.zeros(4), torch.zeros(3))}
    with pytest.raises(SchemaError, match=r"expected leaves of one length, a has 3, b.0 has 4, b.1 has 3"):
        batch_length(batch)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (iter([1]), "found a list_iterator"),
        ("text", "found a str"),
        (3, "found a int"),
        ((1, 2), "the entry '0' is a int"),
        ({"a": "text"}, "the entry 'a' is a str"),
        (torch.tensor(1.0), "the data has no dimension to count elements along"),
        (td(2)[0], "the data has no dimension to count elements along"),
        ({"a": torch.tensor(1.0)}, "the entry 'a' has no dimension"),
    ],
)
def test_what_is_no_batch_is_a_type_error(batch: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        batch_length(batch)


@pytest.mark.parametrize("batch", [[], (), {}, torch.zeros(0, 2), td(0), {"a": torch.zeros(0)}, range(0)])
@pytest.mark.parametrize("kind", [IndexError, RuntimeError])
def test_an_empty_batch_is_an_index_error_and_a_runtime_error(batch: object, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="expected a batch of at least one element, found none"):
        batch_length(batch)


@pytest.mark.parametrize(
    ("data", "batch", "ndim", "rows"),
    [
        (torch.zeros(4, 3), True, 2, 4),
        (torch.zeros(3), False, 2, 4),
        (torch.zeros(4, 3, 2), True, 3, 2),
        (torch.zeros(4, 3), True, 1, 10),
        ([torch.zeros(3), torch.zeros(3)], True, 2, 4),
        ({"a": [torch.zeros(4, 5)]}, True, 2, 2),
        (TensorDict({"a": torch.zeros(4, 3, 7)}, [4, 3]), True, 2, 4),
        (torch.zeros(4, 0), True, 2, 10),
    ],
)
def test_rows_hold_the_elements_asked_for(data: object, batch: bool, ndim: int, rows: int) -> None:
    assert capacity_rows(10, ndim, data, batch=batch) == rows


def test_rows_of_too_few_dimensions_are_refused() -> None:
    with pytest.raises(SchemaError, match=r"expected data with at least 2 dimensions, found \[4\]"):
        capacity_rows(10, 2, TensorDict({"a": torch.zeros(4, 3)}, [4]), batch=True)
