"""Batches of an ensemble of buffers, and the entries in which its members differ."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, is_tensor_collection

from ..errors import SchemaError, UsageError
from ..samplers.ensemble import unit_of
from ..samplers.ensemble_index import (
    BatchForm,
    compose,
    count_of,
    draw_fully,
    flattened,
    index_with,
    labels_of,
    rows_of,
)
from ..storages.ensemble import BUFFER_IDS, INDEX, SOURCE_ID, IndexPart, StorageEnsemble
from ..storages.gathering import Gatherer, MemberRows
from .concurrency import Draw
from .ensemble_state import EnsembleState
from .locks import hold_all
from .pytrees import ragged_elements
from .schemas import Joiner, Schema, SchemaDifference, differences, joined_schema, schema_of


class RowsDraw(Draw):
    """A draw of rows of members that were drawn at once; index, info and the draws of members are made when needed."""

    __slots__ = ("_source_key", "labels", "of_members")

    def __init__(self, rows: MemberRows, labels: Sequence[torch.Tensor], source_key: str | None) -> None:
        self.last, self.rows = False, None
        self.of_members = rows
        self.labels = labels
        self._source_key = source_key

    @property
    def index(self) -> Any:
        return index_with(self.labels)

    @property
    def info(self) -> Any:  # type: ignore[override]
        return {INDEX: self.index} | ({} if self._source_key is None else {self._source_key: self.labels[2]})

    @property
    def parts(self) -> Any:  # type: ignore[override]
        rows, start, found = self.of_members, 0, []
        for member, stop in zip(rows.members.tolist(), rows.stops.tolist(), strict=True):
            index = torch.from_numpy(rows.numbers[start:stop])
            found.append((member, Draw(index, {INDEX: index})))
            start = stop
        return found


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
            self.settle()
            self._refresh()
            some = [(member, count) for member, count in enumerate(counts) if count]
            rows = self._uniform_rows(sum(counts), some)
            draw = self._draw_counts(some) if rows is None else self._draw_rows(rows)
        batch = self.batch_of(draw)
        return (batch, draw.info) if return_info else batch

    def _draw(self, size: int, with_rows: bool = True) -> Draw:
        with self._sampling:
            self._refresh()
            rows = self._uniform_rows(size)
            return (
                self._draw_counts(self._sampler.counts(self._storage.sizes, size))
                if rows is None
                else self._draw_rows(rows)
            )

    def _draw_counts(self, counts: Sequence[tuple[int, int]]) -> Draw:
        """Draw so many elements of each member."""
        with self._sampling:
            self._learn_schemas()
            if reading := [self._members[number] for number, _ in counts if self._reads_at_draw(number)]:
                with hold_all({member.guard for member in reading}):  # the rows are those of the instant of the draw
                    draw = self._drawn(counts, with_rows=False)
                    draw.rows = self._gathered(draw)
                    if draw.rows is None:
                        draw.rows = self._samples_of(draw)
            else:
                draw = self._drawn(counts, with_rows=True)
            return self._completed_in_turn(draw)

    def _draw_rows(self, rows: MemberRows) -> Draw:
        """Make a draw of rows that were drawn at once."""
        self._learn_schemas()
        return self._completed_in_turn(RowsDraw(rows, labels_of(rows, self._storage, self.batch), self.source_key))

    def _completed_in_turn(self, draw: Draw) -> Draw:
        """Make the batches of transforms with random numbers now: these come in the order of the calls."""
        if draw.rows is None:
            for member in self._members:
                if member.transform.draws:
                    draw.rows = self._samples_of(draw)
                    break
        return draw

    def _uniform_rows(self, size: int, counts: Sequence[tuple[int, int]] | None = None) -> MemberRows | None:
        for member in self._members:
            if member.writer.tracks_generations:
                return None  # the info of each has them
            member.settle()
        return self._sampler.draw_uniform(self._storage, size, counts)

    def _drawn(self, counts: Sequence[tuple[int, int]], *, with_rows: bool) -> Draw:
        found: list[Any] = []
        for number, count in counts:
            unit = self._sampler.unit_of_member(number)
            found += draw_fully(number, count, self.batch, unit, partial(self._drawn_of, number, with_rows))
        return self._composed(found)

    def _drawn_of(self, number: int, with_rows: bool, count: int) -> tuple[Any, Mapping[Any, Any], Draw]:
        draw = self._members[number].draw(count, with_rows=with_rows or not self._reads_at_draw(number))
        index = flattened(draw.index) if isinstance(draw.index, TensorDict) else draw.index
        return index, draw.info, draw

    def _reads_at_draw(self, number: int) -> bool:
        """Whether rows of a member are read with their draw, and can be read by `_gathered`."""
        member = self._members[number]
        return member.sampler.reads_rows and member.returns_rows and not isinstance(member, EnsembleDraws)

    def _rows_of(self, draw: Draw) -> Any:
        rows = self._gathered(draw) if draw.rows is None else draw.rows
        if isinstance(rows, TensorDict):
            return rows if self._prefetcher is None else rows.copy()  # a batch may be made again of its draw
        samples = self._samples_of(draw) if rows is None else rows
        if self._collate_fn is not None:
            return self._collate_fn([sample for _, sample in samples])
        return self._joiner.join(samples)

    @property
    def _looking_back(self) -> list[Any]:
        """None: the rows are those of members."""
        return []

    def _gathered(self, draw: Draw) -> TensorDict | None:
        """Return the batch of members whose rows are alike, gathered at once; None where each makes its own.

        They do if they have a transform, a collate function, or info of their sampler that the others do not have.
        """
        if self._collates or self._collate_fn is not None or self._joiner.policy is not None:
            return None
        found = self._rows_and_info(draw)
        if found is None:
            return None
        rows, info = found
        for number in rows.members.tolist():
            if not self._members[number].returns_rows:
                return None
        labels = (
            draw.labels
            if isinstance(draw, RowsDraw)
            else [draw.index.get(name) for name in (BUFFER_IDS, INDEX, SOURCE_ID)]
        )
        batch = self._gatherer.gather(
            self._storage.members,
            [member.guard for member in self._members],
            rows,
            labels,
            draws=len(rows.members) if self.batch == "stack" else 0,
        )
        if batch is not None:
            for key, value in info.items():
                batch.set(key, value)
        return batch

    def _rows_and_info(self, draw: Draw) -> tuple[MemberRows, Mapping[Any, Any]] | None:
        """Return the rows of a draw, and the info that is in its batch; None where members differ in these."""
        if isinstance(draw, RowsDraw):
            return draw.of_members, {}
        parts = draw.parts
        rows = rows_of([(number, part.index) for number, part in parts])
        if rows is None or any(part.rows is not None for _, part in parts):
            return None
        if self.batch == "stack" and len(set(np.diff(rows.stops, prepend=0).tolist())) > 1:
            return None
        common = {key: value for key, value in draw.info.items() if key not in (INDEX, self.source_key)}
        carrying = {self._members[number].carries_info for number, _ in parts}
        if not any(part.info.keys() - {INDEX} for _, part in parts) or carrying == {False}:
            return rows, {}
        alike = carrying == {True} and all(part.info.keys() - {INDEX} == common.keys() for _, part in parts)
        return (rows, common) if alike else None

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
                draw = Draw(index, dict(info) | {INDEX: index}, rows=member.with_past(index, rows))
                return schema_of(labelled(self._sample_of(number, draw), None, None))
            finally:
                member.transform.set_rng(member.sampler.generator)

    def nested_schema(self) -> Schema:
        """Return the schema of the batches of this ensemble, which is a member of another."""
        return joined_schema(self._joiner.policy, self._schemas())


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
            inner = sources[chosen] - int(storage.sources[number])
            entries = {BUFFER_IDS: member.members_of(inner), INDEX: rows, SOURCE_ID: inner}
            yield number, member, TensorDict(entries, [len(rows)]), chosen
        else:
            known = IndexPart(rows, None).rows
            yield number, member, torch.stack(known, -1) if isinstance(known, tuple) else known, chosen
