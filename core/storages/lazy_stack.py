"""A list of tensordicts that is read as a lazy stack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, is_tensor_collection, is_tensorclass

from ..errors import MissingKeyError, SchemaError, UsageError
from .list_storage import ListStorage

__all__ = ["LazyStackStorage"]


class LazyStackStorage(ListStorage):
    """Keeps tensordicts one by one; several are read as a lazy stack along `stack_dim`, which may be negative.

    Their shapes may differ, but not the number of their batch dimensions; that, anything but a tensordict or a
    tensorclass, and tensordicts with too few batch dimensions for `stack_dim` raise SchemaError (a RuntimeError)
    when written. An int reads one as it is; of several, the tensors are the storage's own, but not the containers.

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
            raise UsageError(f"stack_dim is {stack_dim!r}, an int is expected")
        self.stack_dim = stack_dim

    def _gathered(self, items: list[Any]) -> Any:
        if items:
            # An entry that is put into the batch is put into none of the elements, nor into one of them twice.
            return LazyStackedTensorDict.lazy_stack([item.copy() for item in items], self.stack_dim)
        if not self._items:
            return TensorDict({}, [0])
        one: Any = torch.stack([self._items[0]], self.stack_dim)  # no rows, but keys and shapes
        return one[(slice(None),) * (self.stack_dim % one.batch_dims) + (slice(0, 0),)]

    # Editing ---------------------------------------------------------------------------------------

    @property
    def _element_dims(self) -> int:
        return self._items[0].batch_dims if self._items else 0

    def editable(self, key: tuple[str, ...]) -> torch.Tensor:
        """Return one entry of all elements, stacked; SchemaError where these differ in shape."""
        parts = [item.get(key, None) for item in self._items]
        if not parts:
            raise SchemaError("the storage is empty: nothing was ever written to it", hint="write to it first")
        missing = next((row for row, part in enumerate(parts) if part is None), None)
        if missing is not None:
            raise MissingKeyError(f"{'.'.join(key)!r} was asked for, which element {missing} does not have")
        if not all(isinstance(part, torch.Tensor) for part in parts):
            raise SchemaError(f"{'.'.join(key)!r} is no tensor, the key of a tensor is expected")
        if len({(part.shape, part.dtype) for part in parts}) > 1:
            raise SchemaError(f"{'.'.join(key)!r} differs in shape or type; replace elements with rb[i] = …")
        return torch.stack(parts, self._dimension)

    def put_back(self, key: tuple[str, ...], values: torch.Tensor, index: Any) -> None:
        """Give the elements that `index` concerns tensors of their own: those they have may be the caller's."""
        touched = torch.zeros(values.shape, dtype=torch.bool)
        touched[index] = True
        pairs = zip(values.unbind(self._dimension), touched.unbind(self._dimension), strict=True)
        for row, (value, chosen) in enumerate(pairs):
            if chosen.any():
                item = self._items[row].copy()
                item.set(key, value.clone())
                self._items[row] = item

    def create_entries(self, values: Mapping[tuple[str, ...], torch.Tensor]) -> None:
        """Add entries, values of all elements; SchemaError where these differ in batch size, or values do not fit."""
        if not self._items or any(is_tensorclass(item) for item in self._items):
            super().create_entries(values)
        size = self._items[0].batch_size
        if any(item.batch_size != size for item in self._items):
            raise SchemaError("elements differ in shape, and cannot get a new entry together; use rb[i] = …")
        expected = [*size[: self._dimension], len(self._items), *size[self._dimension :]]
        for path, value in values.items():
            if list(value.shape[: len(expected)]) != expected:
                raise SchemaError(
                    f"{'.'.join(path)!r} is {list(value.shape)}, expected is {expected} in front: "
                    "a new entry is one of all elements"
                )
        items = [item.copy() for item in self._items]
        for path, value in values.items():
            for item, part in zip(items, value.unbind(self._dimension), strict=True):
                item.set(path, part.clone())
        self._items = items

    @property
    def _dimension(self) -> int:
        """The dimension that several elements are stacked along, counted from the front."""
        dimensions: int = self._items[0].batch_dims + 1
        return self.stack_dim % dimensions

    def _prepared(self, items: list[Any], *, alone: bool = False) -> list[Any]:
        for item in items:
            if not is_tensor_collection(item):
                raise SchemaError(f"a {type(item).__name__} cannot be stacked lazily, a tensordict is expected")
        self._refuse_other_dimensions({item.batch_dims for item in [*items, *([] if alone else self._items[:1])]})
        return super()._prepared(items, alone=alone)

    def _refuse_other_dimensions(self, dimensions: set[int]) -> None:
        if len(dimensions) > 1:
            found = " and ".join(map(str, sorted(dimensions)))
            raise SchemaError(f"tensordicts of {found} batch dimensions cannot be in one lazy stack")
        if any(not -count - 1 <= self.stack_dim <= count for count in dimensions):
            raise SchemaError(f"tensordicts of {dimensions.pop()} batch dimensions have no dimension {self.stack_dim}")
