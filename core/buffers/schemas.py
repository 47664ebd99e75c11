"""How an ensemble joins the batches of its members: comparison of their entries, and what is done about differences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from tensordict import LazyStackedTensorDict, TensorDict, is_tensor_collection

from ..errors import SchemaError, UsageError
from .pytrees import stack_elements

Key: TypeAlias = tuple[str, ...]
Policy: TypeAlias = Literal["intersect", "union", "error"]
Kind: TypeAlias = tuple[str, tuple[int, ...]]
"""Element type and row shape of an entry."""
Schema: TypeAlias = dict[Key, Kind]

MASK = "schema_mask"
_HINT = 'schema="intersect" leaves entries out, schema="union" adds a mask'


@dataclass(frozen=True, slots=True)
class SchemaDifference:
    """An entry in which members differ: for each member number, its element type and row shape, or None if it is
    missing.
    """

    key: str
    members: Mapping[int, str | None]
    clash: bool
    """Whether members store it with different element types or row shapes."""

    def __str__(self) -> str:
        return f"{self.key!r}: " + ", ".join(
            f"member {member} has {'none' if kind is None else kind}" for member, kind in self.members.items()
        )


Differences: TypeAlias = tuple[SchemaDifference, ...]


def checked_policy(policy: Any) -> Policy | None:
    """Return a schema policy; UsageError if it is unknown."""
    if policy is not None and policy not in get_args(Policy):
        raise UsageError(f"schema is {policy!r}, expected one of {', '.join(get_args(Policy))}")
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
    """The masks that an ensemble with the policy `union` adds to its batches."""
    return [key for key, kind in schema.items() if key[:1] == (MASK,) and kind == ("torch.bool", ()) and key[1:]]


def _without_masks(schema: Schema) -> Schema:
    masks = frozenset(_masks(schema))
    return {key: kind for key, kind in schema.items() if key not in masks}


def _compared(policy: Policy | None, schemas: Mapping[int, Schema]) -> tuple[frozenset[Key], Differences]:
    """Return the entries with masks in some member, which the policy continues, and the entries in which members
    differ.
    """
    if policy not in ("intersect", "union"):
        return frozenset(), differences(schemas)
    marked = frozenset(key[1:] for one in schemas.values() for key in _masks(one))
    return marked, differences({number: _without_masks(one) for number, one in schemas.items()})


def joined_schema(policy: Policy | None, schemas: Mapping[int, Schema]) -> Schema:
    """Return the schema of the batches that a `Joiner` makes for members with these schemas."""
    marked, different = _compared(policy, schemas)
    apart = {one.key for one in different}
    found: Schema = {}
    for schema in schemas.values():
        found |= schema if policy not in ("intersect", "union") else _without_masks(schema)
    if policy == "union":
        masked = [key for key in found if ".".join(key) in apart or key in marked]
    else:
        found = {key: kind for key, kind in found.items() if ".".join(key) not in apart}
        masked = [key for key in found if key in marked]
    return found | {(MASK, *key): ("torch.bool", ()) for key in masked}


def differences(schemas: Mapping[int, Schema]) -> Differences:
    """Compare the schemas of members; empty if they agree."""
    keys: dict[Key, None] = {}
    for schema in schemas.values():
        keys |= dict.fromkeys(schema)
    found = []
    for key in keys:
        kinds = {member: schema.get(key) for member, schema in schemas.items()}
        if len(set(kinds.values())) == 1:
            continue
        named = {member: None if kind is None else _text(kind) for member, kind in kinds.items()}
        clash = len({kind for kind in kinds.values() if kind is not None}) > 1
        found.append(SchemaDifference(".".join(key), named, clash))
    return tuple(found)


def _text(kind: Kind) -> str:
    return f"{kind[0].removeprefix('torch.')} {list(kind[1])}"


class Joiner:
    """Makes one batch from the batches of members.

    With `stack`, the result is `[k, n]`; otherwise the members' batches are concatenated, `[n]`. Every policy raises
    SchemaError for entries whose element types differ. For entries that only some members have:

    - `"error"`: SchemaError names them.
    - `"intersect"`: they are left out, and listed in `dropped_keys`.
    - `"union"`: missing values are zeros, and `("schema_mask", *key)`, bool in the shape of the batch, is True where a
      value exists. A member that is itself such an ensemble has masks of its own; these are continued, also by
      `"intersect"`.
    - None: as in TorchRL, a lazy stack with the keys that all members have; concatenation treats it like `"error"`.

    Batches that differ in their number of rows or in row shapes are stacked lazily with None, and refused by the
    policies.
    """

    def __init__(self, policy: Policy | None, *, stack: bool, labels: frozenset[str] = frozenset()) -> None:
        self.policy = policy
        self._stack = stack
        self._labels = labels
        self._known: dict[int, Schema] = {}
        self._different: Differences = ()
        self._marked: frozenset[Key] = frozenset()  # entries for which some member has a mask

    @property
    def known(self) -> Mapping[int, Schema]:
        """The schemas of members, by number."""
        return self._known

    def learn(self, member: int, schema: Schema) -> None:
        """Take the schema of a member into account."""
        if self._known.get(member) != schema:
            self._known[member] = schema
            self._marked, self._different = _compared(self.policy, self._known)

    @property
    def dropped_keys(self) -> tuple[str, ...]:
        """The entries that `intersect` leaves out."""
        return tuple(one.key for one in self._different) if self.policy == "intersect" else ()

    def join(self, samples: Sequence[tuple[int, Any]]) -> Any:
        """Make a batch from pairs of a member's number and its batch."""
        batches = [batch for _, batch in samples]
        schemas = [schema_of(batch, self._labels) for batch in batches]
        if self.policy is None:
            return self._joined(batches, [member for member, _ in samples], schemas)
        for (member, _), schema in zip(samples, schemas, strict=True):
            self.learn(member, schema)
        if self.policy == "error" and self._different:
            raise SchemaError(f"members differ in {self._different[0]}", hint=_HINT)
        for one in self._different:
            if one.clash:
                raise SchemaError(
                    f"members differ in {one}", hint="make them equal with a transform of one of the members"
                )
        return self._dense([self._fitted(batch, schema) for batch, schema in zip(batches, schemas, strict=True)])

    def _joined(self, batches: list[Any], members: list[int], schemas: list[Schema]) -> Any:
        if all(schema == schemas[0] for schema in schemas[1:]):
            return self._dense([_without_empty_nests(batch) for batch in batches])
        found = differences(dict(enumerate(schemas)))
        different = [
            SchemaDifference(one.key, {members[place]: kind for place, kind in one.members.items()}, one.clash)
            for one in found
        ]
        _refuse_types(schemas, different)
        if not self._stack or not is_tensor_collection(batches[0]):
            raise SchemaError(f"members differ in {different[0]}", hint=_HINT)
        return _lazily_stacked(batches)

    def _fitted(self, batch: Any, schema: Schema) -> Any:
        """Return a batch with exactly the entries that the policy gives to all members."""
        batch = _without_empty_nests(batch)
        if not is_tensor_collection(batch) or not (self._different or self._marked):
            return batch
        if self.policy == "intersect":
            everywhere = set(_without_masks(schema)).intersection(*self._known.values())
            labels = [name for name in self._labels if batch.get(name, None) is not None]
            return self._with_masks(batch.select(*everywhere, *labels), batch, schema, self._marked & everywhere)
        fitted, wanted = batch.copy(), {one.key for one in self._different}
        kinds: Schema = {}
        for known in self._known.values():
            kinds |= _without_masks(known)
        missing = [(key, *kind) for key, kind in kinds.items() if key not in schema and ".".join(key) in wanted]
        for key, dtype, row in missing:
            if dtype == "object":
                raise SchemaError(f"{'.'.join(key)!r} holds objects, for which there is no zero to fill gaps with")
            kind = getattr(torch, dtype.removeprefix("torch."))
            fitted.set(key, torch.zeros((*batch.batch_size, *row), dtype=kind, device=batch.device))
        masked = [key for key in kinds if ".".join(key) in wanted or key in self._marked]
        return self._with_masks(fitted, batch, schema, masked)

    @staticmethod
    def _with_masks(fitted: Any, batch: Any, schema: Schema, keys: Iterable[Key]) -> Any:
        """Set the mask of each of these entries: the member's own, or whether it has the entry."""
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
    if len({batch.device for batch in batches}) > 1:  # for example None for a list, next to a tensor's device
        copies = [batch.clear_device_() for batch in copies]
    return LazyStackedTensorDict.lazy_stack(copies)


def _refuse_types(schemas: Sequence[Schema], different: Sequence[SchemaDifference]) -> None:
    """Raise SchemaError if an entry has different element types: a stack would convert one silently."""
    for key in dict.fromkeys(key for schema in schemas for key in schema):
        types = {schema[key][0] for schema in schemas if key in schema}
        if len(types) > 1:
            one = next(one for one in different if one.key == ".".join(key))
            raise SchemaError(f"members differ in {one}", hint="cast the entry with a transform of one of the members")


def _without_empty_nests(batch: Any) -> Any:
    """Leave out nests without entries, such as those left by RenameTransform; no value is lost."""
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
