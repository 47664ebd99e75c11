"""Entries of the elements of a storage: reading one of them, editing, adding new ones."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import is_tensor_collection

from ..errors import MissingKeyError, SchemaError
from .reports import Reports
from .write_log import Change

__all__ = ["Entries"]


class Entries(Reports):
    """What storages of tensors do with single entries. By default nothing can be edited or added."""

    @abstractmethod
    def read_at(self, index: Any) -> Any:
        """Return the valid elements at `index`, in any form; IndexError for what is not there."""

    def entry(self, key: tuple[str, ...], index: Any) -> torch.Tensor | None:
        """Read one entry of the elements at `index`, a slice or a tensor; None where some of them have none.

        SchemaError (a RuntimeError) for elements that are no tensordicts.
        """
        rows = self.read_at(index)
        parts = rows if isinstance(rows, list) else [rows]
        if not all(is_tensor_collection(part) for part in parts):
            kind = next(type(part).__name__ for part in parts if not is_tensor_collection(part))
            raise SchemaError(f"an entry of tensordicts was asked for, the storage holds a {kind}")
        found = [part.get(key, None) for part in parts]
        if not found or not all(isinstance(part, torch.Tensor) for part in found):
            return None
        return torch.stack(found) if isinstance(rows, list) else found[0]

    # Editing ---------------------------------------------------------------------------------------

    def lacks_dimensions(self, data: Any) -> bool:
        """Tell whether data has fewer dimensions than all elements together."""
        return False

    def repeated(self, index: Any, data: Any) -> Any:
        """Return data for each element at `index`, if `data` lacks dimensions of it; anything else as it is.

        The rule is that of tensordicts: the dimensions that data has are the last ones that `index` selects. A
        dimension of size 1 is not repeated.
        """
        return data

    def editable(self, key: tuple[str, ...]) -> torch.Tensor:
        """Return one entry of all valid elements in a tensor to edit, which is then to be given to `put_back`.

        SchemaError for a storage whose elements cannot be edited, MissingKeyError for an entry that is not there.
        """
        raise SchemaError(f"entries of a {type(self).__name__} cannot be edited")

    def put_back(self, key: tuple[str, ...], values: torch.Tensor, index: Any) -> None:
        """Write what `editable` returned, and was edited at `index`; nothing is to do for views of what is stored."""

    @final
    def add_entries(self, values: Mapping[tuple[str, ...], torch.Tensor]) -> None:
        """Add entries, values of all valid elements; MissingKeyError for a storage that cannot take new ones."""
        self.create_entries(values)
        self.log.changed(Change(keys=tuple(values)))

    def create_entries(self, values: Mapping[tuple[str, ...], torch.Tensor]) -> None:
        """Add entries, values of all valid elements, or raise MissingKeyError."""
        name = ".".join(next(iter(values)))
        raise MissingKeyError(f"{name!r} was asked for, and a {type(self).__name__} takes no new entries here")

    @final
    def set_cells(self, index: Any, data: Any, *, dim: int = 0, label: str | None = None) -> None:
        """Write at an index of several dimensions of what `get(slice(None))` reads, `dim` being the first of them.

        Data is repeated along dimensions that it lacks. The entry `label`, if data lacks it, stays what it is.
        IndexError for what is not there, SchemaError for other keys, types or shapes, with nothing changed.
        """
        self.write_cells(index, data, dim, label)
        self.log.changed()
        if self._attached:
            self.notify(self.elements_of_cells(index, dim))

    def write_cells(self, index: Any, data: Any, dim: int = 0, label: str | None = None) -> None:
        """Write as `set_cells` does; IndexError for a storage that has one dimension."""
        count = len(index) if isinstance(index, tuple) else 1
        raise IndexError(f"{count} coordinates given, the storage has 1 dimension")

    def elements_of_cells(self, index: Any, dim: int) -> Any:
        """Return the index of the elements that a write at such an index concerns."""
        return slice(None)

    def episode_lengths(self) -> NDArray[np.int64] | None:
        """List the lengths of the episodes whose steps are the rows, in their order; None where that is not known.

        Rows behind them are of one that is under way.
        """
        return None
