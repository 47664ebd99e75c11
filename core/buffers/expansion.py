"""Draws whose elements are expanded by a sample unit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..errors import SchemaError, UsageError
from ..samplers.base import Index, Sampler
from ..samplers.consuming import ConsumingSampler
from ..samplers.sample_units import SampleUnit, SampleUnitTypeError, Transition
from ..storages.base import Storage
from ..storages.stream import StreamStorage
from ..writers.base import Writer

_WEIGHT = "priority_weight"
_REAL = ("collector", "mask")


class ExpandedDraws:
    """Draws anchors with a sampler, and expands them; it has what a buffer uses of a sampler to draw.

    The rows are read with the draw, so that they are those that the windows were made of.
    """

    reads_rows: ClassVar[bool] = True

    def __init__(self, sampler: Sampler, unit: SampleUnit) -> None:
        self._sampler = sampler
        self._unit = unit

    @property
    def has_epochs(self) -> bool:
        """Whether the sampler draws in epochs."""
        return self._sampler.has_epochs

    @property
    def ran_out(self) -> bool:
        """Whether the last batch was the last of its epoch."""
        return self._sampler.ran_out

    def sample(self, storage: Storage, batch_size: int) -> tuple[Index, dict[Any, Any]]:
        """Draw anchors; return the index and info of all their rows."""
        return self.expanded(storage, *self._sampler.sample(storage, batch_size))

    def sample_rows(self, storage: Storage, batch_size: int) -> tuple[Index, dict[Any, Any], Any]:
        """Draw as `sample` does; the caller reads the rows."""
        return *self.sample(storage, batch_size), None

    def expanded(self, storage: Storage, index: Index, info: Mapping[Any, Any]) -> tuple[Index, dict[Any, Any]]:
        """Return the index and info of all rows of anchors.

        SampleUnitTypeError (a TypeError) for a unit that returns anything else.
        """
        if self._sampler.needs_order and self._unit.needs_order:
            index, info = _without_slices(index, info)
        found: Any = self._unit.expand(index, info, storage)
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], Mapping):
            raise SampleUnitTypeError(f"{type(self._unit).__name__}.expand returned {found!r}, expected index and info")
        return found[0], dict(found[1])


def drawing_with(sampler: Sampler, unit: SampleUnit | None) -> Sampler | ExpandedDraws:
    """Return what draws for a buffer: the sampler itself, unless a unit expands what it draws."""
    return sampler if unit is None or type(unit) is Transition else ExpandedDraws(sampler, unit)


def checked_unit(unit: Any) -> SampleUnit | None:
    """Return a sample unit or None; SampleUnitTypeError (a TypeError) for anything else."""
    if unit is not None and not isinstance(unit, SampleUnit):
        raise SampleUnitTypeError(f"sample_unit is {unit!r}, expected a SampleUnit such as Sequence(8)")
    return unit


def check_expansion(unit: SampleUnit | None, storage: Storage, sampler: Sampler, writer: Writer) -> None:
    """Raise UsageError or SchemaError for parts of a buffer whose elements a unit cannot expand."""
    if unit is None or type(unit) is Transition:
        return
    name = type(unit).__name__
    if isinstance(storage, StreamStorage):
        raise SchemaError(
            f"a {name} needs the steps around a batch, which a stream does not keep",
            hint="take a StreamSliceSampler, or download the dataset and open it without streaming",
        )
    if unit.needs_order and not writer.keeps_order:
        raise UsageError(f"a {type(writer).__name__} puts rows anywhere, and a {name} needs them in order")
    if unit.needs_order and isinstance(sampler, ConsumingSampler):
        raise UsageError(f"the slots of consumed elements are written in any order, and a {name} needs rows in order")


def refuse_units(owner: str, units: Mapping[str, SampleUnit | None]) -> None:
    """Raise UsageError (a ValueError) for a buffer that draws elements one by one of several others."""
    for where, unit in units.items():
        if unit is not None and type(unit) is not Transition:
            raise UsageError(
                f"{where} has the sample unit {unit!r}, and {owner} draws single elements",
                hint="take a SliceSampler in each member, or sample the members in turn",
            )


def _without_slices(index: Index, info: Mapping[Any, Any]) -> tuple[Index, dict[Any, Any]]:
    """Return the real steps of slices, and of their info what does not mark their ends: windows have other ends."""
    parts = index if isinstance(index, tuple) else (index,)
    weight, real = info.get(_WEIGHT), info.get(_REAL)
    lead = parts[0].dim()
    kept = [part.reshape(-1) for part in parts]
    weight = None if weight is None else weight.flatten(0, lead - 1)
    if real is not None:
        real = real.reshape(-1)
        kept = [part[real] for part in kept]
        weight = None if weight is None else weight[real.to(weight.device)]
    return tuple(kept) if isinstance(index, tuple) else kept[0], {} if weight is None else {_WEIGHT: weight}
