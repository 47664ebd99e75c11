"""Takes data apart into plain tensors and puts it together again.

Data is a tensor, a tensordict, a tensorclass, or a nest of dicts, lists and tuples that ends in such.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection, is_tensorclass

from ..errors import SchemaError

__all__ = ["Path", "Structure", "structure_of"]

Path: TypeAlias = tuple[str, ...]


class Structure(ABC):
    """One node of a nest."""

    @abstractmethod
    def paths(self, prefix: Path = ()) -> Iterator[Path]:
        """Yield the path of every leaf, in the order of `leaves`."""

    @abstractmethod
    def leaves(self, data: Any, prefix: Path = ()) -> Iterator[torch.Tensor]:
        """Yield the tensors of data made like this; SchemaError if `data` is not."""

    @abstractmethod
    def build(self, leaves: Iterator[torch.Tensor], batch: torch.Size) -> Any:
        """Make such data of as many tensors, all of leading shape `batch`."""


class _Leaf(Structure):
    def paths(self, prefix: Path = ()) -> Iterator[Path]:
        yield prefix

    def leaves(self, data: Any, prefix: Path = ()) -> Iterator[torch.Tensor]:
        if not isinstance(data, torch.Tensor):
            raise SchemaError(f"{_place(prefix)} is a {type(data).__name__}, a tensor is expected")
        yield data

    def build(self, leaves: Iterator[torch.Tensor], batch: torch.Size) -> Any:
        return next(leaves)


class _Mapping(Structure):
    """A dict, a tensordict or a tensorclass; what `make` turns a dict of children into."""

    def __init__(self, children: Mapping[str, Structure], make: Callable[[dict[str, Any], torch.Size], Any]) -> None:
        self._children = dict(children)
        self._make = make

    def paths(self, prefix: Path = ()) -> Iterator[Path]:
        for key, child in self._children.items():
            yield from child.paths((*prefix, key))

    def leaves(self, data: Any, prefix: Path = ()) -> Iterator[torch.Tensor]:
        if not (is_tensor_collection(data) or isinstance(data, Mapping)):
            raise SchemaError(
                f"{_place(prefix)} is a {type(data).__name__}, the entries {_list(self._children)} are expected"
            )
        found = dict(data.items())
        if found.keys() != self._children.keys():
            raise SchemaError(f"{_place(prefix)} has the entries {_list(found)}, expected are {_list(self._children)}")
        for key, child in self._children.items():
            yield from child.leaves(found[key], (*prefix, key))

    def build(self, leaves: Iterator[torch.Tensor], batch: torch.Size) -> Any:
        return self._make({key: child.build(leaves, batch) for key, child in self._children.items()}, batch)


class _Sequence(Structure):
    """A list or a tuple; what `make` turns an iterable of children into."""

    def __init__(self, children: Iterable[Structure], make: Callable[[list[Any]], Any]) -> None:
        self._children = list(children)
        self._make = make

    def paths(self, prefix: Path = ()) -> Iterator[Path]:
        for number, child in enumerate(self._children):
            yield from child.paths((*prefix, str(number)))

    def leaves(self, data: Any, prefix: Path = ()) -> Iterator[torch.Tensor]:
        if not isinstance(data, list | tuple) or len(data) != len(self._children):
            found = f"{len(data)} entries" if isinstance(data, list | tuple) else f"a {type(data).__name__}"
            raise SchemaError(f"{_place(prefix)} is {found}, a sequence of {len(self._children)} is expected")
        for number, child in enumerate(self._children):
            yield from child.leaves(data[number], (*prefix, str(number)))

    def build(self, leaves: Iterator[torch.Tensor], batch: torch.Size) -> Any:
        return self._make([child.build(leaves, batch) for child in self._children])


def structure_of(data: Any, prefix: Path = ()) -> Structure:
    """Describe how `data` is made; SchemaError if something in it is neither a tensor nor a nest of tensors."""
    if isinstance(data, torch.Tensor):
        return _Leaf()
    if isinstance(data, TensorDictBase) and not isinstance(data, TensorDict) and not is_non_tensor(data):
        kind = type(data).__name__
        raise SchemaError(f"{_place(prefix)} is a {kind}, whose rows need not lie together; .contiguous() makes them")
    if isinstance(data, list | tuple):
        children = [structure_of(item, (*prefix, str(number))) for number, item in enumerate(data)]
        return _Sequence(children, _sequence_maker(type(data)))
    if not is_non_tensor(data) and (is_tensorclass(data) or isinstance(data, TensorDict | Mapping)):
        found = {key: structure_of(item, (*prefix, key)) for key, item in data.items()}
        return _Mapping(found, _mapping_maker(data))
    raise SchemaError(
        f"{_place(prefix)} is a {type(data).__name__}; tensors, tensordicts and nests of them can be stored"
    )


def _mapping_maker(data: Any) -> Callable[[dict[str, Any], torch.Size], Any]:
    kind = type(data)
    if is_tensorclass(data):
        return lambda children, batch: kind.from_tensordict(TensorDict(children, batch_size=batch))
    if isinstance(data, TensorDict):
        return lambda children, batch: TensorDict(children, batch_size=batch)
    return lambda children, batch: children


def _sequence_maker(kind: type[Any]) -> Callable[[list[Any]], Any]:
    if hasattr(kind, "_fields"):  # a named tuple
        return lambda children: kind(*children)
    return tuple if issubclass(kind, tuple) else list


def _place(path: Path) -> str:
    return f"the entry {'.'.join(path)!r}" if path else "the data"


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
