"""Items of a list storage: arbitrary objects as trees (a tree spec and its leaves), as JSON, and as entries of state
dicts.

The JSON documents are ours or TorchRL's; reading them executes no code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase, is_non_tensor, is_tensorclass

from ..errors import FormatError, SchemaError
from .codec import dtype_named
from .pytree import NO_BATCH, ConstantNode, MappingNode, Path, SequenceNode, TensorDictNode, TensorNode, TreeSpec


@dataclass(frozen=True, slots=True)
class ArrayNode(TensorNode):
    """A leaf that is a NumPy array ("ndarray") or number ("number")."""

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
    """A tensordict or tensorclass that is an item or part of one; it is made with tensordict's own checks.

    With `on_device`, its device is the one that its tensors share when it is made. `names` are the names of its
    dimensions.
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
    """A lazy stack of tensordicts or non-tensor entries in an item."""

    def __init__(self, children: Iterable[TreeSpec], stack_dim: int) -> None:
        super().__init__(children, LazyStackedTensorDict)
        self.stack_dim = stack_dim

    def unflatten(self, leaves: Iterator[torch.Tensor], batch: torch.Size) -> Any:
        children = [child.unflatten(leaves, batch) for child in self.children.values()]
        return LazyStackedTensorDict.lazy_stack(children, self.stack_dim)


@dataclass(frozen=True, slots=True)
class Tree:
    """An item of a list: its tree spec, and for each of its tensors a leaf, the tensor itself or its packed form."""

    spec: TreeSpec
    leaves: Sequence[Any]

    def named_leaves(self) -> Iterator[tuple[Path, Any]]:
        """Yield every leaf with its path."""
        return zip(self.spec.paths(), self.leaves, strict=True)

    def unflatten(self, unpack: Callable[[Any], torch.Tensor]) -> Any:
        """Make the item from fresh containers and the results of `unpack` for the leaves."""
        return self.spec.unflatten(map(unpack, self.leaves), NO_BATCH)


