"""Ensembles: several buffers that are sampled as one, so that a batch has elements of some or all of them.

`ReplayBufferEnsemble` draws from its members and makes one batch. A `Joiner` compares the entries of the members'
batches, and resolves differences by a policy.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, Self, TypeAlias, get_args

import torch
from tensordict import LazyStackedTensorDict, TensorDict, is_tensor_collection

from ..checkpointers.ensemble import saved_members, transform_file
from ..encodings.saved_digests import require_digests
from ..errors import (
    FormatError,
    MissingKeyError,
    RbtoolError,
    SchemaError,
    UnsupportedError,
    UsageError,
    WrongKindError,
    require_choice,
    require_flags,
)
from ..samplers.base import Sampler
from ..samplers.ensemble import (
    BatchForm,
    Counts,
    JointDraw,
    SamplerEnsemble,
    compose,
    count_of,
    draw_fully,
    flattened,
    index_with,
    labels_of,
    rows_of,
    unit_of,
)
from ..state_folder import load_module_state
from ..storages.ensemble import (
    BUFFER_IDS,
    INDEX,
    SOURCE_ID,
    EnsembleKindError,
    Gatherer,
    IndexPart,
    MemberRows,
    StorageEnsemble,
    checked_members,
    chosen_members,
    held_state,
    refuse_write,
    require_members,
)
from ..torchrl_classes import counterpart
from ..transforms.base import Compose
from ..writers.base import WriterEnsemble
from .checkpoint import SavedParts, generator_from_json, generator_to_json, refuse_home_of
from .draws import Draw, refuse_units
from .processes import Guards, HoldAll, Place
from .pytrees import checked_batch_size, ragged_elements, stack_elements
from .replay_buffer import ReplayBuffer
from .tensordict import TensorDictReplayBuffer
from .trajectories import Trajectory

Key: TypeAlias = tuple[str, ...]
Policy: TypeAlias = Literal["intersect", "union", "error"]
Kind: TypeAlias = tuple[str, tuple[int, ...]]
"""Element type and row shape of an entry."""
Schema: TypeAlias = dict[Key, Kind]

MASK = "schema_mask"
_HINT = 'schema="intersect" leaves entries out, schema="union" adds a mask'


@dataclass(frozen=True, slots=True)
class SchemaDifference:
    """An entry in which members differ.

    Attributes:
        key: the entry.
        members: the element type and row shape of the entry in each member, by number; None if it is missing.
    """

    key: str
    members: Mapping[int, str | None]
    clash: bool
    """Whether members have the entry with different element types or row shapes."""

    def __str__(self) -> str:
        return f"{self.key!r}: " + ", ".join(
            f"member {member} has {'none' if kind is None else kind}" for member, kind in self.members.items()
        )


Differences: TypeAlias = dict[Key, SchemaDifference]
"""Differences by key, because `("a.b",)` and `("a", "b")` are two entries with the same name."""


def checked_policy(policy: Any) -> Policy | None:
    """Return a schema policy; UsageError if it is unknown."""
    if policy is not None:
        require_choice("schema", policy, get_args(Policy))
    return policy  # type: ignore[no-any-return]


def schema_of(sample: Any, labels: frozenset[str] = frozenset()) -> Schema:
    """Return the element type and row shape of each entry of a tensordict; a tensor has the key ().

    Entries and nests named in `labels` are left out.
    """
    if isinstance(sample, torch.Tensor):
        return {(): (str(sample.dtype), tuple(sample.shape[1:]))}
    if not is_tensor_collection(sample):
        return {}
    depth, found = sample.ndim, {}
    if isinstance(sample, LazyStackedTensorDict):  # its elements may differ in shape, so look at them
        sample = sample.tensordicts[0]
        depth = sample.ndim
    for name, value in sample.items(True, True):
        key = (name,) if isinstance(name, str) else tuple(name)
        if key[0] in labels:
            continue
        if isinstance(value, torch.Tensor):
            found[key] = str(value.dtype), tuple(value.shape[depth:])
        else:
            found[key] = "object", ()
    return found


def _masks(schema: Schema) -> list[Key]:
    """Return the entries of a schema that are masks, as an ensemble with the policy `union` adds them."""
    return [key for key, kind in schema.items() if key[:1] == (MASK,) and kind == ("torch.bool", ()) and key[1:]]


def _without_masks(schema: Schema) -> Schema:
    masks = frozenset(_masks(schema))
    return {key: kind for key, kind in schema.items() if key not in masks}


def _compared(policy: Policy | None, schemas: Mapping[int, Schema]) -> tuple[frozenset[Key], Differences]:
    """Return the entries that have a mask in some member and by this policy keep it, and the differences of members."""
    if policy not in ("intersect", "union"):
        return frozenset(), differences(schemas)
    marked = frozenset(key[1:] for one in schemas.values() for key in _masks(one))
    return marked, differences({number: _without_masks(one) for number, one in schemas.items()})


def joined_schema(policy: Policy | None, schemas: Mapping[int, Schema]) -> Schema:
    """Return the schema of the batches that a `Joiner` makes for members with these schemas."""
    marked, different = _compared(policy, schemas)
    found: Schema = {}
    for schema in schemas.values():
        found |= schema if policy not in ("intersect", "union") else _without_masks(schema)
    if policy == "union":
        masked = [key for key in found if key in different or key in marked]
    else:
        found = {key: kind for key, kind in found.items() if key not in different}
        masked = [key for key in found if key in marked]
    return found | {(MASK, *key): ("torch.bool", ()) for key in masked}


def differences(schemas: Mapping[int, Schema]) -> Differences:
    """Compare the schemas of members; empty if they agree."""
    keys: dict[Key, None] = {}
    for schema in schemas.values():
        keys |= dict.fromkeys(schema)
    found = {}
    for key in keys:
        kinds = {member: schema.get(key) for member, schema in schemas.items()}
        if len(set(kinds.values())) == 1:
            continue
        named = {member: None if kind is None else _text(kind) for member, kind in kinds.items()}
        clash = len({kind for kind in kinds.values() if kind is not None}) > 1
        found[key] = SchemaDifference(".".join(key), named, clash)
    return found


def _text(kind: Kind) -> str:
    return f"{kind[0].removeprefix('torch.')} {list(kind[1])}"


_LOCK = threading.Lock()
"""Held while a `Joiner` takes up schemas."""


def _renew_lock() -> None:
    global _LOCK
    _LOCK = threading.Lock()  # the thread that may hold the old lock does not exist in a forked child


os.register_at_fork(after_in_child=_renew_lock)


class _Learned(NamedTuple):
    """The schemas of members by number, the entries for which some member has a mask, and the differences."""

    known: Mapping[int, Schema]
    marked: frozenset[Key]
    different: Differences


class Joiner:
    """Makes one batch from the batches of members.

    With `stack`, the result is `[k, n]`; otherwise the members' batches are concatenated, `[n]`. Entries whose element
    types differ always raise SchemaError. The policy decides about entries that only some members have:

    - `"error"`: SchemaError names them.
    - `"intersect"`: they are left out, and listed in `dropped_keys`.
    - `"union"`: missing values are zeros, and `("schema_mask", *key)`, bool in the shape of the batch, is True where a
      value exists. If a member is an ensemble with such masks, its masks are kept, also by `"intersect"`.
    - None: as in TorchRL, batches are stacked lazily, with the keys that all members have. If they are concatenated
      instead, differences raise SchemaError.

    Batches that differ in their number of rows or in row shapes are stacked lazily if the policy is None; otherwise
    they raise SchemaError.
    """

    def __init__(self, policy: Policy | None, *, stack: bool, labels: frozenset[str] = frozenset()) -> None:
        self.policy = policy
        self._stack = stack
        self._labels = labels
        self._learned = _Learned({}, frozenset(), {})

    @property
    def known(self) -> Mapping[int, Schema]:
        """The schemas of members, by number."""
        return self._learned.known

    def learn(self, schemas: Mapping[int, Schema]) -> _Learned:
        """Take up schemas of members, and return everything that is known now.

        Threads that prefetch join batches at the same time. Each has to use the object returned here as a whole: if it
        read attributes of this `Joiner` one after the other, an entry that another thread just found in two members
        could look like a difference.
        """
        learned = self._learned
        if any(learned.known.get(member) != schema for member, schema in schemas.items()):
            with _LOCK:
                known = {**self._learned.known, **schemas}
                learned = self._learned = _Learned(known, *_compared(self.policy, known))
        return learned

    @property
    def dropped_keys(self) -> tuple[str, ...]:
        """The entries that `intersect` leaves out."""
        return tuple(one.key for one in self._learned.different.values()) if self.policy == "intersect" else ()

    def join(self, samples: Sequence[tuple[int, Any]]) -> Any:
        """Make a batch from pairs of a member's number and its batch."""
        batches = [batch for _, batch in samples]
        schemas = [schema_of(batch, self._labels) for batch in batches]
        if self.policy is None:
            return self._joined(batches, [member for member, _ in samples], schemas)
        learned = self.learn({member: schema for (member, _), schema in zip(samples, schemas, strict=True)})
        if self.policy == "error" and learned.different:
            raise SchemaError(f"members differ in {next(iter(learned.different.values()))}", hint=_HINT)
        for one in learned.different.values():
            if one.clash:
                raise SchemaError(
                    f"members differ in {one}", hint="make them equal with a transform of one of the members"
                )
        fitted = [self._fitted(batch, schema, learned) for batch, schema in zip(batches, schemas, strict=True)]
        return self._dense(fitted)

    def _joined(self, batches: list[Any], members: list[int], schemas: list[Schema]) -> Any:
        if all(schema == schemas[0] for schema in schemas[1:]):
            return self._dense([_without_empty_nests(batch) for batch in batches])
        different = {
            key: replace(one, members={members[place]: kind for place, kind in one.members.items()})
            for key, one in differences(dict(enumerate(schemas))).items()
        }
        _refuse_types(schemas, different)
        if not self._stack or not is_tensor_collection(batches[0]):
            raise SchemaError(f"members differ in {next(iter(different.values()))}", hint=_HINT)
        return _lazily_stacked(batches)

    def _fitted(self, batch: Any, schema: Schema, learned: _Learned) -> Any:
        """Return a batch with the entries that, by the policy, the batches of all members have."""
        batch = _without_empty_nests(batch)
        if not is_tensor_collection(batch) or not (learned.different or learned.marked):
            return batch
        if self.policy == "intersect":
            everywhere = set(_without_masks(schema)).intersection(*learned.known.values())
            labels = [name for name in self._labels if batch.get(name, None) is not None]
            return self._with_masks(batch.select(*everywhere, *labels), batch, schema, learned.marked & everywhere)
        fitted = batch.copy()
        kinds: Schema = {}
        for known in learned.known.values():
            kinds |= _without_masks(known)
        missing = [(key, *kind) for key, kind in kinds.items() if key not in schema and key in learned.different]
        for key, dtype, row in missing:
            if dtype == "object":
                raise SchemaError(f"{'.'.join(key)!r} holds objects, which have no zero to fill gaps with")
            kind = getattr(torch, dtype.removeprefix("torch."))
            fitted.set(key, torch.zeros((*batch.batch_size, *row), dtype=kind, device=batch.device))
        masked = [key for key in kinds if key in learned.different or key in learned.marked]
        return self._with_masks(fitted, batch, schema, masked)

    @staticmethod
    def _with_masks(fitted: Any, batch: Any, schema: Schema, keys: Iterable[Key]) -> Any:
        """Set the mask of each of these entries: the member's own mask, or whether it has the entry."""
        for key in keys:
            if (MASK, *key) in schema:
                fitted.set((MASK, *key), batch.get((MASK, *key)))
            else:
                fitted.set((MASK, *key), torch.full(tuple(batch.batch_size), key in schema, device=batch.device))
        return fitted

    def _dense(self, batches: list[Any]) -> Any:
        first = batches[0]
        if is_tensor_collection(first):
            if not self._stack:
                return first if len(batches) == 1 else torch.cat(batches)
            alike = len({batch.batch_size for batch in batches}) == 1
            if alike and not any(isinstance(batch, LazyStackedTensorDict) for batch in batches):
                return torch.stack(batches)
            if self.policy is not None:
                shapes = sorted({str(list(batch.batch_size)) for batch in batches})
                raise SchemaError(f"the batches of the members have the shapes {' and '.join(shapes)}, expected one")
            return _lazily_stacked(batches)
        if self._stack:
            return stack_elements(batches)
        return _concatenated(batches)


