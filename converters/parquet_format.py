"""Declares the export to Parquet."""

from __future__ import annotations

from ..core.declarations import FormatDeclaration

__all__ = ["DECLARATION"]

DECLARATION = FormatDeclaration(
    name="parquet",
    order=3,
    sink="export_parquet:ParquetSink",
    written="a row a step",
    opened=("/steps.parquet", "import pyarrow.parquet as pq; print(pq.read_table({}))"),
)
