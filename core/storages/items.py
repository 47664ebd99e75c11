"""Takes one item of a list apart into nodes that hold its tensors, and puts it together again.

An item may be anything. Tensors, arrays, tensordicts (nested, lazily stacked, with non-tensor entries),
tensorclasses, dicts, lists and tuples are understood; whatever else is found is carried as it is.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensorclass,
)

from ..errors import SchemaError

__all__ = ["Node", "Pack", "Path", "Unpack", "moved", "take_apart"]

Pack: TypeAlias = Callable[[torch.Tensor], Any]
"""What becomes of a tensor when its item is taken apart."""

Unpack: TypeAlias = Callable[[Any], torch.Tensor]
"""Makes the tensor again."""

Path: TypeAlias = tuple[str, ...]
Document: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Node(ABC):
    """One node of an item."""

    @property
    def children(self) -> Mapping[Any, Node]:
        """The nodes below, by key or number."""
        return {}

    def leaves(self, path: Path = ()) -> Iterator[tuple[Path, Any]]:
        """Yield what the tensors became, with the path of each."""
        for key, child in self.children.items():
            yield from child.leaves((*path, str(key)))

    @abstractmethod
    def build(self, unpack: Unpack) -> Any:
        """Put the item together again, of fresh containers."""

    @abstractmethod
    def document(self, describe: Callable[[Any], Document], *, portable: bool) -> Document:
        """Describe the node without its tensors, each of which adds what `describe` says of it.

        A `portable` document is plain JSON, and SchemaError is raised for what that cannot hold; otherwise foreign
        objects and classes stand in it as they are.
        """


@dataclass(frozen=True, slots=True)
class TensorNode(Node):
    """A tensor; `array` is "ndarray" or "number" if it came as an array or a number of NumPy."""

    payload: Any
    array: str = ""

    def leaves(self, path: Path = ()) -> Iterator[tuple[Path, Any]]:
        yield path, self.payload

    def build(self, unpack: Unpack) -> Any:
        tensor = unpack(self.payload)
        if not self.array:
            return tensor
        found = tensor.numpy(force=True)
        return found[()] if self.array == "number" else found

    def document(self, describe: Callable[[Any], Document], *, portable: bool) -> Document:
        return {"type": "tensor", **describe(self.payload)} | ({"array": self.array} if self.array else {})


@dataclass(frozen=True, slots=True)
class TensorDictNode(Node):
    """A tensordict; `placed` tells whether it had a device."""

    fields: dict[str, Node]
    batch: tuple[int, ...]
    placed: bool = False
    names: tuple[str | None, ...] | None = None

    @property
    def children(self) -> Mapping[Any, Node]:
        return self.fields

    def build(self, unpack: Unpack) -> Any:
        devices: set[torch.device] = set()

        def noted(payload: Any) -> torch.Tensor:
            tensor = unpack(payload)
            devices.add(tensor.device)
            return tensor

        entries = {key: child.build(noted) for key, child in self.fields.items()}
        names: Any = list(self.names) if self.names else None
        device = min(devices, key=str, default=torch.device("cpu")) if self.placed and len(devices) < 2 else None
        return TensorDict(entries, batch_size=self.batch, names=names, device=device)

    def document(self, describe: Callable[[Any], Document], *, portable: bool) -> Document:
        fields = {key: child.document(describe, portable=portable) for key, child in self.fields.items()}
        found: Document = {"type": "tensordict", "fields": fields, "batch_size": list(self.batch)}
        return found | ({"placed": True} if self.placed else {}) | ({"names": list(self.names)} if self.names else {})


@dataclass(frozen=True, slots=True)
class LazyStackNode(Node):
    """A lazy stack of tensordicts or of non-tensor entries."""

    items: list[Node]
    stack_dim: int

    @property
    def children(self) -> Mapping[Any, Node]:
        return dict(enumerate(self.items))

    def build(self, unpack: Unpack) -> Any:
        return LazyStackedTensorDict.lazy_stack([item.build(unpack) for item in self.items], self.stack_dim)

    def document(self, describe: Callable[[Any], Document], *, portable: bool) -> Document:
        items = [item.document(describe, portable=portable) for item in self.items]
        return {"type": "lazy_stack", "stack_dim": self.stack_dim, "items": items}


@dataclass(frozen=True, slots=True)
class TensorClassNode(Node):
    """A tensorclass, as the tensordict of its fields."""

    kind: type[Any]
    fields: Node

    @property
    def children(self) -> Mapping[Any, Node]:
        return self.fields.children

    def build(self, unpack: Unpack) -> Any:
        return self.kind.from_tensordict(self.fields.build(unpack))

    def document(self, describe: Callable[[Any], Document], *, portable: bool) -> Document:
        if portable:
            raise SchemaError(
                f"a {self.kind.__name__} is a tensorclass, which a checkpoint of a list cannot name",
                hint="write .to_tensordict() of it into the storage",
            )
        return {"type": "tensorclass", "class": self.kind, "fields": self.fields.document(describe, portable=False)}


@dataclass(frozen=True, slots=True)
class NonTensorNode(Node):
    """A non-tensor entry of a tensordict."""

    value: Any
    batch: tuple[int, ...] = ()

    def build(self, unpack: Unpack) -> Any:
        return NonTensorData(self.value, batch_size=self.batch)

    def document(self, describe: Callable[[Any], Document], *, portable: bool) -> Document:
        value = _plain(self.value) if portable else self.value
        # The tag and its place are TorchRL's.
        tagged = {"__type__": "NonTensorData", "value": value}
        return {"type": "non_tensor", "value": tagged, "batch_size": list(self.batch)}


@dataclass(frozen=True, slots=True)
class MappingNode(Node):
    """A dict."""

    fields: dict[Any, Node]

    @property
    def children(self) -> Mapping[Any, Node]:
        return self.fields

    def build(self, unpack: Unpack) -> Any:
        return {key: child.build(unpack) for key, child in self.fields.items()}

    def document(self, describe: Callable[[Any], Document], *, portable: bool) -> Document:
        strange = next((key for key in self.fields if portable and type(key) is not str), None)
        if strange is not None:
            raise SchemaError(f"{strange!r} is a key of a dict; a checkpoint can hold texts as keys")
        return {
            "type": "mapping",
            "fields": {key: child.document(describe, portable=portable) for key, child in self.fields.items()},
        }


@dataclass(frozen=True, slots=True)
class SequenceNode(Node):
    """A list, a tuple or a named tuple."""

    kind: type[Any]
    items: list[Node] = field(default_factory=list)

    @property
    def children(self) -> Mapping[Any, Node]:
        return dict(enumerate(self.items))

    def build(self, unpack: Unpack) -> Any:
        found = [item.build(unpack) for item in self.items]
        return self.kind(*found) if hasattr(self.kind, "_fields") else self.kind(found)

    def document(self, describe: Callable[[Any], Document], *, portable: bool) -> Document:
        items = [item.document(describe, portable=portable) for item in self.items]
        if self.kind in (list, tuple):
            return {"type": self.kind.__name__, "items": items}
        if portable:
            raise SchemaError(f"a {self.kind.__name__} is a named tuple; a checkpoint can hold lists and tuples")
        return {"type": "named_tuple", "class": self.kind, "items": items}


@dataclass(frozen=True, slots=True)
class ValueNode(Node):
    """Any other object, carried as it is."""

    value: Any

    def build(self, unpack: Unpack) -> Any:
        return self.value

    def document(self, describe: Callable[[Any], Document], *, portable: bool) -> Document:
        return {"type": "other", "value": _plain(self.value) if portable else self.value}


def _plain(value: Any) -> Any:
    """Return what JSON has for a value; SchemaError if it has nothing that gives the same value back."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"__type__": "float", "value": str(value)}
    if type(value) is list:
        return [_plain(item) for item in value]
    if type(value) is tuple:
        return {"__type__": "tuple", "value": [_plain(item) for item in value]}
    if type(value) is dict and "__type__" not in value and all(type(key) is str for key in value):
        return {key: _plain(item) for key, item in value.items()}
    raise SchemaError(
        f"a {type(value).__name__} cannot be written to a checkpoint; tensors, arrays, tensordicts, numbers, texts "
        "and nests of them can"
    )


