"""Storages that keep elements in a Python list: as they are, as a lazy stack, or with compressed tensors.

An item of the list may be any object. To save it, it is divided into a tree spec and the tensors in it. Checkpoints
describe the spec in JSON documents, which rbtool or TorchRL wrote; reading them executes no code. State dicts hold a
similar description in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
    is_tensorclass,
)

from ..errors import FormatError, MissingKeyError, SchemaError, UsageError
from ..torchrl_classes import counterpart
from .base import IndexedStorage, copied, objects_of
from .codec import CODECS, byte_count, codec_of_bytes, dtype_named, tensor_bytes, tensor_from_bytes, to_bytestream
from .columns import Memory
from .cursors import as_index, grown_rows, rows_of
from .pytree import (
    NO_BATCH,
    ConstantNode,
    MappingNode,
    Path,
    SequenceNode,
    TensorDictNode,
    TensorNode,
    TreeSpec,
    class_name,
    class_named,
    leaf_names,
    shallow_copy,
)


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
    """A tensordict or tensorclass in an item. It is made by tensordict's constructor, with its checks.

    Args:
        children: its entries.
        tail: its batch size.
        on_device: whether it has a device; this is the device that its tensors share when it is made.
        names: the names of its dimensions.
        kind: the tensorclass; None for a tensordict.
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
    """A lazy stack of tensordicts, tensorclasses or non-tensor entries in an item."""

    def __init__(self, children: Iterable[TreeSpec], stack_dim: int) -> None:
        super().__init__(children, LazyStackedTensorDict)
        self.stack_dim = stack_dim

    def unflatten(self, leaves: Iterator[torch.Tensor], batch: torch.Size) -> Any:
        children = [child.unflatten(leaves, batch) for child in self.children.values()]
        return LazyStackedTensorDict.lazy_stack(children, self.stack_dim)


@dataclass(frozen=True, slots=True)
class Tree:
    """An item of a list: its tree spec, and a leaf for each of its tensors, which is the tensor or its packed form."""

    spec: TreeSpec
    leaves: Sequence[Any]

    def unflatten(self, unpack: Callable[[Any], torch.Tensor]) -> Any:
        """Make the item again, with new containers; `unpack` turns each leaf into a tensor."""
        return self.spec.unflatten(map(unpack, self.leaves), NO_BATCH)


