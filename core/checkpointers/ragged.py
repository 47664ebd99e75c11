"""Keeps ragged tensors, which hooks may make, as dense ones: their rows, and the table of their shapes."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import MemoryMappedTensor, TensorDict, TensorDictBase, is_tensor_collection

from ..errors import CorruptDataError

__all__ = ["ROWS", "SHAPES", "dense_rows", "ragged_tensor", "with_ragged", "without_ragged"]

ROWS = "ragged_rows"
SHAPES = "ragged_shapes"


def ragged_tensor(shapes: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a ragged tensor for rows of these shapes, int64 `[n, dimensions]`, and a view `[rows, ...]` of its memory.

    All rows have one shape, that is: `shapes` differ in the first column only.
    """
    rows, tail = int(shapes[:, 0].sum()), shapes[0, 1:].tolist()
    ragged: torch.Tensor = MemoryMappedTensor.empty(shapes, dtype=dtype)
    strides = torch.empty((rows, *tail), device="meta").stride()
    flat = torch.empty(0, dtype=dtype).set_(ragged.untyped_storage(), 0, (rows, *tail), strides)
    return ragged, flat


def dense_rows(ragged: torch.Tensor) -> torch.Tensor:
    """Return the rows of a ragged tensor `[rows, ...]`, one element behind the other."""
    return torch.cat([part.as_subclass(torch.Tensor) for part in ragged.unbind(0)])


def without_ragged(data: Any) -> Any:
    """Replace each ragged tensor of a tensordict by a pair of dense ones."""
    if not isinstance(data, TensorDictBase):
        return data
    found = TensorDict({}, [])
    ragged = False
    for key, value in data.items():
        if isinstance(value, torch.Tensor) and value.is_nested:
            shapes = torch.tensor([list(part.shape) for part in value.unbind(0)])
            found.set(key, TensorDict({ROWS: dense_rows(value), SHAPES: shapes}, []))
            ragged = True
        elif is_tensor_collection(value) and isinstance(value, TensorDictBase):
            inner = without_ragged(value)
            ragged |= inner is not value
            found.set(key, inner)
        else:
            found.set(key, value)
    return found if ragged else data


def with_ragged(data: Any) -> Any:
    """Undo `without_ragged`; CorruptDataError for shapes that do not fit the rows."""
    if not isinstance(data, TensorDictBase):
        return data
    found, count = {}, None
    for key, value in data.items():
        if isinstance(value, TensorDictBase):
            if set(value.keys()) == {ROWS, SHAPES}:
                value = _ragged(value[ROWS], value[SHAPES])
                count = value.size(0)
            else:
                value = with_ragged(value)
        found[key] = value
    if count is None and all(found[key] is data.get(key) for key in found):
        return data
    return TensorDict(found, data.batch_size if count is None else [count])


def _ragged(rows: torch.Tensor, shapes: torch.Tensor) -> torch.Tensor:
    whole = shapes.dim() == 2 and len(shapes) and shapes.shape[1] == rows.dim() and int(shapes.min()) >= 0
    if not whole or int(shapes[:, 0].sum()) != len(rows) or bool((shapes[:, 1:] != shapes[0, 1:]).any()):
        raise CorruptDataError(f"a table of shapes {list(shapes.shape)} does not fit rows {list(rows.shape)}")
    ragged, flat = ragged_tensor(shapes, rows.dtype)
    flat.copy_(rows)
    return ragged
