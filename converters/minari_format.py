"""Declares Minari's datasets: read, fetched and written."""

from __future__ import annotations

from ..core.declarations import FormatDeclaration

__all__ = ["DECLARATION"]

DECLARATION = FormatDeclaration(
    name="minari",
    order=0,
    reader="minari:MinariReader",
    source="minari_source:MinariSource",
    sink="export_minari:MinariSink",
    opened=("/data", "import minari; print(minari.MinariDataset({}))"),
)