def tree_of(item: Any, pack: Callable[[torch.Tensor], Any] = lambda tensor: tensor) -> Tree:
    """Divide an item of any kind into its tree spec and its leaves; `pack` turns each tensor into a leaf.

    Tensors in tensordicts (including lazy stacks and non-tensor entries), tensorclasses, dicts, lists and tuples become
    leaves, as do arrays of numbers. Other objects, and tensors that are not dense, become part of the spec.
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
        if isinstance(item._tensordict, LazyStackedTensorDict):  # `to_tensordict` drops entries that some parts lack
            dim = item._tensordict.stack_dim
            return LazyStackNode([_item_spec(part, add) for part in item.unbind(dim)], dim)
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
    """Return the description of an item, with the result of `describe` in place of each leaf.

    A `portable` document is plain JSON; SchemaError for items that JSON cannot represent. Otherwise it contains
    references to classes and to objects that are not tensors.
    """
    return _document(tree.spec, map(describe, tree.leaves), portable)


def _document(spec: TreeSpec, leaves: Iterator[Document], portable: bool) -> dict[str, Any]:
    if isinstance(spec, TensorNode):
        return {"type": "tensor", **next(leaves)} | ({"array": spec.kind} if isinstance(spec, ArrayNode) else {})
    if isinstance(spec, ObjectNode):
        return {"type": "other", "value": _plain(spec.value) if portable else spec.value}
    if isinstance(spec, ConstantNode):
        # The tag is part of TorchRL's format.
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
    if spec.kind is None:
        return found
    return {"type": "tensorclass", "class": class_name(spec.kind) if portable else spec.kind, "fields": found}


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
    strange = next((key for key in spec.children if type(key) is not str), None)
    if strange is not None:
        raise SchemaError(f"{strange!r} is a key of a dict; checkpoints can only hold text keys")


def _plain(value: Any) -> Any:
    """Return a value in its JSON form, from which `_untagged` gets the same value; SchemaError if there is none."""
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
        "texts and nests of them can"
    )


def tree_from(document: Any, take: TakeLeaf, *, portable: bool = True) -> Tree:
    """Return the tree that a document describes, with the leaves that `take` returns.

    A document that is not `portable` may contain references to classes and objects, because it was never in a file.

    Raises:
        FormatError: the document is invalid.
    """
    leaves: list[Any] = []
    reader = _DocumentReader(lambda about, path: leaves.append(take(about, path)), portable)
    try:
        return Tree(reader.spec(document, ()), leaves)
    except RecursionError:
        raise FormatError("the description of an item is nested too deeply") from None


@dataclass(frozen=True, slots=True)
class _DocumentReader:
    """Makes tree specs from documents, and calls `add(document, path)` for each leaf, in their order."""

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
        if kind == "tensorclass":
            fields = self.spec(_expect(document, "fields", Mapping), path)
            named = _expect(document, "class", str if self.portable else type)
            owner = class_named(named, is_tensorclass) if self.portable else named
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
        if not self.portable and is_non_tensor(value):  # a state dict of TorchRL
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
    """Read a shape, tagged or not; FormatError unless it has at most 64 sizes and a tensor can have so many bytes."""
    if isinstance(value, Mapping) and value.get("__type__") == "torch.Size":
        value = value.get("value")
    if not isinstance(value, Sequence) or not all(type(size) is int and size >= 0 for size in value):
        raise FormatError(f"{_short(value)} is not a shape")
    if len(value) > 64 or math.prod(max(size, 1) for size in value) >= 1 << 59:  # of up to 16 bytes each
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
    """Return what a state dict holds of an item, and its description.

    This is a single tensor, or a dict of tensors by their `leaf_names`; or the object, if it is of another kind.
    """
    if isinstance(tree.spec, ObjectNode):
        return tree.spec.value, {"type": "other"}
    about = document_of(tree, describe, portable=False)
    if isinstance(tree.spec, TensorNode):
        return tree.leaves[0], about
    return dict(zip(leaf_names(tree.spec.paths()), tree.leaves, strict=True)), about


def leaf_of_state(state: Any, path: Path) -> torch.Tensor:
    """Find a tensor in an item's state; SchemaError if it is missing."""
    found = state
    if path:
        names = [*leaf_names([path]), *leaf_names([path, path])]  # joined by dots, and as JSON
        found = next((state[name] for name in names if name in state), None) if isinstance(state, Mapping) else None
    if not isinstance(found, torch.Tensor):
        raise SchemaError(f"the state describes a tensor {'.'.join(path)!r}, but does not hold it")
    return found


def items_of_states(states: Sequence[Any], abouts: Sequence[Any]) -> list[Any]:
    """Make items from the results of `state_of_item`, with copies of their tensors."""
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
    # tensordict stores metadata in an attribute of the OrderedDict, by dotted path, parents before children.
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


