"""Helps storages of tensors to take over what was saved of others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import SchemaError
from .columns import Columns
from .describe import structure_from
from .structure import Leaf, Node, Structure, TensorDictNode, place

__all__ = [
    "in_order",
    "named_tensors",
    "refuse_other_constants",
    "rows_to_fill",
    "saved_tensors",
    "with_numbers",
]


def named_tensors(names: Sequence[str], leaves: Sequence[torch.Tensor]) -> Any:
    """Return the leaves by name, or the only one where it has none."""
    if list(names) == [""]:
        return leaves[0]
    if len(set(names)) < len(names):
        raise SchemaError(f"two of the keys {', '.join(names)} are written alike with dots")
    return dict(zip(names, leaves, strict=True))


def saved_tensors(
    saved: Any, description: Mapping[str, Any] | None, like: Structure | None
) -> tuple[Structure, list[torch.Tensor]]:
    """Undo `named_tensors`. Without a description of the data, dots in names separate the keys of a tensordict.

    Classes that are not loaded are taken from `like`, how the data of the receiver is made.
    """
    if isinstance(saved, torch.Tensor):
        return Leaf(), [saved]
    tensors = {name: value for name, value in dict(saved).items() if not name.startswith("__")}
    structure = structure_from(description, like) if description else _nested(list(tensors))
    names = [".".join(path) for path in structure.paths()]
    if sorted(names) != sorted(tensors):
        raise SchemaError(f"the state holds {', '.join(tensors)}; it says that it holds {', '.join(names)}")
    return structure, [tensors[name] for name in names]


def _nested(names: Sequence[str]) -> Structure:
    nest: dict[str, Any] = {}
    for name in names:
        *folders, last = name.split(".")
        inner = nest
        for part in folders:
            inner = inner.setdefault(part, {})
        inner[last] = None
    return _tensordict(nest)


def _tensordict(nest: Mapping[str, Any]) -> Node:
    children = {key: Leaf() if inner is None else _tensordict(inner) for key, inner in nest.items()}
    return TensorDictNode(children, torch.Size([]), None)


def in_order(names: Sequence[str], structure: Structure, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors, which belong together like `structure`, in the order of `names`."""
    found = {".".join(path): tensor for path, tensor in zip(structure.paths(), tensors, strict=True)}
    if sorted(found) != sorted(names):
        raise SchemaError(f"what was saved holds {', '.join(found)}; this storage holds {', '.join(names)}")
    return [found[name] for name in names]


def with_numbers(
    key: str | None, structure: Structure, tensors: Sequence[torch.Tensor], columns: Columns
) -> tuple[Structure, Sequence[torch.Tensor]]:
    """Add the entry of the rows' numbers, which a writer keeps here and another one did not save."""
    if key is None or key not in columns.names or not tensors:
        return structure, tensors
    if not isinstance(structure, Node) or key in structure.children:
        return structure, tensors
    like, rows = columns.leaves[columns.names.index(key)], tensors[0].shape[0]
    numbers = torch.arange(rows, device=like.device).reshape(-1, *[1] * (like.dim() - 1))
    structure = structure.with_children({**structure.children, key: Leaf()})
    return structure, [*tensors, numbers.expand(rows, *like.shape[1:])]


def rows_to_fill(length: int, columns: Columns, max_size: int) -> int:
    """The number of rows that make up `length` elements; SchemaError if they do not fit."""
    rows, rest = divmod(length, math.prod(columns.lead[1:]))
    if rest or not 0 <= rows <= columns.lead[0]:
        raise SchemaError(f"what was saved counts {length} elements; this storage has room for {max_size}")
    return rows


def refuse_other_constants(ours: Structure, saved: Structure) -> None:
    """Raise SchemaError if what is no tensor differs between a storage and what was saved of another."""
    known = dict(ours.constants())
    for path, value in saved.constants():
        if path not in known or known[path] != value:
            raise SchemaError(f"{place(path)} is {value!r} in what was saved, {known.get(path, 'nothing')!r} here")
