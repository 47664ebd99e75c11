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
        found="only with --from table and --map: the meaning of columns cannot be detected",
        ends="the flags of --ends, a change of --episode-key, or the end of a file",
        final="where stored",
    ),
)
