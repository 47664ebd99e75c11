"""Tree specs: how data is nested, without its tensors; also as JSON, and as names of files.

The names of files are those in which tensordict and TorchRL store the tensors of a nest.

`torch.utils._pytree` is not used: for a tensordict of 11 tensors it takes 329 µs to flatten and 468 µs to unflatten,
while a tree spec takes 2.2 µs and 5.0 µs (torch 2.13). It also runs code of any registered class, and its errors do not
name the entry in which data differs from a spec.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
    is_tensorclass,
)

from ..errors import FormatError, SchemaError
from ..format.memmap.tree import require_own_files
from ..ted.schema import file_stem
from .text import Values, alike, column_of, encoded, require_json, rows_of, shared_value, width_of

Path: TypeAlias = tuple[str, ...]

_NONE = "none"
NO_BATCH = torch.Size([])


class TreeSpec(ABC):
    """A node of a tree spec with the nodes below it: how data is nested, without its tensors.

    Specs of rows leave out the leading dimensions that count elements. Specs of single items, for which
    `list_storage.py` adds nodes, may also contain arrays, lazy stacks and arbitrary objects.

        TensorDict({"action": …, "next": {"reward": …}, "task": "walk"})     a ConstantNode for "task", no leaf
        paths     ("action",)   ("next", "reward")
        leaves    tensor 0      tensor 1
    """

    children: Mapping[Any, TreeSpec] = MappingProxyType({})
    """The child nodes, by key or number."""

    def paths(self, prefix: Path = ()) -> Iterator[Path]:
        """Yield the path of every leaf, in the order of the leaves."""
        for key, child in self.children.items():
            yield from child.paths((*prefix, str(key)))

    @functools.cached_property
    def places(self) -> dict[Path, int]:
        """The position of every leaf that is a tensor in the data, not a column of text, by its path."""
        texts = dict(self.texts())
        return {path: number for number, path in enumerate(self.paths()) if path not in texts}

    def values(self, prefix: Path = ()) -> Iterator[tuple[Path, TreeSpec]]:
        """Yield path and node of every entry that is not a tensor."""
        for key, child in self.children.items():
            yield from child.values((*prefix, str(key)))

    def texts(self) -> Iterator[tuple[Path, TextNode]]:
        """Yield path and node of every entry that is not a tensor and may differ between rows."""
        return ((path, node) for path, node in self.values() if isinstance(node, TextNode))

    def constants(self) -> Iterator[tuple[Path, Any]]:
        """Yield path and value of every entry that is not a tensor and the same in all rows."""
        return ((path, node.value) for path, node in self.values() if isinstance(node, ConstantNode))

    def refuse_other_constants(self, saved: TreeSpec) -> None:
        """Raise SchemaError if saved data differs in entries that are not tensors."""
        known = dict(self.constants())
        for path, value in saved.constants():
            if path not in known or not alike(known[path], value):
                raise SchemaError(
                    f"{place(path)} is {value!r} in the saved data, but {known.get(path, 'nothing')!r} here"
                )
        saved_paths = {path for path, _ in saved.values()}
        for path, value in known.items():
            if value is not None and path not in saved_paths:
                raise SchemaError(f"{place(path)} is {value!r} here, but the saved data has no such entry")

    def in_columns(self, prefix: Path = ()) -> TreeSpec:
        """Return this spec with columns in place of values that all rows share."""
        return self.with_children({key: child.in_columns((*prefix, str(key))) for key, child in self.children.items()})

    def with_text_of(self, other: TreeSpec) -> TreeSpec:
        """Return this spec with the text nodes of `other` at the same paths: shared values, or columns of its width."""
        return self.with_children(
            {
                key: child.with_text_of(other.children[key]) if key in other.children else child
                for key, child in self.children.items()
            }
        )

    def with_node(self, path: Path, node: TreeSpec | None) -> TreeSpec:
        """Return this spec with another node at a path, or with none there."""
        if len(path) > 1:
            return self.with_children(
                {
                    key: child.with_node(path[1:], node) if str(key) == path[0] else child
                    for key, child in self.children.items()
                }
            )
        known = {str(key): key for key in self.children}
        children = {**self.children, known.get(path[0], path[0]): node}
        return self.with_children({key: child for key, child in children.items() if child is not None})

    def placed(self, device: torch.device) -> TreeSpec:
        """Return this spec with `device` as the device of tensordicts."""
        return self.with_children({key: child.placed(device) for key, child in self.children.items()})

    def with_children(self, children: Mapping[Any, TreeSpec]) -> TreeSpec:
        """Return a node of the same kind with other child nodes."""
        return self

    def with_room_for(self, data: Any) -> TreeSpec:
        """Return this spec with columns that are wide enough for the text of data; SchemaError if data does not fit."""
        found: TreeSpec = self
        while True:
            try:
                found.flatten(data)
                return found
            except TextGrows as grows:
                found = found.with_node(grows.path, grows.node)

    def flatten(self, data: Any) -> list[torch.Tensor]:
        """Return the tensors of data that fits this spec; SchemaError if it does not."""
        found: list[torch.Tensor] = []
        self.flatten_into(found, data)
        return found

    def flatten_into(self, leaves: list[torch.Tensor], data: Any, prefix: Path = ()) -> None:
        """Append the tensors of data that fits this spec; SchemaError if it does not."""
        raise SchemaError(f"{place(prefix)} is a {self}, which cannot be stored in rows")

    @abstractmethod
    def unflatten(self, leaves: Iterator[torch.Tensor], batch: torch.Size) -> Any:
        """Make data with this spec from its tensors, all of which have the leading shape `batch`."""

    def joined(self, other: TreeSpec, prefix: Path = ()) -> TreeSpec:
        """Return this spec with the entries that only `other` has; SchemaError if an entry has two kinds."""
        if type(other) is not type(self):
            raise SchemaError(f"{place(prefix)} is a {other}, expected a {self}")
        return self


class TensorNode(TreeSpec):
    """A leaf: a tensor."""

    def __str__(self) -> str:
        return "tensor"

    def paths(self, prefix: Path = ()) -> Iterator[Path]:
        yield prefix

    def flatten_into(self, leaves: list[torch.Tensor], data: Any, prefix: Path = ()) -> None:
        if not isinstance(data, torch.Tensor):
            raise SchemaError(f"{place(prefix)} is a {type(data).__name__}, expected a tensor")
        leaves.append(data)

    def unflatten(self, leaves: Iterator[torch.Tensor], batch: torch.Size) -> Any:
        return next(leaves)


class TextGrows(SchemaError):
    """Text for which rows have no column, or one that is too narrow.

    A spec with `node` at `path` has room for it.
    """

    def __init__(self, path: Path, node: TextNode) -> None:
        super().__init__(f"{place(path)} needs {node.width} bytes a row")
        self.path, self.node = path, node


class _Value(TreeSpec):
    """An entry that is not a tensor."""

    __slots__ = ()

    def __str__(self) -> str:
        return "non-tensor value"

    def values(self, prefix: Path = ()) -> Iterator[tuple[Path, TreeSpec]]:
        yield prefix, self


@dataclass(frozen=True, slots=True)
class ConstantNode(_Value):
    """An entry that is not a tensor and is the same in every row.

    Several rows are read as a NonTensorStack. A single row is read as a NonTensorData, as in TorchRL, unless `stacked`.

    Attributes:
        value: the value.
        tail: the batch size of the entry after the dimensions that count elements.
        device: its device.
        stacked: whether a single row is a NonTensorStack, too.
    """

    value: Any
    tail: torch.Size
    device: torch.device | None = None
    stacked: bool = False

    def flatten_into(self, leaves: list[torch.Tensor], data: Any, prefix: Path = ()) -> None:
        shared = shared_value(data, place(prefix))
        if shared or 0 not in data.batch_size:
            self._require(shared, lambda: _text_node(data, 0, prefix).width, prefix)

    def unflatten(self, leaves: Iterator[torch.Tensor], batch: torch.Size) -> Any:
        if batch or self.stacked:
            return Values.of(self.value, batch + self.tail, self.device)
        return NonTensorData(self.value, batch_size=self.tail, device=self.device)

    def placed(self, device: torch.device) -> TreeSpec:
        return replace(self, device=device)

    def joined(self, other: TreeSpec, prefix: Path = ()) -> TreeSpec:
        if isinstance(other, TextNode):
            self._require([], lambda: other.width, prefix)
        if isinstance(other, ConstantNode):
            self._require([other.value], lambda: width_of([encoded(other.value, place(prefix))]), prefix)
        return TreeSpec.joined(self, other, prefix)

    def in_columns(self, prefix: Path = ()) -> TreeSpec:
        return TextNode(self.tail, width_of([encoded(self.value, place(prefix))]), self.device)

    def with_text_of(self, other: TreeSpec) -> TreeSpec:
        if isinstance(other, TextNode):
            return replace(other, device=self.device)
        if isinstance(other, ConstantNode) and not alike(other.value, self.value):
            return replace(self, value=other.value)
        return self

    def _require(self, value: list[Any], width: Callable[[], int], prefix: Path) -> None:
        """Raise TextGrows, with a column of at least `width()` bytes, unless `value` contains just this value."""
        if not (value and alike(value[0], self.value)):
            own: Any = self.in_columns(prefix)
            raise TextGrows(prefix, replace(own, width=max(own.width, width())))


@dataclass(frozen=True, slots=True)
class TextNode(_Value):
    """An entry that is not a tensor and may differ between rows.

    Its leaf is a column uint8 `[..., width]` with the bytes of its values. `tail` is the batch size of the entry after
    the dimensions that count elements.
    """

    tail: torch.Size
    width: int
    device: torch.device | None = None

    def paths(self, prefix: Path = ()) -> Iterator[Path]:
        yield prefix

    def flatten_into(self, leaves: list[torch.Tensor], data: Any, prefix: Path = ()) -> None:
        if type(data) is Values and data.contents[1] is not None and data.contents[1].shape[-1] == self.width:
            leaves.append(data.contents[1])
            return
        rows = rows_of(data, place(prefix))
        if (width := width_of(rows)) > self.width:
            raise TextGrows(prefix, replace(self, width=width))
        found, shape = column_of(rows, self.width), torch.Size([*data.batch_size, self.width])
        leaves.append(found.expand(shape) if isinstance(data, NonTensorData) else found.view(shape))

    def unflatten(self, leaves: Iterator[torch.Tensor], batch: torch.Size) -> Any:
        return Values.of_rows(next(leaves), self.device)

    def placed(self, device: torch.device) -> TreeSpec:
        return replace(self, device=device)

    def joined(self, other: TreeSpec, prefix: Path = ()) -> TreeSpec:
        found = other.in_columns(prefix) if isinstance(other, ConstantNode) else other
        if isinstance(found, TextNode) and found.width > self.width:
            raise TextGrows(prefix, replace(self, width=found.width))
        return TreeSpec.joined(self, found, prefix)

    def with_text_of(self, other: TreeSpec) -> TreeSpec:
        if isinstance(other, ConstantNode):
            return replace(other, tail=self.tail, device=self.device)
        if isinstance(other, TextNode) and other.width != self.width:
            return replace(self, width=other.width)
        return self


def text_column(values: Sequence[Any], shape: Sequence[int], lead: int, prefix: Path) -> tuple[TextNode, torch.Tensor]:
    """Return the node and the column for values, one for each element of `shape`; `lead` dimensions count elements."""
    rows = [encoded(value, place(prefix)) for value in values]
    node = TextNode(torch.Size(shape[lead:]), width_of(rows))
    return node, column_of(rows, node.width).view(*shape, node.width)


def _text_node(data: Any, lead: int, prefix: Path) -> TextNode:
    return TextNode(data.batch_size[lead:], width_of(rows_of(data, place(prefix))), _device_of(data))


def _device_of(data: Any) -> torch.device | None:
    return data.contents[2] if type(data) is Values else data.device


class MappingNode(TreeSpec):
    """A dict; the nodes of tensordicts and tensorclasses derive from it."""

    def __init__(self, children: Mapping[Any, TreeSpec], *, distinct: bool = True) -> None:
        self.children = dict(children)
        leaves = [type(child) is TensorNode for child in self.children.values()]
        self._leading = tuple(self.children)[: leaves.index(False) if False in leaves else None]
        """The keys of the tensors before the first child of another kind; `unflatten` takes their leaves at once."""
        self._others = tuple(self.children.items())[len(self._leading) :]
        if distinct and len(set(map(str, self.children))) < len(self.children):
            raise SchemaError(f"two of the keys {_list(self.children)} are the same as text")

    def __str__(self) -> str:
        return "mapping"

    def flatten_into(self, leaves: list[torch.Tensor], data: Any, prefix: Path = ()) -> None:
        kind = type(data)
        if kind is TensorDict:
            found = data._tensordict  # faster than items(), and needed at every write
        elif kind is LazyStackedTensorDict:
            found = self._stacked(data, prefix)
        elif kind is dict or is_tensor_collection(data) or isinstance(data, Mapping):
            found = _entries(data, prefix)
        else:
            raise SchemaError(f"{place(prefix)} is a {kind.__name__}, expected the entries {_list(self.children)}")
        if found.keys() != self.children.keys():
            found = self._completed(found, data, prefix)
        for key, child in self.children.items():
            value = found[key]
            if type(child) is TensorNode and isinstance(value, torch.Tensor):
                leaves.append(value)
            else:
                child.flatten_into(leaves, value, (*prefix, str(key)))

    def _stacked(self, data: LazyStackedTensorDict, prefix: Path) -> dict[Any, Any]:
        """Stack the entries of a lazy stack; SchemaError if a part has other entries or shapes."""
        for part in data.tensordicts:
            if set(part.keys()) != self.children.keys():
                raise self._other_entries(dict(part.items()), prefix)
        try:
            return dict(data.items())
        except RuntimeError as error:
            raise SchemaError(
                f"{place(prefix)} is a lazy stack of tensordicts that differ in shape, expected parts of one shape"
            ) from error

    def _completed(self, found: Mapping[Any, Any], data: Any, prefix: Path) -> Mapping[Any, Any]:
        """Return `found` with values for missing entries; SchemaError, the default, if they have no default value."""
        raise self._other_entries(found, prefix)

    def _other_entries(self, found: Mapping[Any, Any], prefix: Path) -> SchemaError:
        lacks = _list(key for key in self.children if key not in found)
        brings = _list(key for key in found if key not in self.children)
        what = [f"lacks {lacks}"] * (lacks != _NONE) + [f"brings the new {brings}"] * (brings != _NONE)
        return SchemaError(
            f"{place(prefix)} {' and '.join(what)}, expected the entries {_list(self.children)}",
            hint='a lazy storage with schema="open" takes such data',
        )

    def unflatten(self, leaves: Iterator[torch.Tensor], batch: torch.Size) -> Any:
        return self._taken(leaves, batch, dict)

    def _taken(self, leaves: Iterator[torch.Tensor], batch: torch.Size, kind: type[dict[Any, Any]]) -> dict[Any, Any]:
        """Make the entries, in a dict of type `kind`, from their leaves."""
        found = kind(zip(self._leading, leaves, strict=False))
        for key, child in self._others:
            found[key] = next(leaves) if type(child) is TensorNode else child.unflatten(leaves, batch)
        return found

    def joined(self, other: TreeSpec, prefix: Path = ()) -> TreeSpec:
        if not isinstance(other, MappingNode):
            return super().joined(other, prefix)
        children = dict(self.children)
        for key, child in other.children.items():
            inner = (*prefix, str(key))
            children[key] = children[key].joined(child, inner) if key in children else child.in_columns(inner)
        return self.with_children(children)

    def with_children(self, children: Mapping[Any, TreeSpec]) -> MappingNode:
        return MappingNode(children)


def _kind_of_entries() -> type[dict[Any, Any]] | None:
    """Return the type in which a tensordict keeps its entries; None if this version of tensordict works differently."""
    made = vars(TensorDict._new_unsafe({}, batch_size=NO_BATCH, nested=False))
    known: dict[str, Any] = {"_tensordict": {}, "_batch_size": NO_BATCH, "_device": None, "_td_dim_names": None}
    return type(made["_tensordict"]) if made == known else None


# Tensordicts are made without their constructor: the storage has already checked what it would check again. For 11
# leaves it takes 7.1 µs (13.5 µs with tensordict 0.14), its unchecked form 1.1 µs, and setting the attributes 0.4 µs.
_new = object.__new__
_ENTRIES = _kind_of_entries()


def _made(entries: dict[Any, Any], size: torch.Size, device: torch.device | None) -> TensorDict:
    """Make a tensordict of entries that were checked; they are in a dict of the type `_ENTRIES`, unless it is None."""
    if _ENTRIES is None:
        made = TensorDict._new_unsafe(entries, batch_size=size, nested=False)
    else:
        made = _new(TensorDict)
        made._tensordict = entries
        made._batch_size, made._td_dim_names = size, None
    made._device = device
    return made


def _is_plain(data: Any) -> bool:
    """Whether data is a tensordict, not of a class derived from it, whose dimensions have no names."""
    return type(data) is TensorDict and data._td_dim_names is None


def shallow_copy(data: Any) -> Any:
    """Return `data.copy()`: the same tensors in new containers. A plain tensordict takes a sixth of the time."""
    if not _is_plain(data):
        return data.copy()
    entries = (_ENTRIES or dict)(data._tensordict)
    for key, value in data._tensordict.items():
        if type(value) is TensorDict:
            entries[key] = shallow_copy(value)
        elif type(value) is not torch.Tensor and not isinstance(value, torch.Tensor):
            return data.copy()
    return _made(entries, data._batch_size, data._device)


def stacked(items: Sequence[Any]) -> Any:
    """Return `torch.stack(items)` of tensordicts, in a quarter of the time.

    None unless all are plain tensordicts with the same entries, types and shapes.
    """
    first = items[0]
    if not _is_plain(first):
        return None
    names, size, device, nests = first._tensordict.keys(), first._batch_size, first._device, []
    for item in items:
        if not _is_plain(item) or item._batch_size != size or item._device != device:
            return None
        if item._tensordict.keys() != names:
            return None
        nests.append(item._tensordict)
    found = (_ENTRIES or dict)()
    for name in names:
        values = [nest[name] for nest in nests]
        kinds = set(map(type, values))
        if kinds == {torch.Tensor} and len({value.dtype for value in values}) == 1:
            try:
                found[name] = torch.stack(values)
            except RuntimeError:  # their shapes or devices differ
                return None
        elif kinds != {TensorDict} or (inner := stacked(values)) is None:
            return None
        else:
            found[name] = inner
    return _made(found, torch.Size([len(items), *size]), device)


class TensorDictNode(MappingNode):
    """A tensordict or tensorclass.

    Args:
        children: its entries.
        tail: its batch size after the dimensions that count elements.
        device: its device.
        kind: the tensorclass; None for a tensordict.
    """

    def __init__(
        self,
        children: Mapping[str, TreeSpec],
        tail: torch.Size = NO_BATCH,
        device: torch.device | None = None,
        kind: type[Any] | None = None,
    ) -> None:
        super().__init__(children)
        self.tail = tail
        self.device = device
        self.kind = kind

    @classmethod
    def nested(cls, paths: Iterable[Path]) -> TensorDictNode:
        """Return the spec of tensordicts without batch size that have tensors at these paths."""
        nest: dict[str, Any] = {}
        for *folders, name in paths:
            inner = nest
            for part in folders:
                inner = inner.setdefault(part, {})
            inner[name] = None

        def spec(inner: Mapping[str, Any]) -> TensorDictNode:
            return cls({key: TensorNode() if below is None else spec(below) for key, below in inner.items()})

        return spec(nest)

    def __str__(self) -> str:
        return self.kind.__name__ if self.kind else "tensordict"

    def unflatten(self, leaves: Iterator[torch.Tensor], batch: torch.Size) -> Any:
        size = batch + self.tail if self.tail else batch
        tensors = _made(self._taken(leaves, batch, _ENTRIES or dict), size, self.device)
        return self.kind.from_tensordict(tensors) if self.kind else tensors

    def placed(self, device: torch.device) -> TreeSpec:
        children = {key: child.placed(device) for key, child in self.children.items()}
        return TensorDictNode(children, self.tail, device, self.kind)

    def _completed(self, found: Mapping[Any, Any], data: Any, prefix: Path) -> Mapping[Any, Any]:
        lacking = {key: child for key, child in self.children.items() if key not in found}
        brought = {key: value for key, value in found.items() if key not in self.children}
        text = all(isinstance(child, _Value) for child in lacking.values()) and all(
            map(is_non_tensor, brought.values())
        )
        if not (self.kind and text):
            raise self._other_entries(found, prefix)
        for key, value in brought.items():  # a field that was None in all rows so far
            inner = (*prefix, str(key))
            raise TextGrows(inner, TextNode(self.tail, _text_node(value, 0, inner).width, self.device))
        none = NonTensorData(None, batch_size=data.batch_size)
        return {**found, **dict.fromkeys(lacking, none)}

    def with_text_of(self, other: TreeSpec) -> TreeSpec:
        if not self.kind:
            return super().with_text_of(other)
        children = {
            key: child.with_text_of(other.children.get(key, child))
            for key, child in self.children.items()
            if key in other.children or not isinstance(child, _Value)
        }
        children |= {
            key: child for key, child in other.children.items() if isinstance(child, _Value) and key not in children
        }
        return self.with_children(children)

    def with_children(self, children: Mapping[Any, TreeSpec]) -> MappingNode:
        if self.kind and _tensors(children) != _tensors(self.children):
            raise SchemaError(f"a {self} has the fields {_list(self.children)}, found {_list(children)}")
        return TensorDictNode(children, self.tail, self.device, self.kind)


def _tensors(children: Mapping[Any, TreeSpec]) -> set[Any]:
    return {key for key, child in children.items() if not isinstance(child, _Value)}


class StackNode(TreeSpec):
    """A lazy stack of tensordicts that differ in entries or shapes, along a dimension of each element.

    Args:
        children: the tensordicts.
        dim: the dimension, counted from the first one that does not count elements.
    """

    def __init__(self, children: Iterable[TreeSpec], dim: int) -> None:
        self.children = dict(enumerate(children))
        self.dim = dim

    def __str__(self) -> str:
        return f"lazy stack of {len(self.children)} tensordicts"

    @property
    def tail(self) -> torch.Size:
        """The batch size after the dimensions that count elements."""
        part: Any = self.children[0]
        return torch.Size([*part.tail[: self.dim], len(self.children), *part.tail[self.dim :]])

    def flatten_into(self, leaves: list[torch.Tensor], data: Any, prefix: Path = ()) -> None:
        dim = data.batch_dims - len(self.tail) + self.dim if isinstance(data, TensorDictBase) else -1
        if dim < 0 or data.batch_size[dim] != len(self.children):
            found = f" of batch size {list(data.batch_size)}" if isinstance(data, TensorDictBase) else ""
            raise SchemaError(
                f"{place(prefix)} is a {type(data).__name__}{found}, expected a {self} along dimension {dim}"
            )
        for (number, child), part in zip(self.children.items(), data.unbind(dim), strict=True):
            child.flatten_into(leaves, part, (*prefix, str(number)))

    def unflatten(self, leaves: Iterator[torch.Tensor], batch: torch.Size) -> Any:
        parts = [child.unflatten(leaves, batch) for child in self.children.values()]
        return LazyStackedTensorDict(*parts, stack_dim=len(batch) + self.dim)

    def with_children(self, children: Mapping[Any, TreeSpec]) -> TreeSpec:
        return StackNode(children.values(), self.dim)

    def joined(self, other: TreeSpec, prefix: Path = ()) -> TreeSpec:
        if not isinstance(other, StackNode) or (other.dim, len(other.children)) != (self.dim, len(self.children)):
            raise SchemaError(f"{place(prefix)} is a {other}, expected a {self}")
        pairs = zip(self.children.values(), other.children.values(), strict=True)
        return StackNode((one.joined(two, (*prefix, str(n))) for n, (one, two) in enumerate(pairs)), self.dim)


def entry_of(data: Any, key: Path) -> Any:
    """Return an entry of a tensordict, or None if it is missing, five times as fast as `get`."""
    node = data
    for part in key:
        if type(node) is not TensorDict:
            return data.get(key, None)
        node = node._tensordict.get(part)
    return node if type(node) is torch.Tensor else data.get(key, None)


def added(data: Any, entries: Mapping[Any, Any]) -> bool:
    """Add tensors to a tensordict of one dimension, by keys, five times as fast as `set`.

    Returns:
        False, with nothing changed, if `set` would do more than add the tensors, or raise an error.
    """
    if type(data) is not TensorDict or len(data.batch_size) != 1:
        return False
    places = []
    for key, value in entries.items():
        node: Any = data
        name = key
        if type(key) is tuple and key:
            for part in key[:-1]:
                node = node._tensordict.get(part)
                if type(node) is not TensorDict:
                    return False
            name = key[-1]
        size, device = node.batch_size, node.device
        if type(name) is not str or type(value) is not torch.Tensor or value.shape[: len(size)] != size:
            return False
        if node.is_locked or (device is not None and value.device != device):
            return False
        places.append((node._tensordict, name, value))
    for children, name, value in places:
        children[name] = value
    return True


class SequenceNode(TreeSpec):
    """A list, a tuple or a named tuple."""

    def __init__(self, children: Iterable[TreeSpec], kind: type[Any]) -> None:
        self.children = dict(enumerate(children))
        self.kind = kind

    def __str__(self) -> str:
        return self.kind.__name__

    def flatten_into(self, leaves: list[torch.Tensor], data: Any, prefix: Path = ()) -> None:
        if not isinstance(data, list | tuple) or len(data) != len(self.children):
            found = f"{len(data)} entries" if isinstance(data, list | tuple) else f"a {type(data).__name__}"
            raise SchemaError(f"{place(prefix)} is {found}, expected a sequence of {len(self.children)}")
        for number, child in self.children.items():
            child.flatten_into(leaves, data[number], (*prefix, str(number)))

    def unflatten(self, leaves: Iterator[torch.Tensor], batch: torch.Size) -> Any:
        children = [child.unflatten(leaves, batch) for child in self.children.values()]
        return self.kind(*children) if hasattr(self.kind, "_fields") else self.kind(children)

    def with_children(self, children: Mapping[Any, TreeSpec]) -> TreeSpec:
        return SequenceNode(children.values(), self.kind)

    def joined(self, other: TreeSpec, prefix: Path = ()) -> TreeSpec:
        if not isinstance(other, SequenceNode) or len(other.children) != len(self.children):
            raise SchemaError(f"{place(prefix)} is a sequence of another type or length than in the rows stored before")
        pairs = zip(self.children.values(), other.children.values(), strict=True)
        return SequenceNode((one.joined(two, (*prefix, str(n))) for n, (one, two) in enumerate(pairs)), self.kind)


def tree_spec_of(data: Any, lead: int = 0, prefix: Path = (), *, dense: bool = True) -> TreeSpec:
    """Return the tree spec of rows, whose first `lead` dimensions count elements.

    With `dense`, a lazy stack whose parts have the same entries, types and shapes is described as a tensordict.

    Raises:
        SchemaError: something in the data is neither a tensor, nor a nest of tensors, nor a constant in a tensordict.
    """
    if isinstance(data, torch.Tensor):
        return TensorNode()
    if isinstance(data, list | tuple):
        parts = [tree_spec_of(item, lead, (*prefix, str(n)), dense=dense) for n, item in enumerate(data)]
        named = hasattr(data, "_fields")
        return SequenceNode(parts, type(data) if named else tuple if isinstance(data, tuple) else list)
    if type(data) is Values and data.contents[1] is not None and prefix:
        return TextNode(data.batch_size[lead:], data.contents[1].shape[-1], data.contents[2])
    if isinstance(data, NonTensorData | NonTensorStack) and prefix:
        if not (shared := shared_value(data, place(prefix))):
            return _text_node(data, lead, prefix)
        tail = data.batch_size[lead:]
        return ConstantNode(shared[0], tail, _device_of(data), bool(tail) and not isinstance(data, NonTensorData))
    if isinstance(data, TensorDictBase) and not isinstance(data, TensorDict) and not is_non_tensor(data):
        if isinstance(data, LazyStackedTensorDict) and dense and _agree(data, text=data.stack_dim >= lead):
            return tree_spec_of(data.contiguous(), lead, prefix)
        if isinstance(data, LazyStackedTensorDict) and data.stack_dim >= lead:
            parts = [
                tree_spec_of(part, lead, (*prefix, str(n)), dense=dense) for n, part in enumerate(data.tensordicts)
            ]
            return StackNode(parts, data.stack_dim - lead)
        raise SchemaError(
            f"{place(prefix)} is a {type(data).__name__}, whose rows need not be contiguous in memory; "
            ".contiguous() copies them"
        )
    if is_non_tensor(data) or not (is_tensorclass(data) or isinstance(data, TensorDict | Mapping)):
        raise SchemaError(
            f"{place(prefix)} is a {type(data).__name__}; only tensors, tensordicts and nests of them can be stored",
            hint="a ListStorage keeps any object",
        )
    entries = _entries(data, prefix)
    found = {key: tree_spec_of(item, lead, (*prefix, str(key)), dense=dense) for key, item in entries.items()}
    if not is_tensor_collection(data):
        return MappingNode(found)
    if data.batch_dims < lead:
        shape, what = list(data.batch_size), f"its first {lead} dimension{'s' * (lead > 1)}"
        raise SchemaError(f"{place(prefix)} has the batch size {shape}, but {what} must count elements")
    return TensorDictNode(found, data.batch_size[lead:], data.device, type(data) if is_tensorclass(data) else None)


def _entries(data: Any, prefix: Path) -> dict[Any, Any]:
    """Return the entries of a mapping, a tensordict or a tensorclass.

    In a lazy stack of tensorclasses, a field may be missing in some parts; its value there is None.
    """
    stack = data._tensordict if is_tensorclass(data) else None
    if not isinstance(stack, LazyStackedTensorDict):
        return dict(data.items())
    parts, found = data.unbind(stack.stack_dim), dict(data.items())
    fields = [_entries(part, prefix) for part in parts]
    for key in dict.fromkeys(key for own in fields for key in own if key not in found):
        pairs = zip(fields, parts, strict=True)
        values = [own.get(key, NonTensorData(None, batch_size=part.batch_size)) for own, part in pairs]
        if not all(map(is_non_tensor, values)):
            raise SchemaError(f"{place((*prefix, str(key)))} is not in all parts of a lazy stack")
        found[key] = NonTensorStack(*values, stack_dim=stack.stack_dim)
    return found


def _agree(stack: LazyStackedTensorDict, *, text: bool) -> bool:
    """Whether all parts of a lazy stack have the same entries, types and shapes, without other lazy stacks.

    With `text`, they also have the same values in entries that are not tensors.
    """
    first, *others = (_outline(part, text) for part in stack.tensordicts)
    return first is not None and all(other == first for other in others)


def _outline(data: Any, text: bool) -> Any:
    """Return entries, types and shapes of a tensordict, to be compared; None if there is a lazy stack in it."""
    if isinstance(data, torch.Tensor):
        return data.dtype, data.shape
    if is_non_tensor(data):
        return data.batch_size, data.tolist() if text else None
    if isinstance(data, LazyStackedTensorDict):
        return None
    found = {key: _outline(value, text) for key, value in data.items()}
    return None if None in found.values() else (type(data), data.batch_size, found)


def place(path: Path) -> str:
    """Name an entry of a nest in a message."""
    return f"the entry {'.'.join(path)!r}" if path else "the data"


def _list(names: Iterable[Any]) -> str:
    return ", ".join(map(str, names)) or _NONE


SUFFIX = ".memmap"
_TENSORDICT = "<class 'tensordict._td.TensorDict'>"
_STACK = "<class 'tensordict._lazy.LazyStackedTensorDict'>"
_NON_TENSOR = "<class 'tensordict.tensorclass.NonTensorData'>"
_FIELDS = "_tensordict"
"""The folder in which a tensorclass keeps its tensors."""

_OWN = __package__.rpartition(".")[0] + "."
"""Prefixes of the modules that may be imported to find a class."""

_SEQUENCES = {"list": list, "tuple": tuple}


# JSON ----------------------------------------------------------------------------------------------


def spec_to_json(spec: TreeSpec) -> dict[str, Any]:
    """Return a tree spec of rows as JSON, with classes by name, as `module:name`.

    Raises:
        SchemaError: constants or keys cannot be represented in JSON.
    """
    if isinstance(spec, TensorNode):
        return {"kind": "tensor"}
    if isinstance(spec, ConstantNode):
        require_json(spec.value)
        stacked = {"stacked": True} if spec.stacked else {}
        return {"kind": "constant", "value": spec.value, **_batch(spec), **stacked}
    if isinstance(spec, TextNode):
        return {"kind": "text", "width": spec.width, **_batch(spec)}
    if isinstance(spec, SequenceNode):
        entries = [spec_to_json(child) for child in spec.children.values()]
        kind = spec.kind.__name__ if spec.kind in _SEQUENCES.values() else "named tuple"
        named = {} if kind in _SEQUENCES else {"class": class_name(spec.kind)}
        return {"kind": kind, "entries": entries, **named}
    if isinstance(spec, StackNode):
        return {"kind": "stack", "dim": spec.dim, "entries": [spec_to_json(child) for child in spec.children.values()]}
    if not isinstance(spec, MappingNode):
        raise TypeError(f"a {type(spec).__name__} has no description")
    children = [[_key(key), spec_to_json(child)] for key, child in spec.children.items()]
    if not isinstance(spec, TensorDictNode):
        return {"kind": "dict", "entries": children}
    kind = "tensorclass" if spec.kind else "tensordict"
    named = {"class": class_name(spec.kind)} if spec.kind else {}
    return {"kind": kind, "entries": children, **_batch(spec), **named}


def spec_from_json(document: Mapping[str, Any], like: TreeSpec | None = None) -> TreeSpec:
    """Return the tree spec described by a document of `spec_to_json`.

    Classes are looked up among the loaded modules: nothing is imported because of a file. A class that is not found
    there, such as one defined in a function, is taken from the same place in `like`.

    Raises:
        SchemaError: a class is found in neither.
        FormatError: the document is invalid.
    """
    try:
        return _spec(document, like)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"a description of data is damaged: {error!r}") from error


def _spec(document: Mapping[str, Any], like: TreeSpec | None) -> TreeSpec:
    kind = document["kind"]
    if kind == "tensor":
        return TensorNode()
    if kind == "constant":
        tail, stacked = torch.Size(document["batch"]), document.get("stacked") is True
        return ConstantNode(document["value"], tail, _device(document), stacked)
    if kind == "text":
        return TextNode(torch.Size(document["batch"]), int(document["width"]), _device(document))
    entries = document["entries"]
    if kind in (*_SEQUENCES, "named tuple"):
        counterparts: Any = list(like.children.values()) if isinstance(like, SequenceNode) else ()
        parts = [_spec(*pair) for pair in zip_longest(entries, counterparts[: len(entries)])]
        if kind in _SEQUENCES:
            return SequenceNode(parts, _SEQUENCES[kind])
        known = like.kind if isinstance(like, SequenceNode) else None
        return SequenceNode(parts, class_named(document["class"], _is_named_tuple, known))
    if kind == "stack":
        known_parts = like.children if isinstance(like, StackNode) else {}
        return _stack([_spec(entry, known_parts.get(number)) for number, entry in enumerate(entries)], document["dim"])
    counterparts = like.children if isinstance(like, MappingNode) else {}
    children = {key: _spec(child, counterparts.get(key)) for key, child in entries}
    if kind == "dict":
        return MappingNode(children)
    if kind not in {"tensordict", "tensorclass"}:
        raise FormatError(f"a description of data has the unknown kind {kind!r}")
    owner = None
    if kind == "tensorclass":
        owner = class_named(document["class"], is_tensorclass, like.kind if isinstance(like, TensorDictNode) else None)
    return TensorDictNode(children, torch.Size(document["batch"]), _device(document), owner)


def _stack(parts: list[TreeSpec], dim: Any) -> StackNode:
    known = all(isinstance(part, TensorDictNode | StackNode) for part in parts)
    if not parts or not known or type(dim) is not int or not 0 <= dim <= len(parts[0].tail):  # type: ignore[attr-defined]
        raise FormatError(
            f"a lazy stack of {', '.join(map(str, parts)) or 'nothing'} along dimension {dim} is impossible"
        )
    return StackNode(parts, dim)


def _batch(node: TensorDictNode | ConstantNode | TextNode) -> dict[str, Any]:
    return {"batch": list(node.tail), "device": None if node.device is None else str(node.device)}


def _device(document: Mapping[str, Any]) -> torch.device | None:
    return None if document["device"] is None else torch.device(document["device"])


def _key(key: Any) -> str | int:
    if type(key) not in {str, int}:
        raise SchemaError(
            f"the key {key!r} is a {type(key).__name__}; only text and whole numbers can be saved as keys"
        )
    return key  # type: ignore[no-any-return]


def class_name(kind: type[Any]) -> str:
    """Return the name of a class with its module, for `class_named`."""
    return f"{kind.__module__}:{kind.__qualname__}"


def _is_named_tuple(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")


def class_named(name: str, fits: Any, known: type[Any] | None = None) -> type[Any]:
    """Find a class by name among the loaded modules and this package; otherwise return `known`.

    A module of another package that a file names is never imported: that would run its code.

    Args:
        name: `module:name`, as `class_name` returns it.
        fits: whether a class is of the expected kind.
        known: the class at the same place in the receiver's data, if there is one.

    Raises:
        SchemaError: there is no such class.
    """
    module, _, path = name.partition(":")
    if module.startswith(_OWN):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if found is None and module.startswith(_OWN):  # modules move, public names stay
        found = getattr(sys.modules[_OWN.partition(".")[0]], path, None)
    if found is None or not isinstance(found, type) or not fits(found):
        if known is not None and fits(known):
            return known
        raise SchemaError(
            f"the data was made with the class {path} of the module {module}, which is not imported",
            hint=f"import {module} first",
        )
    return found


# Leaves by name ------------------------------------------------------------------------------------


def leaf_names(paths: Iterable[Path]) -> list[str]:
    """Return the names of leaves in a state: their keys joined by dots, or all as JSON if two would be the same."""
    paths = list(paths)
    names = [".".join(path) for path in paths]
    return names if len(set(names)) == len(names) else [json.dumps(path) for path in paths]


def named_tensors(paths: Iterable[Path], leaves: Sequence[torch.Tensor]) -> Any:
    """Return the leaves by name, or the single leaf of data without names."""
    names = leaf_names(paths)
    return leaves[0] if names == [""] else dict(zip(names, leaves, strict=True))


def saved_tensors(
    saved: Any, description: Mapping[str, Any] | None, like: TreeSpec | None
) -> tuple[TreeSpec, list[torch.Tensor]]:
    """Return the tree spec and the leaves of what `named_tensors` has returned.

    Without a description of the data, dots in names separate the keys of a tensordict. Classes that are not loaded are
    taken from `like`, the structure of the receiver's data.
    """
    if isinstance(saved, torch.Tensor):
        return TensorNode(), [saved]
    tensors = {name: value for name, value in dict(saved).items() if not name.startswith("__")}
    if description:
        structure = spec_from_json(description, like)
    else:
        structure = TensorDictNode.nested(tuple(name.split(".")) for name in tensors)
    names = leaf_names(structure.paths())
    if sorted(names) != sorted(tensors):
        raise SchemaError(f"the state holds {', '.join(tensors)}, but its description says {', '.join(names)}")
    return structure, [tensors[name] for name in names]


def in_order(own: TreeSpec, structure: TreeSpec, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors with this structure in the order of the storage's `own`.

    Tensors are matched by path, as `a.b` may be an entry beside the entry `b` of `a`. If the paths differ but their
    names with dots are the same, each of them once, tensors are matched by name: TorchRL saves some nests like this.
    """
    found = dict(zip(structure.paths(), tensors, strict=True))
    paths = list(own.paths())
    if found.keys() == set(paths):
        return [found[path] for path in paths]
    named = {".".join(path): tensor for path, tensor in found.items()}
    names = [".".join(path) for path in paths]
    if len(named) < len(found) or sorted(named) != sorted(names):
        saved = ", ".join(".".join(path) for path in found)
        raise SchemaError(f"the saved data holds {saved}, but this storage holds {', '.join(names)}")
    return [named[name] for name in names]


