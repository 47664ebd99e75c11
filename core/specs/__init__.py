"""Specs: which shape, element type and values something may have."""

from .base import TensorSpec
from .bounded import Bounded, BoundedContinuous, BoundedDiscrete, Unbounded, UnboundedContinuous, UnboundedDiscrete
from .categorical import Binary, Categorical
from .composite import Composite
from .multi_categorical import MultiCategorical
from .non_tensor import NonTensor
from .spaces import spec_from_space
from .values import (
    BinaryBox,
    Box,
    BoxList,
    CategoricalBox,
    ContinuousBox,
    LockedSpecError,
    NotInSpecError,
    SpecTypeError,
    UndefinedForSpecError,
)

__all__ = [
    "Binary",
    "BinaryBox",
    "Bounded",
    "BoundedContinuous",
    "BoundedDiscrete",
    "Box",
    "BoxList",
    "Categorical",
    "CategoricalBox",
    "Composite",
    "ContinuousBox",
    "LockedSpecError",
    "MultiCategorical",
    "NonTensor",
    "NotInSpecError",
    "SpecTypeError",
    "TensorSpec",
    "Unbounded",
    "UnboundedContinuous",
    "UnboundedDiscrete",
    "UndefinedForSpecError",
    "spec_from_space",
]
