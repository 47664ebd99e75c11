"""Adapters for other libraries, `rbtool.adapters`: buffers of Stable-Baselines3 and d3rlpy, and D4RL's arrays."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "from_d3rlpy": "d3rlpy", "qlearning_arrays": "arrays", "sb3": "", "sequence_dataset": "arrays",
    "to_d3rlpy": "d3rlpy",
}  # fmt: skip
"""The module of each name; sb3 is a module itself."""

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{_HOMES[name] or name}", __name__)
    return getattr(module, name) if _HOMES[name] else module
