"""The index of an ensemble: the rows that the samplers of its members drew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict
from torch import from_numpy

from ..errors import SchemaError
from ..storages.ensemble import BUFFER_IDS, INDEX, SOURCE_ID, StorageEnsemble
from ..storages.gathering import MemberRows, Parts
from ..storages.pytree import TensorDictNode, TensorNode

_INDEX = TensorDictNode({BUFFER_IDS: TensorNode(), INDEX: TensorNode(), SOURCE_ID: TensorNode()})

BatchForm: TypeAlias = Literal["stack", "exact"]
"""`stack`: `[k, batch // k]`, one row for each of k draws of a member; `exact`: `[batch]`."""


def draw_fully(member: int, count: int, form: BatchForm, unit: int, draw: Callable[[int], Sequence[Any]]) -> list[Any]:
    """Draw `count` elements of a member, in exact batches with as many draws as it takes.

    A sampler without replacement returns fewer at the end of an epoch. SchemaError (a RuntimeError) for one that
    returns more than it was asked for, or nothing, and for one whose slices are shorter than asked for, if the rest is
    no multiple of its `unit`: a part of a slice would end without a mark.
    """
    found, missing = [], count
    while missing:
        drawn = draw(missing)
        got = count_of(drawn[0])
        found.append((member, *drawn))
        if form == "stack":
            break
        missing -= got
        if missing % unit and got and missing > 0:
            raise SchemaError(
                f"member {member} drew {got} of {missing + got} elements, and the other {missing} are no whole slice: "
                "it has trajectories shorter than its slices",
                hint="give it a sampler with strict_length=True, or shorter slices",
            )
        if missing < 0 or not got:
            raise SchemaError(f"the sampler of member {member} returned {got} elements, expected {missing + got}")
    return found


def count_of(index: Any) -> int:
    """Return how many elements an index names."""
    first = index[0] if isinstance(index, tuple) else index
    return flattened(first).get(SOURCE_ID).numel() if isinstance(first, TensorDict) else int(first.numel())


def rows_of(parts: Sequence[Any]) -> MemberRows | None:
    """Return the rows of drawn parts, each `(member, index, …)`; None for other indices than row numbers."""
    numbers = []
    for part in parts:
        index = part[1]
        if isinstance(index, tuple) and len(index) == 1:
            index = index[0]
        if type(index) is not torch.Tensor or index.dim() != 1 or not index.is_cpu:
            return None
        numbers.append(index.numpy())
    counts = [(part[0], len(one)) for part, one in zip(parts, numbers, strict=True)]
    return MemberRows(Parts(counts), np.concatenate(numbers))


def labels_of(
    rows: MemberRows, storage: StorageEnsemble, form: BatchForm
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the entries `"buffer_ids"`, `"index"` and `"source_id"` of a batch, in its form.

    With `"stack"` the parts have one length.
    """
    ids, sources = rows.parts.labels(storage.sources)
    numbers = rows.numbers
    if form == "stack":  # arrays take a fifth of the time of views of tensors
        shape = len(rows.parts), -1
        ids, numbers, sources = ids.reshape(shape), numbers.reshape(shape), sources.reshape(shape)
    return from_numpy(ids), from_numpy(numbers), from_numpy(sources)


def index_of(rows: MemberRows, storage: StorageEnsemble, form: BatchForm) -> TensorDict:
    """Make the index of an ensemble of rows."""
    return index_with(rows, labels_of(rows, storage, form))


def index_with(rows: MemberRows, labels: Sequence[torch.Tensor]) -> TensorDict:
    """Make the index of an ensemble of rows with these labels."""
    ids, numbers, sources = labels
    if ids.dim() > 1:
        ids = torch.from_numpy(rows.parts.members.copy())
    index: TensorDict = _INDEX.unflatten(iter((ids, numbers, sources)), ids.shape)
    return index


