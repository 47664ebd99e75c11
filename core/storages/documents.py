"""Reads back the documents that describe items: ours and TorchRL's. Whatever stands in them, nothing is executed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from tensordict import is_non_tensor

from ..errors import FormatError
from .codec import dtype_named
from .items import (
    LazyStackNode,
    MappingNode,
    Node,
    NonTensorNode,
    Path,
    SequenceNode,
    TensorClassNode,
    TensorDictNode,
    TensorNode,
    ValueNode,
)

__all__ = ["Take", "parse", "read_dtype", "read_shape", "untagged"]

Document: TypeAlias = Mapping[str, Any]

Take: TypeAlias = Callable[[Document, Path], Any]
"""What stands for the tensor that a document at a path describes."""


def parse(document: Any, take: Take, *, portable: bool = True) -> Node:
    """Make the node that a document describes; FormatError if it describes none.

    A document that is not `portable` may hold classes and objects: it never left memory, or the caller loaded it.
    """
    try:
        return _parse(document, take, (), portable)
    except RecursionError:
        raise FormatError("the description of an item is nested without end") from None


def _parse(document: Any, take: Take, path: Path, portable: bool) -> Node:
    if not isinstance(document, Mapping):
        raise FormatError(f"an item is described by {_short(document)}, an object is expected")
    kind = document.get("type")
    if kind == "tensor":
        array = document.get("array", "")
        if array not in ("", "ndarray", "number"):
            raise FormatError(f"{_short(array)} is no kind of array")
        return TensorNode(take(document, path), array)
    if kind == "other":
        value = document.get("value")
        return ValueNode(untagged(value) if portable else value)
    if kind == "non_tensor":
        return _non_tensor(document, portable)
    if kind in ("tensordict", "mapping"):
        fields = _expect(document, "fields", Mapping)
        parsed = {key: _parse(part, take, (*path, str(key)), portable) for key, part in fields.items()}
        return MappingNode(parsed) if kind == "mapping" else _tensordict(document, parsed)
    if kind in ("list", "tuple", "lazy_stack"):
        items = _items(document, take, path, portable)
        if kind == "lazy_stack":
            return _lazy_stack(document, items)
        return SequenceNode(list if kind == "list" else tuple, items)
    if not portable and kind == "named_tuple":
        return SequenceNode(_expect(document, "class", type), _items(document, take, path, portable))
    if not portable and kind == "tensorclass":
        return TensorClassNode(_expect(document, "class", type), _parse(document["fields"], take, path, portable))
    raise FormatError(f"{_short(kind)} is no kind of item")


def _items(document: Document, take: Take, path: Path, portable: bool) -> list[Node]:
    items = _expect(document, "items", list)
    return [_parse(part, take, (*path, str(number)), portable) for number, part in enumerate(items)]


def _tensordict(document: Document, fields: dict[str, Node]) -> Node:
    batch = read_shape(document.get("batch_size", []))  # TorchRL records none, and means []
    names = document.get("names")
    if names is not None and (
        not isinstance(names, list)
        or len(names) != len(batch)
        or not all(name is None or isinstance(name, str) for name in names)
    ):
        raise FormatError(f"{_short(names)} cannot name the {len(batch)} dimensions of a tensordict")
    return TensorDictNode(fields, batch, document.get("placed") is True, tuple(names) if names else None)


def _lazy_stack(document: Document, items: list[Node]) -> Node:
    stack_dim = document.get("stack_dim")
    if any(not isinstance(item, TensorDictNode | LazyStackNode | TensorClassNode | NonTensorNode) for item in items):
        raise FormatError("a lazy stack of other things than tensordicts cannot be")
    if type(stack_dim) is not int or stack_dim < 0 or not items:
        raise FormatError(f"a lazy stack of {len(items)} items along {_short(stack_dim)} cannot be")
    return LazyStackNode(items, stack_dim)


def _non_tensor(document: Document, portable: bool) -> Node:
    value: Any = document.get("value")
    if isinstance(value, Mapping) and value.get("__type__") == "NonTensorData":
        value = value.get("value")
    if not portable and is_non_tensor(value):  # TorchRL's, in memory
        value = value.data
    return NonTensorNode(untagged(value) if portable else value, read_shape(document.get("batch_size", [])))


def untagged(value: Any) -> Any:
    """Undo the tags, `{"__type__": …, "value": …}`, by which plain JSON stands for other values."""
    if isinstance(value, list):
        return [untagged(part) for part in value]
    if not isinstance(value, Mapping):
        return value
    if "__type__" not in value:
        return {key: untagged(part) for key, part in value.items()}
    tag, inner = value["__type__"], value.get("value")
    if tag == "torch.Size":
        return torch.Size(read_shape(inner))
    if tag == "torch.dtype":
        return dtype_named(inner)
    if tag == "NonTensorData":
        return untagged(inner)
    if tag == "tuple" and isinstance(inner, list):
        return tuple(untagged(part) for part in inner)
    if tag == "float" and inner in ("nan", "inf", "-inf"):
        return float(inner)
    try:
        if tag == "torch.device" and isinstance(inner, str):
            return torch.device(inner)
        if tag == "torch.Tensor":
            return torch.tensor(untagged(inner))
    except (TypeError, ValueError, RuntimeError) as error:
        raise FormatError(f"{_short(inner)} is not the value of a {tag}") from error
    raise FormatError(f"{_short(inner)} cannot be read as {_short(tag)}")


def read_shape(value: Any) -> tuple[int, ...]:
    """Read a shape, tagged or not; FormatError for anything but a few sizes whose product is a 64-bit number."""
    if isinstance(value, Mapping) and value.get("__type__") == "torch.Size":
        value = value.get("value")
    if not isinstance(value, Sequence) or not all(type(size) is int and size >= 0 for size in value):
        raise FormatError(f"{_short(value)} is no shape")
    if len(value) > 64 or math.prod(max(size, 1) for size in value) >= 1 << 59:  # bytes, too, must fit into 64 bits
        raise FormatError(f"{_short(value)} is the shape of no tensor")
    return tuple(value)


def read_dtype(value: Any) -> torch.dtype:
    """Read an element type, tagged or not; FormatError for what is none."""
    return dtype_named(value.get("value") if isinstance(value, Mapping) else value)


def _expect(document: Document, name: str, kind: type[Any]) -> Any:
    value = document.get(name)
    if not isinstance(value, kind):
        raise FormatError(f"{name!r} of a described item is {_short(value)}, a {kind.__name__} is expected")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
