"""The arguments of an ensemble of buffers: members, or their parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from ..errors import SchemaError
from ..samplers.ensemble import SamplerEnsemble
from ..storages.ensemble import EnsembleKindError, StorageEnsemble
from ..writers.ensemble import WriterEnsemble
from .base import ReplayBuffer
from .parts import WrongKindError


def refuse_sampler(sampler: Any) -> NoReturn:
    """Raise EnsembleKindError (a TypeError) for a sampler that is no `SamplerEnsemble`."""
    raise EnsembleKindError(f"an ensemble takes a SamplerEnsemble, found a {type(sampler).__name__}")


def refuse_both(parts: Mapping[str, Any]) -> None:
    """Raise SchemaError (a RuntimeError) if buffers and parts were given."""
    both = [name for name, part in parts.items() if part is not None]
    if both:
        raise SchemaError(f"buffers and {', '.join(both)} were given, an ensemble is made of one or the other")


def checked_collates(collates: Any, count: int) -> list[Any]:
    """Return the collate functions of members, none or `count`; EnsembleKindError for another number."""
    if collates is None:
        return []
    if len(collates) != count:
        raise EnsembleKindError(f"{len(collates)} collate_fns were given for {count} members")
    return list(collates)


def members_of(parts: Mapping[str, Any], given: Mapping[str, Any], collates: Any) -> list[ReplayBuffer]:
    """Make buffers of the parts of an ensemble.

    SchemaError (a RuntimeError) if a part is missing, if they are not of one number, and for arguments that the
    `SamplerEnsemble` has.
    """
    missing = [name for name, part in parts.items() if part is None]
    if missing:
        raise SchemaError(f"neither buffers nor {', '.join(missing)} were given, all parts of an ensemble are needed")
    kinds = {"storages": StorageEnsemble, "samplers": SamplerEnsemble, "writers": WriterEnsemble}
    for name, kind in kinds.items():
        if not isinstance(parts[name], kind):
            raise WrongKindError(f"{name} is a {type(parts[name]).__name__}, expected a {kind.__name__}")
    defaults = {"p": None, "sample_from_all": False, "num_buffer_sampled": None, "temperature": 1.0, "batch": "stack"}
    for name, value in given.items():
        if value is not None and value != defaults[name]:
            raise SchemaError(f"samplers and {name} were given, the SamplerEnsemble takes it")
    counts = {name: len(part) for name, part in parts.items()}
    if len(set(counts.values())) > 1:
        raise SchemaError(
            f"{', '.join(f'{count} {name}' for name, count in counts.items())} were given: one number is expected"
        )
    storages = parts["storages"]
    own = checked_collates(collates, len(storages)) or [None] * len(storages)
    return [
        ReplayBuffer(storage=storage, sampler=sampler, writer=writer, transform=transform, collate_fn=collate)
        for storage, transform, sampler, writer, collate in zip(
            storages.members, storages.transforms, parts["samplers"].members, parts["writers"].members, own, strict=True
        )
    ]
