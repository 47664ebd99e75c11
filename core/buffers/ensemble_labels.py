"""The labels of the elements of an ensemble: the member and the row that each is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, is_tensor_collection

from ..errors import SchemaError
from ..storages.ensemble import BUFFER_IDS, INDEX, SOURCE_ID, IndexPart, StorageEnsemble
from .pytrees import ragged_elements


def labelled(sample: Any, index: TensorDict | None, source_key: str | None) -> Any:
    """Return the batch of a member with `"index"`, `[n]` rows of an index of an ensemble, and its source.

    Without an index the entry is left out. SchemaError if the batch has an entry of the name `source_key` already.
    """
    if not is_tensor_collection(sample):
        return sample
    if index is None:
        return sample.exclude(INDEX)
    if source_key is not None and sample.get(source_key, None) is not None:
        raise SchemaError(
            f"a member has an entry {source_key!r} of its own",
            hint="choose another source_key, or None to leave it out",
        )
    if (elements := ragged_elements(sample)) is not None:
        found = [labelled(one.unsqueeze(0), index[place : place + 1], source_key) for place, one in enumerate(elements)]
        return LazyStackedTensorDict.lazy_stack([one[0] for one in found])
    batch = sample.batch_size
    labels = {name: _spread(index.get(name), batch) for name in (BUFFER_IDS, INDEX)}
    sample.set(INDEX, TensorDict(labels, batch))
    if source_key is not None:
        sample.set(source_key, _spread(index.get(SOURCE_ID), batch))
    return sample


def _spread(values: torch.Tensor, batch: torch.Size) -> torch.Tensor:
    """Give the labels of elements, `[n, …]`, the shape of a batch: `[n]`, slices, or elements of several steps."""
    if values.shape[:1] == batch[:1] and len(batch) == 1:
        return values
    rest = values.shape[1:]
    if len(values) == batch.numel():
        return values.reshape(*batch, *rest)
    if len(values) != batch[0]:
        raise SchemaError(f"a transform changed the number of rows from {len(values)} to {list(batch)}")
    return values.reshape(len(values), *[1] * (len(batch) - 1), *rest).expand(*batch, *rest).contiguous()


def one_behind_another(batch: Any) -> Any:
    """Return a batch `[k, n, …]` as `[k * n, …]`."""
    if isinstance(batch, torch.Tensor) or is_tensor_collection(batch):
        return torch.cat(list(batch.unbind(0)))
    raise SchemaError(f"the batch of an ensemble in an ensemble is a {type(batch).__name__}, expected a tensordict")


def part_of_index(index: Any, storage: StorageEnsemble) -> Iterator[tuple[int, Any, Any, torch.Tensor]]:
    """Yield each member that the index of a batch names, its storage, the rows there and which elements they are.

    Rows are int64 `[n]`, coordinates `[n, ndim]`, or the index of a nested ensemble.
    """
    ids, numbers, sources = index.get(BUFFER_IDS), index.get(INDEX), index.get(SOURCE_ID, None)
    if numbers.shape[: ids.dim()] != ids.shape:
        ids = ids.reshape(*ids.shape, *[1] * (numbers.dim() - ids.dim())).expand(numbers.shape)
    for number in ids.unique().tolist():
        chosen = ids == number
        member, rows = storage.members[number], numbers[chosen]
        if isinstance(member, StorageEnsemble):
            if sources is None:
                raise SchemaError(f"member {number} is an ensemble, and the index has no source_id of its rows")
            inner = sources[chosen] - int(storage.sources[number])
            entries = {BUFFER_IDS: member.members_of(inner), INDEX: rows, SOURCE_ID: inner}
            yield number, member, TensorDict(entries, [len(rows)]), chosen
        else:
            known = IndexPart(rows, None).rows
            yield number, member, torch.stack(known, -1) if isinstance(known, tuple) else known, chosen
