"""Reads and writes rows of plain tensors, as fast as torch can."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .cursors import Index

__all__ = ["plain_column", "read_rows", "write_rows"]

# torch gathers no unsigned integers wider than a byte; their bits travel in the signed type of the same width.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def plain_column(leaf: torch.Tensor) -> torch.Tensor:
    """Return a view of the same memory that torch indexes without detours: no subclass, no wide unsigned type."""
    column = leaf.detach().as_subclass(torch.Tensor)
    return column.view(_SIGNED[column.dtype]) if column.dtype in _SIGNED else column


def read_rows(columns: Sequence[torch.Tensor], index: Index) -> list[torch.Tensor]:
    """Read `index` of every column.

    A vector of row numbers goes through `index_select`, which copies whole rows; anything else through torch's
    indexing, where ints and slices give views. IndexError for rows that are not there.
    """
    if not (isinstance(index, torch.Tensor) and index.dim() == 1 and index.dtype == torch.int64):
        return [column[index] for column in columns]
    device = columns[0].device
    index = index.to(device)
    if device.type == "cpu":
        try:
            return [column.index_select(0, index) for column in columns]
        except IndexError:  # a negative number, or one out of range: torch's indexing knows which
            pass
    return [column[index] for column in columns]


def write_rows(column: torch.Tensor, rows: slice | torch.Tensor, values: torch.Tensor) -> None:
    """Put `values` at `rows` of a column; row numbers must not repeat."""
    values = plain_column(values)
    if isinstance(rows, slice):
        column[rows].copy_(values)
    else:
        column.index_copy_(0, rows.to(column.device), values.to(column.device))
