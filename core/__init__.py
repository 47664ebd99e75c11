"""The library under the verbs: what TED is, how a dataset lies on disk, and what is done with it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .samplers import RandomSampler, Sampler
    from .storages import Storage, TensorStorage

_HOMES = {"RandomSampler": "samplers", "Sampler": "samplers", "Storage": "storages", "TensorStorage": "storages"}

__all__ = ["RandomSampler", "Sampler", "Storage", "TensorStorage"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
