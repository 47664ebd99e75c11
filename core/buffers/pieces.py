"""Nests of dense tensors as one piece of memory, of which the tensors are views where it arrives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from tensordict import NonTensorData, TensorDict

from ..errors import SchemaError
from ..storages.pytree import NO_BATCH, TreeSpec, tree_spec_of

_ALIGNMENT = 64
_ZEROS = bytes(_ALIGNMENT)
_NUMPY = frozenset({torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64})
"""Common element types that NumPy has, too, and that have no bit which negates or conjugates."""
_Place: TypeAlias = tuple[int, torch.dtype, torch.Size]
"""Where a leaf is in the bytes of a piece."""


class NestLayout(NamedTuple):
    """How a nest is made of the bytes of a piece."""

    structure: TreeSpec
    places: list[_Place]

    def views(self, content: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors in memory, uint8 `[size]`."""
        found = []
        for start, dtype, shape in self.places:
            size = shape.numel() * dtype.itemsize
            found.append(content[start : start + size].view(dtype).view(shape))
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        # Names and tuples: torch takes several times as long for its own types.
        return _layout, (self.structure, [(start, str(dtype)[6:], tuple(shape)) for start, dtype, shape in self.places])

    def nest(self, content: torch.Tensor) -> Any:
        """Return the nest, whose tensors are views of memory, uint8 `[size]`."""
        return self.structure.unflatten(iter(self.views(content)), NO_BATCH)

    def nest_in(self, content: bytearray) -> Any:
        """Return the nest, whose tensors are views of the bytes, and keep them."""
        found = []
        for start, dtype, shape in self.places:
            count = shape.numel()
            part = torch.frombuffer(content, dtype=dtype, count=count, offset=start) if count else torch.empty(0)
            found.append(part.view(shape) if count else part.to(dtype).reshape(shape))
        return self.structure.unflatten(iter(found), NO_BATCH)


def _layout(structure: TreeSpec, places: Sequence[tuple[int, str, tuple[int, ...]]]) -> NestLayout:
    return NestLayout(structure, [(start, getattr(torch, name), torch.Size(shape)) for start, name, shape in places])


class NestPiece:
    """A nest of dense tensors that is to be one piece: its layout, to be pickled, and its `size` in bytes."""

    def __init__(self, structure: TreeSpec, leaves: Sequence[torch.Tensor]) -> None:
        self._leaves = leaves
        places: list[_Place] = []
        self.size = 0
        for leaf in leaves:
            places.append((self.size, leaf.dtype, leaf.shape))
            self.size += -(-leaf.numel() * leaf.element_size() // _ALIGNMENT) * _ALIGNMENT
        self.layout = NestLayout(structure, places)

    @classmethod
    def of(cls, nest: Any) -> NestPiece | None:
        """Return the layout of a nest that becomes the same nest again; None for anything else.

        Such are plain tensors on the CPU, without gradients, in tensordicts, dicts, lists and tuples.
        """
        found: list[torch.Tensor] = []
        with contextlib.suppress(SchemaError):
            if _is_dense(nest, found) and found:
                structure = tree_spec_of(nest)
                return cls(structure, structure.flatten(nest))
        return None

    def write(self, content: torch.Tensor) -> None:
        """Copy the tensors into memory, uint8 `[size]`."""
        for leaf, target in zip(self._leaves, self.layout.views(content), strict=True):
            target.copy_(leaf)

    def parts(self) -> Iterator[Any]:
        """Yield the bytes of the tensors, by reference where they are contiguous, and those between them."""
        for leaf in self._leaves:
            plain = leaf.contiguous()
            if plain.dtype not in _NUMPY or plain.is_neg():
                plain = plain.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
            yield plain.numpy()
            if rest := -leaf.numel() * leaf.element_size() % _ALIGNMENT:
                yield _ZEROS[:rest]


def _is_dense(part: Any, leaves: list[torch.Tensor]) -> bool:
    """Append the tensors of a part of a nest; return whether all of them are dense and the nest has no other types."""
    kind = type(part)
    if kind is torch.Tensor:
        leaves.append(part)
        return part.is_cpu and part.layout is torch.strided and not (part.requires_grad or part.is_quantized)
    if kind is NonTensorData:
        return True
    if kind not in (TensorDict, dict, list, tuple) or (kind is TensorDict and any(part.names)):
        return False
    return all(_is_dense(child, leaves) for child in (part if kind in (list, tuple) else part.values()))
