"""Takes data apart into plain tensors and puts it together again.

Data is a tensor, a tensordict, a tensorclass, or a nest of dicts, lists and tuples that ends in such.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection, is_tensorclass

from ..errors import SchemaError

__all__ = ["Constant", "Leaf", "Node", "Path", "SequenceNode", "Structure", "TensorDictNode", "place", "structure_of"]

Path: TypeAlias = tuple[str, ...]


class Structure(ABC):
    """One node of a nest."""

    @abstractmethod
    def paths(self, prefix: Path = ()) -> Iterator[Path]:
        """Yield the path of every leaf, in the order of `leaves`."""

    @abstractmethod
    def take_apart(self, data: Any, into: list[torch.Tensor], prefix: Path = ()) -> None:
        """Append the tensors of data made like this; SchemaError if `data` is not."""

    @abstractmethod
    def build(self, leaves: Iterator[torch.Tensor], batch: torch.Size) -> Any:
        """Make such data of as many tensors, all of leading shape `batch`."""

    @abstractmethod
    def joined(self, other: Structure, prefix: Path = ()) -> Structure:
        """Return this structure with the entries that only `other` has; SchemaError where the two contradict."""

    def constants(self, prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
        """Yield the path and the value of every entry that is no tensor."""
        return iter(())

    def placed(self, device: torch.device) -> Structure:
        """The same, with tensordicts that say they lie on `device`."""
        return self

    def leaves(self, data: Any) -> list[torch.Tensor]:
        """Return the tensors of data made like this; SchemaError if `data` is not."""
        found: list[torch.Tensor] = []
        self.take_apart(data, found)
        return found

    def _refuse_other(self, other: Structure, prefix: Path) -> None:
        if type(other) is not type(self):
            raise SchemaError(f"{place(prefix)} is a {other}, a {self} is expected")


class Leaf(Structure):
    """A tensor."""

    def __str__(self) -> str:
        return "tensor"

    def paths(self, prefix: Path = ()) -> Iterator[Path]:
        yield prefix

    def take_apart(self, data: Any, into: list[torch.Tensor], prefix: Path = ()) -> None:
        if not isinstance(data, torch.Tensor):
            raise SchemaError(f"{place(prefix)} is a {type(data).__name__}, a tensor is expected")
        into.append(data)

    def build(self, leaves: Iterator[torch.Tensor], batch: torch.Size) -> Any:
        return next(leaves)

    def joined(self, other: Structure, prefix: Path = ()) -> Structure:
        self._refuse_other(other, prefix)
        return self


class Constant(Structure):
    """A value that is no tensor and the same in every row: it takes no memory per row."""

    def __init__(self, value: Any, tail: torch.Size, device: torch.device | None) -> None:
        self.value = value
        self.tail = tail
        self.device = device

    def __str__(self) -> str:
        return "value that is no tensor"

    def paths(self, prefix: Path = ()) -> Iterator[Path]:
        return iter(())

    def take_apart(self, data: Any, into: list[torch.Tensor], prefix: Path = ()) -> None:
        if not isinstance(data, NonTensorData):
            raise SchemaError(f"{place(prefix)} is a {type(data).__name__}, a NonTensorData is expected")
        self._refuse_change(data.data, prefix)

    def build(self, leaves: Iterator[torch.Tensor], batch: torch.Size) -> Any:
        return NonTensorData(self.value, batch_size=batch + self.tail, device=self.device)

    def constants(self, prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
        yield prefix, self.value

    def placed(self, device: torch.device) -> Structure:
        return Constant(self.value, self.tail, device)

    def joined(self, other: Structure, prefix: Path = ()) -> Structure:
        self._refuse_other(other, prefix)
        self._refuse_change(other.value, prefix)  # type: ignore[attr-defined]
        return self

    def _refuse_change(self, value: Any, prefix: Path) -> None:
        if value is not self.value and value != self.value:
            raise SchemaError(
                f"{place(prefix)} is {value!r}, in the rows stored before it is {self.value!r}",
                hint="keep what differs from row to row as a tensor, or use a ListStorage",
            )


class Node(Structure):
    """Children by key: a dict, and the ground of tensordicts and tensorclasses."""

    def __init__(self, children: Mapping[Any, Structure]) -> None:
        self.children = dict(children)
        self._flat = all(type(child) is Leaf for child in self.children.values())
        names = [str(key) for key in self.children]
        if len(set(names)) < len(names):
            raise SchemaError(f"two of the keys {_list(names)} are written alike")

    def __str__(self) -> str:
        return "mapping"

    def paths(self, prefix: Path = ()) -> Iterator[Path]:
        for key, child in self.children.items():
            yield from child.paths((*prefix, str(key)))

    def take_apart(self, data: Any, into: list[torch.Tensor], prefix: Path = ()) -> None:
        kind = type(data)
        if kind is TensorDict:
            found = data._tensordict  # items() goes through several calls for it, and this is done at every write
        elif kind is dict or is_tensor_collection(data) or isinstance(data, Mapping):
            found = dict(data.items())
        else:
            raise SchemaError(f"{place(prefix)} is a {kind.__name__}, the entries {_list(self.children)} are expected")
        if found.keys() != self.children.keys():
            raise self._other_entries(found, prefix)
        for key, child in self.children.items():
            value = found[key]
            if type(child) is Leaf and (type(value) is torch.Tensor or isinstance(value, torch.Tensor)):
                into.append(value)
            else:
                child.take_apart(value, into, (*prefix, str(key)))

    def _other_entries(self, found: Mapping[Any, Any], prefix: Path) -> SchemaError:
        lacks = _list(key for key in self.children if key not in found)
        brings = _list(key for key in found if key not in self.children)
        what = [f"lacks {lacks}"] * (lacks != _NONE) + [f"brings the new {brings}"] * (brings != _NONE)
        return SchemaError(
            f"{place(prefix)} {' and '.join(what)}; the entries {_list(self.children)} are expected",
            hint='a lazy storage with schema="open" takes such data',
        )

    def build(self, leaves: Iterator[torch.Tensor], batch: torch.Size) -> Any:
        return {
            key: next(leaves) if type(child) is Leaf else child.build(leaves, batch)
            for key, child in self.children.items()
        }

    def joined(self, other: Structure, prefix: Path = ()) -> Structure:
        if not isinstance(other, Node):
            self._refuse_other(other, prefix)
        children = dict(self.children)
        for key, child in other.children.items():  # type: ignore[attr-defined]
            children[key] = children[key].joined(child, (*prefix, str(key))) if key in children else child
        return self.with_children(children)

    def constants(self, prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
        for key, child in self.children.items():
            yield from child.constants((*prefix, str(key)))

    def placed(self, device: torch.device) -> Node:
        return self.with_children({key: child.placed(device) for key, child in self.children.items()})

    def with_children(self, children: Mapping[Any, Structure]) -> Node:
        """The same kind of node with other entries."""
        return Node(children)


class TensorDictNode(Node):
    """A tensordict, or a tensorclass of the type `kind`; `tail` is its batch size beyond what counts elements."""

    def __init__(
        self,
        children: Mapping[str, Structure],
        tail: torch.Size,
        device: torch.device | None,
        kind: type[Any] | None = None,
    ) -> None:
        super().__init__(children)
        self.tail = tail
        self.device = device
        self.kind = kind

    def __str__(self) -> str:
        return self.kind.__name__ if self.kind else "tensordict"

    def build(self, leaves: Iterator[torch.Tensor], batch: torch.Size) -> Any:
        children = dict(zip(self.children, leaves, strict=False)) if self._flat else super().build(leaves, batch)
        # The public constructor would compare again, in several times the time, what the storage has checked; and to be
        # told the device, this one looks at every entry.
        size = batch + self.tail if self.tail else batch
        tensors = TensorDict._new_unsafe(children, batch_size=size)
        tensors._device = self.device
        return self.kind.from_tensordict(tensors) if self.kind else tensors

    def placed(self, device: torch.device) -> Node:
        children = {key: child.placed(device) for key, child in self.children.items()}
        return TensorDictNode(children, self.tail, device, self.kind)

    def with_children(self, children: Mapping[Any, Structure]) -> Node:
        if self.kind and children.keys() != self.children.keys():
            raise SchemaError(f"a {self} has the fields {_list(self.children)}, found {_list(children)}")
        return TensorDictNode(children, self.tail, self.device, self.kind)


class SequenceNode(Structure):
    """A list, a tuple or a named tuple."""

    def __init__(self, children: Iterable[Structure], kind: type[Any]) -> None:
        self.children = list(children)
        self.kind = kind

    def __str__(self) -> str:
        return self.kind.__name__

    def paths(self, prefix: Path = ()) -> Iterator[Path]:
        for number, child in enumerate(self.children):
            yield from child.paths((*prefix, str(number)))

    def take_apart(self, data: Any, into: list[torch.Tensor], prefix: Path = ()) -> None:
        if not isinstance(data, list | tuple) or len(data) != len(self.children):
            found = f"{len(data)} entries" if isinstance(data, list | tuple) else f"a {type(data).__name__}"
            raise SchemaError(f"{place(prefix)} is {found}, a sequence of {len(self.children)} is expected")
        for number, child in enumerate(self.children):
            child.take_apart(data[number], into, (*prefix, str(number)))

    def build(self, leaves: Iterator[torch.Tensor], batch: torch.Size) -> Any:
        children = [child.build(leaves, batch) for child in self.children]
        return self.kind(*children) if hasattr(self.kind, "_fields") else self.kind(children)

    def constants(self, prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
        for number, child in enumerate(self.children):
            yield from child.constants((*prefix, str(number)))

    def placed(self, device: torch.device) -> Structure:
        return SequenceNode((child.placed(device) for child in self.children), self.kind)

    def joined(self, other: Structure, prefix: Path = ()) -> Structure:
        if not isinstance(other, SequenceNode) or len(other.children) != len(self.children):
            raise SchemaError(f"{place(prefix)} is another sequence than the one stored before")
        pairs = zip(self.children, other.children, strict=True)
        return SequenceNode(
            (one.joined(two, (*prefix, str(number))) for number, (one, two) in enumerate(pairs)), self.kind
        )


_NONE = "none"


def structure_of(data: Any, lead: int = 0, prefix: Path = ()) -> Structure:
    """Describe how `data` is made, of whose dimensions the first `lead` count elements.

    SchemaError if something in it is neither a tensor, a nest of tensors, nor a constant in a tensordict.
    """
    if isinstance(data, torch.Tensor):
        return Leaf()
    if isinstance(data, list | tuple):
        parts = [structure_of(item, lead, (*prefix, str(number))) for number, item in enumerate(data)]
        return SequenceNode(parts, _sequence_kind(type(data)))
    if isinstance(data, NonTensorData) and prefix:
        return Constant(data.data, data.batch_size[lead:], data.device)
    if isinstance(data, TensorDictBase) and not isinstance(data, TensorDict) and not is_non_tensor(data):
        kind = type(data).__name__
        raise SchemaError(
            f"{place(prefix)} is a {kind}, whose rows need not be contiguous in memory; .contiguous() copies them"
        )
    if is_non_tensor(data) or not (is_tensorclass(data) or isinstance(data, TensorDict | Mapping)):
        raise SchemaError(
            f"{place(prefix)} is a {type(data).__name__}; tensors, tensordicts and nests of them can be stored",
            hint="a ListStorage keeps any object",
        )
    found = {key: structure_of(item, lead, (*prefix, str(key))) for key, item in data.items()}
    if not is_tensor_collection(data):
        return Node(found)
    if data.batch_dims < lead:
        shape, what = list(data.batch_size), f"its first {lead} dimension{'s' * (lead > 1)}"
        raise SchemaError(f"{place(prefix)} has the batch size {shape}, but {what} must count elements")
    return TensorDictNode(found, data.batch_size[lead:], data.device, type(data) if is_tensorclass(data) else None)


def _sequence_kind(kind: type[Any]) -> type[Any]:
    return kind if hasattr(kind, "_fields") else tuple if issubclass(kind, tuple) else list


def place(path: Path) -> str:
    """Name a place in a nest within a sentence."""
    return f"the entry {'.'.join(path)!r}" if path else "the data"


def _list(names: Iterable[Any]) -> str:
    return ", ".join(map(str, names)) or _NONE
