"""What samplers that go through all there is before anything comes again have in common."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import CorruptDataError, SchemaError
from ..storages import Storage
from .base import Sampler
from .folder import read_state, write_state

__all__ = ["EpochSampler", "Numbers", "inserted_at_random", "permutation"]

Numbers: TypeAlias = NDArray[np.int64]

_NEEDED = ("len_storage", "_sample_list", "drop_last", "_ran_out")


class EpochSampler(Sampler):
    """Says when an epoch is over, and keeps its state in a folder, as TorchRL's samplers of this kind do."""

    has_epochs: ClassVar[bool] = True
    _replacement: ClassVar[bool] = False

    _ran_out = False

    @property
    def ran_out(self) -> bool:
        """Whether the batch drawn last was the last of its epoch."""
        return self._ran_out

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        self._ran_out = bool(value)

    @abstractmethod
    def _epoch_batches(self, storage: Storage, batch_size: int) -> int:
        """Return how many batches a whole epoch has of the elements that are there now."""

    @abstractmethod
    def _forget(self) -> None:
        """Go back to before the first epoch."""

    def _begin_anew(self) -> None:
        self._forget()

    def _require_state(self, state: Mapping[str, Any]) -> None:
        """Raise SchemaError for a state that lacks what all samplers of this kind save."""
        missing = [name for name in _NEEDED if name not in state]
        if missing:
            raise SchemaError(f"{', '.join(missing)} is missing in the state of a {type(self).__name__}")

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Write the state into the folder `path`, as a memory-mapped tensordict."""
        state = self.state_dict()
        write_state(Path(path), {k: v if v is None else torch.as_tensor(v) for k, v in state.items()})

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Take over what `dumps`, here or in TorchRL, wrote; CorruptDataError for a state that cannot be."""
        state = read_state(Path(path))
        try:
            self.load_state_dict(state)
        except SchemaError as error:
            raise CorruptDataError(f"{path} cannot be read: {error}") from error


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