def _lazily_stacked(batches: Sequence[Any]) -> Any:
    copies = [batch.copy() for batch in batches]
    if len({batch.device for batch in batches}) > 1:  # such as None for a list storage, and a tensor's device
        copies = [batch.clear_device_() for batch in copies]
    return LazyStackedTensorDict.lazy_stack(copies)


def _refuse_types(schemas: Sequence[Schema], different: Differences) -> None:
    """Raise SchemaError if an entry has different element types: a stack would convert one silently."""
    for key in dict.fromkeys(key for schema in schemas for key in schema):
        types = {schema[key][0] for schema in schemas if key in schema}
        if len(types) > 1:
            raise SchemaError(
                f"members differ in {different[key]}", hint="cast the entry with a transform of one of the members"
            )


def _without_empty_nests(batch: Any) -> Any:
    """Leave out empty nests, such as those that RenameTransform leaves behind."""
    if not is_tensor_collection(batch) or isinstance(batch, LazyStackedTensorDict):
        return batch
    empty = [key for key, value in batch.items() if isinstance(value, TensorDict) and value.is_empty()]
    return batch.exclude(*empty) if empty else batch


def _concatenated(batches: list[Any]) -> Any:
    first = batches[0]
    if isinstance(first, torch.Tensor):
        return first if len(batches) == 1 else torch.cat(batches)
    if isinstance(first, Mapping) and all(batch.keys() == first.keys() for batch in batches):
        return {key: _concatenated([batch[key] for batch in batches]) for key in first}
    if isinstance(first, tuple) and len({len(batch) for batch in batches}) == 1:
        return tuple(_concatenated([batch[place] for batch in batches]) for place in range(len(first)))
    if isinstance(first, list) and not any(isinstance(item, torch.Tensor) for item in first):
        return [item for batch in batches for item in batch]
    if isinstance(first, list) and len({len(batch) for batch in batches}) == 1:
        return [_concatenated([batch[place] for batch in batches]) for place in range(len(first))]
    raise SchemaError(f"batches of {type(first).__name__} of several members cannot be concatenated")


