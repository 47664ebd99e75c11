"""The state of an ensemble of buffers, and the random streams of its members."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from ..checkpointers.ensemble import saved_members, transform_file
from ..encodings.saved_digests import require_digests
from ..errors import FormatError, RbtoolError, SchemaError
from ..samplers.ensemble import SamplerEnsemble, compose
from ..state_folder import load_module_state
from ..storages.ensemble import INDEX, SOURCE_ID, StorageEnsemble, held_state, require_members
from .base import ReplayBuffer, as_draw
from .checkpoint import SavedParts, generator_from_json, generator_to_json, refuse_home_of
from .concurrency import Draw, Place
from .pytrees import checked_batch_size

_OF_PARTS = frozenset({"_storage", "_sampler", "_writer", "_prefetch_state"})


class EnsembleState(ReplayBuffer):
    """Saves, loads, copies and shares the members of an ensemble, and lends them its generator."""

    _members: list[ReplayBuffer]
    _storage: StorageEnsemble
    _sampler: SamplerEnsemble
    source_key: str | None
    """The entry of the number of the member in batches; None for none."""
    _replaced: list[tuple[ReplayBuffer, dict[str, Any], torch.Generator | None]]
    """During a load, the members that are loaded, with their state and generator of before."""

    _followed: list[object] | None = None
    """The revisions of members that the parts of this ensemble are of."""

    @property
    def revision(self) -> object:
        """Another value after each exchange of a part or a lock, also of members."""
        return self._revision, *(member.revision for member in self._members)

    def _refresh(self) -> None:
        """Follow members whose parts were exchanged."""
        revisions = [member.revision for member in self._members]
        if revisions == self._followed:
            return
        storages, samplers = zip(*((member.storage, member.sampler) for member in self._members), strict=True)
        if not _same(storages, self._storage.members) or not _same(samplers, self._sampler.members):
            self._storage.members, self._sampler.members = storages, samplers
        self._line_up()
        self._followed = revisions

    def _line_up(self) -> None:
        """Called after an exchange of parts of members."""

    # Random streams --------------------------------------------------------------------------------

    def _lend(self, before: torch.Generator | None) -> None:
        """Give the generator to the members that have none, none of their own, or the one lent before."""
        generator = self._rng
        for member in self._members:
            own = member.generator
            free = generator is not None and (own is None or member.unseeded)
            if own is not generator and (free or (own is before and own is not None)):
                member.set_rng(generator)

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Set the generator of the ensemble, and of the members that have none of their own."""
        before = self._rng
        super().set_rng(generator)
        self._lend(before)

    def draw_from(self, generator: torch.Generator | None) -> None:
        """Set the generator of the ensemble, and of the members that draw from it."""
        before = self._rng
        super().draw_from(generator)
        self._lend(before)

    @contextlib.contextmanager
    def drawing_from(self, generator: torch.Generator) -> Iterator[None]:
        """Draw from another generator inside the context, in all members, also those with a seed of their own."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(super().drawing_from(generator))
            for member in self._members:
                stack.enter_context(member.drawing_from(generator))
            yield

    def _borrowers(self) -> list[bool]:
        """Which members draw from the generator of the ensemble."""
        return [self._rng is not None and member.generator is self._rng for member in self._members]

    def move_to(self, here: Place, *, begins_epoch: bool) -> None:
        """Draw in another process from now on, with the members that draw from this stream."""
        super().move_to(here, begins_epoch=begins_epoch)
        for member, borrows in zip(self._members, self._borrowers(), strict=True):
            if borrows:
                member.move_to(here, begins_epoch=begins_epoch)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_borrowing": self._borrowers(), "_followed": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        borrowing = state.pop("_borrowing")
        super().__setstate__(state)
        for member, borrows in zip(self._members, borrowing, strict=True):
            if borrows:  # one stream, as before: copies of it would draw the same rows of several members
                member.draw_from(self._rng)

    @property
    def shared(self) -> bool:
        """Whether several processes may write to all members."""
        return all(member.shared for member in self._members)

    def share(self, shared: bool = True) -> Self:
        """Set whether several processes may write to the members; see `ReplayBuffer.share`."""
        for member in self._members:
            member.share(shared)
        return self

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude writers to the members, and draws, inside the context."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(super().paused())  # first, as a draw takes its own lock before those of members
            for member in sorted(self._members, key=lambda member: member.guard.rank):
                stack.enter_context(member.paused())
            yield

    # State -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all members, the weights, and of the batches drawn ahead; tensors by reference."""
        self._refresh()
        with self.paused():
            members = []
            for member, borrows in zip(self._members, self._borrowers(), strict=True):
                state = {name: value for name, value in member.state_dict().items() if name not in _OF_PARTS}
                members.append(state | ({"_rng": None} if borrows else {}))
            return super().state_dict() | {"_members": members}

    def _take_over(self, state_dict: Mapping[str, Any], batch_size: int | None) -> None:
        states = state_dict.get("_members")
        if not isinstance(states, Sequence) or len(states) != len(self._members):
            found = len(states) if isinstance(states, Sequence) else 0
            raise SchemaError(f"the state is that of {found} members, this ensemble has {len(self._members)}")
        parts = [state_dict[name] for name in ("_storage", "_sampler", "_writer")]
        for part in parts:
            require_members(part, len(self._members))
        ahead = state_dict.get("_prefetch_state") or {"capacity": self.batches_ahead, "queue": ()}
        if ahead["capacity"] != self.batches_ahead:
            raise SchemaError(
                f"the state has {ahead['capacity']} batches made ahead, this buffer makes {self.batches_ahead}"
            )
        with self._all_or_nothing():
            self._transform.load_state_dict(dict(state_dict["_transforms"]))
            self._sampler.load_weights(state_dict["_sampler"])
            for number, (member, state) in enumerate(zip(self._members, states, strict=True)):
                storage, sampler, writer = (part[str(number)] for part in parts)
                whole = {**state, "_storage": storage, "_sampler": sampler, "_writer": writer}
                self._load_member(number, partial(member.load_state_dict, whole))
            if state_dict.get("_rng") is not None:
                self._restore_rng(*state_dict["_rng"])
            self._batch_size = batch_size
            self._restore_ahead([as_draw(item) for item in ahead["queue"]])

    def _prepare_dump(self, path: Path) -> None:
        self._refresh()
        for leaf in self._storage.leaves:
            refuse_home_of(leaf, path)

    def folder_notes(self) -> dict[str, Any]:
        """Return batch size and generator of each member."""
        notes = [
            {
                "batch_size": member.batch_size,
                "generator": None if borrows else generator_to_json(member.generator),
                **member.folder_notes(),
            }
            for member, borrows in zip(self._members, self._borrowers(), strict=True)
        ]
        return {"members": notes}

    def _load_saved(self, saved: SavedParts) -> None:
        notes = saved.notes.get("members")
        if not isinstance(notes, list) or saved.storage is None:
            raise FormatError("a checkpoint of a single buffer was found, expected one of an ensemble")
        require_digests(saved.storage)  # the folders of members are those that were saved, each in its place
        with_rows = saved_members(saved.storage, len(self._members))
        if len(notes) != len(self._members) or not all(isinstance(note, dict) for note in notes):
            raise SchemaError(f"the checkpoint holds {len(notes)} members, this ensemble has {len(self._members)}")
        members = [_saved_member(saved, number, note, with_rows) for number, note in enumerate(notes)]
        if saved.transforms is not None:
            self._transform.load_state_dict(saved.transforms)
        if saved.sampler is not None:
            self._sampler.load_weights(self._sampler.read_weights(saved.sampler))
        for number, (member, one) in enumerate(zip(self._members, members, strict=True)):
            self._load_member(number, partial(member.load_saved, one))
        if saved.generator is not None:
            self._restore_rng(*saved.generator)
        self._batch_size = saved.batch_size

    def _load_member(self, number: int, load: Callable[[], None]) -> None:
        """Load a member inside `_all_or_nothing`, and name it in errors."""
        member = self._members[number]
        generator, borrows = member.generator, self._borrowers()[number]
        before = held_state(member.state_dict()) | ({"_rng": None} if borrows else {})
        try:
            load()
        except RbtoolError as error:
            error.hint = f"this is member {number} of the ensemble; nothing is loaded"
            raise
        self._replaced.append((member, before, generator))

    def _restore_members(self) -> None:
        """Give the members that were loaded the state and the generator of before."""
        for member, before, generator in reversed(self._replaced):
            member.draw_from(generator)
            member.load_state_dict(before)

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Load inside the context; on failure restore everything, members included."""
        with self._guard, self._sampling:
            self.settle()
            self._refresh()
            rng, batch_size, weights = self._rng, self._batch_size, self._sampler.weights_state()
            rng_state = None if rng is None else rng.get_state()
            transforms = copy.deepcopy(self._transform.state_dict())
            self._replaced = []
            try:
                yield
            except BaseException:
                self._restore_members()
                self._transform.load_state_dict(transforms)
                self._sampler.load_weights(weights)
                if rng is not None and rng_state is not None:
                    rng.set_state(rng_state)
                self._batch_size = batch_size
                self.draw_from(rng)
                raise
            finally:
                self._replaced = []

    # Batches made ahead ----------------------------------------------------------------------------

    def rotated_draws(self, draws: list[Draw]) -> list[Draw]:
        """Return loaded draws with the numbers that the rows of the members have here; they are changed."""
        for draw in draws:
            for member, part in draw.parts:
                self._members[member].rotated_draws([part])
        return draws

    def _restore_ahead(self, draws: list[Draw]) -> None:
        super()._restore_ahead([self.completed_draw(draw) for draw in self.rotated_draws(draws)])

    def completed_draw(self, draw: Draw) -> Draw:
        """Return a loaded draw with its index, which is that of its parts."""
        if draw.index is None:
            parts = []
            for number, part in draw.parts:
                member = self._members[number]
                parts.append((number, member.completed_draw(part) if isinstance(member, EnsembleState) else part))
            found = self._composed([(number, part.index, part.info, part) for number, part in parts])
            found.last, found.size = draw.last, draw.size
            return found
        return draw

    def _composed(self, found: Sequence[Any]) -> Draw:
        """Make a draw of those of members: `(member, index, info, draw)`."""
        index, info = compose(found, self._storage, self._sampler.batch)
        return self._labelled(index, info, [(part[0], part[3]) for part in found])

    def _labelled(self, index: Any, info: dict[Any, Any], parts: Sequence[tuple[int, Draw]]) -> Draw:
        """Make a draw with the index in its info."""
        info[INDEX] = index
        if self.source_key is not None:
            info[self.source_key] = index.get(SOURCE_ID)
        return Draw(index, info, parts=parts)


def _same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether these are the very same objects."""
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


def _saved_member(saved: SavedParts, number: int, note: Mapping[str, Any], with_rows: frozenset[int]) -> SavedParts:
    """Return what a checkpoint holds of a member; FormatError for notes that are damaged."""

    def folder(parent: Path | None) -> Path | None:
        place = None if parent is None else parent / str(number)
        return place if place is not None and place.is_dir() else None

    assert saved.storage is not None
    return SavedParts(
        storage=saved.storage / str(number) if number in with_rows else None,
        sampler=folder(saved.sampler),
        writer=folder(saved.writer),
        transforms=load_module_state(transform_file(saved.storage, number)),
        generator=generator_from_json(note.get("generator"), str(saved.storage.parent)),
        batch_size=checked_batch_size(note.get("batch_size")),
        notes=note,
        verify=saved.verify,
    )
