"""A spec of each kind, in each shape, for tests of what every spec does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rbtool.core.specs.base import TensorSpec
from rbtool.core.specs.bounded import Bounded, Unbounded
from rbtool.core.specs.categorical import Binary, Categorical, MultiCategorical, MultiOneHot, OneHot
from rbtool.core.specs.composite import Composite
from rbtool.core.specs.non_tensor import Choice, NonTensor

SHAPES = [(), (3,), (2, 3)]
Make = Callable[[tuple[int, ...]], TensorSpec]


def nested(shape: tuple[int, ...]) -> Composite:
    return Composite(
        {
            "action": Bounded(-1, 1, (*shape, 2)),
            "hold": None,
            "inner": {"number": Categorical(4, shape), "text": NonTensor(shape, example_data="a")},
        },
        shape=shape,
    )


def varied(shape: tuple[int, ...]) -> torch.Tensor:
    """Numbers that differ from element to element."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


MAKERS: dict[str, Make] = {
    "bounded": lambda shape: Bounded(-varied(shape) - 1, varied(shape) + 1, shape),
    "bounded float64": lambda shape: Bounded(-3, 7.5, shape, dtype=torch.float64),
    "bounded bfloat16": lambda shape: Bounded(-3, 7.5, shape, dtype=torch.bfloat16),
    "bounded infinite": lambda shape: Bounded(-float("inf"), 5, shape),
    "bounded int32": lambda shape: Bounded(-3, varied(shape) + 3, shape, dtype=torch.int32),
    "bounded uint16": lambda shape: Bounded(2, 60_000, shape, dtype=torch.uint16),
    "bounded whole floats": lambda shape: Bounded(-2.5, 3.5, shape, domain="discrete"),
    "unbounded": lambda shape: Unbounded(shape),
    "unbounded uint8": lambda shape: Unbounded(shape, dtype=torch.uint8),
    "unbounded int64": lambda shape: Unbounded(shape, dtype=torch.int64),
    "unbounded bool": lambda shape: Unbounded(shape, dtype=torch.bool),
    "categorical": lambda shape: Categorical(5, shape),
    "categorical masked": lambda shape: Categorical(4, shape, mask=torch.tensor([True, False, True, False])),
    "multi categorical": lambda shape: MultiCategorical([2, 5], (*shape, 2)),
    "multi categorical masked": lambda shape: MultiCategorical(
        [2, 3], (*shape, 2), mask=torch.tensor([True, True, False, True, True])
    ),
    "one-hot": lambda shape: OneHot(4, (*shape, 4)),
    "one-hot numbers masked": lambda shape: OneHot(
        4, (*shape, 4), dtype=torch.int64, mask=torch.tensor([True, False, True, True])
    ),
    "multi one-hot": lambda shape: MultiOneHot([2, 3], (*shape, 5)),
    "multi one-hot masked": lambda shape: MultiOneHot(
        [2, 3], (*shape, 5), dtype=torch.float32, mask=torch.tensor([True, True, False, True, True])
    ),
    "choice": lambda shape: Choice([Bounded(-1, 1, shape), Bounded(3, 4, shape)]),
    "choice of categories": lambda shape: Choice([Categorical(3, shape), Categorical(7, shape)]),
    "unbounded whole floats": lambda shape: Unbounded(shape, dtype=torch.float32, domain="discrete"),
    "binary": lambda shape: Binary(shape=shape),
    "non tensor": lambda shape: NonTensor(shape, example_data="a"),
    "composite": nested,
}
CASES = [pytest.param(make, shape, id=f"{name} {list(shape)}") for name, make in MAKERS.items() for shape in SHAPES]
every = pytest.mark.parametrize(("make", "shape"), CASES)
TENSORS = [case for case in CASES if "non tensor" not in str(case.id) and "composite" not in str(case.id)]
every_tensor = pytest.mark.parametrize(("make", "shape"), TENSORS)
