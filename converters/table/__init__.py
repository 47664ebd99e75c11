"""Tables whose columns a user maps: HDF5, npz, CSV, Parquet, and folders of npy, CSV or Parquet files."""

from __future__ import annotations

from ...core.declarations import FormatDeclaration

__all__ = ["FORMATS"]

FORMATS = (
    FormatDeclaration(
        name="table",
        package=__name__,
        order=90,
        reader="reader:TableReader",
        overview="reader:overview",
        title="Tables: HDF5, npz, npy, CSV, Parquet",
        found="only --from table, with --map: what columns mean cannot be detected",
        ends="the flags in --ends, where --episode-key changes, the end of a file",
        final="where stored",
    ),
)
