"""Declares the export to NumPy's files."""

from __future__ import annotations

from ..core.declarations import FormatDeclaration

__all__ = ["DECLARATION"]

DECLARATION = FormatDeclaration(
    name="npz",
    order=2,
    sink="export_npz:NpzSink",
    written="NumPy",
    opened=("", "import numpy; print(numpy.load({}).files)"),
)