@counterpart
class ReplayBufferEnsemble(ReplayBuffer):
    """Samples from several buffers at once: datasets, live rings, other ensembles.

    A batch of B elements is `[k, B // k]`: the sampler chooses k members (see `SamplerEnsemble`), and each contributes
    `B // k` elements. A member's rows go through its own collate function and transform. The results are stacked,
    densely if their entries agree and lazily otherwise, or passed as a list to `collate_fn`. Then `transform` is
    applied.

    Batches of tensordicts have int64 entries, in the batch's shape, that tell where elements come from: `("index",
    "buffer_ids")` is the member; `("index", "index")` is the row in it; `"source_id"` is the number of the innermost
    buffer, counted through ensembles of ensembles.

    `rb[i]` is a member, `rb[1:]` and `rb[[0, 2]]` are ensembles of some members with their weights, and `rb[:, rows]`
    is a stack of these rows of all members, without transforms. `len(rb)` is the number of members. To write to the
    ensemble itself, give it a `routing_key` or a `routing_dim`; otherwise writes raise EnsembleWriteError (a
    RuntimeError and a TypeError), and `rb[i].extend(data)` writes to a member. A checkpoint holds all members.

    Args:
        *rbs: the members. Instead of them, `storages`, `samplers` and `writers` can be given.
        p: weights of the members, see `SamplerEnsemble`; can be assigned later.
        temperature: weights are raised to `1 / temperature`; can be assigned later.
        sample_from_all, num_buffer_sampled: how many members take part in a batch, see `SamplerEnsemble`.
        batch: `"exact"` makes batches `[B]` of any size B, in which the rows of each member are consecutive.
        schema: what to do about entries that only some members have: `"error"`, `"intersect"` (leave them out, see
            `dropped_keys`) or `"union"` (fill gaps with zeros, and add a mask). `schema_report()` lists the
            differences.
        source_key: another name for `"source_id"`; None leaves it out.
        generator: chooses members, and rows in members without a seed of their own.
        collate_fns: one for each member, instead of its own.
        routing_key: the entry, int64, with the number of the member to which `extend` and `add` write an element.
        routing_dim: instead, the dimension of written data along which member i gets the data at position i, such as
            the dimension of environments in a batched one.
        **arguments: further arguments of `ReplayBuffer`.

    Raises:
        SchemaError: (a RuntimeError) both buffers and parts are given, or both `p` and `sample_from_all`.
        UsageError: (a ValueError) the weights are invalid, k does not divide the batch size, or both ways of routing
            are given.

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

    _members: list[ReplayBuffer]
    _storage: StorageEnsemble
    _sampler: SamplerEnsemble
    source_key: str | None
    """The entry of batches that holds the member's number; None if there is none."""
    _replaced: list[tuple[ReplayBuffer, dict[str, Any], torch.Generator | None]]
    """During a load, the members loaded so far, with their previous state and generator."""
    _followed: list[object] | None = None
    """The revisions of the members when this ensemble last took over their parts."""
    _collates: list[Callable[[Any], Any] | None]
    _joiner: Joiner
    _gatherer: Gatherer
    _lineup: _Lineup
    """The `_Lineup` for the present revisions of the members."""
    _reads_by_index = False

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
        routing_key: str | tuple[str, ...] | None = None,
        routing_dim: int | None = None,
        **arguments: Any,
    ) -> None:
        require_flags(sample_from_all=sample_from_all, shared=shared)
        if routing_key is not None and routing_dim is not None:
            raise UsageError(f"routing_key is {routing_key!r} and routing_dim is {routing_dim}: give one of them")
        self.routing_key, self.routing_dim = routing_key, routing_dim
        if any(isinstance(member, ReplayBufferEnsemble) for member in rbs) and (routing_key or routing_dim is not None):
            raise UsageError("elements are not routed to members that are ensembles: give these a routing of their own")
        given = {"p": p, "sample_from_all": sample_from_all, "num_buffer_sampled": num_buffer_sampled,
                 "temperature": temperature, "batch": batch}  # fmt: skip
        parts = {"storages": storages, "samplers": samplers, "writers": writers}
        for name in ("storage", "sampler", "writer"):
            if name in arguments:
                raise UsageError(f"an ensemble takes {name}s, one for each member, instead of {name}")
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
        """Return a member, an ensemble of some members, or rows of all; see the class.

        Raises:
            IndexError: a member or row does not exist.
            EnsembleKindError: (a TypeError) the index is a float or a key.
            SchemaError: (a RuntimeError) the index is a tensor of several dimensions.
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
            num_buffer_sampled=part.draws,
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
        """Yield the trajectories of the members, member by member; see `ReplayBuffer.query`.

        Equal ids in two members are different trajectories.

        Raises:
            UnsupportedError: (a NotImplementedError) the ensemble has a transform or collate function of its own, which
                expects rows of several members.
        """
        if not self._transform.is_empty or self._collate_fn is not None or any(self._collates):
            raise UnsupportedError(
                "an ensemble with a transform or collate function of its own cannot list trajectories: query its "
                "members"
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

        Raises:
            EnsembleKindError: (a TypeError) it is not a `SamplerEnsemble`.
            SchemaError: (a RuntimeError) the number of samplers differs.
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
            "an ensemble uses the parts of its members", hint="replace them there: rb[0].set_storage(…)"
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
        """The exponent of the weights is `1 / temperature`."""
        return self._sampler.temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        self._sampler.temperature = value

    @property
    def schema(self) -> Policy | None:
        """The policy for entries that only some members have."""
        return self._joiner.policy

    # Priorities ------------------------------------------------------------------------------------

    def update_priority(self, index: Any, priority: Any) -> None:
        """Set the priorities of elements.

        Args:
            index: the entry `"index"` of a batch.
            priority: one number for all elements, or a tensor in the shape of the index.

        Raises:
            WrongKindError: (a TypeError) the index is not a tensordict.
            SchemaError: (a RuntimeError) the number of priorities does not match.
        """
        if not is_tensor_collection(index) or index.get(BUFFER_IDS, None) is None:
            raise WrongKindError(f'an ensemble takes the entry "index" of a batch, found a {type(index).__name__}')
        for number, _, rows, chosen in part_of_index(index, self.storage):
            part = priority
            if isinstance(priority, torch.Tensor) and priority.dim():
                if priority.shape != chosen.shape:
                    raise SchemaError(f"priorities are {list(priority.shape)}, expected {list(chosen.shape)}")
                part = priority[chosen]
            self._members[number].update_priority(rows, part)

    def update_tensordict_priority(self, data: Any) -> None:
        """Set the priorities of a batch's elements in the members that are `TensorDictReplayBuffer`s; see there.

        Raises:
            MissingKeyError: (a KeyError) the batch has no `"index"`.
        """
        index = data.get(INDEX, None)
        if index is None or index.get(BUFFER_IDS, None) is None:
            raise MissingKeyError('the batch has no entry ("index", "buffer_ids"): it was not sampled from an ensemble')
        if index.get(SOURCE_ID, None) is None and self.source_key is not None and self.source_key in data:
            index = index.copy().set(SOURCE_ID, data.get(self.source_key))  # the innermost buffers hold the priorities
        for number, _, rows, chosen in part_of_index(index, self.storage):
            member = self._members[number]
            if isinstance(member, TensorDictReplayBuffer | ReplayBufferEnsemble):
                member.update_tensordict_priority(data[chosen].set(INDEX, rows))

    # Writing and counting --------------------------------------------------------------------------

    def _refused(self, *arguments: Any, **named: Any) -> NoReturn:
        refuse_write(self)

    __setitem__ = write_all = flush = set_ = set_at_ = update_ = mark_update = _refused

    def add(self, data: Any) -> Any:
        """Write an element to the member given by `routing_key`, or one to each along `routing_dim`; see `extend`."""
        return self._written(data, lambda member, part: member.add(part), 0)

    def extend(self, data: Any, *, update_priority: bool | None = None) -> Any:
        """Write each row to the member given by `routing_key` or `routing_dim`.

        The members write one after the other: if one of them refuses its part, the ones before it have written theirs.

        Args:
            data: a tensordict. With `routing_dim`, the other dimensions are as the members expect them.
            update_priority: see `TensorDictReplayBuffer.extend`.

        Returns:
            A tensordict `[n]`: `"buffer_ids"`, int64 `[n]`, the members; `"index"`, int64 `[n]` or `[n, ndim]`, the
            elements there; and `"index_generation"`, int64 `[n]`, which is -1 if the writer does not track generations.
            They have the same order as the rows of the data, flattened; if members have transforms that hold data back,
            they are ordered by member.

        Raises:
            EnsembleWriteError: (a RuntimeError and a TypeError) the ensemble has no routing.
            UsageError: (a ValueError) the data is not a tensordict, or names members or has dimensions that do not fit.
            MissingKeyError: (a KeyError) the entry `routing_key` is missing.
        """
        options = {} if update_priority is None else {"update_priority": update_priority}
        return self._written(data, lambda member, part: member.extend(part, **options), 1)

    def _written(self, data: Any, write: Callable[[ReplayBuffer, Any], Any], rows: int) -> TensorDict:
        """Write the parts of data with `rows` dimensions of rows, 0 or 1."""
        if self.routing_key is None and self.routing_dim is None:
            refuse_write(self)
        if not is_tensor_collection(data):
            raise UsageError(f"only tensordicts are routed to members, found a {type(data).__name__}")
        data = self._inward(data, self._transform.inv)
        found, places = [], []
        for number, part, place in () if data is None else self._parts_of(data, rows):
            member = self._members[number]
            index = write(member, part)
            index = torch.zeros(0) if index is None else torch.as_tensor(index)
            if index.numel():  # a writer may reject an element, and a transform may hold it back
                index = index if index.dim() else index.unsqueeze(0)
                ids, generations = torch.full((len(index),), number), member.writer.generations_of(index)
                found.append([ids, index, generations])
                places.append(place)
        parts = [torch.cat(some) for some in zip(*found, strict=True)] or [torch.zeros(0, dtype=torch.int64)] * 3
        order = torch.cat(places).argsort() if places else parts[0]
        whole = TensorDict(dict(zip((BUFFER_IDS, INDEX, "index_generation"), parts, strict=True)), [len(parts[0])])
        return whole[order] if len(order) == len(whole) else whole

    def _parts_of(self, data: Any, rows: int) -> list[tuple[int, Any, torch.Tensor]]:
        """Return the members that get a part of the data, these parts, and their positions in the flattened data."""
        if (dim := self.routing_dim) is not None:
            if not 0 <= dim < data.ndim or data.shape[dim] != len(self):
                raise UsageError(
                    f"the data has the shape {list(data.shape)}, expected {len(self)} in dimension {dim}: one for each "
                    "member"
                )
            places = torch.arange(data.numel()).view(data.shape).movedim(dim, 0)
            places = places.reshape(len(self), data.numel() // len(self))
            return list(zip(range(len(self)), data.unbind(dim), places, strict=True))
        key: Any = self.routing_key
        if (ids := data.get(key, None)) is None:
            raise MissingKeyError(f"the data has no entry {key!r}, which says to which member it goes")
        ids = torch.as_tensor(ids)
        if ids.is_floating_point() or ids.numel() != (len(data) if rows else 1):
            raise UsageError(f"{key!r} is {ids.dtype} {list(ids.shape)}, expected the number of a member for each row")
        ids = ids.reshape(-1)
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < len(self):
            raise UsageError(f"{key!r} is from {ids.min()} to {ids.max()}, the members are 0 to {len(self) - 1}")
        chosen = [(number, (ids == number).nonzero()[:, 0]) for number in ids.unique().tolist()]
        return [(number, data[place] if rows else data, place) for number, place in chosen]

    def read_all_in_order(self, end: int | None = None) -> NoReturn:
        """Raise UnsupportedError (a NotImplementedError): rows have an order only within a member."""
        raise UnsupportedError("the rows of an ensemble have no order", hint="read a member: rb[0].read_all_in_order()")

    def empty(self, empty_write_count: bool = True) -> None:
        """Remove all elements of all members.

        Raises:
            SchemaError: (a RuntimeError) a member, such as a dataset, cannot be written to. Nothing is changed.
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
        """Return the sums of size, write_count and capacity, and under `members` the statistics of each member."""
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

    @property
    def batch(self) -> BatchForm:
        """The form of batches: `"stack"`, `[k, n]`, or `"exact"`, `[n]`."""
        return self._sampler.batch

    # Sampling --------------------------------------------------------------------------------------

    def sample_counts(self, counts: Sequence[int], *, return_info: bool = False) -> Any:
        """Draw a batch with a given number of elements from each member, one member after the other; see `sample`.

        The ensemble must have `batch="exact"`; its weights are not used.

        Args:
            counts: how many elements to draw from each member.
            return_info: whether to return a pair `(batch, info)`.

        Raises:
            UsageError: (a ValueError) `counts` does not fit the members.
        """
        require_flags(return_info=return_info)
        if self.batch != "exact" or len(counts) != len(self._members) or min(counts) < 0 or not any(counts):
            raise UsageError(
                f"counts is {list(counts)}, expected one number for each of {len(self._members)} members",
                hint='create the ensemble with batch="exact"',
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
        """Draw from members that the sampler chooses, or with `counts` from the given ones."""
        with self._sampling:
            self._refresh()
            joint = self._joint()
            if joint is None:
                return self._draw_counts(self._chosen_counts(size) if counts is None else counts)
            exclusion = self._lineup.exclusion(joint)
            if exclusion is None:
                draw, counts = self._draw_jointly(joint, size, counts)
            else:
                with exclusion:
                    draw, counts = self._draw_jointly(joint, size, counts)
            if draw is None:
                return self._draw_counts(counts)
            return draw if draw.plain else self._completed_in_turn(draw)

    def _chosen_counts(self, size: int) -> Counts:
        """Draw how many elements each member contributes."""
        sampler = self._sampler
        with self._lineup.draws_and_writes if sampler.by_sampleable else contextlib.nullcontext():
            sizes = sampler.sizes(self._storage, size)
        return sampler.counts(sizes, size)

    def _draw_counts(self, counts: Sequence[tuple[int, int]]) -> Draw:
        """Draw the given number of elements from each member."""
        with self._sampling:
            self._learn_schemas()
            reading = [self._members[number] for number, _ in counts if self._reads_at_draw(number)]
            guards = sorted({member.guard for member in reading}, key=lambda guard: guard.rank)
            found: list[tuple[int, Draw]] = []
            try:
                with HoldAll(guards):  # so that rows and index are of the same instant
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
        """If the batch of a draw was not made, keep its parts in the members that have epochs."""
        if not isinstance(draw, RowsDraw):  # members of a joint draw have no epochs
            self._keep_parts(draw.parts)

    def _keep_parts(self, parts: Sequence[tuple[int, Draw]]) -> None:
        for number, part in parts:
            self._members[number].keep(part, count_of(part.index) if part.size is None else part.size)

    def restored(self, draw: Draw) -> bool:
        """Read the rows of an interrupted draw again; False if some were overwritten meanwhile."""
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
        """Return the joint draw of all members, and settle them; None if each has to draw by itself."""
        joint = self._sampler.joint(self._storage)
        if joint is None or self._lineup.apart:
            return None
        if joint.reads_rows and not (self._gathers and self._lineup.plain):
            return None
        # If rows cannot be gathered from all members, every draw would have to be repeated one by one.
        if joint.reads_rows and not self._gatherer.covers(self._storage.members):
            return None
        here = self._place  # the process in which this ensemble is settled
        for member in self._members:
            member.settle(here)
        return joint

    def _draw_jointly(self, joint: JointDraw, size: int, counts: Counts | None) -> tuple[RowsDraw | None, Counts]:
        """Draw from all members in one call.

        Returns:
            The draw, or None if the members have to draw one by one; and how many elements each member contributes.
        """
        sizes = self._sampler.sizes(self._storage, size)
        counts, drawn = self._sampler.draw_jointly(joint, sizes, size, counts)
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
        """Make the parts of members now if a transform draws, so that random numbers follow the order of calls."""
        if draw.rows is None:
            for member in self._members:
                if member.transform.draws:
                    draw.rows = self._samples_of(draw)
                    break
        return draw

    def _drawn(self, counts: Sequence[tuple[int, int]], drawn: list[tuple[int, Draw]], *, with_rows: bool) -> Draw:
        """Draw the given number of elements from each member.

        The members' draws are appended to `drawn`, so that they can be kept if a later one fails.
        """
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
        draw.size = count  # the draw itself may be smaller, at the end of an epoch
        drawn.append((number, draw))
        index = flattened(draw.index) if isinstance(draw.index, TensorDict) else draw.index
        return index, draw.info, draw

    def _reads_at_draw(self, number: int) -> bool:
        """Return whether a member's rows have to be read with its draw, and `_gathered` may be able to read them."""
        member = self._members[number]
        return member.sampler.reads_rows and member.returns_rows and not isinstance(member, ReplayBufferEnsemble)

    def _rows_of(self, draw: Draw, collate: Callable[[Any], Any] | None = None) -> Any:
        rows = self._gathered(draw) if draw.rows is None else draw.rows
        if isinstance(rows, TensorDict):
            return rows if self._prefetcher is None else rows.copy()  # a retry uses the rows of the same draw again
        samples = self._samples_of(draw) if rows is None else rows
        if (collate := collate or self._collate_fn) is not None:
            return collate([sample for _, sample in samples])
        return self._joiner.join(samples)

    @property
    def _looking_back(self) -> list[Any]:
        """Empty, because members apply their own transforms that look back."""
        return []

    @property
    def _gathers(self) -> bool:
        """Whether a batch consists of the members' rows unchanged, if their entries agree."""
        return not self._collates and self._collate_fn is None and self._joiner.policy is None

    def _gathered(self, draw: Draw) -> TensorDict | None:
        """Return the batch, gathered from all members at once; None if each member has to make its own part.

        They have to if a member has a transform, a collate function, or sampler info that the others do not have.
        """
        if not self._gathers:
            return None
        if isinstance(draw, RowsDraw) and draw.plain and not draw.common:
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
        """Return the rows of a draw, and the info to add to the batch; None if members differ in these."""
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
        """Return whether the batches of these members have their info as entries; None if members differ."""
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
        """Make the part of a batch that a member contributes, as its `sample` would."""
        member = self._members[number]
        collate = self._collates[number] if self._collates else None
        if isinstance(member, ReplayBufferEnsemble):
            batch = member.batch_of(part)
            flat = batch if member.batch == "exact" else one_behind_another(batch)
            key = member.source_key
            return flat.exclude(key) if key is not None and is_tensor_collection(flat) else flat
        return member.batch_of(part, collate)

    # Schemas ---------------------------------------------------------------------------------------

    def schema_report(self) -> tuple[SchemaDifference, ...]:
        """Return the entries of batches, after the members' transforms, in which members differ.

        Members without elements are left out. Random streams do not advance.
        """
        return tuple(differences(self._schemas()).values())

    @property
    def dropped_keys(self) -> tuple[str, ...]:
        """The entries that `schema="intersect"` leaves out of batches, as far as members have elements."""
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
                self._joiner.learn({number: self._probed(number)})

    def _probed(self, number: int) -> Schema:
        """Return the schema of a member's batches, from a draw that does not change its sampler or random stream."""
        member = self._members[number]
        if isinstance(member, ReplayBufferEnsemble):
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
        """Return the schema of this ensemble's batches, for an ensemble that it is a member of."""
        return joined_schema(self._joiner.policy, self._schemas())

    @property
    def revision(self) -> object:
        """A value that changes whenever a part or a lock is replaced, also in a member."""
        return self._revision, *(member.revision for member in self._members)

    def _refresh(self) -> None:
        """Take over the parts of the members again if any of them were replaced."""
        revisions = [member.revision for member in self._members]
        if revisions == self._followed:
            return
        storages, samplers = zip(*((member.storage, member.sampler) for member in self._members), strict=True)
        if not _same(storages, self._storage.members) or not _same(samplers, self._sampler.members):
            self._storage.members, self._sampler.members = storages, samplers
        self._lineup = _Lineup.of(self._members)
        self._followed = revisions

    # Random streams --------------------------------------------------------------------------------

    def _lend(self, before: torch.Generator | None) -> None:
        """Set the generator of members that have none of their own, and of those that use `before`, the last one."""
        generator = self._rng
        for member in self._members:
            own = member.generator
            free = generator is not None and (own is None or member.unseeded)
            if own is not generator and (free or (own is before and own is not None)):
                member.set_rng(generator)

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Set the generator of the ensemble, and of the members without one of their own."""
        before = self._rng
        super().set_rng(generator)
        self._lend(before)

    def draw_from(self, generator: torch.Generator | None) -> None:
        """Set the generator of the ensemble, and of the members that share it."""
        before = self._rng
        super().draw_from(generator)
        self._lend(before)

    @contextlib.contextmanager
    def drawing_from(self, generator: torch.Generator) -> Iterator[None]:
        """Draw from another generator inside the context, in all members, even those with a seed of their own."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(super().drawing_from(generator))
            for member in self._members:
                stack.enter_context(member.drawing_from(generator))
            yield

    def _borrowers(self) -> list[bool]:
        """Return for each member whether it draws from the ensemble's generator."""
        return [self._rng is not None and member.generator is self._rng for member in self._members]

    def move_to(self, here: Place, *, begins_epoch: bool) -> None:
        """Record that draws are now made in this process, also by the members that share the random stream."""
        super().move_to(here, begins_epoch=begins_epoch)
        for member, borrows in zip(self._members, self._borrowers(), strict=True):
            if borrows:
                member.move_to(here, begins_epoch=begins_epoch)

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in super().__getstate__().items() if name != "_lineup"}
        return state | {"_borrowing": self._borrowers(), "_followed": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        borrowing = state.pop("_borrowing")
        super().__setstate__(state)
        for member, borrows in zip(self._members, borrowing, strict=True):
            if borrows:  # share one stream again, as members with copies of it would draw the same rows
                member.draw_from(self._rng)
        self._refresh()

    @property
    def shared(self) -> bool:
        """Whether several processes may write to all members."""
        return all(member.shared for member in self._members)

    def share(self, shared: bool = True) -> Self:
        """Set whether several processes may write to the members; see `ReplayBuffer.share`."""
        for member in self._members:
            member.share(shared)
        return self

    def paused(self) -> HoldAll:
        """Return a context that excludes draws, and writers to the members."""
        members = sorted(self._members, key=lambda member: member.guard.rank)
        # The locks are taken in the order of a draw: the ensemble's own locks first, then the members' locks.
        return HoldAll([super().paused(), *(member.paused() for member in members)])

    # State -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all members, the weights, and the batches prepared ahead; tensors are references."""
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
            raise SchemaError(f"the state has {found} members, this ensemble has {len(self._members)}")
        parts = [state_dict[name] for name in ("_storage", "_sampler", "_writer")]
        for part in parts:
            require_members(part, len(self._members))
        ahead = self._prepared_in(state_dict)
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
            self._restore_ahead(ahead)

    def _prepare_dump(self, path: Path) -> None:
        self._refresh()
        for leaf in self._storage.leaves:
            refuse_home_of(leaf, path)

    def folder_notes(self) -> dict[str, Any]:
        """Return the batch size and generator of each member."""
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
        require_digests(saved.storage)  # no member's folder may have been replaced
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
        """Load a member inside `_all_or_nothing`; errors name the member."""
        member = self._members[number]
        generator, borrows = member.generator, self._borrowers()[number]
        before = held_state(member.state_dict()) | ({"_rng": None} if borrows else {})
        try:
            load()
        except RbtoolError as error:
            error.hint = f"this is member {number} of the ensemble; nothing was loaded"
            raise
        self._replaced.append((member, before, generator))

    def _restore_members(self) -> None:
        """Give the members loaded so far their previous state and generator."""
        for member, before, generator in reversed(self._replaced):
            member.draw_from(generator)
            member.load_state_dict(before)

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Load inside the context; on failure restore everything, including members."""
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
        """Change loaded draws to the members' row numbers after a rotation, in place, and return them."""
        for draw in draws:
            for member, part in draw.parts:
                self._members[member].rotated_draws([part])
        return draws

    def _restore_ahead(self, draws: list[Draw]) -> None:
        super()._restore_ahead([self.completed_draw(draw) for draw in self.rotated_draws(draws)])

    def date(self, draw: Draw) -> None:
        """Note the state of the members' write logs in the parts of a loaded draw."""
        for member, part in draw.parts:
            self._members[member].date(part)

    def completed_draw(self, draw: Draw) -> Draw:
        """Return a loaded draw with its index, composed from its parts."""
        if draw.index is None:
            parts = []
            for number, part in draw.parts:
                member = self._members[number]
                parts.append(
                    (number, member.completed_draw(part) if isinstance(member, ReplayBufferEnsemble) else part)
                )
            found = self._composed([(number, part.index, part.info, part) for number, part in parts])
            found.last, found.size = draw.last, draw.size
            return found
        return draw

    def _composed(self, found: Sequence[Any]) -> Draw:
        """Make a draw from draws of members, given as `(member, index, info, draw)`."""
        index, info = compose(found, self._storage, self._sampler.batch)
        return self._labelled(index, info, [(part[0], part[3]) for part in found])

    def _labelled(self, index: Any, info: dict[Any, Any], parts: Sequence[tuple[int, Draw]]) -> Draw:
        """Make a draw with the index in its info."""
        info[INDEX] = index
        if self.source_key is not None:
            info[self.source_key] = index.get(SOURCE_ID)
        return Draw(index, info, parts=parts)


def labelled(sample: Any, index: TensorDict | None, source_key: str | None) -> Any:
    """Add `"index"` and the source key to a member's batch, from the rows `index`, `[n]`, of an ensemble's index.

    If `index` is None, `"index"` is removed. SchemaError if the batch already has an entry `source_key`.
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
    """Expand labels, `[n, …]`, to the shape of a batch: of n elements, or of elements with several steps each."""
    if values.shape[:1] == batch[:1] and len(batch) == 1:
        return values
    rest = values.shape[1:]
    if len(values) == batch.numel():
        return values.reshape(*batch, *rest)
    if len(values) != batch[0]:
        raise SchemaError(f"a transform changed the number of rows from {len(values)} to {list(batch)}")
    return values.reshape(len(values), *[1] * (len(batch) - 1), *rest).expand(*batch, *rest).contiguous()


def one_behind_another(batch: Any) -> Any:
    """Reshape a batch `[k, n, …]`, also a lazy stack, to `[k * n, …]`."""
    if isinstance(batch, torch.Tensor) or is_tensor_collection(batch):
        return torch.cat(list(batch.unbind(0)))
    raise SchemaError(f"a nested ensemble returned a batch of type {type(batch).__name__}, expected a tensordict")


def part_of_index(index: Any, storage: StorageEnsemble) -> Iterator[tuple[int, Any, Any, torch.Tensor]]:
    """Split the index of a batch by members.

    Yields:
        The member's number, its storage, the rows there, and a mask of the batch that marks the member's elements. Rows
        are int64 `[n]`, coordinates `[n, ndim]`, or the index of a nested ensemble.
    """
    ids, numbers, sources = index.get(BUFFER_IDS), index.get(INDEX), index.get(SOURCE_ID, None)
    if numbers.shape[: ids.dim()] != ids.shape:
        ids = ids.reshape(*ids.shape, *[1] * (numbers.dim() - ids.dim())).expand(numbers.shape)
    for number in ids.unique().tolist():
        chosen = ids == number
        member, rows = storage.members[number], numbers[chosen]
        if isinstance(member, StorageEnsemble):
            if sources is None:
                raise SchemaError(f"member {number} is an ensemble, and the index has no source_id for its rows")
            inner = sources[chosen] - int(storage.sources[number])
            entries = {BUFFER_IDS: member.members_of(inner), INDEX: rows, SOURCE_ID: inner}
            yield number, member, TensorDict(entries, [len(rows)]), chosen
        else:
            known = IndexPart(rows, None).rows
            yield number, member, torch.stack(known, -1) if isinstance(known, tuple) else known, chosen


class RowsDraw(Draw):
    """Rows of several members from a joint draw; index, info and the members' draws are computed when needed.

    Attributes:
        of_members: the rows, member by member.
        labels: member, row and source of each element, in the shape of the batch; see `labels_of`.
        common: the info of the samplers, in the shape of the batch.
        plain: whether the members' batches are rows as their storages return them.
    """

    __slots__ = ("_source_key", "common", "labels", "of_members", "plain")

    def __init__(
        self,
        rows: MemberRows,
        labels: Sequence[torch.Tensor],
        source_key: str | None,
        common: Mapping[Any, Any],
        plain: bool,
    ) -> None:
        self.last, self.rows, self.chances, self.written, self.size = False, None, None, None, None
        self.of_members = rows
        self.labels = labels
        self.common = common
        self.plain = plain
        self._source_key = source_key

    @property
    def index(self) -> Any:
        return index_with(self.of_members, self.labels)

    @property
    def info(self) -> Any:  # type: ignore[override]
        source = {} if self._source_key is None else {self._source_key: self.labels[2]}
        return {**self.common, INDEX: self.index, **source}

    @property
    def parts(self) -> Any:  # type: ignore[override]
        rows, dims, found = self.of_members, self.labels[1].dim(), []
        flat = {key: value.flatten(0, dims - 1) for key, value in self.common.items()}
        for member, part in rows.parts:
            index = torch.from_numpy(rows.numbers[part])
            info = {key: value[part] for key, value in flat.items()} | {INDEX: index}
            found.append((member, Draw(index, info, written=None if self.written is None else self.written[member])))
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return Draw, (self.index, self.info, self.last, self.rows, self.parts, None, None, self.size)


_OF_PARTS = frozenset({"_storage", "_sampler", "_writer", "_prefetch_state"})


def _same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Return whether two sequences consist of the same objects."""
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


def _saved_member(saved: SavedParts, number: int, note: Mapping[str, Any], with_rows: frozenset[int]) -> SavedParts:
    """Return the saved parts of a member in a checkpoint; FormatError if its notes are damaged."""

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


_IS_EMPTY = operator.attrgetter("is_empty")


class _Lineup(NamedTuple):
    """Properties of the members' parts that draws need; valid until a part is replaced."""

    guards: Guards
    apart: bool
    """Whether a member's draws hold more than its sampler's index and info, such as generations, so that it has to draw
    by itself.
    """
    transforms: list[Compose] | None
    """The members' transforms; None if a member changes rows in another way, too, such as by a collate function."""
    draws: HoldAll
    """Excludes other draws from the members, and changes of their samplers."""
    draws_and_writes: HoldAll

    @classmethod
    def of(cls, members: Sequence[ReplayBuffer]) -> _Lineup:
        """Derive the properties from the members."""
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
        """Whether the batches of all members are rows as their storages return them."""
        return self.transforms is not None and all(map(_IS_EMPTY, self.transforms))

    def exclusion(self, joint: JointDraw) -> HoldAll | None:
        """Return a context that excludes whatever could interfere with a joint draw; None if nothing can."""
        return self.draws_and_writes if joint.reads_rows else self.draws if joint.uses_state else None


def _refuse_sampler(sampler: Any) -> NoReturn:
    """Raise EnsembleKindError (a TypeError): only a `SamplerEnsemble` can draw for an ensemble."""
    raise EnsembleKindError(f"an ensemble takes a SamplerEnsemble, found a {type(sampler).__name__}")


def _refuse_both(parts: Mapping[str, Any]) -> None:
    """Raise SchemaError (a RuntimeError) if both buffers and parts were given."""
    both = [name for name, part in parts.items() if part is not None]
    if both:
        raise SchemaError(f"buffers and {', '.join(both)} are both given: give one or the other")


def _checked_collates(collates: Any, count: int) -> list[Any]:
    """Return the members' collate functions, none or `count`; EnsembleKindError for another number."""
    if collates is None:
        return []
    if len(collates) != count:
        raise EnsembleKindError(f"there are {len(collates)} collate_fns, expected {count}: one for each member")
    return list(collates)


def _members_of(parts: Mapping[str, Any], given: Mapping[str, Any], collates: Any) -> list[ReplayBuffer]:
    """Make buffers from the parts of an ensemble.

    Raises:
        SchemaError: (a RuntimeError) a part is missing, the numbers of parts differ, or an argument belongs to the
            `SamplerEnsemble`.
    """
    missing = [name for name, part in parts.items() if part is None]
    if missing:
        raise SchemaError(f"{' and '.join(missing)} missing: give buffers, or storages, samplers and writers")
    kinds = {"storages": StorageEnsemble, "samplers": SamplerEnsemble, "writers": WriterEnsemble}
    for name, kind in kinds.items():
        if not isinstance(parts[name], kind):
            raise WrongKindError(f"{name} is a {type(parts[name]).__name__}, expected a {kind.__name__}")
    defaults = {"p": None, "sample_from_all": False, "num_buffer_sampled": None, "temperature": 1.0, "batch": "stack"}
    for name, value in given.items():
        if value is not None and value != defaults[name]:
            raise SchemaError(f"pass {name} to the SamplerEnsemble instead")
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