def take_apart(item: Any, pack: Pack) -> Node:
    """Take an item apart; every dense tensor and every array of numbers goes through `pack`."""
    if isinstance(item, torch.Tensor):
        dense = item.layout == torch.strided and not item.is_nested and not item.is_quantized
        return TensorNode(pack(item)) if dense else ValueNode(item)
    if isinstance(item, np.ndarray | np.generic) and item.dtype.kind in "biufc" and item.dtype.isnative:
        if item.dtype.itemsize // (2 if item.dtype.kind == "c" else 1) > 8:  # long doubles: torch has none
            return ValueNode(item)
        kind = "number" if isinstance(item, np.generic) else "ndarray"
        return TensorNode(pack(torch.from_numpy(np.array(item, order="C"))), kind)
    if isinstance(item, LazyStackedTensorDict):
        return LazyStackNode([take_apart(part, pack) for part in item.tensordicts], item.stack_dim)
    if is_non_tensor(item):
        return NonTensorNode(item.data, tuple(item.batch_size))
    if is_tensorclass(item):
        return TensorClassNode(type(item), take_apart(item.to_tensordict(), pack))
    if isinstance(item, TensorDictBase):
        names = tuple(item.names) if any(item.names) else None
        fields = {key: take_apart(part, pack) for key, part in item.items()}
        return TensorDictNode(fields, tuple(item.batch_size), item.device is not None, names)
    if type(item) is dict:
        return MappingNode({key: take_apart(part, pack) for key, part in item.items()})
    if type(item) in (list, tuple) or (isinstance(item, tuple) and hasattr(item, "_fields")):
        return SequenceNode(type(item), [take_apart(part, pack) for part in item])
    return ValueNode(item)


def moved(item: Any, device: torch.device) -> Any:
    """Return the item with its tensors, tensordicts and those in dicts, lists and tuples on a device."""
    if isinstance(item, torch.Tensor | TensorDictBase) or is_tensorclass(item):
        return item.to(device)
    if type(item) is dict:
        return {key: moved(part, device) for key, part in item.items()}
    if type(item) in (list, tuple):
        return type(item)(moved(part, device) for part in item)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(moved(part, device) for part in item))
    return item
