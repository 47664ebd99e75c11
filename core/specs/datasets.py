"""Specs of what a dataset records: of its rows, from its fields and spaces, and of a space alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..errors import SchemaError, UsageError
from ..format.contracts import StepReader
from ..ted.schema import NEXT, Field, Key, safe_part
from .base import TensorSpec
from .bounded import BoundedContinuous, Unbounded
from .composite import Composite
from .interop import spec_from_space
from .non_tensor import NonTensor


def dataset_specs(reader: StepReader) -> Composite:
    """Return the spec of one row of a dataset, with the keys that a batch of it has.

    Observations and actions have the values of the spaces that the source records, where it does and they are of the
    shape of the field: `Bounded`, `Categorical` and so on, in the element type that is stored. Every other field is an
    Unbounded. The source may have recorded values outside its spaces, which `check` counts (TED015).
    """
    recorded = {
        key: leaf
        for name, space in reader.manifest.spaces.items()
        if space is not None
        for key, leaf in _leaves(spec_from_space(space), (name,))
    }
    specs = Composite()
    for field in reader.fields:
        specs.set(field.key, _spec_of(field, recorded.get(field.key[field.key[0] == NEXT :])))
    return specs


def _leaves(spec: TensorSpec, key: Key) -> Iterator[tuple[Key, TensorSpec]]:
    if not isinstance(spec, Composite):
        yield key, spec
        return
    for name, entry in spec.items():
        if entry is not None:
            yield from _leaves(entry, (*key, safe_part(str(name))))


def _spec_of(field: Field, recorded: TensorSpec | None) -> TensorSpec:
    """Return what is recorded, in the type and shape of the field; an Unbounded where nothing that fits it is."""
    dtype: torch.dtype = getattr(torch, field.dtype)
    anything = Unbounded(field.shape, dtype=dtype)
    if recorded is None or isinstance(recorded, NonTensor) or recorded.shape.numel() != anything.shape.numel():
        return anything
    try:
        spec = recorded.reshape(field.shape).to(dtype)
    except (SchemaError, UsageError):  # such as bounds that the type cannot hold
        return anything
    return _without_infinite_bounds(spec)


def spec_of_space(space: Mapping[str, Any]) -> TensorSpec:
    """Return the spec of a space that a source records, with an Unbounded in place of what has no finite bound.

    FormatError for a space that has no spec.
    """
    return _without_infinite_bounds(spec_from_space(space))


def _without_infinite_bounds(spec: TensorSpec) -> TensorSpec:
    """Make an Unbounded of what has no finite bound, in a nest too."""
    if isinstance(spec, Composite):
        for name, child in list(spec.items()):
            if child is not None:
                spec.set(name, _without_infinite_bounds(child))
    elif isinstance(spec, BoundedContinuous) and bool((spec.space.low.isneginf() & spec.space.high.isposinf()).all()):
        return Unbounded(spec.shape, spec.device, spec.dtype)
    return spec
