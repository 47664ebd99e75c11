"""Specs: which shape, element type and values something may have."""

from .base import TensorSpec
from .binary import Binary
from .bounded import Bounded, BoundedContinuous, BoundedDiscrete
from .boxes import BinaryBox, Box, BoxList, CategoricalBox, ContinuousBox
from .categorical import Categorical
from .composite import Composite
from .failures import LockedSpecError, NotInSpecError, SpecTypeError, UndefinedForSpecError
from .multi_categorical import MultiCategorical
from .non_tensor import NonTensor
from .spaces import spec_from_space
from .unbounded import Unbounded, UnboundedContinuous, UnboundedDiscrete

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
