from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from rbtool.core.buffers.pytrees import default_collate, lazy_stack_elements, stack_elements
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.list_storage import CompressedListStorage, LazyStackStorage, ListStorage
from rbtool.core.storages.tensor import TensorStorage

Pair = namedtuple("Pair", ["left", "right"])


@pytest.mark.parametrize(
    ("storage", "collate"),
    [
        (TensorStorage(torch.zeros(2)), None),
        (TensorStorage([torch.zeros(2)]), None),
        (LazyTensorStorage(2), None),
        (LazyMemmapStorage(2), None),
        (LazyStackStorage(2), None),
        (ListStorage(2), stack_elements),
        (CompressedListStorage(2), lazy_stack_elements),
    ],
)
def test_the_default_follows_the_storage(storage: object, collate: object) -> None:
    assert default_collate(storage) is collate


def steps(*shape: int, **more: torch.Tensor) -> TensorDict:
    return TensorDict({"a": torch.ones(*shape), **more}, [])


def test_tensordicts_are_stacked_densely_if_their_shapes_and_keys_agree() -> None:
    stacked = stack_elements([steps(2), steps(2)])
    assert (type(stacked), stacked["a"].shape) == (TensorDict, (2, 2))
    for other in (steps(3), steps(2, b=torch.ones(1))):
        stacked = stack_elements([steps(2), other])
        assert type(stacked) is LazyStackedTensorDict
        assert stacked[1]["a"].shape == other["a"].shape
    assert type(lazy_stack_elements([steps(2), steps(2)])) is LazyStackedTensorDict
    assert lazy_stack_elements([torch.ones(2), torch.ones(2)]).shape == (2, 2)


def test_nests_are_stacked_leaf_by_leaf() -> None:
    item = {"a": torch.ones(2), "b": [Pair(torch.zeros(1), (torch.ones(()),))]}
    stacked = stack_elements([item, item, item])
    assert (stacked["a"].shape, stacked["b"][0].left.shape, stacked["b"][0].right[0].shape) == ((3, 2), (3, 1), (3,))


@pytest.mark.parametrize(
    "items",
    [
        [],
        ["a", None, 3],
        [torch.ones(2), torch.ones(3)],
        [torch.ones(2), "a"],
        [steps(2), "a"],
        [{"a": torch.ones(1)}, {"b": torch.ones(1)}],
        [(1,), (1, 2)],
        ["ab", "cd"],
        torch.ones(2),
    ],
)
def test_other_items_are_left_alone(items: list) -> None:
    assert stack_elements(items) is items
