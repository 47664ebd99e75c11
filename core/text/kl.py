"""Controllers of the KL coefficient: how strongly a policy is held to its reference.

The adaptive one is that of Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (2019).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch

from ..errors import UsageError

_LARGEST_ERROR = 0.2


class NoCoefficientError(UsageError, AttributeError):
    """A model has no `kl_coef` that a controller could set."""


class KLControllerBase(ABC):
    """Sets the KL coefficient `coef`, and that of `model`, an object with an attribute `kl_coef`, if there is one."""

    coef: float

    def __init__(self, model: Any) -> None:
        if model is not None and not hasattr(model, "kl_coef"):
            raise NoCoefficientError(f"the {type(model).__name__} has no attribute kl_coef, which is what is set")
        self.model = model

    @abstractmethod
    def update(self, kl_values: Any) -> float:
        """Return the coefficient after these rewards for the KL divergence, and set that of the model."""

    def _set(self, coef: float) -> float:
        self.coef = coef
        if self.model is not None:
            self.model.kl_coef = coef
        return coef


class ConstantKLController(KLControllerBase):
    """A coefficient that stays as it is: `kl_coef`, or that of `model` if None.

    UsageError (a ValueError) for neither, or a coefficient that is no number from 0; a model without `kl_coef` is an
    AttributeError, too.
    """

    def __init__(self, *, kl_coef: float | None = None, model: Any = None) -> None:
        super().__init__(model)
        if kl_coef is None and model is None:
            raise UsageError("kl_coef and model are None, expected one that has the coefficient")
        self._set(_number("kl_coef", model.kl_coef if kl_coef is None else kl_coef, zero=True))

    def update(self, kl_values: Any = None) -> float:
        """Return the coefficient, which does not depend on `kl_values`."""
        return self._set(self.coef)


class AdaptiveKLController(KLControllerBase):
    """A coefficient that grows while the divergence is above `target`, and shrinks while it is below.

    An update with n values multiplies it by 1 + error × n / `horizon`, where the error is how far the divergence is
    from the target, as a part of it, and at most ±0.2. `init_kl_coef` is the first coefficient.

    UsageError (a ValueError) for arguments that are no numbers above 0, and for updates without values, with values
    that are not finite, or with more than 5 × `horizon`, after which the coefficient could be negative.

    >>> controller = AdaptiveKLController(init_kl_coef=0.1, target=6.0, horizon=10)
    >>> round(controller.update([-2.0, -1.0]), 4)
    0.104
    """

    def __init__(self, *, init_kl_coef: float, target: float, horizon: int, model: Any = None) -> None:
        super().__init__(model)
        self.target = _number("target", target)
        self.horizon = _number("horizon", horizon)
        self._set(_number("init_kl_coef", init_kl_coef))

    def update(self, kl_values: Any) -> float:
        """Return the coefficient after `kl_values`, rewards for the divergence: -coefficient × divergence each."""
        if kl_values is None:
            raise UsageError("kl_values is None, and the coefficient follows from these values")
        values = _floats(kl_values)
        if not values:
            raise UsageError("kl_values is empty, and the coefficient follows from these values")
        if not all(map(math.isfinite, values)):
            raise UsageError(
                f"kl_values has {next(one for one in values if not math.isfinite(one))}, which is no number"
            )
        if _LARGEST_ERROR * len(values) >= self.horizon:
            raise UsageError(
                f"kl_values has {len(values):,} values, expected fewer than 5 times the horizon, {self.horizon:g}: "
                "the coefficient could be 0 or below"
            )
        divergence = -math.fsum(values) / len(values) / self.coef
        error = min(max(divergence / self.target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
        return self._set(self.coef * (1 + error * len(values) / self.horizon))


def _floats(values: Any) -> list[float]:
    try:
        if isinstance(values, torch.Tensor):
            return [float(value) for value in values.detach().flatten().tolist()]
        if isinstance(values, Iterable):
            return [float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise UsageError(f"kl_values are numbers, and one of them is none: {error}") from error
    raise UsageError(f"kl_values is a {type(values).__name__}, expected several numbers")


def _number(name: str, value: Any, *, zero: bool = False) -> float:
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not (found > 0 or (zero and found == 0)) or math.isinf(found):
        raise UsageError(f"{name} is {value!r}, expected a number {'from' if zero else 'above'} 0")
    return found
