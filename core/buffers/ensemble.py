"""Several buffers as one: batches are of some or all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from tensordict import is_tensor_collection

from ..errors import MissingKeyError, SchemaError, UsageError, require_flags
from ..samplers.base import Sampler
from ..samplers.ensemble import BatchForm, SamplerEnsemble
from ..storages.ensemble import (
    BUFFER_IDS,
    INDEX,
    SOURCE_ID,
    EnsembleKindError,
    Gatherer,
    StorageEnsemble,
    checked_members,
    chosen_members,
    refuse_write,
)
from ..writers.ensemble import WriterEnsemble
from .base import ReplayBuffer
from .ensemble_draws import EnsembleDraws
from .ensemble_labels import part_of_index
from .expansion import refuse_units
from .parts import UnsupportedError, WrongKindError
from .queries import Trajectory
from .schemas import Joiner, Policy, checked_policy
from .tensordict import TensorDictReplayBuffer


class ReplayBufferEnsemble(EnsembleDraws):
    """Samples from several buffers at once: datasets, live rings, other ensembles.

    It is made of buffers, or of the three parts `storages`, `samplers` and `writers`. Writes raise EnsembleWriteError
    (a RuntimeError and a TypeError): `rb[i]` is a member, `rb[i].extend(data)` writes to it.

    A batch of B elements is `[k, B // k]`: k draws of a member, see `SamplerEnsemble`. The rows of each draw go through
    the collate function and the transform of their member; they are stacked, densely where they are alike, else
    lazily, or by `collate_fn`, which gets a list of them; then `transform` is applied. A batch of tensordicts has
    `("index", "buffer_ids")`, `("index", "index")`, the row in the member, and `"source_id"`, the number of the
    member, which counts the members of members where there are ensembles in the ensemble: all int64 of its shape.

    - `p`, `temperature`, `sample_from_all`, `num_buffer_sampled`: the choice of members, see `SamplerEnsemble`; `p` and
      `temperature` can be assigned at any time.
    - `batch`: `"exact"` makes batches `[B]` for every B, the rows of each member behind those of the one before.
    - `schema`: what to do about entries that only some members have: `"error"`, `"intersect"`, `"union"` (with a mask),
      see `Joiner`; `schema_report()` lists them, `dropped_keys` those that `"intersect"` leaves out.
    - `source_key`: another name for `"source_id"`; None leaves it out.
    - `generator`: decides on members and, in members without a seed of their own, on rows.
    - `collate_fns`: for each member, instead of its own. Other arguments are those of `ReplayBuffer`.

    `rb[i]` is a member, `rb[1:]`, `rb[[0, 2]]` an ensemble of some with their weights, and `rb[:, rows]` a stack of
    these rows of all, without any transform. `len(rb)` is the number of members. A checkpoint holds all members.

    SchemaError (a RuntimeError) for buffers and parts at once, and for `p` with `sample_from_all`; UsageError (a
    ValueError) for weights that make no sense, and for a batch size that k does not divide.

    >>> import torch
    >>> from rbtool import LazyTensorStorage, TensorDictReplayBuffer
    >>> from tensordict import TensorDict
    >>> rings = [TensorDictReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(2)]
    >>> buffer = ReplayBufferEnsemble(*rings, p=[1, 3], batch="exact", batch_size=8)
    >>> for number, ring in enumerate(rings):
    ...     _ = ring.extend(TensorDict({"a": torch.full((5,), number)}, [5]))
    >>> buffer.sample()["a"].shape
    torch.Size([8])
    """

    def __init__(
        self,
        *rbs: ReplayBuffer,
        storages: StorageEnsemble | None = None,
        samplers: SamplerEnsemble | None = None,
        writers: WriterEnsemble | None = None,
        transform: Any = None,
        batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        collate_fns: Sequence[Callable[[Any], Any] | None] | None = None,
        p: Any = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
        generator: torch.Generator | None = None,
        shared: bool = False,
        temperature: float = 1.0,
        batch: BatchForm = "stack",
        schema: Policy | None = None,
        source_key: str | None = SOURCE_ID,
        **arguments: Any,
    ) -> None:
        require_flags(sample_from_all=sample_from_all, shared=shared)
        given = {"p": p, "sample_from_all": sample_from_all, "num_buffer_sampled": num_buffer_sampled,
                 "temperature": temperature, "batch": batch}  # fmt: skip
        parts = {"storages": storages, "samplers": samplers, "writers": writers}
        for name in ("storage", "sampler", "writer"):
            if name in arguments:
                raise UsageError(f"{name} is set, expected {name}s for an ensemble")
        if rbs:
            _refuse_both(parts)
            self._members = list(checked_members("ReplayBufferEnsemble", rbs, ReplayBuffer))
            self._collates = _checked_collates(collate_fns, len(rbs))
            storages = StorageEnsemble(*(one.storage for one in rbs), transforms=[one.transform for one in rbs])
            samplers = SamplerEnsemble(*(one.sampler for one in rbs), **given)
            writers = WriterEnsemble(*(one.writer for one in rbs))
        else:
            self._members, self._collates = _members_of(parts, given, collate_fns), []
        units = {f"member {number}": member.sample_unit for number, member in enumerate(self._members)}
        refuse_units("an ensemble", {"the ensemble": arguments.get("sample_unit")} | units)
        self.source_key = source_key
        self._gatherer = Gatherer(source_key)
        assert samplers is not None
        self._joiner = self._joiner_of(checked_policy(schema), samplers)
        super().__init__(
            storage=storages, sampler=samplers, writer=writers, transform=transform, batch_size=batch_size,
            collate_fn=collate_fn, generator=generator, **arguments,
        )  # fmt: skip
        self._lend(None)
        self._refresh()
        if shared:
            self.share()

    def _joiner_of(self, policy: Policy | None, samplers: SamplerEnsemble) -> Joiner:
        labels = frozenset({INDEX} if self.source_key is None else {INDEX, self.source_key})
        return Joiner(policy, stack=samplers.batch == "stack", labels=labels)

    # Members ---------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self._members)

    def __getitem__(self, index: Any) -> Any:
        """Return a member, an ensemble of some, or rows of all; see the class.

        IndexError for members and rows that do not exist, EnsembleKindError (a TypeError) for floats and keys,
        SchemaError (a RuntimeError) for a tensor of several dimensions.
        """
        if isinstance(index, tuple) and len(index) > 1:
            self._refresh()
            chosen, rows = chosen_members(index[0], len(self)), index[1] if len(index) == 2 else index[1:]
            numbers = [chosen] if isinstance(chosen, int) else chosen
            found = [(number, self._looked_up_in(number, rows)) for number in numbers]
            return found[0][1] if isinstance(chosen, int) else Joiner(None, stack=True).join(found)
        chosen = chosen_members(index[0] if isinstance(index, tuple) and index else index, len(self))
        if isinstance(chosen, int):
            return self._members[chosen]
        if chosen == list(range(len(self))):
            return self
        part = self._sampler.part(chosen)
        return type(self)(
            *(self._members[member] for member in chosen),
            transform=self._transform,
            batch_size=self._batch_size,
            collate_fn=self._collate_fn,
            collate_fns=[self._collates[member] for member in chosen] if self._collates else None,
            p=part.p,
            sample_from_all=part.sample_from_all,
            num_buffer_sampled=part.num_buffer_sampled,
            generator=self._rng,
            temperature=part.temperature,
            batch=part.batch,
            schema=self._joiner.policy,
            source_key=self.source_key,
        )

    def _looked_up_in(self, member: int, rows: Any) -> Any:
        buffer = self._members[member]
        found, collate = buffer.storage.get(rows), buffer.collate_fn
        return found if collate is None or isinstance(buffer, ReplayBufferEnsemble) else collate(found)

    def trajectories(self, trajectory_key: Any = None) -> Iterator[Trajectory]:
        """Yield the trajectories of the members, one member after the other, as each of them does; see `query`.

        Equal ids in two members are two trajectories. UnsupportedError (a NotImplementedError) for an ensemble with a
        transform or collate function of its own: these are for rows of several members.
        """
        if not self._transform.is_empty or self._collate_fn is not None or any(self._collates):
            raise UnsupportedError(
                "an ensemble with a transform or collate function of its own lists no trajectories: query its members"
            )
        for member in self._members:
            yield from member.trajectories(trajectory_key)

    @property
    def storage(self) -> StorageEnsemble:
        """The storages of the members."""
        self._refresh()
        return self._storage

    @property
    def sampler(self) -> SamplerEnsemble:
        """The samplers of the members, and their weights."""
        self._refresh()
        return self._sampler

    @property
    def writer(self) -> WriterEnsemble:
        """The writers of the members."""
        self._writer.members = tuple(member.writer for member in self._members)  # type: ignore[attr-defined]
        return self._writer  # type: ignore[return-value]

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Replace the samplers of all members, and the weights; return the previous ones.

        EnsembleKindError (a TypeError) for anything but a `SamplerEnsemble`, SchemaError (a RuntimeError) for another
        number of samplers.
        """
        sampler.check_storage(self.storage) if isinstance(sampler, SamplerEnsemble) else _refuse_sampler(sampler)
        for member, one in zip(self._members, sampler.members, strict=True):  # type: ignore[attr-defined]
            if member.sampler is not one:
                member.set_sampler(one)
        previous = super().set_sampler(sampler)
        self._joiner = self._joiner_of(self._joiner.policy, self._sampler)
        return previous

    def _set_part(self, *arguments: Any, **named: Any) -> NoReturn:
        raise UnsupportedError(
            "an ensemble has the parts of its members", hint="exchange them there: rb[0].set_storage(…)"
        )

    set_storage = set_writer = _set_part

    # Weights ---------------------------------------------------------------------------------------

    @property
    def p(self) -> Any:
        """The weights of the members; see `SamplerEnsemble`."""
        return self._sampler.p

    @p.setter
    def p(self, weights: Any) -> None:
        self._sampler.p = weights

    @property
    def temperature(self) -> float:
        """Weights are raised to `1 / temperature`."""
        return self._sampler.temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        self._sampler.temperature = value

    @property
    def schema(self) -> Policy | None:
        """The policy about entries that only some members have."""
        return self._joiner.policy

    # Priorities ------------------------------------------------------------------------------------

    def update_priority(self, index: Any, priority: Any) -> None:
        """Set the priority of elements, by the entry `"index"` of a batch: one for all, or of the shape of the index.

        WrongKindError (a TypeError) for an index that is no tensordict, SchemaError (a RuntimeError) for another number
        of priorities.
        """
        if not is_tensor_collection(index) or index.get(BUFFER_IDS, None) is None:
            raise WrongKindError(f'elements are named by the entry "index" of a batch, found a {type(index).__name__}')
        for number, _, rows, chosen in part_of_index(index, self.storage):
            part = priority
            if isinstance(priority, torch.Tensor) and priority.dim():
                if priority.shape != chosen.shape:
                    raise SchemaError(f"priorities are {list(priority.shape)}, expected {list(chosen.shape)}")
                part = priority[chosen]
            self._members[number].update_priority(rows, part)

    def update_tensordict_priority(self, data: Any) -> None:
        """Set the priorities of the elements of a batch of members that are buffers of tensordicts; see these.

        MissingKeyError (a KeyError) for a batch without `"index"`.
        """
        index = data.get(INDEX, None)
        if index is None or index.get(BUFFER_IDS, None) is None:
            raise MissingKeyError('the batch has no entry ("index", "buffer_ids"): it was not sampled from an ensemble')
        if index.get(SOURCE_ID, None) is None and self.source_key is not None and self.source_key in data:
            index = index.copy().set(SOURCE_ID, data.get(self.source_key))  # the members of members have priorities
        for number, _, rows, chosen in part_of_index(index, self.storage):
            member = self._members[number]
            if isinstance(member, TensorDictReplayBuffer | ReplayBufferEnsemble):
                member.update_tensordict_priority(data[chosen].set(INDEX, rows))

    # Writing and counting --------------------------------------------------------------------------

    def _refused(self, *arguments: Any, **named: Any) -> NoReturn:
        refuse_write(self)

    add = extend = __setitem__ = write_all = flush = set_ = set_at_ = update_ = mark_update = _refused

    def read_all_in_order(self, end: int | None = None) -> NoReturn:
        """Raise UnsupportedError (a NotImplementedError): members are read one by one."""
        raise UnsupportedError("an ensemble has no order of its rows", hint="read a member: rb[0].read_all_in_order()")

    def empty(self, empty_write_count: bool = True) -> None:
        """Remove all elements of all members.

        SchemaError (a RuntimeError), with nothing changed, if one of them, such as a dataset, cannot be written to.
        """
        for number, member in enumerate(self._members):
            if not isinstance(member, ReplayBufferEnsemble) and not member.writer.writes:
                raise SchemaError(f"member {number} doesn't allow writing, and stays as it is", hint="empty the others")
        for member in self._members:
            member.empty(empty_write_count)
        self.forget_drawn()

    @property
    def write_count(self) -> int:
        """How many elements were written to all members."""
        return sum(member.write_count for member in self._members)

    def stats(self) -> dict[str, Any]:
        """Return the sums of size, write_count and capacity, and the statistics of each of `members`."""
        members = [member.stats() for member in self._members]
        size, capacity = (sum(one.get(name, 0) for one in members) for name in ("size", "capacity"))
        return {
            "size": size,
            "write_count": self.write_count,
            "prefetch_queue_size": 0 if self._prefetcher is None else len(self._prefetcher),
            "initialized": True,
            "capacity": capacity,
            "utilization": size / max(capacity, 1),
            "members": members,
        }

    def __repr__(self) -> str:
        parts = {
            "storages": self.storage,
            "samplers": self.sampler,
            "writers": self.writer,
            "batch_size": self._batch_size,
            "transform": self._transform,
            "collate_fn": self._collate_fn or torch.stack,
        }
        return f"{type(self).__name__}(\n    " + ",\n    ".join(f"{name}={part}" for name, part in parts.items()) + ")"


