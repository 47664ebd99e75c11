"""Exports to plain file formats: HDF5, NumPy and Parquet."""

from __future__ import annotations

from ...core.declarations import FormatDeclaration

__all__ = ["FORMATS"]

_OPENED = {
    "h5:H5Exporter": ("one dataset a leaf", "", "import h5py; h5py.File({}).visititems(print)"),
    "npz:NpzExporter": ("NumPy", "", "import numpy; print(numpy.load({}).files)"),
    "parquet:ParquetExporter": (
        "a row a step", "/steps.parquet", "import pyarrow.parquet as pq; print(pq.read_table({}))"
    ),
}  # fmt: skip

FORMATS = tuple(
    FormatDeclaration(
        name=sink.partition(":")[0], package=__name__, order=order, sink=sink, written=written, opened=(suffix, code)
    )
    for order, (sink, (written, suffix, code)) in enumerate(_OPENED.items(), start=1)
)
