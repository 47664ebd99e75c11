"""From the arrays of a dataset to tensors, without copying."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict

from ..format import Array
from ..ted import Field, Key

__all__ = ["tensor_of", "tensordict_of"]


def tensor_of(array: Array, field: Field) -> torch.Tensor:
    """View an array as a tensor of the field's element type; bfloat16 arrives as its bits."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if field.dtype == "bfloat16" else tensor


def tensordict_of(tensors: Mapping[Key, torch.Tensor], batch: tuple[int, ...]) -> TensorDict:
    """Nest tensors by their keys in one tensordict of this batch size."""
    nest: dict[str, Any] = {}
    for (*folders, name), tensor in tensors.items():
        inner = nest
        for part in folders:
            inner = inner.setdefault(part, {})
        inner[name] = tensor
    return TensorDict(nest, batch_size=batch)
