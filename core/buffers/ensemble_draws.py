"""Batches of an ensemble of buffers, and the entries in which its members differ."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, is_tensor_collection

from ..errors import SchemaError, UsageError
from ..samplers.ensemble import unit_of
from ..samplers.ensemble_index import BatchForm, compose, count_of, draw_fully, flattened
from ..storages.ensemble import BUFFER_IDS, INDEX, SOURCE_ID, IndexPart, StorageEnsemble
from ..storages.gathering import Gatherer
from .concurrency import Draw
from .ensemble_state import EnsembleState
from .pytrees import ragged_elements
from .schemas import MASK, Joiner, Schema, SchemaDifference, differences, schema_of


class EnsembleDraws(EnsembleState):
    """Draws rows of the members of an ensemble, and makes batches of them."""

    _collates: list[Callable[[Any], Any] | None]
    _joiner: Joiner
    _gatherer: Gatherer

    @property
    def batch(self) -> BatchForm:
        """The form of batches: `"stack"`, `[k, n]`, or `"exact"`, `[n]`."""
        return self._sampler.batch

    # Sampling --------------------------------------------------------------------------------------

    def sample_counts(self, counts: Sequence[int], *, return_info: bool = False) -> Any:
        """Draw a batch with this many elements of each member, one behind the other; see `sample`.

        For ensembles with `batch="exact"`, whose weights are not used. UsageError (a ValueError) for other numbers.
        """
        if self.batch != "exact" or len(counts) != len(self._members) or min(counts) < 0 or not any(counts):
            raise UsageError(
                f"{list(counts)} elements of {len(self._members)} members were asked for, one number each is expected",
                hint='make the ensemble with batch="exact"',
            )
        with self._sampling:
            self._settle()
        draw = self._draw_counts([(member, count) for member, count in enumerate(counts) if count])
        batch = self.batch_of(draw)
        return (batch, draw.info) if return_info else batch

    def _draw(self, size: int) -> Draw:
        with self._sampling:
            self._refresh()
            return self._draw_counts(self._sampler.counts(self._storage.sizes, size))

    def _draw_counts(self, counts: Sequence[tuple[int, int]]) -> Draw:
        with self._sampling:
            self._refresh()
            found: list[Any] = []
            for member, count in counts:
                found += draw_fully(member, count, self._sampler.batch, self._drawing(member))
            self._learn_schemas()
            draw = self._composed(found)
            if any(member.transform.draws for member in self._members):  # random numbers come in the caller's thread
                draw.rows = self._samples_of(draw)
            return draw

    def _drawing(self, number: int) -> Callable[[int], tuple[Any, Mapping[Any, Any], Draw]]:
        member = self._members[number]

        def drawn(count: int) -> tuple[Any, Mapping[Any, Any], Draw]:
            draw = member.draw(count)
            index = flattened(draw.index) if isinstance(draw.index, TensorDict) else draw.index
            return index, draw.info, draw

        return drawn

    def _rows_of(self, draw: Draw) -> Any:
        if self._collate_fn is None and draw.rows is None and (batch := self._gathered(draw)) is not None:
            return batch
        samples = self._samples_of(draw) if draw.rows is None else draw.rows
        if self._collate_fn is not None:
            return self._collate_fn([sample for _, sample in samples])
        return self._joiner.join(samples)

    def _gathered(self, draw: Draw) -> TensorDict | None:
        """Return the batch of members whose rows are alike, gathered at once; None where each makes its own.

        They do if they have a transform, a collate function, info of their sampler, or another kind of storage.
        """
        if self._collates or self._joiner.policy is not None:
            return None
        reads = []
        for number, part in draw.parts:
            member = self._members[number]
            if type(part.index) is not torch.Tensor or part.rows is not None or len(part.info) > 1:
                return None
            if not member.returns_rows:
                return None
            reads.append((member.storage, part.index, member.guard.read))
        return self._gatherer.gather(reads, draw.index, stack=self.batch == "stack")

    def _samples_of(self, draw: Draw) -> list[tuple[int, Any]]:
        parts: list[tuple[int, Any, dict[Any, Any]]] = [
            (number, self._part_index(part), {}) for number, part in draw.parts
        ]
        index, _ = compose(parts, self._storage, "exact")
        found, start = [], 0
        for (number, rows, _), (_, part) in zip(parts, draw.parts, strict=True):
            stop = start + count_of(rows)
            sample = self._sample_of(number, part)
            found.append((number, labelled(sample, index[start:stop], self.source_key)))
            start = stop
        return found

    @staticmethod
    def _part_index(part: Draw) -> Any:
        return flattened(part.index) if isinstance(part.index, TensorDict) else part.index

    def _sample_of(self, number: int, part: Draw) -> Any:
        """Make the batch of a member, as its `sample` returns it."""
        member = self._members[number]
        collate = self._collates[number] if self._collates else None
        if isinstance(member, EnsembleDraws):
            batch = member.batch_of(part)
            flat = batch if member.batch == "exact" else one_behind_another(batch)
            key = member.source_key
            return flat.exclude(key) if key is not None and is_tensor_collection(flat) else flat
        return member.batch_of(part, collate)

    # Schemas ---------------------------------------------------------------------------------------

    def schema_report(self) -> tuple[SchemaDifference, ...]:
        """Return the entries that members do not have alike in their batches, after their transforms.

        Members without elements are left out. Nothing is drawn from the random streams of the members.
        """
        return differences(self._schemas())

    @property
    def dropped_keys(self) -> tuple[str, ...]:
        """The entries that `schema="intersect"` leaves out of batches; those of the members that have elements."""
        self._learn_schemas()
        return self._joiner.dropped_keys

    def _schemas(self) -> dict[int, Schema]:
        self._refresh()
        return {number: self._probed(number) for number, size in enumerate(self._storage.sizes) if size}

    def _learn_schemas(self) -> None:
        if self._joiner.policy is None:
            return
        for number, size in enumerate(self._storage.sizes):
            if size and number not in self._joiner.known:
                self._joiner.learn(number, self._probed(number))

    def _probed(self, number: int) -> Schema:
        """Return the schema of the batches of a member, without a change of its sampler or its random stream."""
        member = self._members[number]
        if isinstance(member, EnsembleDraws):
            return member.nested_schema()
        with member.paused():
            sampler = copy.deepcopy(member.sampler)
            sampler.generator = torch.Generator().manual_seed(0)
            index, info, rows = sampler.sample_rows(member.storage, unit_of(sampler))
            member.transform.set_rng(sampler.generator)
            try:
                draw = Draw(index, dict(info) | {INDEX: index}, rows=rows)
                return schema_of(labelled(self._sample_of(number, draw), None, None))
            finally:
                member.transform.set_rng(member.sampler.generator)

    def nested_schema(self) -> Schema:
        """Return the schema of the batches of this ensemble, which is a member of another."""
        schemas = self._schemas()
        different = {one.key for one in differences(schemas)}
        found: Schema = {}
        for schema in schemas.values():
            found |= schema
        if self._joiner.policy == "union":
            return found | {(MASK, *key): ("torch.bool", ()) for key in found if ".".join(key) in different}
        return {key: kind for key, kind in found.items() if ".".join(key) not in different}


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
    raise SchemaError(f"the batch of an ensemble in an ensemble is a {type(batch).__name__}, a tensordict is expected")


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
            inner = sources[chosen] - storage.source_of(number)
            entries = {BUFFER_IDS: member.members_of(inner), INDEX: rows, SOURCE_ID: inner}
            yield number, member, TensorDict(entries, [len(rows)]), chosen
        else:
            known = IndexPart(rows, None).rows
            yield number, member, torch.stack(known, -1) if isinstance(known, tuple) else known, chosen