# Files of leaves -----------------------------------------------------------------------------------


def is_tree(spec: TreeSpec) -> bool:
    """Whether the data is a tensordict or tensorclass, whose folders have `meta.json` files."""
    return isinstance(spec, TensorDictNode)


def is_plain(spec: TreeSpec) -> bool:
    """Whether the data is a tensordict of tensors and such tensordicts, without types or batch sizes of their own."""
    if not isinstance(spec, TensorDictNode) or spec.kind or spec.tail:
        return False
    return all(isinstance(child, TensorNode) or is_plain(child) for child in spec.children.values())


def has_stacks(spec: TreeSpec) -> bool:
    """Whether there is a lazy stack in the data."""
    return isinstance(spec, StackNode) or any(map(has_stacks, spec.children.values()))


def single_name() -> str:
    """Return the file name of a bare tensor; the environment variable `SINGLE_TENSOR_BUFFER_NAME` overrides it."""
    return os.environ.get("SINGLE_TENSOR_BUFFER_NAME", "_-single-tensor-_")


def leaf_files(spec: TreeSpec) -> list[str]:
    """Return the path of every leaf's file, in the order of the leaves, with `/` between its parts.

    Keys are escaped, so that none can point outside of the folder. SchemaError if two leaves need the same file.
    """
    places = list(_places(spec, ()))
    keys = [place or (single_name(),) for place in places]
    require_own_files(keys)
    return ["/".join(map(file_stem, key)) + SUFFIX for key in keys]