def tree_of(item: Any, pack: Callable[[torch.Tensor], Any] = lambda tensor: tensor) -> Tree:
    """Flatten an item of any kind; its leaves are the results of `pack` for dense tensors and arrays of numbers.

    Flattened are tensordicts (including lazy stacks and non-tensor entries), tensorclasses, dicts, lists and tuples.
    Other objects become part of the spec.
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
    """Return the item with its tensors and tensordicts, also inside dicts, lists and tuples, on a device."""
    if isinstance(item, torch.Tensor | TensorDictBase) or is_tensorclass(item):
        return item.to(device)
    if type(item) is dict:
        return {key: to_device(part, device) for key, part in item.items()}
    if type(item) in (list, tuple):
        return type(item)(to_device(part, device) for part in item)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(to_device(part, device) for part in item))
    return item


Document: TypeAlias = Mapping[str, Any]

TakeLeaf: TypeAlias = Callable[[Document, Path], Any]
"""Returns the leaf described by the document at a path."""


def document_of(tree: Tree, describe: Callable[[Any], Document], *, portable: bool) -> dict[str, Any]:
    """Describe an item without its leaves; for each leaf the result of `describe` is added.

    A `portable` document is plain JSON; SchemaError for items that JSON cannot represent. Otherwise it contains other
    objects and classes by reference.
    """
    return _document(tree.spec, map(describe, tree.leaves), portable)


def _document(spec: TreeSpec, leaves: Iterator[Document], portable: bool) -> dict[str, Any]:
    if isinstance(spec, TensorNode):
        return {"type": "tensor", **next(leaves)} | ({"array": spec.kind} if isinstance(spec, ArrayNode) else {})
    if isinstance(spec, ObjectNode):
        return {"type": "other", "value": _plain(spec.value) if portable else spec.value}
    if isinstance(spec, ConstantNode):
        # TorchRL defines the tag and where it is written.
        tagged = {"__type__": "NonTensorData", "value": _plain(spec.value) if portable else spec.value}
        return {"type": "non_tensor", "value": tagged, "batch_size": list(spec.tail)}
    if isinstance(spec, SequenceNode):
        return _sequence_document(spec, leaves, portable)
    if portable:
        _require_portable(spec)
    fields = {key: _document(child, leaves, portable) for key, child in spec.children.items()}
    if not isinstance(spec, ItemNode):
        return {"type": "mapping", "fields": fields}
    found: dict[str, Any] = {"type": "tensordict", "fields": fields, "batch_size": list(spec.tail)}
    found |= ({"placed": True} if spec.on_device else {}) | ({"names": list(spec.names)} if spec.names else {})
    return {"type": "tensorclass", "class": spec.kind, "fields": found} if spec.kind else found


def _sequence_document(spec: SequenceNode, leaves: Iterator[Document], portable: bool) -> dict[str, Any]:
    items = [_document(child, leaves, portable) for child in spec.children.values()]
    if isinstance(spec, LazyStackNode):
        return {"type": "lazy_stack", "stack_dim": spec.stack_dim, "items": items}
    if spec.kind in (list, tuple):
        return {"type": spec.kind.__name__, "items": items}
    if portable:
        raise SchemaError(f"a {spec.kind.__name__} is a named tuple; checkpoints can only hold lists and tuples")
    return {"type": "named_tuple", "class": spec.kind, "items": items}


def _require_portable(spec: TreeSpec) -> None:
    if isinstance(spec, ItemNode) and spec.kind:
        raise SchemaError(
            f"a {spec.kind.__name__} is a tensorclass, which checkpoints of lists cannot hold",
            hint="store its .to_tensordict() instead",
        )
    strange = next((key for key in spec.children if type(key) is not str), None)
    if strange is not None:
        raise SchemaError(f"{strange!r} is a key of a dict; checkpoints can only hold text keys")


def _plain(value: Any) -> Any:
    """Return a value in its JSON form; SchemaError if JSON cannot give the same value back."""
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
        f"a {type(value).__name__} cannot be written to a checkpoint; only tensors, arrays, tensordicts, numbers, "
        "texts "
        "and nests of them can"
    )


def tree_from(document: Any, take: TakeLeaf, *, portable: bool = True) -> Tree:
    """Return the tree described by a document, with the leaves that `take` returns; FormatError if the document is
    invalid.

    A document that is not `portable` may hold classes and objects: it never left memory.
    """
    leaves: list[Any] = []
    reader = _DocumentReader(lambda about, path: leaves.append(take(about, path)), portable)
    try:
        return Tree(reader.spec(document, ()), leaves)
    except RecursionError:
        raise FormatError("the description of an item is nested too deeply") from None


@dataclass(frozen=True, slots=True)
class _DocumentReader:
    add: Callable[[Document, Path], None]
    portable: bool

    def spec(self, document: Any, path: Path) -> TreeSpec:
        if not isinstance(document, Mapping):
            raise FormatError(f"an item is described by {_short(document)}, expected an object")
        kind = document.get("type")
        if kind == "tensor":
            return self._tensor(document, path)
        if kind == "other":
            value = document.get("value")
            return ObjectNode(_untagged(value) if self.portable else value)
        if kind == "non_tensor":
            return self._non_tensor(document)
        if kind in ("tensordict", "mapping"):
            fields = _expect(document, "fields", Mapping)
            children = {key: self.spec(part, (*path, str(key))) for key, part in fields.items()}
            return MappingNode(children, distinct=False) if kind == "mapping" else _tensordict(document, children)
        if kind in ("list", "tuple", "lazy_stack"):
            items = self._items(document, path)
            if kind == "lazy_stack":
                return _lazy_stack(document, items)
            return SequenceNode(items, list if kind == "list" else tuple)
        if not self.portable and kind == "named_tuple":
            return SequenceNode(self._items(document, path), _expect(document, "class", type))
        if not self.portable and kind == "tensorclass":
            owner, fields = _expect(document, "class", type), self.spec(document["fields"], path)
            if not isinstance(fields, ItemNode):
                raise FormatError(
                    f"the fields of a {owner.__name__} are described as a {fields}, expected a tensordict"
                )
            return ItemNode(fields.children, fields.tail, fields.on_device, fields.names, owner)
        raise FormatError(f"{_short(kind)} is not a known kind of item")

    def _tensor(self, document: Document, path: Path) -> TreeSpec:
        array = document.get("array", "")
        if array not in ("", "ndarray", "number"):
            raise FormatError(f"{_short(array)} is not a known kind of array")
        self.add(document, path)
        return ArrayNode(array) if array else TensorNode()

    def _items(self, document: Document, path: Path) -> list[TreeSpec]:
        items = _expect(document, "items", list)
        return [self.spec(part, (*path, str(number))) for number, part in enumerate(items)]

    def _non_tensor(self, document: Document) -> TreeSpec:
        value: Any = document.get("value")
        if isinstance(value, Mapping) and value.get("__type__") == "NonTensorData":
            value = value.get("value")
        if not self.portable and is_non_tensor(value):  # a state of TorchRL's, in memory
            value = value.data
        batch = read_shape(document.get("batch_size", []))
        return ConstantNode(_untagged(value) if self.portable else value, torch.Size(batch))


def _tensordict(document: Document, children: dict[str, TreeSpec]) -> ItemNode:
    batch = read_shape(document.get("batch_size", []))  # TorchRL omits it for []
    names = document.get("names")
    if names is not None and (
        not isinstance(names, list)
        or len(names) != len(batch)
        or not all(name is None or isinstance(name, str) for name in names)
    ):
        raise FormatError(f"{_short(names)} are not names for the {len(batch)} dimensions of a tensordict")
    return ItemNode(children, torch.Size(batch), document.get("placed") is True, tuple(names) if names else None)


def _lazy_stack(document: Document, items: list[TreeSpec]) -> LazyStackNode:
    stack_dim = document.get("stack_dim")
    if any(not isinstance(item, TensorDictNode | LazyStackNode | ConstantNode) for item in items):
        raise FormatError("a lazy stack can only consist of tensordicts")
    if type(stack_dim) is not int or stack_dim < 0 or not items:
        raise FormatError(f"a lazy stack of {len(items)} items along dimension {_short(stack_dim)} is impossible")
    return LazyStackNode(items, stack_dim)


def _untagged(value: Any) -> Any:
    """Undo the tags, `{"__type__": …, "value": …}`, that represent other values in JSON."""
    if isinstance(value, list):
        return [_untagged(part) for part in value]
    if not isinstance(value, Mapping):
        return value
    if "__type__" not in value:
        return {key: _untagged(part) for key, part in value.items()}
    tag, inner = value["__type__"], value.get("value")
    if tag == "torch.Size":
        return torch.Size(read_shape(inner))
    if tag == "torch.dtype":
        return dtype_named(inner)
    if tag == "NonTensorData":
        return _untagged(inner)
    if tag == "tuple" and isinstance(inner, list):
        return tuple(_untagged(part) for part in inner)
    if tag == "float" and inner in ("nan", "inf", "-inf"):
        return float(inner)
    try:
        if tag == "torch.device" and isinstance(inner, str):
            return torch.device(inner)
        if tag == "torch.Tensor":
            return torch.tensor(_untagged(inner))
    except (TypeError, ValueError, RuntimeError) as error:
        raise FormatError(f"{_short(inner)} is not a valid {tag}") from error
    raise FormatError(f"{_short(inner)} cannot be read as {_short(tag)}")


def read_shape(value: Any) -> tuple[int, ...]:
    """Read a shape, tagged or not; FormatError unless it is a short list of sizes whose product fits into 64 bits."""
    if isinstance(value, Mapping) and value.get("__type__") == "torch.Size":
        value = value.get("value")
    if not isinstance(value, Sequence) or not all(type(size) is int and size >= 0 for size in value):
        raise FormatError(f"{_short(value)} is not a shape")
    if (
        len(value) > 64 or math.prod(max(size, 1) for size in value) >= 1 << 59
    ):  # the number of bytes must fit into 64 bits, too
        raise FormatError(f"{_short(value)} is not the shape of a possible tensor")
    return tuple(value)


def read_dtype(value: Any) -> torch.dtype:
    """Read an element type, tagged or not; FormatError if it is not one."""
    return dtype_named(value.get("value") if isinstance(value, Mapping) else value)


def _expect(document: Document, name: str, kind: type[Any]) -> Any:
    value = document.get(name)
    if not isinstance(value, kind):
        raise FormatError(f"{name!r} of a described item is {_short(value)}, expected a {kind.__name__}")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# States --------------------------------------------------------------------------------------------


def state_of_item(tree: Tree, describe: Callable[[Any], dict[str, Any]] = lambda _: {}) -> tuple[Any, dict[str, Any]]:
    """Return an item's tensors (a single one, or all by dotted path) or the object itself, and its description."""
    if isinstance(tree.spec, ObjectNode):
        return tree.spec.value, {"type": "other"}
    about = document_of(tree, describe, portable=False)
    if isinstance(tree.spec, TensorNode):
        return tree.leaves[0], about
    tensors = {".".join(path): leaf for path, leaf in tree.named_leaves()}
    if len(tensors) < len(tree.leaves):
        names = ", ".join(".".join(path) for path in tree.spec.paths())
        raise SchemaError(f"two of the keys {names} are the same when written with dots")
    return tensors, about


