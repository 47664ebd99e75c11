"""The names that specs had before: they are the classes of today, and warn when they are called."""

from __future__ import annotations

import warnings
from typing import Any

from .bounded import Bounded
from .categorical import Binary, Categorical
from .composite import Composite
from .multi_categorical import MultiCategorical
from .non_tensor import NonTensor
from .one_hot import MultiOneHot, OneHot
from .stacked import Stacked
from .stacked_composite import StackedComposite
from .unbounded import UnboundedContinuous, UnboundedDiscrete


class _Renamed(type):
    """Makes instances of the class `now`, and takes them for its own."""

    now: type

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        warnings.warn(f"{cls.__name__} is now called {cls.now.__name__}", DeprecationWarning, stacklevel=2)
        return cls.now(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.now)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.now)


class BinaryDiscreteTensorSpec(metaclass=_Renamed):
    """The former name of Binary; a call warns."""

    now = Binary


class BoundedTensorSpec(metaclass=_Renamed):
    """The former name of Bounded; a call warns."""

    now = Bounded


class CompositeSpec(metaclass=_Renamed):
    """The former name of Composite; a call warns."""

    now = Composite


class DiscreteTensorSpec(metaclass=_Renamed):
    """The former name of Categorical; a call warns."""

    now = Categorical


class LazyStackedCompositeSpec(metaclass=_Renamed):
    """The former name of StackedComposite; a call warns."""

    now = StackedComposite


class LazyStackedTensorSpec(metaclass=_Renamed):
    """The former name of Stacked; a call warns."""

    now = Stacked


class MultiDiscreteTensorSpec(metaclass=_Renamed):
    """The former name of MultiCategorical; a call warns."""

    now = MultiCategorical


class MultiOneHotDiscreteTensorSpec(metaclass=_Renamed):
    """The former name of MultiOneHot; a call warns."""

    now = MultiOneHot


class NonTensorSpec(metaclass=_Renamed):
    """The former name of NonTensor; a call warns."""

    now = NonTensor


class OneHotDiscreteTensorSpec(metaclass=_Renamed):
    """The former name of OneHot; a call warns."""

    now = OneHot


class UnboundedContinuousTensorSpec(metaclass=_Renamed):
    """The former name of UnboundedContinuous; a call warns."""

    now = UnboundedContinuous


class UnboundedDiscreteTensorSpec(metaclass=_Renamed):
    """The former name of UnboundedDiscrete; a call warns."""

    now = UnboundedDiscrete