def _places(spec: TreeSpec, prefix: Path) -> Iterator[Path]:
    if isinstance(spec, TensorNode | TextNode):
        yield prefix
    folder = (*prefix, _FIELDS) if isinstance(spec, TensorDictNode) and spec.kind else prefix
    for key, child in spec.children.items():
        yield from _places(child, (*folder, str(key)))


def tree_documents(
    spec: TreeSpec, leaves: Sequence[tuple[torch.dtype, Sequence[int]]], lead: Sequence[int]
) -> dict[str, bytes]:
    """Return the contents of the `meta.json` files of a tensordict, by path; no files for data of other kinds.

    Args:
        spec: its tree spec.
        leaves: types and full shapes of its leaves.
        lead: the sizes of the dimensions that count elements.
    """
    if not isinstance(spec, TensorDictNode | StackNode):
        return {}
    documents: dict[str, Mapping[str, Any]] = {}
    _describe(spec, iter(leaves), list(lead), "", documents)
    return {path: json.dumps(document).encode() for path, document in documents.items()}


def _describe(
    node: TreeSpec,
    leaves: Iterator[tuple[torch.dtype, Sequence[int]]],
    lead: list[int],
    folder: str,
    documents: dict[str, Mapping[str, Any]],
) -> None:
    if isinstance(node, StackNode):
        documents[f"{folder}meta.json"] = {"_type": _STACK, "stack_dim": len(lead) + node.dim}
        for number, child in node.children.items():
            _describe(child, leaves, lead, f"{folder}{number}/", documents)
    if not isinstance(node, TensorDictNode):
        return
    if node.kind:
        documents[f"{folder}meta.json"] = {"_type": str(node.kind)}
        folder += f"{_FIELDS}/"
    entries: dict[str, Any] = {}
    documents[f"{folder}meta.json"] = entries
    for key, child in node.children.items():
        inner = f"{folder}{file_stem(key)}/"
        if isinstance(child, TensorNode | TextNode):
            dtype, shape = next(leaves)
            entries[key] = {"device": "cpu", "shape": list(shape), "dtype": str(dtype), "is_nested": False}
            entries[key] |= {"text": True} if isinstance(child, TextNode) else {}
        elif isinstance(child, ConstantNode):
            entries[key] = {"type": "NonTensorData"}
            documents[f"{inner}meta.json"] = _constant(child, key)
        elif isinstance(child, TensorDictNode | StackNode):
            kind = LazyStackedTensorDict if isinstance(child, StackNode) else child.kind or TensorDict
            entries[key] = {"type": kind.__name__}
            _describe(child, leaves, lead, inner, documents)
    entries |= {"shape": [*lead, *node.tail], "device": "cpu", "_type": _TENSORDICT}


def _constant(child: ConstantNode, key: str) -> dict[str, Any]:
    try:
        json.dumps(child.value)
    except (TypeError, ValueError):
        kind = type(child.value).__name__
        raise SchemaError(
            f"the entry {key!r} is a {kind}; of non-tensor data, only JSON values can be written to disk",
            hint="rbtool never pickles data, so that loading never unpickles",
        ) from None
    return {"_type": _NON_TENSOR, "data": child.value, "_metadata": None, "_is_non_tensor": True}
