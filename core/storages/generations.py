"""Counts how often each row of a storage was written over."""

from __future__ import annotations

import torch

from ..errors import SchemaError, UsageError

__all__ = ["Generations"]

_NEVER = -1
_MOST = 1 << 40


class Generations:
    """One int64 a row: -1 before its first write, 0 after it, one more with each further write and each emptying.

    With `shared` the numbers lie in shared memory.
    """

    def __init__(self, rows: int, *, shared: bool) -> None:
        if rows > _MOST:
            raise UsageError(
                f"generations of {rows} rows were asked for, {_MOST} is the most", hint="give the storage a max_size"
            )
        self.rows = torch.full((rows,), _NEVER)
        if shared:
            self.rows.share_memory_()

    def count(self, index: torch.Tensor) -> None:
        """Count a write to each row named, as often as it is named."""
        self.rows.index_add_(0, index, torch.ones_like(index))

    def count_all(self) -> None:
        """Count a write to each row that was ever written."""
        self.rows += self.rows != _NEVER

    def at(self, index: torch.Tensor) -> torch.Tensor:
        """Return the numbers of these rows; -1 for rows that there are not."""
        there = (index >= 0) & (index < len(self.rows))
        return self.rows[index.where(there, 0)].where(there, _NEVER)

    def apart(self) -> Generations:
        """Return a copy that no other process counts with."""
        other = Generations(0, shared=False)
        other.rows = self.rows.clone()
        return other

    def fitting(self, saved: torch.Tensor) -> torch.Tensor:
        """Return saved numbers with as many rows as there are here; SchemaError if that would lose one."""
        if saved.dtype != torch.int64 or saved.dim() != 1:
            raise SchemaError(f"generations are {saved.dtype} {list(saved.shape)}, expected are torch.int64 [rows]")
        if bool((saved[len(self.rows) :] != _NEVER).any()):
            raise SchemaError(f"generations of {len(saved)} rows were saved; this storage has {len(self.rows)} rows")
        fitted = torch.full_like(self.rows, _NEVER)
        fitted[: len(saved)] = saved[: len(self.rows)]
        return fitted
