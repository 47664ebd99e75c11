"""Rows of TED to ragged tensors, one element an episode, and back."""

from __future__ import annotations

from typing import Any

import torch

from ...ted import Key
from ..ragged import dense_rows
from .flat import Flat2TED, TED2Flat

__all__ = ["Nested2TED", "TED2Nested"]


class TED2Nested(TED2Flat):
    """Lays rows out as `TED2Flat` does, in ragged tensors `[episodes, rows, ...]`; a save hook.

    The result has the batch size `[episodes]`. Episodes end where the flag says so, in front of `shift` where the ring
    is not full, and with every lane. The arguments are those of `TED2Flat`.
    """

    _nested = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class Nested2TED(Flat2TED):
    """Undoes `TED2Nested`; a load hook with the arguments of `Flat2TED`."""

    def _dense(self, key: Key, leaf: Any) -> torch.Tensor:
        return dense_rows(leaf) if leaf.is_nested else super()._dense(key, leaf)
