"""Adapters for other libraries, `rbtool.adapters`: buffers of Stable-Baselines3 and d3rlpy, and D4RL's arrays."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import sb3
    from .arrays import qlearning_arrays, sequence_dataset
    from .d3rlpy import from_d3rlpy, to_d3rlpy

__all__ = ["from_d3rlpy", "qlearning_arrays", "sb3", "sequence_dataset", "to_d3rlpy"]

_HOMES = {"qlearning_arrays": "arrays", "sequence_dataset": "arrays", "from_d3rlpy": "d3rlpy", "to_d3rlpy": "d3rlpy"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{_HOMES.get(name, name)}", __name__)
    return getattr(module, name) if name in _HOMES else module
