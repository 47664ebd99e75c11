"""What samplers that go through all there is before anything comes again have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import SchemaError
from .base import Sampler

__all__ = ["EpochSampler", "Numbers", "inserted_at_random", "permutation"]

Numbers: TypeAlias = NDArray[np.int64]

_NEEDED = ("len_storage", "_sample_list", "drop_last", "_ran_out")


class EpochSampler(Sampler):
    """A sampler whose state is what is left of an epoch, as TorchRL's samplers of this kind save it."""

    has_epochs: ClassVar[bool] = True
    replacement: ClassVar[bool] = False

    def require_state(self, state: Mapping[str, Any]) -> None:
        """Raise SchemaError for a state that lacks what all samplers of this kind save."""
        missing = [name for name in _NEEDED if name not in state]
        if missing:
            raise SchemaError(f"{', '.join(missing)} is missing in the state of a {type(self).__name__}")


def permutation(length: int, generator: torch.Generator | None) -> Numbers:
    """Return the numbers below `length` in a random order."""
    device = generator.device if generator is not None else None
    return torch.randperm(length, generator=generator, device=device).numpy(force=True)


def inserted_at_random(left: Numbers, late: Numbers, generator: torch.Generator | None) -> Numbers:
    """Put numbers among others that are in a random order, so that all orders are equally likely.

    Each takes one swap: a step of the shuffle by Durstenfeld, run inside out.
    """
    order = np.concatenate([left, late])
    device = generator.device if generator is not None else None
    chances = torch.rand(len(late), generator=generator, device=device, dtype=torch.float64).tolist()
    for place, chance in enumerate(chances, start=len(left)):
        other = int(chance * (place + 1))
        order[place], order[other] = order[other], order[place]
    return order
