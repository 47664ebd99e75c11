"""Batches of an ensemble of buffers, and the entries in which its members differ."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, is_tensor_collection

from ..errors import UsageError
from ..samplers.ensemble import (
    BatchForm,
    Counts,
    JointDraw,
    compose,
    count_of,
    draw_fully,
    flattened,
    labels_of,
    rows_of,
    unit_of,
)
from ..storages.ensemble import INDEX, Gatherer, MemberRows
from ..transforms.base import Compose
from .base import ReplayBuffer
from .concurrency import Draw
from .ensemble_labels import labelled, one_behind_another
from .ensemble_rows import RowsDraw
from .ensemble_state import EnsembleState
from .locks import Guards, HoldAll
from .schemas import Joiner, Schema, SchemaDifference, differences, joined_schema, schema_of

_IS_EMPTY = operator.attrgetter("is_empty")


class _Lineup(NamedTuple):
    """What follows from the parts of members, until one of them is exchanged."""

    guards: Guards
    apart: bool
    """Whether the draws of a member have more than the index and info of its sampler, such as generations."""
    transforms: list[Compose] | None
    """The transforms of the batches of members; None if something else makes batches of the rows of one."""
    draws: HoldAll
    """Excludes other draws from members, and changes of their samplers."""
    draws_and_writes: HoldAll

    @classmethod
    def of(cls, members: Sequence[ReplayBuffer]) -> _Lineup:
        """Ask the members."""
        ranked = sorted(members, key=lambda member: member.guard.rank)
        guards, locks = [member.guard for member in ranked], [member.draw_lock for member in ranked]
        return cls(
            Guards([member.guard for member in members]),
            any(member.writer.tracks_generations or member.draws_apart for member in members),
            [member.transform for member in members] if all(member.rows_are_batches for member in members) else None,
            HoldAll(locks),
            HoldAll([*guards, *locks]),
        )

    @property
    def plain(self) -> bool:
        """Whether the batches of members are rows as their storages return them."""
        return self.transforms is not None and all(map(_IS_EMPTY, self.transforms))

    def exclusion(self, joint: JointDraw) -> HoldAll | None:
        """Return a context in which nobody else uses what a joint draw uses; None if that may be."""
        return self.draws_and_writes if joint.reads_rows else self.draws if joint.uses_state else None


class EnsembleDraws(EnsembleState):
    """Draws rows of the members of an ensemble, and makes batches of them."""

    _collates: list[Callable[[Any], Any] | None]
    _joiner: Joiner
    _gatherer: Gatherer
    _lineup: _Lineup
    """That of the present revision."""
    _reads_by_index = False

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_lineup"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._refresh()

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
                f"counts is {list(counts)}, expected one number for each of {len(self._members)} members",
                hint='make the ensemble with batch="exact"',
            )
        with self._sampling:
            self.settle()
            draw = self._draw(sum(counts), counts=[(member, count) for member, count in enumerate(counts) if count])
        try:
            batch = self.batch_of(draw)
        except BaseException:
            self.keep(draw, sum(counts))
            raise
        return (batch, draw.info) if return_info else batch

    def _draw(self, size: int, with_rows: bool = True, counts: Counts | None = None) -> Draw:
        """Draw from members that the sampler chooses, or so many elements of each."""
        with self._sampling:
            self._refresh()
            joint = self._joint()
            if joint is None:
                return self._draw_counts(self._sampler.counts(self._storage.sizes, size) if counts is None else counts)
            exclusion = self._lineup.exclusion(joint)
            if exclusion is None:
                draw, counts = self._draw_jointly(joint, size, counts)
            else:
                with exclusion:
                    draw, counts = self._draw_jointly(joint, size, counts)
            if draw is None:
                return self._draw_counts(counts)
            return draw if draw.plain else self._completed_in_turn(draw)

    def _draw_counts(self, counts: Sequence[tuple[int, int]]) -> Draw:
        """Draw so many elements of each member."""
        with self._sampling:
            self._learn_schemas()
            reading = [self._members[number] for number, _ in counts if self._reads_at_draw(number)]
            guards = sorted({member.guard for member in reading}, key=lambda guard: guard.rank)
            found: list[tuple[int, Draw]] = []
            try:
                with HoldAll(guards):  # the rows are those of the instant of the draw
                    draw = self._drawn(counts, found, with_rows=not reading)
                    if reading:
                        draw.rows = self._gathered(draw)
                        if draw.rows is None:
                            draw.rows = self._samples_of(draw)
                return self._completed_in_turn(draw)
            except BaseException:
                self._keep_parts(found)
                raise

    def keep(self, draw: Draw, size: int) -> None:
        """Keep the parts of a draw whose batch was not made with those members that have epochs."""
        if not isinstance(draw, RowsDraw):  # its members have none
            self._keep_parts(draw.parts)

    def _keep_parts(self, parts: Sequence[tuple[int, Draw]]) -> None:
        for number, part in parts:
            self._members[number].keep(part, count_of(part.index) if part.size is None else part.size)

    def restored(self, draw: Draw) -> bool:
        """Read the rows of members again, whose batch was started; False if some were written over since."""
        if not isinstance(draw, RowsDraw):
            draw.rows = None
            return all(self._members[number].restored(part) for number, part in draw.parts)
        if draw.written is not None:
            with self._lineup.draws_and_writes:
                if not all(self._members[number].restored(part) for number, part in draw.parts):
                    return False
                draw.rows = self._gathered(draw)
        return True

    def _joint(self) -> JointDraw | None:
        """Return what draws of all members in one go; None where each has to draw by itself."""
        joint = self._sampler.joint(self._storage)
        if joint is None or self._lineup.apart:
            return None
        if joint.reads_rows and not (self._gathers and self._lineup.plain):
            return None
        if joint.reads_rows and not self._gatherer.covers(self._storage.members):  # the draw would be made twice
            return None
        here = self._place  # where this ensemble is settled
        for member in self._members:
            member.settle(here)
        return joint

    def _line_up(self) -> None:
        self._lineup = _Lineup.of(self._members)

    def _draw_jointly(self, joint: JointDraw, size: int, counts: Counts | None) -> tuple[RowsDraw | None, Counts]:
        """Draw in one go; return the draw, None if that has to be member by member, and how many of each."""
        counts, drawn = self._sampler.draw_jointly(joint, self._storage.sizes, size, counts)
        if drawn is None:
            return None, counts
        if self._joiner.policy is not None:
            self._learn_schemas()
        rows, info = drawn
        labels = labels_of(rows, self._storage, self._sampler.batch)
        if info and labels[1].dim() > 1:
            info = {key: value.view(labels[1].shape) for key, value in info.items()}
        draw = RowsDraw(rows, labels, self.source_key, info, self._lineup.plain)
        if joint.reads_rows:
            carrying = self._carrying(rows.parts.listed)
            draw.rows = batch = None if carrying is None else self._gathered(draw)
            if batch is None:
                return None, counts
            draw.common = joint.info_of(batch)
            draw.written = [member.log.now for member in self._storage.members]
            for key, value in draw.common.items() if carrying else ():
                batch.set(key, value)
        return draw, counts

    def _completed_in_turn(self, draw: Draw) -> Draw:
        """Make the batches of transforms with random numbers now: these come in the order of the calls."""
        if draw.rows is None:
            for member in self._members:
                if member.transform.draws:
                    draw.rows = self._samples_of(draw)
                    break
        return draw

    def _drawn(self, counts: Sequence[tuple[int, int]], drawn: list[tuple[int, Draw]], *, with_rows: bool) -> Draw:
        """Draw so many elements of each member; what is drawn is added to `drawn`, also if a later draw fails."""
        found: list[Any] = []
        for number, count in counts:
            unit = self._sampler.unit_of_member(number)
            found += draw_fully(number, count, self.batch, unit, partial(self._drawn_of, number, drawn, with_rows))
        return self._composed(found)

    def _drawn_of(
        self, number: int, drawn: list[tuple[int, Draw]], with_rows: bool, count: int
    ) -> tuple[Any, Mapping[Any, Any], Draw]:
        with_rows = with_rows or not self._reads_at_draw(number)
        draw = self._members[number].draw(count, with_rows=with_rows, or_fewer=self.batch == "exact")
        draw.size = count  # at the end of an epoch there are fewer
        drawn.append((number, draw))
        index = flattened(draw.index) if isinstance(draw.index, TensorDict) else draw.index
        return index, draw.info, draw

    def _reads_at_draw(self, number: int) -> bool:
        """Whether rows of a member are read with their draw, and can be read by `_gathered`."""
        member = self._members[number]
        return member.sampler.reads_rows and member.returns_rows and not isinstance(member, EnsembleDraws)

    def _rows_of(self, draw: Draw, collate: Callable[[Any], Any] | None = None) -> Any:
        rows = self._gathered(draw) if draw.rows is None else draw.rows
        if isinstance(rows, TensorDict):
            return rows if self._prefetcher is None else rows.copy()  # a batch may be made again of its draw
        samples = self._samples_of(draw) if rows is None else rows
        if (collate := collate or self._collate_fn) is not None:
            return collate([sample for _, sample in samples])
        return self._joiner.join(samples)

    @property
    def _looking_back(self) -> list[Any]:
        """None: the rows are those of members."""
        return []

    @property
    def _gathers(self) -> bool:
        """Whether batches are the rows of members as they are, if these are alike."""
        return not self._collates and self._collate_fn is None and self._joiner.policy is None

    def _gathered(self, draw: Draw) -> TensorDict | None:
        """Return the batch of members whose rows are alike, gathered at once; None where each makes its own.

        They do if they have a transform, a collate function, or info of their sampler that the others do not have.
        """
        if not self._gathers:
            return None
        if isinstance(draw, RowsDraw) and draw.plain and not draw.common:  # nothing is added to the rows
            members, guards = self._storage.members, self._lineup.guards
            return self._gatherer.gather(members, guards, draw.of_members, draw.labels)
        found = self._rows_and_info(draw)
        if found is None:
            return None
        rows, info = found
        for number in () if isinstance(draw, RowsDraw) and draw.plain else rows.parts.listed:
            if not self._members[number].returns_rows:
                return None
        labels = draw.labels if isinstance(draw, RowsDraw) else labels_of(rows, self._storage, self.batch)
        batch = self._gatherer.gather(self._storage.members, self._lineup.guards, rows, labels)
        if batch is not None:
            for key, value in info.items():
                batch.set(key, value)
        return batch

    def _rows_and_info(self, draw: Draw) -> tuple[MemberRows, Mapping[Any, Any]] | None:
        """Return the rows of a draw, and the info that is in its batch; None where members differ in these."""
        if isinstance(draw, RowsDraw):
            carrying = self._carrying(draw.of_members.parts.listed) if draw.common else False
            return None if carrying is None else (draw.of_members, draw.common if carrying else {})
        parts = draw.parts
        rows = rows_of([(number, part.index) for number, part in parts])
        if rows is None or any(part.rows is not None for _, part in parts):
            return None
        if self.batch == "stack" and not rows.parts.equal:
            return None
        common = {key: value for key, value in draw.info.items() if key not in (INDEX, self.source_key)}
        carrying = self._carrying(rows.parts.listed)
        if carrying is False or not any(part.info.keys() - {INDEX} for _, part in parts):
            return rows, {}
        alike = carrying and all(part.info.keys() - {INDEX} == common.keys() for _, part in parts)
        return (rows, common) if alike else None

    def _carrying(self, numbers: Sequence[int]) -> bool | None:
        """Whether the batches of these members have their info; None for members that differ in that."""
        found = {self._members[number].carries_info for number in numbers}
        return found.pop() if len(found) == 1 else None

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
                rows = member.with_past(index, rows)
                draw = Draw(index, dict(info) | {INDEX: index}, rows=rows, chances=torch.empty(0))
                return schema_of(labelled(self._sample_of(number, draw), None, None))
            finally:
                member.transform.set_rng(member.sampler.generator)

    def nested_schema(self) -> Schema:
        """Return the schema of the batches of this ensemble, which is a member of another."""
        return joined_schema(self._joiner.policy, self._schemas())