def _refuse_sampler(sampler: Any) -> NoReturn:
    """Raise EnsembleKindError (a TypeError) for a sampler that is no `SamplerEnsemble`."""
    raise EnsembleKindError(f"an ensemble takes a SamplerEnsemble, found a {type(sampler).__name__}")


def _refuse_both(parts: Mapping[str, Any]) -> None:
    """Raise SchemaError (a RuntimeError) if buffers and parts were given."""
    both = [name for name, part in parts.items() if part is not None]
    if both:
        raise SchemaError(f"buffers and {', '.join(both)} are set, expected one or the other")


def _checked_collates(collates: Any, count: int) -> list[Any]:
    """Return the collate functions of members, none or `count`; EnsembleKindError for another number."""
    if collates is None:
        return []
    if len(collates) != count:
        raise EnsembleKindError(f"there are {len(collates)} collate_fns, expected {count}: one for each member")
    return list(collates)


def _members_of(parts: Mapping[str, Any], given: Mapping[str, Any], collates: Any) -> list[ReplayBuffer]:
    """Make buffers of the parts of an ensemble.

    SchemaError (a RuntimeError) if a part is missing, if they are not of one number, and for arguments that the
    `SamplerEnsemble` has.
    """
    missing = [name for name, part in parts.items() if part is None]
    if missing:
        raise SchemaError(f"{' and '.join(missing)} = None, expected buffers or all parts of an ensemble")
    kinds = {"storages": StorageEnsemble, "samplers": SamplerEnsemble, "writers": WriterEnsemble}
    for name, kind in kinds.items():
        if not isinstance(parts[name], kind):
            raise WrongKindError(f"{name} is a {type(parts[name]).__name__}, expected a {kind.__name__}")
    defaults = {"p": None, "sample_from_all": False, "num_buffer_sampled": None, "temperature": 1.0, "batch": "stack"}
    for name, value in given.items():
        if value is not None and value != defaults[name]:
            raise SchemaError(f"{name} is set, expected in the SamplerEnsemble")
    counts = {name: len(part) for name, part in parts.items()}
    if len(set(counts.values())) > 1:
        raise SchemaError(
            f"there are {', '.join(f'{count} {name}' for name, count in counts.items())}, expected one number"
        )
    storages = parts["storages"]
    own = _checked_collates(collates, len(storages)) or [None] * len(storages)
    return [
        ReplayBuffer(storage=storage, sampler=sampler, writer=writer, transform=transform, collate_fn=collate)
        for storage, transform, sampler, writer, collate in zip(
            storages.members, storages.transforms, parts["samplers"].members, parts["writers"].members, own, strict=True
        )
    ]