def leaf_of_state(state: Any, path: Path) -> torch.Tensor:
    """Find a tensor in an item's state; SchemaError if it is missing."""
    found = state
    if path:
        found = state.get(".".join(path)) if isinstance(state, Mapping) else None
    if not isinstance(found, torch.Tensor):
        raise SchemaError(f"the state describes a tensor {'.'.join(path)!r}, but does not hold it")
    return found


def items_of_states(states: Sequence[Any], abouts: Sequence[Any]) -> list[Any]:
    """Make the items described by `state_of_item`, with copies of their tensors."""
    if len(states) != len(abouts):
        raise SchemaError(f"the state holds {len(states)} objects, but describes {len(abouts)}")
    return [_item(state, about) for state, about in zip(states, abouts, strict=True)]


def _item(state: Any, about: Any) -> Any:
    if about == {"type": "other"}:
        return state
    return tree_from(about, lambda _, path: leaf_of_state(state, path), portable=False).unflatten(torch.clone)


def item_of_state(state: Any) -> Any:
    """Make an item from the form in which TorchRL saves it: a tensor, or the result of `TensorDict.state_dict`."""
    if isinstance(state, torch.Tensor):
        return state.clone()
    if not isinstance(state, Mapping) or not all(isinstance(leaf, torch.Tensor) for leaf in state.values()):
        raise TypeError(
            f"a state without descriptions can only hold tensors and tensordicts, found a {type(state).__name__}"
        )
    # torch keeps metadata in an attribute of the OrderedDict, by dotted path, parents before children.
    facts: Mapping[str, Mapping[str, Any]] = getattr(state, "_metadata", {})
    root = TensorDict({}, batch_size=facts.get("", {}).get("batch_size", []))
    for name, about in facts.items():
        if name:
            root.set(tuple(name.split(".")), _empty_node(about))
    for name, leaf in state.items():
        root.set(tuple(name.split(".")), leaf.clone())
    return root


def _empty_node(about: Mapping[str, Any]) -> Any:
    batch = about.get("batch_size", [])
    if about.get("_type") == "NonTensorData":
        return NonTensorData(about.get("_non_tensor", {}).get("data"), batch_size=batch)
    return TensorDict({}, batch_size=batch)