@counterpart
class ListStorage(IndexedStorage):
    """Keeps up to `max_size` objects of any kind, by reference.

    An int reads and writes one object. Any other index (a slice, list, mask, array, tensor) reads a list of objects,
    and writes one object a row from a list, tuple, set, range, array, tensor or tensordict. The objects live in one
    process; passing the storage to a spawned process raises SchemaError.

    Args:
        max_size: the capacity; None for 2^63 - 1.
        checkpointer: saves and loads the storage.
        compilable: whether `torch.compile` may trace the methods.
        device: where tensors and tensordicts, also inside dicts, lists and tuples, are moved when written.

    Raises:
        SchemaError: (a RuntimeError) a write is beyond `max_size`, leaves a gap, or has another number of objects than
            rows. Also a TypeError for a dict or a text where several objects are expected. Nothing is changed.

    >>> storage = ListStorage(10)
    >>> storage.set(range(2), ["a text", {"a": 1}])
    >>> storage[[1, 0]]
    [{'a': 1}, 'a text']
    """

    returns_objects: ClassVar[bool] = True

    def __init__(
        self,
        max_size: int | None = None,
        *,
        compilable: bool = False,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__((1 << 63) - 1 if max_size is None else max_size, compilable=compilable)
        self.device = None if device is None else torch.device(device)
        self._items: list[Any] = []

    @property
    def _storage(self) -> list[Any]:  # the name in TorchRL's storages
        return list(self._items)

    def __len__(self) -> int:
        return len(self._items)

    # Reading ---------------------------------------------------------------------------------------

    def read_at(self, index: Any) -> Any:
        """Read one object for an int, otherwise the list of objects at `index`."""
        found = index if type(index) is int else _one_dimensional(index)
        if isinstance(found, int):
            return self._shown(self._item(found))
        if isinstance(found, slice):
            return self._gathered(self._items[found])
        return self._gathered([self._item(row) for row in self._rows(found)])

    def _item(self, row: int) -> Any:
        try:
            return self._items[row]
        except IndexError:
            raise IndexError(f"row is {row}, expected one of {len(self._items)} rows") from None

    def _rows(self, index: torch.Tensor) -> list[int]:
        if index.dtype != torch.bool:
            rows: list[int] = index.tolist()
            return rows
        if len(index) != len(self._items):
            raise IndexError(f"the mask is for {len(index)} rows, expected {len(self._items)}")
        return self._rows(index.nonzero().squeeze(1))

    def _shown(self, item: Any) -> Any:
        """Return the object of a kept item."""
        return item

    def _gathered(self, items: list[Any]) -> Any:
        """Return the result of reading several rows, given a new list of kept items."""
        return items

    # Writing ---------------------------------------------------------------------------------------

    def write_at(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> slice | torch.Tensor:
        """Write one object at an int; at any other index, one object of `data` at each row.

        If a row occurs twice, the later one of its objects is stored. All objects are checked, and moved to the device,
        before the first one is stored.
        """
        if type(cursor) is int and 0 <= cursor < len(self._items):
            self._items[cursor] = self._prepared([data])[0]
            return slice(cursor, cursor + 1)
        return self._write(_one_dimensional(cursor), data)

    def _write(self, index: int | slice | torch.Tensor, data: Any) -> slice | torch.Tensor:
        """Write, and return the rows that were written."""
        rows = rows_of(index, len(self._items), self.max_size)
        if not isinstance(rows, slice) and not len(rows):
            rows = slice(0, 0)
        grown = grown_rows(rows, len(self._items))
        if isinstance(index, int):
            self._place(rows, grown, self._prepared([data]))
        else:
            items = objects_of(data)
            count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
            if len(items) != count:
                raise SchemaError(f"found {len(items)} objects for {count} rows")
            self._place(rows, grown, self._prepared(items))
        return rows

    def _prepared(self, items: list[Any], *, alone: bool = False) -> list[Any]:
        """Convert objects to the items that are kept. It may raise an error: nothing has changed yet.

        With `alone`, they will replace all stored objects.
        """
        return items if self.device is None else [to_device(item, self.device) for item in items]

    def _place(self, rows: slice | torch.Tensor, grown: int, kept: list[Any]) -> None:
        """Store prepared objects; a reader never sees a row without an object."""
        if isinstance(rows, slice):
            self._items[rows] = kept
            return
        by_row = dict(zip(rows.tolist(), kept, strict=True))
        fresh = [by_row.pop(row) for row in range(len(self._items), grown)]
        for row, item in by_row.items():
            self._items[row] = item
        self._items += fresh

    def repeated(self, index: Any, data: Any) -> Any:
        """Return copies of a single tensor or tensordict, one for each row; data that may have rows is unchanged."""
        if not (isinstance(data, torch.Tensor) or is_tensor_collection(data)) or data.ndim != self._element_dims:
            return data
        found = _one_dimensional(index)
        if isinstance(found, int):
            return data
        rows = rows_of(found, len(self._items), self.max_size)
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        return copied(data.expand(count, *data.shape))

    @property
    def _element_dims(self) -> int:
        """Return how many dimensions a tensor has if it must be one element rather than several."""
        return 0

    def editable(self, key: tuple[str, ...]) -> torch.Tensor:
        """Raise SchemaError: elements may differ from each other."""
        raise SchemaError(f"a {type(self).__name__} keeps elements one by one: replace them with rb[i] = …")

    def clear_rows(self) -> None:
        """Forget all objects."""
        self._items = []

    # State -----------------------------------------------------------------------------------------

    def trees(self) -> Iterator[Tree]:
        """Yield the tree of every object, with references to its tensors, for checkpoints."""
        return map(tree_of, self._items)

    def save_state(self) -> dict[str, Any]:
        """Return `_storage`, a list, and `_metadata`, its description; tensors are references.

        An item of `_storage` is a tensor, a dict of an object's tensors by dotted path, or another object as it is.
        """
        states = [state_of_item(tree) for tree in self.trees()]
        return {"_storage": [tensors for tensors, _ in states], "_metadata": [about for _, about in states]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load what `save_state` returned, here or in TorchRL; tensors are copied.

        Raises:
            SchemaError: there is not enough room.
            TypeError: a state of TorchRL's has objects other than tensors and tensordicts, whose types it does not
                record.
        """
        saved = state["_storage"]
        self.require_room(len(saved))
        if "_metadata" in state:
            items = items_of_states(saved, state["_metadata"])
        else:
            items = [item_of_state(state) for state in saved]
        self.replace_all(items)

    def replace_all(self, items: list[Any], *, capacity: int | None = None, last_row: int | None = None) -> None:
        """Replace all objects by these; if they cannot all be stored, nothing is changed.

        Args:
            items: the objects.
            capacity: the capacity of the storage that they come from; None if unknown.
            last_row: the row written last there; None if unknown. When a buffer loads a full ring into a larger
                storage, the oldest object becomes row 0.
        """
        self.require_room(len(items))
        self._take_over(self._prepared(items, alone=True), capacity, last_row)

    def _take_over(self, kept: list[Any], capacity: int | None = None, last_row: int | None = None) -> None:
        turn = self.rotation_of(len(kept), self.max_size, capacity, last_row)
        self._items = [*kept[turn:], *kept[:turn]]
        self.mark_replaced(len(kept) % self.max_size, last_row if self.rotated is None else len(kept) - 1)

    def require_room(self, count: int) -> None:
        """Raise SchemaError unless this many objects can be loaded."""
        if count > self.max_size:
            raise SchemaError(f"{count} objects do not fit: this storage has room for {self.max_size}")

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            raise SchemaError(
                f"a {type(self).__name__} cannot be shared with a spawned process: its objects live in this one",
                hint="use a LazyMemmapStorage, or a LazyTensorStorage with shared_init=True",
            )
        return super().__getstate__()


def _one_dimensional(index: Any) -> int | slice | torch.Tensor:
    """Convert an index of rows to an int, a slice or a vector."""
    while isinstance(index, tuple):
        if len(index) != 1:
            raise SchemaError(f"found {len(index)} coordinates, but a list has one dimension")
        index = index[0]
    found = as_index(index, 1)
    if not isinstance(found, torch.Tensor):
        return found  # type: ignore[return-value]
    if found.dim() == 0:
        return int(found)
    if found.dim() != 1:
        raise IndexError(f"rows are selected by a vector, found an index of shape {list(found.shape)}")
    return found


@counterpart
class LazyStackStorage(ListStorage):
    """Keeps tensordicts one by one, and reads several of them as a lazy stack along `stack_dim`.

    Their shapes may differ, but not the number of their batch dimensions. An int reads the stored tensordict itself. A
    stack has the stored tensors in new containers.

    Args:
        max_size: the capacity; None for 2^63 - 1.
        stack_dim: the dimension of the stack; may be negative.
        **options: the other arguments of `ListStorage`.

    Raises:
        SchemaError: (a RuntimeError) when written: an element is not a tensordict or tensorclass, or has another number
            of batch dimensions, or too few for `stack_dim`.

    >>> from tensordict import TensorDict
    >>> storage = LazyStackStorage(10, stack_dim=-1)
    >>> storage.set(range(2), [TensorDict({"a": torch.zeros(n, 3)}, [n]) for n in (4, 5)])
    >>> storage[:].batch_size
    torch.Size([-1, 2])
    """

    def __init__(
        self,
        max_size: int | None = None,
        *,
        compilable: bool = False,
        stack_dim: int = 0,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__(max_size, compilable=compilable, device=device)
        if type(stack_dim) is not int:
            raise UsageError(f"stack_dim is {stack_dim!r}, expected an int")
        self.stack_dim = stack_dim

    def _gathered(self, items: list[Any]) -> Any:
        if items:
            # With new containers, adding an entry to the batch does not add it to the elements.
            return LazyStackedTensorDict.lazy_stack(list(map(shallow_copy, items)), self.stack_dim)
        if not self._items:
            return TensorDict({}, [0])
        one: Any = torch.stack([self._items[0]], self.stack_dim)  # for the keys and shapes of a stack without rows
        return one[(slice(None),) * (self.stack_dim % one.batch_dims) + (slice(0, 0),)]

    # Editing ---------------------------------------------------------------------------------------

    @property
    def _element_dims(self) -> int:
        return self._items[0].batch_dims if self._items else 0

    def editable(self, key: tuple[str, ...]) -> torch.Tensor:
        """Return one entry of all elements, stacked; SchemaError if their shapes differ."""
        parts = [item.get(key, None) for item in self._items]
        if not parts:
            raise SchemaError("the storage is empty: nothing was ever written to it", hint="write to it first")
        missing = next((row for row, part in enumerate(parts) if part is None), None)
        if missing is not None:
            raise MissingKeyError(f"{'.'.join(key)!r} is missing in element {missing}")
        if not all(isinstance(part, torch.Tensor) for part in parts):
            raise SchemaError(f"{'.'.join(key)!r} is not a tensor")
        if len({(part.shape, part.dtype) for part in parts}) > 1:
            raise SchemaError(f"{'.'.join(key)!r} differs in shape or type between elements; use rb[i] = …")
        return torch.stack(parts, self._dimension)

    def put_back(self, key: tuple[str, ...], values: torch.Tensor, index: Any) -> None:
        """Replace the entry in the elements that `index` selects; their present tensors may be the caller's."""
        touched = torch.zeros(values.shape, dtype=torch.bool)
        touched[index] = True
        pairs = zip(values.unbind(self._dimension), touched.unbind(self._dimension), strict=True)
        for row, (value, chosen) in enumerate(pairs):
            if chosen.any():
                item = self._items[row].copy()
                item.set(key, value.clone())
                self._items[row] = item

    def create_entries(self, values: Mapping[tuple[str, ...], torch.Tensor]) -> None:
        """Add entries, with values for all elements; SchemaError if batch sizes differ, or values do not fit."""
        if not self._items or any(is_tensorclass(item) for item in self._items):
            super().create_entries(values)
        size = self._items[0].batch_size
        if any(item.batch_size != size for item in self._items):
            raise SchemaError("elements differ in shape, and cannot get a new entry together; use rb[i] = …")
        expected = [*size[: self._dimension], len(self._items), *size[self._dimension :]]
        for path, value in values.items():
            if list(value.shape[: len(expected)]) != expected:
                raise SchemaError(
                    f"{'.'.join(path)!r} has the shape {list(value.shape)}, expected it to begin with {expected}: "
                    "a new entry needs values for all elements"
                )
        items = [item.copy() for item in self._items]
        for path, value in values.items():
            for item, part in zip(items, value.unbind(self._dimension), strict=True):
                item.set(path, part.clone())
        self._items = items

    @property
    def _dimension(self) -> int:
        """The dimension along which elements are stacked, counted from the front."""
        dimensions: int = self._items[0].batch_dims + 1
        return self.stack_dim % dimensions

    def _prepared(self, items: list[Any], *, alone: bool = False) -> list[Any]:
        for item in items:
            if not is_tensor_collection(item):
                raise SchemaError(f"a {type(item).__name__} cannot be stacked lazily, expected a tensordict")
        self._refuse_other_dimensions({item.batch_dims for item in [*items, *([] if alone else self._items[:1])]})
        return super()._prepared(items, alone=alone)

    def _refuse_other_dimensions(self, dimensions: set[int]) -> None:
        if len(dimensions) > 1:
            found = " and ".join(map(str, sorted(dimensions)))
            raise SchemaError(f"tensordicts with {found} batch dimensions cannot be stacked lazily")
        if any(not -count - 1 <= self.stack_dim <= count for count in dimensions):
            raise SchemaError(
                f"tensordicts with {dimensions.pop()} batch dimensions cannot be stacked along dimension "
                f"{self.stack_dim}"
            )


CUSTOM = "custom"
"""The codec name of tensors compressed by a user's function."""


@dataclass(frozen=True, slots=True)
class CompressedTensor:
    """A compressed tensor: bytes of one of our codecs, or the tensor that a user's function returned."""

    codec: str
    data: bytes | torch.Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The compressed size."""
        return self.data.nbytes if isinstance(self.data, torch.Tensor) else len(self.data)

    @property
    def as_tensor(self) -> torch.Tensor:
        """The compressed bytes as a uint8 tensor, or the tensor that a user's function returned."""
        if isinstance(self.data, torch.Tensor):
            return self.data
        return tensor_from_bytes(self.data, torch.uint8, (len(self.data),))

    def document(self) -> dict[str, Any]:
        """Describe it in plain JSON."""
        return {"shape": list(self.shape), "dtype": str(self.dtype), "codec": self.codec}


@counterpart
class CompressedListStorage(ListStorage):
    """A `ListStorage` that keeps tensors compressed; reading returns fresh tensors on `device`.

    Tensors and arrays are compressed, also in tensordicts, tensorclasses, dicts, lists and tuples. Other objects are
    kept as they are. Several rows are read as a list.

    Args:
        max_size: the capacity; None for 2^63 - 1.
        codec: `"zstd"`, or `"zlib"`, which TorchRL reads below Python 3.14.
        compression_level: the level of the codec.
        compression_fn: replaces the codec: turns a tensor on `device` into another tensor of any type and shape.
        decompression_fn: the inverse: called with that tensor, and a dict with the `shape`, `dtype` and `device` of the
            original.
        device: the device of the tensors returned.

    Raises:
        CorruptDataError: when reading: compressed bytes are damaged.

    >>> storage = CompressedListStorage(10)
    >>> storage.set(0, torch.zeros(1000))
    >>> storage.bytes() < 100, storage[0].shape
    (True, torch.Size([1000]))
    """

    returns_objects: ClassVar[bool] = False

    def __init__(
        self,
        max_size: int,
        *,
        compression_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
        decompression_fn: Callable[[torch.Tensor, dict[str, Any]], torch.Tensor] | None = None,
        compression_level: int = 3,
        device: torch.device | str | int = "cpu",
        compilable: bool = False,
        codec: str = "zstd",
    ) -> None:
        super().__init__(max_size, compilable=compilable, device=device)
        if codec not in CODECS:
            raise UsageError(f"the codec {codec!r} is unknown; known: {', '.join(CODECS)}")
        self.codec = codec if compression_fn is None else CUSTOM
        self.compression_level = compression_level
        self.compression_fn = compression_fn
        self.decompression_fn = decompression_fn
        self._codec = CODECS[codec](compression_level)

    to_bytestream = staticmethod(to_bytestream)

    def bytes(self) -> int:
        """Return the number of compressed bytes of all tensors."""
        return sum(leaf.nbytes for tree in self._items for leaf in tree.leaves)

    def trees(self) -> Iterator[Tree]:
        """Yield the tree of every object, with compressed tensors, for checkpoints."""
        return iter(self._items)

    # One tensor ------------------------------------------------------------------------------------

    def _prepared(self, items: list[Any], *, alone: bool = False) -> list[Any]:
        return self.compressed(items)

    def compressed(self, items: list[Any]) -> list[Tree]:
        """Compress objects as a write does, without storing them."""
        return [tree_of(item, self._pack) for item in items]

    def _shown(self, item: Any) -> Any:
        return item.unflatten(self.unpacked)

    def _gathered(self, items: list[Any]) -> Any:
        return [item.unflatten(self.unpacked) for item in items]

    def _pack(self, tensor: torch.Tensor) -> CompressedTensor:
        shape = tuple(tensor.shape)
        if self.compression_fn is None:
            return CompressedTensor(self.codec, self._codec.compress(tensor_bytes(tensor)), tensor.dtype, shape)
        data: Any = self.compression_fn(tensor.detach().to(self._place_of_tensors))
        if not isinstance(data, torch.Tensor) or data.layout != torch.strided or data.is_nested:
            found = f"a {data.layout} tensor" if isinstance(data, torch.Tensor) else f"a {type(data).__name__}"
            raise SchemaError(f"compression_fn returned {found}, expected a dense tensor")
        return CompressedTensor(CUSTOM, _apart(data.detach(), tensor), tensor.dtype, shape)

    def unpacked(self, packed: CompressedTensor) -> torch.Tensor:
        """Decompress a tensor; CorruptDataError if its bytes are damaged."""
        if isinstance(packed.data, torch.Tensor):
            return self._unpack_custom(packed)
        data = CODECS[packed.codec]().decompress(packed.data, byte_count(packed.dtype, packed.shape))
        return tensor_from_bytes(data, packed.dtype, packed.shape).to(self._place_of_tensors)

    def _unpack_custom(self, packed: CompressedTensor) -> torch.Tensor:
        if self.decompression_fn is None:
            raise UsageError(
                "the data was compressed by a compression_fn, and this storage has no decompression_fn to undo it"
            )
        about = {
            "type": "tensor", "shape": torch.Size(packed.shape), "dtype": packed.dtype, "device": self._place_of_tensors
        }  # fmt: skip
        found: torch.Tensor = _apart(self.decompression_fn(packed.as_tensor, about), packed.as_tensor)
        return found

    @property
    def _place_of_tensors(self) -> torch.device:
        return self.device or torch.device("cpu")

    def compressed_tensor(self, document: Mapping[str, Any], data: torch.Tensor) -> CompressedTensor:
        """Make a compressed tensor from a copy of its data and its description.

        Descriptions of TorchRL do not name the codec: it is the storage's `decompression_fn`, if there is one;
        otherwise it is detected from the first bytes.

        Raises:
            FormatError: (a ValueError) the description is invalid.
            UsageError: the storage has no decompression_fn for the data.
        """
        dtype, shape = read_dtype(document.get("dtype")), read_shape(document.get("shape"))
        codec = document.get("codec")
        if codec is None:
            codec = codec_of_bytes(to_bytestream(data)) if self.decompression_fn is None else CUSTOM
        if codec == CUSTOM:
            if self.decompression_fn is None:
                raise UsageError(
                    "the data was compressed by its writer's compression_fn, and this storage has no decompression_fn",
                    hint="create the storage with the function that undoes it",
                )
            return CompressedTensor(CUSTOM, data.to(self._place_of_tensors, copy=True), dtype, shape)
        if not isinstance(codec, str) or codec not in CODECS:
            raise FormatError(f"the codec {codec!r} is unknown; known: {', '.join(CODECS)}")
        if data.dtype != torch.uint8 or data.dim() != 1:
            raise FormatError(f"data of the codec {codec!r} is {data.dtype} {list(data.shape)}, expected a byte vector")
        packed = to_bytestream(data)
        CODECS[codec]().refuse_too_few(packed, byte_count(dtype, shape))
        return CompressedTensor(codec, packed, dtype, shape)

    # State -----------------------------------------------------------------------------------------

    def save_state(self) -> dict[str, Any]:
        """Return `_storage`, a list, and `_metadata`, its description with the codec of every tensor.

        An item of `_storage` is a compressed tensor, a dict of them by dotted path, or another object as it is.
        """
        states = [state_of_item(tree, CompressedTensor.document) for tree in self._items]
        return {"_storage": [_as_tensors(kept) for kept, _ in states], "_metadata": [about for _, about in states]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load what `save_state` returned, here or in TorchRL; bytes are copied, and not decompressed yet.

        Raises:
            SchemaError: there is not enough room, or tensors and descriptions do not match.
        """
        saved, abouts = state["_storage"], state["_metadata"]
        self.require_room(len(saved))
        if len(saved) != len(abouts):
            raise SchemaError(f"the state holds {len(saved)} objects, but describes {len(abouts)}")
        self._take_over([self._tree(state, about) for state, about in zip(saved, abouts, strict=True)])

    def _tree(self, state: Any, about: Any) -> Tree:
        if isinstance(about, Mapping) and about.get("type") == "other":
            return Tree(ObjectNode(state), [])

        def take(document: Mapping[str, Any], path: Path) -> CompressedTensor:
            return self.compressed_tensor(document, leaf_of_state(state, path))

        return tree_from(about, take, portable=False)

    def replace_trees(self, trees: list[Tree]) -> None:
        """Replace all objects by these, whose tensors are compressed; SchemaError if there is not enough room."""
        self.require_room(len(trees))
        self._take_over(trees)


def _apart(made: Any, source: torch.Tensor) -> Any:
    """Return the result of a user's function; a copy if it shares memory with the argument, which it could change."""
    if not isinstance(made, torch.Tensor) or not Memory([source]).may_hold(made):
        return made
    return made.clone()


def _as_tensors(kept: Any) -> Any:
    if isinstance(kept, CompressedTensor):
        return kept.as_tensor
    if isinstance(kept, dict) and all(isinstance(packed, CompressedTensor) for packed in kept.values()):
        return {path: packed.as_tensor for path, packed in kept.items()}
    return kept
