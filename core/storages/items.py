"""Items of a list: any objects as trees, which are a tree spec with its leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensorclass,
)

from .pytree import NO_BATCH, ConstantNode, MappingNode, Path, SequenceNode, TensorDictNode, TensorNode, TreeSpec


@dataclass(frozen=True, slots=True)
class ArrayNode(TensorNode):
    """A leaf that is an array ("ndarray") or a number ("number") of NumPy."""

    kind: str

    def unflatten(self, leaves: Iterator[torch.Tensor], batch: torch.Size) -> Any:
        found = next(leaves).numpy(force=True)
        return found[()] if self.kind == "number" else found


@dataclass(frozen=True, slots=True)
class ObjectNode(TreeSpec):
    """Any other object in an item."""

    value: Any

    def __str__(self) -> str:
        return type(self.value).__name__

    def unflatten(self, leaves: Iterator[torch.Tensor], batch: torch.Size) -> Any:
        return self.value


class ItemNode(TensorDictNode):
    """A tensordict or tensorclass that is an item, or part of one: it is made with the checks of tensordict.

    With `on_device`, its device is the one that its tensors share when it is made. `names` are those of its dimensions.
    """

    def __init__(
        self,
        children: Mapping[str, TreeSpec],
        tail: torch.Size,
        on_device: bool = False,
        names: tuple[str | None, ...] | None = None,
        kind: type[Any] | None = None,
    ) -> None:
        super().__init__(children, tail, None, kind)
        self.on_device = on_device
        self.names = names

    def unflatten(self, leaves: Iterator[torch.Tensor], batch: torch.Size) -> Any:
        devices: set[torch.device] = set()

        def noted() -> Iterator[torch.Tensor]:
            for leaf in leaves:
                devices.add(leaf.device)
                yield leaf

        entries = MappingNode.unflatten(self, noted(), batch)
        names: Any = list(self.names) if self.names else None
        device = min(devices, key=str, default=torch.device("cpu")) if self.on_device and len(devices) < 2 else None
        tensors = TensorDict(entries, batch_size=batch + self.tail, names=names, device=device)
        return self.kind.from_tensordict(tensors) if self.kind else tensors


class LazyStackNode(SequenceNode):
    """A lazy stack of tensordicts or of non-tensor entries, in an item."""

    def __init__(self, children: Iterable[TreeSpec], stack_dim: int) -> None:
        super().__init__(children, LazyStackedTensorDict)
        self.stack_dim = stack_dim

    def unflatten(self, leaves: Iterator[torch.Tensor], batch: torch.Size) -> Any:
        children = [child.unflatten(leaves, batch) for child in self.children.values()]
        return LazyStackedTensorDict.lazy_stack(children, self.stack_dim)


@dataclass(frozen=True, slots=True)
class Tree:
    """One item of a list: its tree spec, and a leaf for each of its tensors: itself, or what it was packed into."""

    spec: TreeSpec
    leaves: Sequence[Any]

    def named_leaves(self) -> Iterator[tuple[Path, Any]]:
        """Yield every leaf with its path."""
        return zip(self.spec.paths(), self.leaves, strict=True)

    def unflatten(self, unpack: Callable[[Any], torch.Tensor]) -> Any:
        """Make the item from fresh containers and what `unpack` makes of the leaves."""
        return self.spec.unflatten(map(unpack, self.leaves), NO_BATCH)


def tree_of(item: Any, pack: Callable[[torch.Tensor], Any] = lambda tensor: tensor) -> Tree:
    """Flatten an item, which may be anything; its leaves are what `pack` makes of dense tensors and arrays of numbers.

    Flattened are tensordicts, also lazily stacked ones and those with non-tensor entries, tensorclasses, dicts, lists
    and tuples. Other objects are kept in the spec.
    """
    leaves: list[Any] = []
    return Tree(_item_spec(item, lambda tensor: leaves.append(pack(tensor))), leaves)


def _item_spec(item: Any, add: Callable[[torch.Tensor], None]) -> TreeSpec:
    if isinstance(item, torch.Tensor):
        if item.layout != torch.strided or item.is_nested or item.is_quantized:
            return ObjectNode(item)
        add(item)
        return TensorNode()
    if isinstance(item, np.ndarray | np.generic) and item.dtype.kind in "biufc" and item.dtype.isnative:
        if item.dtype.itemsize // (2 if item.dtype.kind == "c" else 1) > 8:  # torch has no long doubles
            return ObjectNode(item)
        add(torch.from_numpy(np.array(item, order="C")))
        return ArrayNode("number" if isinstance(item, np.generic) else "ndarray")
    if isinstance(item, LazyStackedTensorDict):
        return LazyStackNode([_item_spec(part, add) for part in item.tensordicts], item.stack_dim)
    if is_non_tensor(item):
        return ConstantNode(item.data, item.batch_size)
    if is_tensorclass(item):
        return _tensordict_item(item.to_tensordict(), add, type(item))
    if isinstance(item, TensorDictBase):
        return _tensordict_item(item, add)
    if type(item) is dict:
        return MappingNode({key: _item_spec(part, add) for key, part in item.items()}, distinct=False)
    if type(item) in (list, tuple) or (isinstance(item, tuple) and hasattr(item, "_fields")):
        return SequenceNode([_item_spec(part, add) for part in item], type(item))
    return ObjectNode(item)


def _tensordict_item(item: Any, add: Callable[[torch.Tensor], None], kind: type[Any] | None = None) -> ItemNode:
    names = tuple(item.names) if any(item.names) else None
    children = {key: _item_spec(part, add) for key, part in item.items()}
    return ItemNode(children, item.batch_size, item.device is not None, names, kind)


def to_device(item: Any, device: torch.device) -> Any:
    """Return the item with its tensors, tensordicts and those in dicts, lists and tuples on a device."""
    if isinstance(item, torch.Tensor | TensorDictBase) or is_tensorclass(item):
        return item.to(device)
    if type(item) is dict:
        return {key: to_device(part, device) for key, part in item.items()}
    if type(item) in (list, tuple):
        return type(item)(to_device(part, device) for part in item)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(to_device(part, device) for part in item))
    return item
