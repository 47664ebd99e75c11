"""Batches of an ensemble of buffers, and the entries in which its members differ."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, is_tensor_collection

from ..errors import UsageError
from ..samplers.ensemble import unit_of
from ..samplers.ensemble_index import compose, count_of, draw_fully, flattened
from ..storages.ensemble import BUFFER_IDS, INDEX, SOURCE_ID
from ..storages.gathering import Gatherer
from .concurrency import Draw
from .ensemble_rows import gathered, labelled, one_behind_another
from .ensemble_state import EnsembleState
from .schemas import MASK, Joiner, Schema, SchemaDifference, differences, schema_of


class EnsembleDraws(EnsembleState):
    """Draws rows of the members of an ensemble, and makes batches of them."""

    _collates: list[Callable[[Any], Any] | None]
    _joiner: Joiner
    _gatherer: Gatherer

    # Sampling --------------------------------------------------------------------------------------

    def sample_counts(self, counts: Sequence[int], *, return_info: bool = False) -> Any:
        """Draw a batch with this many elements of each member, one behind the other; see `sample`.

        For ensembles with `batch="exact"`, whose weights are not used. UsageError (a ValueError) for other numbers.
        """
        if self._sampler.batch != "exact" or len(counts) != len(self._members) or min(counts) < 0 or not any(counts):
            raise UsageError(
                f"{list(counts)} elements of {len(self._members)} members were asked for, one number each is expected",
                hint='make the ensemble with batch="exact"',
            )
        with self._sampling:
            self._settle()
        draw = self._draw_counts([(member, count) for member, count in enumerate(counts) if count])
        batch = self._batch_of(draw)
        return (batch, draw.info) if return_info else batch

    def _draw(self, size: int) -> Draw:
        with self._sampling:
            return self._draw_counts(self._refresh()._sampler.counts(self._storage.sizes, size))

    def _draw_counts(self, counts: Sequence[tuple[int, int]]) -> Draw:
        with self._sampling:
            sampler, found = self._refresh()._sampler, []
            for member, count in counts:
                drawing = self._drawing(member)
                found += draw_fully(member, count, sampler.batch, drawing)
            self._learn_schemas()
            draw = self._composed(found)
            if any(member.transform.draws for member in self._members):  # random numbers come in the caller's thread
                draw.rows = self._samples_of(draw)
            return draw

    def _drawing(self, number: int) -> Callable[[int], tuple[Any, Mapping[Any, Any], Draw]]:
        member = self._members[number]

        def drawn(count: int) -> tuple[Any, Mapping[Any, Any], Draw]:
            with member._sampling:
                member._settle()
                draw = member._draw(count)
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
        """Return the batch of members that are alike, at once; None where each makes its own."""
        if self._collates or self._joiner.policy is not None:
            return None
        stack = self._sampler.batch == "stack"
        batch = gathered(self._gatherer, self._members, draw, stack=stack)
        if batch is None or (self._source_key is not None and self._source_key in batch._tensordict):
            return None  # an entry of that name is refused there
        index, size = draw.index, batch.batch_size
        ids = index.get(BUFFER_IDS)
        if stack:
            ids = ids.unsqueeze(-1).expand(size).contiguous()
        labels: dict[Any, Any] = {BUFFER_IDS: ids, INDEX: index.get(INDEX)}
        batch._tensordict[INDEX] = TensorDict._new_unsafe(labels, batch_size=size)
        if self._source_key is not None:
            batch._tensordict[self._source_key] = index.get(SOURCE_ID)
        return batch

    def _samples_of(self, draw: Draw) -> list[tuple[int, Any]]:
        parts: list[tuple[int, Any, dict[Any, Any]]] = [
            (number, self._part_index(part), {}) for number, part in draw.parts
        ]
        index, _ = compose(parts, self._storage, "exact")
        found, start = [], 0
        for (number, rows, _), (_, part) in zip(parts, draw.parts, strict=True):
            stop = start + count_of(rows)
            sample = self._sample_of(number, part)
            found.append((number, labelled(sample, index[start:stop], self._source_key)))
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
            batch = member._batch_of(part)
            flat = batch if member._sampler.batch == "exact" else one_behind_another(batch)
            key = member._source_key
            return flat.exclude(key) if key is not None and is_tensor_collection(flat) else flat
        if collate is None:
            return member._batch_of(part)
        rows = member._guard.read(member.storage.get, part.index) if part.rows is None else part.rows
        return member._changed(collate(rows), part)

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
        sizes = self._refresh()._storage.sizes
        return {number: self._probed(number) for number, size in enumerate(sizes) if size}

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
            return member._nested_schema()
        with member._sampling:
            sampler = copy.deepcopy(member.sampler)
            sampler.generator = torch.Generator().manual_seed(0)
            index, info, rows = sampler.sample_rows(member.storage, unit_of(sampler))
            member.transform.set_rng(sampler.generator)
            try:
                draw = Draw(index, dict(info) | {INDEX: index}, rows=rows)
                return schema_of(labelled(self._sample_of(number, draw), None, None))
            finally:
                member.transform.set_rng(member._sampler.generator)

    def _nested_schema(self) -> Schema:
        schemas = self._schemas()
        different = {one.key for one in differences(schemas)}
        found: Schema = {}
        for schema in schemas.values():
            found |= schema
        if self._joiner.policy == "union":
            return found | {(MASK, *key): ("torch.bool", ()) for key in found if ".".join(key) in different}
        return {key: kind for key, kind in found.items() if ".".join(key) not in different}