def compose(parts: Sequence[Any], storage: StorageEnsemble, form: BatchForm) -> tuple[TensorDict, dict[str, Any]]:
    """Make the index of an ensemble of drawn parts, each `(member, index, info, …)`, and their common info."""
    rows, infos = rows_of(parts), [part[2] for part in parts]
    if rows is not None and (form == "exact" or rows.parts.equal):
        return index_of(rows, storage, form), _common(infos, torch.cat if form == "exact" else torch.stack)
    numbers = [_numbers(part[1]) for part in parts]
    width = max(one.shape[-1] if one.dim() > 1 else 1 for one in numbers)
    if width > 1:
        numbers = [_widened(one, width) for one in numbers]
    ids = torch.tensor([part[0] for part in parts])
    sources = [_sources(part[1], part[0], storage, one) for part, one in zip(parts, numbers, strict=True)]
    if form == "exact":
        lengths = torch.tensor([len(one) for one in numbers])
        index = {BUFFER_IDS: ids.repeat_interleave(lengths), INDEX: torch.cat(numbers), SOURCE_ID: torch.cat(sources)}
        return TensorDict(index, [int(lengths.sum())]), _common(infos, torch.cat)
    together = torch.stack if len({one.shape for one in numbers}) == 1 else _nested
    index = {BUFFER_IDS: ids, INDEX: together(numbers), SOURCE_ID: together(sources)}
    return TensorDict(index, [len(parts)]), _common(infos, torch.stack)


def _nested(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def _numbers(index: Any) -> torch.Tensor:
    """Return row numbers int64 `[n]`, or coordinates `[n, ndim]`."""
    if isinstance(index, TensorDict):  # of a nested ensemble
        numbers: torch.Tensor = flattened(index).get(INDEX)
        return numbers
    if isinstance(index, tuple):
        flat = [part.reshape(-1).cpu() for part in index]
        return flat[0] if len(flat) == 1 else torch.stack(flat, -1)
    return index.reshape(-1).cpu()  # type: ignore[no-any-return]


def _widened(numbers: torch.Tensor, width: int) -> torch.Tensor:
    wide = numbers.unsqueeze(-1) if numbers.dim() == 1 else numbers
    return torch.nn.functional.pad(wide, (0, width - wide.shape[-1]), value=-1)


def _sources(index: Any, member: int, storage: StorageEnsemble, numbers: torch.Tensor) -> torch.Tensor:
    first = int(storage.sources[member])
    if isinstance(index, TensorDict):
        inner: torch.Tensor = flattened(index).get(SOURCE_ID)
        return inner + first
    return torch.full((len(numbers),), first)


def flattened(index: TensorDict) -> TensorDict:
    """Return the index of a nested ensemble row by row: `[n]` instead of `[k, n / k]`."""
    if index.get(SOURCE_ID).dim() == 1 and not index.get(INDEX).is_nested:
        return index
    ids, numbers, sources = index.get(BUFFER_IDS), index.get(INDEX), index.get(SOURCE_ID)
    parts = list(zip(numbers.unbind(), sources.unbind(), strict=True))
    flat = {
        BUFFER_IDS: ids.repeat_interleave(torch.tensor([len(part) for part, _ in parts])),
        INDEX: torch.cat([part for part, _ in parts]),
        SOURCE_ID: torch.cat([source for _, source in parts]),
    }
    return TensorDict(flat, [len(flat[INDEX])])


def _common(
    infos: Sequence[Mapping[Any, Any]], together: Callable[[list[torch.Tensor]], torch.Tensor]
) -> dict[Any, Any]:
    """Return the entries that all infos have, as tensors of one type and row shape."""
    found: dict[Any, Any] = {}
    for key, value in (infos[0] if infos else {}).items():
        values = [info.get(key) for info in infos]
        if key == INDEX or not all(isinstance(one, torch.Tensor) and one.dtype == value.dtype for one in values):
            continue
        part = slice(1, None) if together is torch.cat else slice(0, None)
        if len({one.shape[part] for one in values}) == 1:  # type: ignore[union-attr]
            found[key] = together(values)  # type: ignore[arg-type]
    return found
