"""torch functions on specs: `torch.stack`, `squeeze`, `unsqueeze` and `index_select`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import SchemaError
from .failures import SpecTypeError, UndefinedForSpecError
from .shaping import normal_dim

if TYPE_CHECKING:
    from .base import TensorSpec

__all__ = ["FUNCTIONS"]


def _stack(specs: Sequence[TensorSpec], dim: int = 0, *, out: Any = None) -> TensorSpec:
    """Stack specs that differ in bounds, masks or categories at most into one with a dimension more."""
    _expect_no_out(out)
    first = specs[0]
    for spec in specs:
        if type(spec) is not type(first):
            kinds = ", ".join(sorted({type(spec).__name__ for spec in specs}))
            error = SchemaError if all(hasattr(spec, "is_in") for spec in specs) else SpecTypeError
            raise error(f"specs of one class can be stacked, found {kinds}")
        for what in ("dtype", "device", "shape"):
            found, expected = getattr(spec, what), getattr(first, what)
            if found != expected:
                raise SchemaError(f"specs of one {what} can be stacked, found {found} and {expected}")
    return first._stack(specs, normal_dim(dim, first.ndim + 1))


def _squeeze(spec: TensorSpec, dim: int | None = None, *, out: Any = None) -> TensorSpec:
    _expect_no_out(out)
    return spec.squeeze(dim)


def _unsqueeze(spec: TensorSpec, dim: int, *, out: Any = None) -> TensorSpec:
    _expect_no_out(out)
    return spec.unsqueeze(dim)


def _index_select(spec: TensorSpec, dim: int, index: torch.Tensor, *, out: Any = None) -> TensorSpec:
    _expect_no_out(out)
    place = normal_dim(dim, spec.ndim)
    picked: TensorSpec = spec[(*[slice(None)] * place, index)]
    return picked


def _expect_no_out(out: Any) -> None:
    if out is not None:
        raise UndefinedForSpecError("out= was given, but a spec is not written into another")


FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.stack: _stack,
    torch.squeeze: _squeeze,
    torch.unsqueeze: _unsqueeze,
    torch.index_select: _index_select,
}
"""Maps torch functions to their implementation for specs."""
