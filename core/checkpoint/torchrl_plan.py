"""Lays the leaves of TED rows out as TorchRL's flat, nested and H5 layouts do, and refuses what they cannot hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import SchemaError
from ..ted import NEXT, Field, Key, key_name
from .filled import FilledStorage
from .layout import CompactForm
from .torchrl_h5 import H5_LENGTH
from .torchrl_header import TorchrlHeader, TorchrlKeys

__all__ = ["OWN_FORM", "TorchrlPlan"]

OWN_FORM = "rbtool's own form, without compatible=True and --for torchrl, keeps everything"

_DIMENSIONS = 2
"""Of how many dimensions TorchRL 0.14 loads storages from these layouts."""
_VANISHING = frozenset({"shape", "device", "_type"})


@dataclass(frozen=True, slots=True)
class TorchrlPlan:
    """The stored leaves by the TED key whose values they hold; the key of each field is its place.

    `states` have one row more behind every end, `steps` one a step; `silent` are root done flags, which TorchRL makes
    up as false and which must be that.
    """

    header: TorchrlHeader
    done: Key
    states: Mapping[Key, Field]
    steps: Mapping[Key, Field]
    silent: Sequence[Key]

    @classmethod
    def of(cls, fields: Sequence[Field], filled: FilledStorage, keys: TorchrlKeys, form: CompactForm) -> TorchrlPlan:
        """Lay fields out for a form; SchemaError names the first leaf for which there is no place."""
        header = _header(filled)
        by_key = {field.key: field for field in fields}
        _require_one_flag(by_key, keys)
        results = [key for key in dict.fromkeys((*keys.dones, *keys.rewards)) if (NEXT, *key) in by_key]
        after = [field.key[1:] for field in fields if field.key[0] == NEXT]
        states = {}
        for key in after:
            if key in results:
                continue
            if key not in by_key:
                raise _refused(f"{NEXT}.{key_name(key)} is below {NEXT!r} only", "its states are at the root, too")
            if (by_key[key].dtype, by_key[key].shape) != (by_key[NEXT, *key].dtype, by_key[NEXT, *key].shape):
                raise _refused(f"{key_name(key)} and what is below {NEXT!r} differ in type or shape", "they are alike")
            states[key] = by_key[key]
        reward = next((key for key in keys.rewards if key in by_key), None)
        if reward is not None:
            raise _refused(f"there is a {key_name(reward)} at the root", f"rewards are below {NEXT!r} only")
        silent = [key for key in keys.dones if key in by_key]
        lone = next((key for key in silent if key not in results), None)
        if lone is not None:
            raise _refused(f"{key_name(lone)} is at the root only", f"done flags are below {NEXT!r}")
        taken = {*states, *silent}
        steps = {key: by_key[key] for key in by_key if key[0] != NEXT and key not in taken}
        steps |= {(NEXT, *key): _moved(by_key[NEXT, *key], key) for key in results}
        plan = cls(header, (NEXT, *keys.done), states, steps, silent)
        plan._require_places(form, keys)
        return plan

    @property
    def leaves(self) -> list[Field]:
        """All stored leaves."""
        return [*self.states.values(), *self.steps.values()]

    def bytes(self, ends: int) -> int:
        """Bytes of all rows, also of those that were never written."""
        per_state = sum(field.row_bytes for field in self.states.values())
        return per_state * (self.header.steps + ends) + self.header.steps * sum(
            field.row_bytes for field in self.steps.values()
        )

    def _require_places(self, form: CompactForm, keys: TorchrlKeys) -> None:
        names = keys.names | ({H5_LENGTH} if form == "h5" else {"storage_metadata.json"})
        for field in self.leaves:
            if field.key[0] in names and form != "h5":
                raise _refused(f"there is an entry {field.name!r}", "that name is the layout's own")
            if form != "h5" and _VANISHING & set(field.key):
                raise _refused(f"there is an entry {field.name!r}", "tensordict keeps that name for itself")
            if form == "h5" and any("/" in part or "\0" in part or part in {"", ".", ".."} for part in field.key):
                raise _refused(f"there is an entry {field.name!r}", "HDF5 takes such a name for a path")
            if form == "h5" and field.dtype == "bfloat16":
                raise _refused(f"{field.name} is of bfloat16", "HDF5 has no such type", "take the flat or nested form")
            if "complex" in field.dtype:
                raise _refused(f"{field.name} is of {field.dtype}", "its memory-mapped tensors hold no such numbers")
            if not math.prod(field.shape):
                raise _refused(f"{field.name} has rows without elements", "every row has some")


def _header(filled: FilledStorage) -> TorchrlHeader:
    if len(filled.shape) > _DIMENSIONS:
        raise _refused(
            f"the storage has ndim={len(filled.shape)}", f"TorchRL 0.14 loads up to {_DIMENSIONS} dimensions"
        )
    if not filled.length:
        raise SchemaError("the storage holds no row; TorchRL's layout needs one", hint="write to it first")
    rows, *lanes = filled.shape
    capacity = filled.capacity // math.prod(lanes)
    if not filled.full:
        # The row in front of it is taken for an end, and the last valid row needs that: what follows was never written.
        return TorchrlHeader((capacity, *lanes), False, rows, filled.length)
    # For rows that are not turned TorchRL writes the capacity, but then fails to load it into most buffers; of the
    # numbers that mean the same, it takes this one everywhere.
    return TorchrlHeader((capacity, *lanes), True, filled.oldest or -capacity, filled.length)


def _require_one_flag(fields: Mapping[Key, Field], keys: TorchrlKeys) -> None:
    done = fields.get((NEXT, *keys.done))
    if done is None:
        raise _refused(
            f"there is no {NEXT}.{key_name(keys.done)}", "that flag ends episodes", "name it with done_key=..."
        )
    if done.shape not in {(), (1,)}:
        raise _refused(f"{done.name} has {list(done.shape)} numbers a step", "one flag ends an episode for all agents")


def _moved(field: Field, place: Key) -> Field:
    return Field(place, field.dtype, field.shape, field.role)


def _refused(found: str, expected: str, hint: str = OWN_FORM) -> SchemaError:
    return SchemaError(f"{found}, which TorchRL's layout cannot hold: {expected}", hint=hint)
