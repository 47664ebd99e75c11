"""Exports to plain file formats: HDF5, NumPy and Parquet."""

from __future__ import annotations

from ...core.declarations import FormatDeclaration

__all__ = ["FORMATS"]

FORMATS = (
    FormatDeclaration(
        name="h5",
        package=__name__,
        order=1,
        sink="h5:H5Exporter",
        written="one dataset a leaf",
        opened=("", "import h5py; h5py.File({}).visititems(print)"),
    ),
    FormatDeclaration(
        name="npz",
        package=__name__,
        order=2,
        sink="npz:NpzExporter",
        written="NumPy",
        opened=("", "import numpy; print(numpy.load({}).files)"),
    ),
    FormatDeclaration(
        name="parquet",
        package=__name__,
        order=3,
        sink="parquet:ParquetExporter",
        written="a row a step",
        opened=("/steps.parquet", "import pyarrow.parquet as pq; print(pq.read_table({}))"),
    ),
)
