"""Declares the export to plain HDF5."""

from __future__ import annotations

from ..core.declarations import FormatDeclaration

__all__ = ["DECLARATION"]

DECLARATION = FormatDeclaration(
    name="h5",
    order=1,
    sink="export_h5:H5Sink",
    written="one dataset a leaf",
    opened=("", "import h5py; h5py.File({}).visititems(print)"),
)
